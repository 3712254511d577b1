// Hyper-connections: writing a sublayer's output into the residual streams, and reading the next sublayer's input.
//
// The projection that sets the mixing spans all streams, so it is a sum over blocks: `write` leaves each block's part,
// `read` adds them up. Streams are bf16 [S, 4, D]; a block of `write` has 32 columns of every stream.

namespace icebox {

constexpr int kStreams = 4;
constexpr int kColumns = 32;
constexpr int kLayerMixes = 24;  // numbers that set the mixing around a sublayer

// The thread has column `column` of stream `stream`: its part of fn, float32 [J, 4 * D].
template <int D, int J>
struct Factors {
  float of[J];
  __device__ Factors(const float* fn, int stream, int column) {
#pragma unroll
    for (int j = 0; j < J; ++j) of[j] = fn[j * kStreams * D + stream * D + column];
  }
};

// The parts of the next projection and of the sum of squares, parts[token][block][J + 1], of the streams' new values:
// h[s] is token s at the thread's column.
template <int D, int S, int J>
__device__ __forceinline__ void project(const float (&h)[S], const Factors<D, J>& factors, float* parts) {
  __shared__ float sums[kStreams][S][J + 1];
#pragma unroll
  for (int j = 0; j <= J; ++j) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      const float sum = warp_sum(h[s] * (j < J ? factors.of[j < J ? j : 0] : h[s]));
      if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5][s][j] = sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < S * (J + 1); i += kStreams * kColumns) {
    const int s = i / (J + 1), j = i % (J + 1);
    parts[(s * (D / kColumns) + blockIdx.x) * (J + 1) + j] =
        (sums[0][s][j] + sums[1][s][j]) + (sums[2][s][j] + sums[3][s][j]);
  }
}

// Every stream starts as the token's embedding.
template <int D, int S, int J>
__device__ __forceinline__ void streams_start(const int* tokens, const void* embedding, void* streams, const float* fn,
                                              float* parts) {
  const int stream = threadIdx.x >> 5, column = blockIdx.x * kColumns + (threadIdx.x & 31);
  const Factors<D, J> factors(fn, stream, column);
  await_previous();
  float h[S];
#pragma unroll
  for (int s = 0; s < S; ++s) {
    const __nv_bfloat16 x = static_cast<const __nv_bfloat16*>(embedding)[int64_t(tokens[s]) * D + column];
    static_cast<__nv_bfloat16*>(streams)[(s * kStreams + stream) * D + column] = x;
    h[s] = __bfloat162float(x);
  }
  project<D, S, J>(h, factors, parts);
}

// h'[k] = post[k] * x + sum over j of comb[j][k] * h[j], in place; x(s, column) is the sublayer's output.
template <int D, int S, int J, typename Output>
__device__ __forceinline__ void streams_write(Output x, void* streams, const float* post, const float* comb,
                                              const float* fn, float* parts) {
  const int stream = threadIdx.x >> 5, column = blockIdx.x * kColumns + (threadIdx.x & 31);
  __nv_bfloat16* at = static_cast<__nv_bfloat16*>(streams) + column;
  const Factors<D, J> factors(fn, stream, column);
  await_previous();
  float h[S];
#pragma unroll
  for (int s = 0; s < S; ++s) {
    float mixed = 0;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      mixed += comb[(s * kStreams + j) * kStreams + stream] * __bfloat162float(at[(s * kStreams + j) * D]);
    }
    h[s] = bf16_round(mixed + post[s * kStreams + stream] * x(s, column));
  }
  __syncthreads();  // every stream of these columns has been read
#pragma unroll
  for (int s = 0; s < S; ++s) at[(s * kStreams + stream) * D] = __float2bfloat16_rn(h[s]);
  project<D, S, J>(h, factors, parts);
}

// The attention's output, bf16 [S, D].
template <int D, int S, int J>
__device__ __forceinline__ void attention_write(const void* y, void* streams, const float* post, const float* comb,
                                                const float* fn, float* parts) {
  streams_write<D, S, J>(
      [&](int s, int column) { return __bfloat162float(static_cast<const __nv_bfloat16*>(y)[s * D + column]); }, streams,
      post, comb, fn, parts);
}

// Mixing numbers of a token from the parts: numbers FIRST to FIRST + COUNT - 1 and, as the last, the streams' sum of squares.
// A warp of the block adds up every WARPS-th.
template <int D, int J, int FIRST, int COUNT, int WARPS>
__device__ __forceinline__ void mixes(const float* parts, float (&mix)[COUNT + 1]) {
  constexpr int BLOCKS = D / kColumns, ROUNDS = (COUNT + WARPS) / WARPS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float sums[ROUNDS];
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const int i = r * WARPS + warp, j = i < COUNT ? FIRST + i : J;
    sums[r] = 0;
    for (int block = lane; block < BLOCKS; block += 32) sums[r] += parts[block * (J + 1) + j];
  }
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const float sum = warp_sum(sums[r]);
    if (lane == 0 && r * WARPS + warp <= COUNT) mix[r * WARPS + warp] = sum;
  }
  __syncthreads();
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// post [4] and comb [4][4] of a token, by the block's first 16 lanes; lane 4 * j + k has comb[j][k].
template <int D, int THREADS>
__device__ __forceinline__ void streams_mix(const float* parts, const float* scale, const float* base, float eps,
                                            float hc_eps, int iterations, float* post, float* comb) {
  constexpr int COUNT = kLayerMixes - kStreams;
  __shared__ float mix[COUNT + 1];
  const int lane = threadIdx.x & 15;
  const float post_scale = scale[1], post_base = base[4 + lane % 4], comb_scale = scale[2], comb_base = base[8 + lane];
  await_previous();
  mixes<D, kLayerMixes, kStreams, COUNT, THREADS / 32>(parts, mix);
  if (threadIdx.x >= 32) return;
  const float inverse_rms = rsqrtf(mix[COUNT] / (kStreams * D) + eps);
  if (threadIdx.x < 4) post[threadIdx.x] = 2.0f * sigmoid(mix[lane] * inverse_rms * post_scale + post_base);
  const float x = mix[4 + lane] * inverse_rms * comb_scale + comb_base;
  const auto over_row = [](float v) { v += __shfl_xor_sync(0xFFFFFFFFu, v, 1); return v + __shfl_xor_sync(0xFFFFFFFFu, v, 2); };
  const auto over_column = [](float v) { v += __shfl_xor_sync(0xFFFFFFFFu, v, 4); return v + __shfl_xor_sync(0xFFFFFFFFu, v, 8); };
  float top = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
  const float exponential = expf(x - top);
  float c = exponential / over_row(exponential) + hc_eps;
  c = c / (over_column(c) + hc_eps);
  for (int i = 1; i < iterations; ++i) {
    c = c / (over_row(c) + hc_eps);
    c = c / (over_column(c) + hc_eps);
  }
  if (threadIdx.x < 16) comb[lane] = c;
}

// A token's input of the next sublayer: the weighted sum of the streams, normed, plain and quantised, the codes also as
// float16 in the order of fp4_place.
// J numbers a token set the mixing: kLayerMixes in a layer, kStreams at the head. Threads have 8 neighbouring columns at a time.
template <int D, int J, int THREADS>
__device__ __forceinline__ void streams_read(const void* streams, const float* parts, const float* scale,
                                             const float* base, const float* norm, float eps, float hc_eps, void* out,
                                             uint8_t* codes, uint16_t* halves, float* scales) {
  constexpr int PER_THREAD = 8, ROUNDS = (D + PER_THREAD * THREADS - 1) / (PER_THREAD * THREADS);
  __shared__ float mix[kStreams + 1];
  float weights[ROUNDS][PER_THREAD], bases[kStreams];
  const float pre_scale = scale[0];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) bases[j] = base[j];
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const int column = (r * THREADS + threadIdx.x) * PER_THREAD;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) weights[r][i] = column < D ? norm[column + i] : 0.0f;
  }
  await_previous();
  uint4 values[ROUNDS][kStreams];  // on their way while the mixes are added up
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const int column = (r * THREADS + threadIdx.x) * PER_THREAD;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      values[r][j] = column < D ? load16(static_cast<const uint16_t*>(streams) + j * D + column) : make_uint4(0, 0, 0, 0);
    }
  }
  mixes<D, J, 0, kStreams, THREADS / 32>(parts, mix);
  const float inverse_rms = rsqrtf(mix[kStreams] / (kStreams * D) + eps);
  float pre[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) pre[j] = sigmoid(mix[j] * inverse_rms * pre_scale + bases[j]) + hc_eps;
  float x[ROUNDS][PER_THREAD], squares = 0;
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) x[r][i] = 0;
#pragma unroll
    for (int j = 0; j < kStreams; ++j) {
      const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&values[r][j]);
#pragma unroll
      for (int i = 0; i < PER_THREAD / 2; ++i) {
        const float2 f = __bfloat1622float2(pairs[i]);
        x[r][2 * i] += pre[j] * f.x;
        x[r][2 * i + 1] += pre[j] * f.y;
      }
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      x[r][i] = bf16_round(x[r][i]);
      squares += x[r][i] * x[r][i];
    }
  }
  const float factor = rsqrtf(block_sum(squares) / D + eps);
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const int column = (r * THREADS + threadIdx.x) * PER_THREAD;
    float amax = 0;
    uint32_t words[PER_THREAD / 2];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      x[r][i] = bf16_round(x[r][i] * factor * weights[r][i]);
      amax = fmaxf(amax, fabsf(x[r][i]));
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD / 2; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[r][2 * i], x[r][2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    const Fp8Scale quantiser(lanes_max<16>(amax));  // 16 lanes of 8 values are a block of 128
    if (column >= D) continue;
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out) + column) = make_uint4(words[0], words[1], words[2], words[3]);
    uint32_t packed[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) packed[i / 4] |= quantiser.code(x[r][i]) << (8 * (i % 4));
    *reinterpret_cast<uint2*>(codes + column) = make_uint2(packed[0], packed[1]);
    if (halves) {
#pragma unroll
      for (int i = 0; i < PER_THREAD / 2; ++i) words[i] = quantiser.half(x[r][i]) | quantiser.half(x[r][i + 4]) << 16;
      *reinterpret_cast<uint4*>(halves + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if ((threadIdx.x & 15) == 0) scales[column / kActBlock] = quantiser.scale;
  }
}

// Before a sublayer, two blocks a token: its input, and how the streams will take its output.
template <int D, int THREADS>
__device__ __forceinline__ void sublayer_read(const void* streams, const float* parts, const float* scale,
                                              const float* base, const float* norm, float eps, float hc_eps,
                                              int iterations, void* out, uint8_t* codes, void* halves,
                                              float* scales, float* post, float* comb) {
  const int s = blockIdx.y;
  const float* own = parts + s * (D / kColumns) * (kLayerMixes + 1);
  if (blockIdx.x == 0) {
    streams_read<D, kLayerMixes, THREADS>(static_cast<const uint16_t*>(streams) + s * kStreams * D, own, scale, base,
                                          norm, eps, hc_eps, static_cast<uint16_t*>(out) + s * D, codes + s * D,
                                          static_cast<uint16_t*>(halves) + s * D, scales + s * (D / kActBlock));
  } else {
    streams_mix<D, THREADS>(own, scale, base, eps, hc_eps, iterations, post + s * kStreams, comb + s * kStreams * kStreams);
  }
}

template <int D, int THREADS>
__device__ __forceinline__ void head_read(const void* streams, const float* parts, const float* scale, const float* base,
                                          const float* norm, float eps, float hc_eps, void* out, uint8_t* codes,
                                          float* scales) {
  const int s = blockIdx.y;
  streams_read<D, kStreams, THREADS>(static_cast<const uint16_t*>(streams) + s * kStreams * D,
                                     parts + s * (D / kColumns) * (kStreams + 1), scale, base, norm, eps, hc_eps,
                                     static_cast<uint16_t*>(out) + s * D, codes + s * D, nullptr,
                                     scales + s * (D / kActBlock));
}

}  // namespace icebox
