// Matrix-vector products: a block computes 16 rows for all tokens, its warps share the inputs between them.

namespace icebox {

// One block's sums on their way together: [warp][token][row].
template <int S, int WARPS>
using Partials = float[WARPS][S][16];

// Results of fp8_rows, fp8_rows_bf16 and bf16_rows.
template <int S>
__device__ __forceinline__ void keep(float (&out)[S][16], const float* acc) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (2 * lane.t + i < S) {
      out[2 * lane.t + i][lane.g] = acc[2 * i];
      out[2 * lane.t + i][lane.g + 8] = acc[2 * i + 1];
    }
  }
}

// Results of fp4_rows.
template <int S>
__device__ __forceinline__ void keep_fp4(float (&out)[S][16], const float* acc) {
  const Lane lane;
#pragma unroll
  for (int p = 0; p < (S + 1) / 2; ++p) {
    const float top = acc[2 * p] + __shfl_xor_sync(0xFFFFFFFFu, acc[2 * p], 1);
    const float bottom = acc[2 * p + 1] + __shfl_xor_sync(0xFFFFFFFFu, acc[2 * p + 1], 1);
    const int token = 2 * p + (lane.t >> 1);
    if (token < S && (lane.t & 1) == 0) {
      out[token][lane.g] = top;
      out[token][lane.g + 8] = bottom;
    }
  }
}

// The sum of one token's row, in the order of the warps.
template <int S, int WARPS>
__device__ __forceinline__ float total(const float (&partials)[WARPS][S][16], int token, int row) {
  float sum = partials[0][token][row];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) sum += partials[warp][token][row];
  return sum;
}

// The sums of 16 rows, from `row` of N on, once all warps have kept theirs. y: bf16 [S, N].
template <int N, int S, int WARPS>
__device__ __forceinline__ void store_totals(const float (&partials)[WARPS][S][16], int row, void* y) {
  for (int i = threadIdx.x; i < 16 * S; i += 32 * WARPS) {
    static_cast<__nv_bfloat16*>(y)[(i / 16) * N + row + i % 16] =
        __float2bfloat16_rn(total<S, WARPS>(partials, i / 16, i % 16));
  }
}

// Quantises a block of 128 inputs, of which each lane of the warp has four neighbours, to e4m3 codes or, for FP4 weights, to
// their values as float16 in the order of fp4_place.
template <typename Code>
__device__ __forceinline__ void quantise_block(float4 v, Code* codes, float* scale) {
  const int first = 4 * (threadIdx.x & 31);
  const float x[4] = {v.x, v.y, v.z, v.w};
  const float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  const Fp8Scale quantiser(lanes_max<32>(amax));
  if constexpr (sizeof(Code) == 1) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= quantiser.code(x[i]) << (8 * i);
    *reinterpret_cast<uint32_t*>(codes + first) = word;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[fp4_place(first + i)] = quantiser.half(x[i]);
  }
  if (first == 0) *scale = quantiser.scale;
}

// Quantised stretch of inputs that one warp makes for itself.
template <int K, int S, typename Code>
struct __align__(16) Quantised {
  Code codes[S][K];
  float scales[S][K / kActBlock];
};

// The warp quantises K inputs of each token; values(token, i) are inputs i to i + 3.
template <int K, int S, typename Code, typename Values>
__device__ __forceinline__ void quantise(Quantised<K, S, Code>& out, Values values) {
#pragma unroll
  for (int token = 0; token < S; ++token) {
#pragma unroll
    for (int block = 0; block < K / kActBlock; ++block) {
      const int first = block * kActBlock;
      quantise_block(values(token, first + 4 * (threadIdx.x & 31)), &out.codes[token][first], &out.scales[token][block]);
    }
  }
  __syncwarp();
}

// Four neighbouring bf16 values.
__device__ __forceinline__ float4 load_bf16x4(const void* p) {
  const uint2 v = *static_cast<const uint2*>(p);
  const float2 a = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v.x));
  const float2 b = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v.y));
  return make_float4(a.x, a.y, b.x, b.y);
}

// Of a warp's blocks of inputs, how many are loaded together: at most `most`, and a divisor of all.
__host__ __device__ constexpr int at_once(int blocks, int most) {
  while (blocks % most) --most;
  return most;
}

// y[token][row], float32, of N8 FP8 rows on quantised inputs, rounded to bf16, then N16 bf16 rows on plain ones.
template <int N8, int N16, int K, int S, int WARPS, int ROWS_PER_SCALE>
__device__ __forceinline__ void fused_linear(const uint8_t* w8, const uint8_t* scale, const void* w16,
                                             const uint8_t* codes, const float* scales, const void* x, float* y) {
  constexpr int KW = K / WARPS;
  __shared__ Partials<S, WARPS> partials;
  const int warp = threadIdx.x >> 5, row = blockIdx.x * 16, k = warp * KW;
  const bool is_fp8 = row < N8;
  float acc[4] = {0, 0, 0, 0};
  if (is_fp8) {
    fp8_rows<KW, S, at_once(KW / kActBlock, 2)>(
        w8 + int64_t(row) * K + k, K, scale + row / ROWS_PER_SCALE * (K / kActBlock) + k / kActBlock, codes + k, K,
        scales + k / kActBlock, K / kActBlock, acc, await_previous);
  } else {
    bf16_rows<KW, S, at_once(KW / 32, 4)>(static_cast<const uint16_t*>(w16) + int64_t(row - N8) * K + k, K,
                                        static_cast<const uint16_t*>(x) + k, K, acc, await_previous);
  }
  keep<S>(partials[warp], acc);
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * S; i += 32 * WARPS) {
    const float sum = total<S, WARPS>(partials, i / 16, i % 16);
    y[(i / 16) * (N8 + N16) + row + i % 16] = is_fp8 ? bf16_round(sum) : sum;
  }
}

// Groups of rows, each on its own stretch of K bf16 inputs that are not quantised. x: [S, N / ROWS * K], y: bf16 [S, N].
template <int N, int ROWS, int K, int S, int WARPS, int ROWS_PER_SCALE>
__device__ __forceinline__ void grouped_linear(const uint8_t* w, const uint8_t* scale, const void* x, void* y) {
  constexpr int KW = K / WARPS, STRIDE = N / ROWS * K;
  __shared__ Partials<S, WARPS> partials;
  const int warp = threadIdx.x >> 5, row = blockIdx.x * 16, k = warp * KW;
  float acc[4] = {0, 0, 0, 0};
  fp8_rows_bf16<KW, S, at_once(KW / kActBlock, 2)>(
      w + int64_t(row) * K + k, K, scale + row / ROWS_PER_SCALE * (K / kActBlock) + k / kActBlock,
      static_cast<const uint16_t*>(x) + row / ROWS * K + k, STRIDE, acc, await_previous);
  keep<S>(partials[warp], acc);
  __syncthreads();
  store_totals<N>(partials, row, y);
}

// 16 FP8 rows of N, from `row` on, on inputs that are quantised here: values(token, i) are inputs i to i + 3, and may need
// the kernel before. y: bf16 [S, N].
template <int N, int K, int S, int WARPS, int ROWS_PER_SCALE, typename Values>
__device__ __forceinline__ void quantised_rows(Partials<S, WARPS>& partials, const uint8_t* w, const uint8_t* scale,
                                               int row, Values values, void* y) {
  constexpr int KW = K / WARPS;
  __shared__ Quantised<KW, S, uint8_t> inputs[WARPS];
  const int warp = threadIdx.x >> 5, k = warp * KW;
  float acc[4] = {0, 0, 0, 0};
  fp8_rows<KW, S, at_once(KW / kActBlock, 2)>(
      w + int64_t(row) * K + k, K, scale + row / ROWS_PER_SCALE * (K / kActBlock) + k / kActBlock, inputs[warp].codes[0],
      KW, inputs[warp].scales[0], KW / kActBlock, acc, [&] {
        await_previous();
        quantise(inputs[warp], [&](int token, int i) { return values(token, k + i); });
      });
  keep<S>(partials[warp], acc);
  __syncthreads();
  store_totals<N>(partials, row, y);
}

// FP8 rows on inputs that are quantised here. x: bf16 [S, K], y: bf16 [S, N].
template <int N, int K, int S, int WARPS, int ROWS_PER_SCALE>
__device__ __forceinline__ void quantised_linear(const uint8_t* w, const uint8_t* scale, const void* x, void* y) {
  __shared__ Partials<S, WARPS> partials;
  const __nv_bfloat16* inputs = static_cast<const __nv_bfloat16*>(x);
  quantised_rows<N, K, S, WARPS, ROWS_PER_SCALE>(
      partials, w, scale, blockIdx.x * 16, [&](int token, int i) { return load_bf16x4(inputs + token * K + i); }, y);
}

}  // namespace icebox
