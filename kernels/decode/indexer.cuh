// Chooses the TOPK best entries of a sequence that has more.

namespace icebox {

// Scores of 64 entries a block, (block, token): sum over heads of relu(q . key) * weight. q: float [S, q_stride], the
// indexer's heads; w: float [S, w_stride], the head weights' products; keys: bf16 [S, entries, D]; scores: float
// [S, entries].
template <int H, int D, int R, int RATIO, int TOPK>
__device__ __forceinline__ void index_scores(const float* q, int q_stride, const float* w, int w_stride, float scale,
                                             const int* positions, const void* keys, int entries,
                                             const float* frequencies, float* scores) {
  static_assert(D == 128 || D == 64, "a lane holds D / 32 values of a head");
  constexpr int V = D / 32;
  __shared__ __align__(16) __nv_bfloat16 query[H][D];
  __shared__ float weights[H];
  await_previous();
  const int s = blockIdx.y, position = positions[s], count = (position + 1) / RATIO, first = blockIdx.x * 64;
  if (count <= TOPK || first >= count) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  for (int head = warp; head < H; head += warps) {
    float v[V];
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = q[int64_t(s) * q_stride + head * D + V * lane + i];
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
    if (lane == 0) weights[head] = bf16_round(bf16_round(w[s * w_stride + head]) * scale);
  }
  __syncthreads();
  const Lane at;
  const __nv_bfloat16* own = static_cast<const __nv_bfloat16*>(keys) + int64_t(s) * entries * D;
  for (int tile = warp; tile < 4; tile += warps) {  // 16 entries: the A operand, heads its columns
    const int top = first + tile * 16 + at.g, bottom = top + 8;
    uint4 a[D / 32], b[D / 32];
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      a[k] = load16(own + int64_t(min(top, count - 1)) * D + 32 * k + 8 * at.t);
      b[k] = load16(own + int64_t(min(bottom, count - 1)) * D + 32 * k + 8 * at.t);
    }
    float sum = 0, sum8 = 0;
    for (int head = 0; head < H; head += 8) {
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int k = 0; k < D / 32; ++k) {
        const uint4 v = load16(&query[head + at.g][32 * k + 8 * at.t]);
        mma_bf16(c, a[k].x, b[k].x, a[k].y, b[k].y, v.x, v.y);
        mma_bf16(c, a[k].z, b[k].z, a[k].w, b[k].w, v.z, v.w);
      }
      const float w0 = weights[head + 2 * at.t], w1 = weights[head + 2 * at.t + 1];
      sum += fmaxf(c[0], 0.0f) * w0 + fmaxf(c[1], 0.0f) * w1;
      sum8 += fmaxf(c[2], 0.0f) * w0 + fmaxf(c[3], 0.0f) * w1;
    }
#pragma unroll
    for (int step = 1; step < 4; step <<= 1) {
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
      sum8 += __shfl_xor_sync(0xFFFFFFFFu, sum8, step);
    }
    if (at.t == 0) {
      if (top < count) scores[int64_t(s) * entries + top] = sum;
      if (bottom < count) scores[int64_t(s) * entries + bottom] = sum8;
    }
  }
}

// The TOPK largest scores of a token, one block of 1024 threads each; of equal ones the first. chosen: int [S, TOPK],
// ascending.
template <int RATIO, int TOPK>
__device__ __forceinline__ void index_topk(const float* scores, const int* positions, int entries, int* chosen) {
  __shared__ int warp_first[32], taken_shared, equal_shared;
  await_previous();
  const int s = blockIdx.x, count = (positions[s] + 1) / RATIO, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  if (count <= TOPK) return;
  scores += int64_t(s) * entries;
  if (threadIdx.x == 0) taken_shared = equal_shared = 0;
  const auto [threshold, wanted] = kth_largest([=](int i) { return ordered(scores[i]); }, count, TOPK);
  for (int begin = 0; begin < count; begin += blockDim.x) {
    const int i = begin + threadIdx.x;
    const unsigned key = i < count ? ordered(scores[i]) : 0;
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
      if (key > threshold || (key == threshold && equals < wanted)) chosen[s * TOPK + place] = i;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      taken_shared = base + all_above + min(equal_before + all_equal, wanted) - min(equal_before, wanted);
      equal_shared = equal_before + all_equal;
    }
    __syncthreads();
  }
}

}  // namespace icebox
