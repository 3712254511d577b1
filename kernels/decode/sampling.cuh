// From logits to the next token, and the step to it: greedy, or a draw that depends on seed and position alone.

namespace icebox {

// Of a sequence. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.
struct Sampling {
  float temperature, top_p, min_p;
  int top_k;
  u64 seed;
};

// Philox 4x32-10 (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405).
__device__ __forceinline__ uint4 philox(u64 key, uint4 counter) {
  unsigned k0 = unsigned(key), k1 = unsigned(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 a = 0xD2511F53ull * counter.x, b = 0xCD9E8D57ull * counter.z;
    counter = make_uint4(unsigned(b >> 32) ^ counter.y ^ k0, unsigned(b), unsigned(a >> 32) ^ counter.w ^ k1, unsigned(a));
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// Gumbel noise of 32 random bits: the argmax of logits / temperature + noise is a draw from their softmax. Of a uniform
// number u in (0, 1] it takes 1 - u, so that large noise, which decides, has the fine steps of floats near 0; and where
// rounding makes u 1, the noise is -inf, not inf, which would draw that token whatever its logit.
__device__ __forceinline__ float gumbel(unsigned bits) {
  const float u = (float(bits) + 0.5f) * 0x1p-32f;
  return -logf(-log1pf(-u));
}

// The smallest logit that top-k, then top-p, then min-p let pass: one block of 1024 threads a token. Ties at a cut pass.
// Probabilities are summed as whole numbers of 2^-40, so that no order of additions matters.
template <int V>
__device__ __forceinline__ void sample_threshold(const float* logits, const void* sampling, float* threshold) {
  __shared__ u64 bins[256];
  __shared__ float tops[32];
  __shared__ unsigned prefix, cut;
  __shared__ u64 wanted;
  await_previous();
  const int s = blockIdx.x;
  const Sampling own = static_cast<const Sampling*>(sampling)[s];
  const bool has_k = own.top_k > 0 && own.top_k < V, has_p = own.top_p < 1.0f, has_min = own.min_p > 0.0f;
  if (threadIdx.x == 0) threshold[s] = -INFINITY;
  if (own.temperature == 0.0f || !(has_k || has_p || has_min)) return;
  logits += int64_t(s) * V;
  float top = -INFINITY;
  for (int i = threadIdx.x; i < V; i += blockDim.x) top = fmaxf(top, logits[i]);
  top = lanes_max<32>(top);
  if ((threadIdx.x & 31) == 0) tops[threadIdx.x >> 5] = top;
  if (threadIdx.x == 0) cut = 0;
  __syncthreads();
  for (int i = 0; i < int(blockDim.x >> 5); ++i) top = fmaxf(top, tops[i]);
  const float inverse = 1.0f / own.temperature;
  const auto mass = [&](float x) { return (u64)(expf((x - top) * inverse) * 0x1p40f); };
  for (int stage = 0; stage < 2; ++stage) {  // top-k by counts, top-p by masses of what top-k left
    if (!(stage == 0 ? has_k : has_p)) continue;
    __syncthreads();
    if (threadIdx.x == 0) {
      prefix = 0;
      wanted = own.top_k;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
      if (threadIdx.x < 256) bins[threadIdx.x] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < V; i += blockDim.x) {
        const unsigned key = ordered(logits[i]);
        if (key < cut || (shift < 24 && key >> (shift + 8) != prefix >> (shift + 8))) continue;
        atomicAdd(&bins[(key >> shift) & 255], stage == 0 ? 1ull : mass(logits[i]));
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        if (stage == 1 && shift == 24) {
          u64 sum = 0;
          for (int i = 0; i < 256; ++i) sum += bins[i];
          const u64 share = (u64)(double(sum) * double(own.top_p));
          wanted = share ? share : 1;
        }
        int bin = 255;
        u64 left = wanted;
        while (bin > 0 && bins[bin] < left) left -= bins[bin--];
        prefix |= unsigned(bin) << shift;
        wanted = left;
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) cut = prefix;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const float lowest = cut == 0 ? -INFINITY : __uint_as_float(cut & 0x80000000u ? cut & 0x7FFFFFFFu : ~cut);
    threshold[s] = has_min ? fmaxf(lowest, top + logf(own.min_p) * own.temperature) : lowest;
  }
}

struct Best {
  float value;
  int index;
  __device__ void take(float v, int i) {
    if (v > value || (v == value && i < index)) *this = Best{v, i};
  }
};

// The draw, by all blocks; the one that ends last takes the best of them and moves the sequence on: (blocks, token).
// log: int [steps, S], the tokens of each step, in the host's memory. done: unsigned [S], 0 between launches.
// What the token wants of HASHED layers goes to the host as hints, before it sees the token.
template <int V, int S, int STEPS, int HASHED, int E, int K>
__device__ __forceinline__ void sample(const float* logits, const void* sampling, const float* threshold, void* bests_of_blocks,
                                       unsigned* done, int* tokens, int* positions, int* step, int* log,
                                       const void* hashed, const int* table, const void* clock, int* hints, int* hinted) {
  Best* best = static_cast<Best*>(bests_of_blocks);
  __shared__ float best_values[32];
  __shared__ int best_indices[32];
  __shared__ bool is_last;
  await_previous();
  const int s = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Sampling own = static_cast<const Sampling*>(sampling)[s];
  const float lowest = threshold[s];
  Best mine{-INFINITY, V};
  const auto gather = [&] {
#pragma unroll
    for (int step = 16; step; step >>= 1) {
      const float value = __shfl_xor_sync(0xFFFFFFFFu, mine.value, step);
      mine.take(value, __shfl_xor_sync(0xFFFFFFFFu, mine.index, step));
    }
    __syncthreads();
    if (lane == 0) {
      best_values[warp] = mine.value;
      best_indices[warp] = mine.index;
    }
    __syncthreads();
    for (int i = 0; i < int(blockDim.x >> 5); ++i) mine.take(best_values[i], best_indices[i]);
  };
  for (int quad = blockIdx.x * blockDim.x + threadIdx.x; quad < (V + 3) / 4; quad += gridDim.x * blockDim.x) {
    uint4 random = make_uint4(0, 0, 0, 0);
    if (own.temperature > 0.0f) random = philox(own.seed, make_uint4(quad, positions[s], 0, 0));
    const unsigned bits[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int index = 4 * quad + i;
      if (index >= V) continue;
      const float x = logits[int64_t(s) * V + index];
      if (own.temperature == 0.0f) mine.take(x, index);
      else if (x >= lowest) mine.take(x / own.temperature + gumbel(bits[i]), index);
    }
  }
  gather();
  if (threadIdx.x == 0) {
    best[s * gridDim.x + blockIdx.x] = mine;
    __threadfence();
    is_last = atomicAdd(&done[s], 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  mine = Best{-INFINITY, V};
  for (int i = threadIdx.x; i < int(gridDim.x); i += blockDim.x) {
    const volatile Best* other = best + s * gridDim.x + i;
    mine.take(other->value, other->index);
  }
  gather();
  const int token = mine.index < V ? mine.index : 0;  // all logits NaN: the host discards the step
  if (threadIdx.x == 0) {
    done[s] = 0;
    tokens[s] = token;
    positions[s] += 1;
    log[(step[s] % STEPS) * S + s] = token;
    step[s] += 1;
  }
  if constexpr (HASHED > 0) {
    if (warp == 0) hint_hashed<HASHED, K>(hashed, V, token, table, E, *static_cast<const u64*>(clock), hints, hinted);
  }
}

}  // namespace icebox
