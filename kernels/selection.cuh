// The largest of many numbers, by a block of threads.

namespace icebox {

// Floats in the order of unsigned numbers, all of them above 0.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x == 0.0f ? 0.0f : x);  // -0 is 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Threshold {
  unsigned key;  // the k-th largest
  int ties;      // how many of its equals are among the first k
};

// Of key(0) to key(count - 1), count at least k, k at least 1: eight bits at a time, by counting. For whole warps; every
// thread of the block must call it.
template <class Key>
__device__ __forceinline__ Threshold kth_largest(Key key, int count, int k) {
  __shared__ int bins[256];
  __shared__ Threshold found;
  unsigned prefix = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const unsigned x = key(i);
      if ((x & mask) == prefix) atomicAdd(&bins[(x >> shift) & 255], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // a lane has eight bins, and one lane the k-th largest in them
      const int lane = threadIdx.x;
      int own = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) own += bins[8 * lane + i];
      int above = own;
#pragma unroll
      for (int step = 1; step < 32; step <<= 1) {
        const int other = __shfl_down_sync(0xFFFFFFFFu, above, step);
        if (lane + step < 32) above += other;
      }
      int left = k - (above - own);
      if (left > 0 && left <= own) {
        int bin = 8 * lane + 7;
        while (bins[bin] < left) left -= bins[bin--];
        found = {prefix | unsigned(bin) << shift, left};
      }
    }
    __syncthreads();
    prefix = found.key;
    k = found.ties;
    mask |= 255u << shift;
  }
  return {prefix, k};
}

// kept[i]: whether scores[i] is among the `topk` largest of the visible ones, of equal ones the first. One row a block;
// all: [rows, count], and count is at least topk.
__device__ __forceinline__ void keep_largest(const float* scores, const unsigned char* visible, int count, int topk,
                                             unsigned char* kept) {
  __shared__ int warp_ties[32];
  const int64_t row = int64_t(blockIdx.x) * count;
  const auto key = [=](int i) { return visible[row + i] ? ordered(scores[row + i]) : 0u; };
  const Threshold threshold = kth_largest(key, count, topk);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  int ties = 0;  // before this stretch
  for (int begin = 0; begin < count; begin += blockDim.x) {
    const int i = begin + threadIdx.x;
    const unsigned x = i < count ? key(i) : 0u;
    const bool is_tie = x && x == threshold.key;
    const unsigned in_warp = __ballot_sync(0xFFFFFFFFu, is_tie);
    if (lane == 0) warp_ties[warp] = __popc(in_warp);
    __syncthreads();
    int rank = ties + __popc(in_warp & ((1u << lane) - 1));
    for (int j = 0; j < warps; ++j) {
      if (j < warp) rank += warp_ties[j];
      ties += warp_ties[j];
    }
    if (i < count) kept[row + i] = x > threshold.key || (is_tie && rank < threshold.ties);
    __syncthreads();  // warp_ties is written again
  }
}

}  // namespace icebox
