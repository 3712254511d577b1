// What threads of one block do together: reductions in a fixed order, and the model's quantisers on registers.

namespace icebox {

__device__ __forceinline__ float bf16_round(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}

// The largest of `width` neighbouring lanes.
template <int WIDTH>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int step = WIDTH / 2; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}

// Sum over all threads of the block, the same in each. Every thread must call it.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[32];
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  x = warp_sum(x);
  __syncthreads();  // an earlier call may still be reading
  if ((threadIdx.x & 31) == 0) sums[warp] = x;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < warps; ++i) total += sums[i];
  return total;
}

// The exponent of 2^ceil(log2(amax / largest)), biased as in a float, from the bits of the rounded quotient.
__device__ __forceinline__ int scale_exponent(float amax, float reciprocal) {
  const int bits = __float_as_int(amax * reciprocal);
  return (bits >> 23) + ((bits & 0x7FFFFF) != 0);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float(exponent << 23); }

// act_quant's scale of a block with this largest magnitude, and its exact reciprocal.
struct Fp8Scale {
  float scale, reciprocal;
  __device__ explicit Fp8Scale(float amax) {
    const int exponent = scale_exponent(fmaxf(amax, 1e-4f), 1.0f / 448.0f);
    scale = power_of_two(exponent);
    reciprocal = power_of_two(254 - exponent);
  }
  __device__ uint32_t code(float x) const { return __nv_cvt_float_to_fp8(x * reciprocal, __NV_SATFINITE, __NV_E4M3); }
  // The code's value as float16 bits, exact.
  __device__ uint32_t half(float x) const { return __nv_cvt_fp8_to_halfraw(code(x), __NV_E4M3).x; }
  // Quantise and dequantise.
  __device__ float round(float x) const {
    const __half_raw h = __nv_cvt_fp8_to_halfraw(code(x), __NV_E4M3);
    return __half2float(__half(h)) * scale;
  }
};

// fp4_simulate of a value whose block of 32 has this largest magnitude.
__device__ __forceinline__ float fp4_round(float x, float amax) {
  const int exponent = scale_exponent(fmaxf(amax, 6.0f * 1.1754943508222875e-38f), 1.0f / 6.0f);
  const float scaled = fabsf(x) * power_of_two(254 - exponent);
  // Steps of 0.5 below 2, 1 below 4, 2 above; ties to even codes are ties to even multiples of the step.
  const float step = scaled < 2.0f ? 0.5f : scaled < 4.0f ? 1.0f : 2.0f;
  const float rounded = fminf(rintf(scaled / step) * step, 6.0f) * power_of_two(exponent);
  return copysignf(rounded, x);
}

// The rotation of a pair at a position: exp(i * position * frequency), the angle a float product.
struct Rotation {
  float c, s;
  __device__ explicit Rotation(float2 turn) : c(turn.x), s(turn.y) {}
  __device__ Rotation(int position, float frequency) { sincosf(float(position) * frequency, &s, &c); }
  __device__ float2 turn(float x, float y) const { return make_float2(x * c - y * s, x * s + y * c); }
  __device__ float2 turn_back(float x, float y) const { return make_float2(x * c + y * s, y * c - x * s); }
};

}  // namespace icebox
