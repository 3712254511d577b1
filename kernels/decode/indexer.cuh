// Chooses the TOPK best entries of a sequence that has more.

namespace icebox {

constexpr int kIndexEntries = 64;  // that one block scores

// A query's heads as the scores take them, by all warps: rotated, through a Hadamard transform, and FP4's values. q: float
// [H * D] of one token.
template <int H, int D, int R>
__device__ __forceinline__ void index_query(const float* q, int position, const float* frequencies,
                                            __nv_bfloat16 (*query)[D]) {
  static_assert(D == 128 || D == 64, "a lane holds D / 32 values of a head");
  constexpr int V = D / 32;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  for (int head = warp; head < H; head += warps) {
    float v[V];
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = q[head * D + V * lane + i];
#pragma unroll
    for (int i = 0; i < V; i += 2) {
      const int pair = (V * lane + i - (D - R)) / 2;
      if (V * lane + i < D - R) continue;
      const float2 turned = Rotation(position, frequencies[pair]).turn(v[i], v[i + 1]);
      v[i] = bf16_round(turned.x);
      v[i + 1] = bf16_round(turned.y);
    }
#pragma unroll
    for (int step = 1; step < V; step <<= 1) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (i & step) continue;
        const float a = v[i], b = v[i + step];
        v[i] = a + b;
        v[i + step] = a - b;
      }
    }
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], step);
        v[i] = lane & step ? other - v[i] : v[i] + other;
      }
    }
    float amax = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      v[i] = bf16_round(v[i] * (D == 128 ? 0.08838834764831845f : 0.125f));
      amax = fmaxf(amax, fabsf(v[i]));
    }
    amax = lanes_max<32 / V>(amax);  // a block of 32 values
#pragma unroll
    for (int i = 0; i < V; ++i) query[head][V * lane + i] = __float2bfloat16_rn(fp4_round(v[i], amax));
  }
}

// Scores of the entries from `first` on, as many as a block has and there are: sum over heads of relu(q . key) * weight. A
// warp has 16 entries, the rows of an mma, and eight heads, its columns.
template <int H, int D>
__device__ __forceinline__ void index_scores(const __nv_bfloat16 (*query)[D], const float* weights,
                                             const __nv_bfloat16* keys, int first, int count, float* scores) {
  constexpr int GROUPS = H / 8, TILES = kIndexEntries / 16;
  __shared__ float sums[GROUPS][kIndexEntries];
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const Lane at;
  for (int unit = warp; unit < GROUPS * TILES; unit += warps) {
    const int head = unit / TILES * 8, row = unit % TILES * 16 + at.g;
    const __nv_bfloat16* top = keys + int64_t(min(first + row, count - 1)) * D + 8 * at.t;
    const __nv_bfloat16* bottom = keys + int64_t(min(first + row + 8, count - 1)) * D + 8 * at.t;
    float c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < D; k += 32) {
      const uint4 a = load16(top + k), b = load16(bottom + k), v = load16(&query[head + at.g][k + 8 * at.t]);
      mma_bf16(c, a.x, b.x, a.y, b.y, v.x, v.y);
      mma_bf16(c, a.z, b.z, a.w, b.w, v.z, v.w);
    }
    const float w0 = weights[head + 2 * at.t], w1 = weights[head + 2 * at.t + 1];
    float sum = fmaxf(c[0], 0.0f) * w0 + fmaxf(c[1], 0.0f) * w1;
    float sum8 = fmaxf(c[2], 0.0f) * w0 + fmaxf(c[3], 0.0f) * w1;
#pragma unroll
    for (int step = 1; step < 4; step <<= 1) {
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
      sum8 += __shfl_xor_sync(0xFFFFFFFFu, sum8, step);
    }
    if (at.t == 0) {
      sums[head / 8][row] = sum;
      sums[head / 8][row + 8] = sum8;
    }
  }
  __syncthreads();
  const int i = threadIdx.x;
  if (i >= kIndexEntries || first + i >= count) return;
  float sum = 0;
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) sum += sums[group][i];
  scores[first + i] = sum;
}

// The TOPK largest of a token's scores, which other blocks wrote; of equal ones the first. chosen: int [TOPK], ascending.
template <int TOPK>
__device__ __forceinline__ void index_topk(const float* scores, int count, int* chosen) {
  __shared__ int warp_first[32], taken_shared, equal_shared;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) taken_shared = equal_shared = 0;
  const auto score = [=](int i) { return ordered(__ldcg(scores + i)); };  // past L1, which others' writes do not reach
  const auto [threshold, wanted] = kth_largest(score, count, TOPK);
  for (int begin = 0; begin < count; begin += blockDim.x) {
    const int i = begin + threadIdx.x;
    const unsigned key = i < count ? score(i) : 0;
    const unsigned above = __ballot_sync(0xFFFFFFFFu, i < count && key > threshold);
    const unsigned equal = __ballot_sync(0xFFFFFFFFu, i < count && key == threshold);
    if (lane == 0) warp_first[warp] = __popc(above) << 16 | __popc(equal);
    __syncthreads();
    const unsigned below = (1u << lane) - 1;
    int equals = equal_shared + __popc(equal & below), aboves = __popc(above & below), all_equal = 0, all_above = 0;
    for (int j = 0; j < int(blockDim.x >> 5); ++j) {
      const int a = warp_first[j] >> 16, q = warp_first[j] & 0xFFFF;
      if (j < warp) {
        aboves += a;
        equals += q;
      }
      all_above += a;
      all_equal += q;
    }
    const int base = taken_shared, equal_before = equal_shared;
    // What has been taken so far: everything above, and equal ones up to `wanted`.
    if (i < count) {
      const int place = base + aboves + min(equals, wanted) - min(equal_before, wanted);
      if (key > threshold || (key == threshold && equals < wanted)) chosen[place] = i;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      taken_shared = base + all_above + min(equal_before + all_equal, wanted) - min(equal_before, wanted);
      equal_shared = equal_before + all_equal;
    }
    __syncthreads();
  }
}

// Scores by all blocks, (block, token); the one of a token that ends last chooses. q: float [S, q_stride], the indexer's
// heads; w: float [S, w_stride], the head weights' products; keys: bf16 [S, entries, D]; scores: float [S, entries];
// done: unsigned [S], 0 between launches; chosen: int [S, TOPK].
template <int H, int D, int R, int RATIO, int TOPK>
__device__ __forceinline__ void index_choice(const float* q, int q_stride, const float* w, int w_stride, float scale,
                                             const int* positions, const void* keys, int entries,
                                             const float* frequencies, float* scores, unsigned* done, int* chosen) {
  __shared__ __align__(16) __nv_bfloat16 query[H][D];
  __shared__ float weights[H];
  __shared__ bool is_last;
  const int s = blockIdx.y, position = peek_system(positions + s), count = (position + 1) / RATIO;
  const int first = blockIdx.x * kIndexEntries;
  if (count <= TOPK || first >= count) return;
  const __nv_bfloat16* own_keys = static_cast<const __nv_bfloat16*>(keys) + int64_t(s) * entries * D;
  scores += int64_t(s) * entries;
  // The newest entry too is older than the kernel before, which makes the query.
  prefetch_row(reinterpret_cast<const float*>(own_keys + int64_t(first) * D), min(kIndexEntries, count - first) * D / 2);
  await_previous();
  for (int head = threadIdx.x; head < H; head += blockDim.x) {
    weights[head] = bf16_round(bf16_round(w[s * w_stride + head]) * scale);
  }
  index_query<H, D, R>(q + int64_t(s) * q_stride, position, frequencies, query);
  __syncthreads();
  index_scores<H, D>(query, weights, own_keys, first, count, scores);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicAdd(&done[s], 1) == unsigned(count - 1) / kIndexEntries;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) done[s] = 0;
  index_topk<TOPK>(scores, count, chosen + s * TOPK);
}

}  // namespace icebox
