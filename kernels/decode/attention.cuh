// Attention of one token a sequence: norms, cached keys and compressed entries; scores in chunks of the key list, and
// their combination. `position` is the token's place in its sequence and lives on the device.

namespace icebox {

// What a thread of `attention_inputs` and its helpers has: values 2 * tid and 2 * tid + 1 of a vector of D, D <= 512.
struct Pair {
  float x, y;
};

template <int D>
__device__ __forceinline__ bool has_pair() { return threadIdx.x < D / 2; }

// RMSNorm of a vector of bf16 values, rounded to bf16. Every thread of the block must call it.
template <int D>
__device__ __forceinline__ Pair rms_norm(Pair v, const float* weight, float eps) {
  const bool mine = has_pair<D>();
  const float factor = rsqrtf(block_sum(mine ? v.x * v.x + v.y * v.y : 0.0f) / D + eps);
  if (!mine) return Pair{0, 0};
  return Pair{bf16_round(v.x * factor * weight[2 * threadIdx.x]), bf16_round(v.y * factor * weight[2 * threadIdx.x + 1])};
}

// The last R values rotate.
template <int D, int R>
__device__ __forceinline__ Pair rope(Pair v, int position, const float* frequencies) {
  const int pair = int(threadIdx.x) - (D - R) / 2;
  if (pair < 0 || !has_pair<D>()) return v;
  const float2 turned = Rotation(position, frequencies[pair]).turn(v.x, v.y);
  return Pair{bf16_round(turned.x), bf16_round(turned.y)};
}

// A key as the cache keeps it: blocks of 64, a warp each, on the FP8 grid, all but the rotated ones; to bf16 [D].
template <int D, int R>
__device__ __forceinline__ void store_key(Pair v, __nv_bfloat16* key) {
  const Fp8Scale scale(lanes_max<32>(fmaxf(fabsf(v.x), fabsf(v.y))));
  if (!has_pair<D>()) return;
  if (2 * threadIdx.x < D - R) v = Pair{scale.round(v.x), scale.round(v.y)};
  reinterpret_cast<__nv_bfloat162*>(key)[threadIdx.x] = __floats2bfloat162_rn(v.x, v.y);
}

// Walsh-Hadamard of D = 64 or 128 values, scaled and rounded to bf16, then FP4 blocks of 32. The first D / 64 warps hold
// the values; every thread of the block must call it.
template <int D>
__device__ __forceinline__ Pair hadamard_fp4(Pair v) {
  static_assert(D == 64 || D == 128);
  v = Pair{v.x + v.y, v.x - v.y};
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const Pair other{__shfl_xor_sync(0xFFFFFFFFu, v.x, step), __shfl_xor_sync(0xFFFFFFFFu, v.y, step)};
    v = threadIdx.x & step ? Pair{other.x - v.x, other.y - v.y} : Pair{v.x + other.x, v.y + other.y};
  }
  if constexpr (D == 128) {
    __shared__ float halves[2][64];
    if (threadIdx.x < 64) {
      halves[0][threadIdx.x] = v.x;
      halves[1][threadIdx.x] = v.y;
    }
    __syncthreads();
    if (threadIdx.x < 64) {
      const Pair other{halves[0][threadIdx.x ^ 32], halves[1][threadIdx.x ^ 32]};
      v = threadIdx.x & 32 ? Pair{other.x - v.x, other.y - v.y} : Pair{v.x + other.x, v.y + other.y};
    }
  }
  const float factor = D == 128 ? 0.08838834764831845f : 0.125f;  // D^-0.5
  v = Pair{bf16_round(v.x * factor), bf16_round(v.y * factor)};
  const float amax = lanes_max<16>(fmaxf(fabsf(v.x), fabsf(v.y)));
  return Pair{fp4_round(v.x, amax), fp4_round(v.y, amax)};
}

// Takes the token into its group, and pools the group if the token closes it: the pooled entry, rounded to bf16.
// projected: keys then gates, float [2 * WIDTH]; rows: float [2][ROWS][WIDTH], with overlap the closed group first.
template <int RATIO, int D>
struct Compressor {
  static constexpr bool OVERLAPS = RATIO == 4;
  static constexpr int WIDTH = OVERLAPS ? 2 * D : D, PREVIOUS = OVERLAPS ? RATIO : 0, ROWS = PREVIOUS + RATIO;

  static __device__ __forceinline__ void add(const float* projected, const float* ape, float* rows, int position) {
    const int place = position % RATIO;
    float* row = rows + (PREVIOUS + place) * WIDTH;
    for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) {
      row[i] = projected[i];
      row[ROWS * WIDTH + i] = projected[WIDTH + i] + ape[place * WIDTH + i];
    }
    __syncthreads();
  }

  static __device__ __forceinline__ float pool(const float* rows, int channel) {
    float top = -INFINITY;
    for (int i = 0; i < ROWS; ++i) top = fmaxf(top, gate(rows, i, channel));
    float sum = 0, weighted = 0;
    for (int i = 0; i < ROWS; ++i) sum += expf(gate(rows, i, channel) - top);
    for (int i = 0; i < ROWS; ++i) weighted += expf(gate(rows, i, channel) - top) / sum * rows[at(i, channel)];
    return bf16_round(weighted);
  }

  static __device__ __forceinline__ void advance(float* rows) {
    if (!OVERLAPS) return;
    __syncthreads();  // the group before has been pooled
    for (int i = threadIdx.x; i < RATIO * WIDTH; i += blockDim.x) {
      rows[i] = rows[RATIO * WIDTH + i];
      rows[ROWS * WIDTH + i] = rows[(ROWS + RATIO) * WIDTH + i];
    }
  }

 private:
  // With overlap, the group before counts with the first half of its width, the own group with the second.
  static __device__ __forceinline__ int at(int i, int channel) {
    return i * WIDTH + (OVERLAPS && i >= RATIO ? D : 0) + channel;
  }
  static __device__ __forceinline__ float gate(const float* rows, int i, int channel) {
    return rows[ROWS * WIDTH + at(i, channel)];
  }
};

// Norm and rotation of a pooled entry, whose position is that of its group's first token.
template <int RATIO, int D, int R>
__device__ __forceinline__ Pair entry(const float* rows, const float* norm, float eps, int position,
                                      const float* frequencies) {
  Pair v{0, 0};
  if (has_pair<D>()) {
    v = Pair{Compressor<RATIO, D>::pool(rows, 2 * threadIdx.x), Compressor<RATIO, D>::pool(rows, 2 * threadIdx.x + 1)};
  }
  return rope<D, R>(rms_norm<D>(v, norm, eps), position / RATIO * RATIO, frequencies);
}

// One block a token and role: 0 the low-rank query, 1 the key, 2 the compressor, 3 the indexer's compressor.
// y: float [S, N]: query [Q], key [D], compressor's keys and gates, the indexer's, its head weights.
// keys: bf16 [S, WINDOW + entries, D]; rows, index_rows: the compressors' states; index_keys: bf16 [S, entries, ID].
template <int Q, int D, int R, int RATIO, int ID, int WINDOW, int N>
__device__ __forceinline__ void attention_inputs(const float* y, const int* positions, const float* q_norm,
                                                 const float* kv_norm, const float* norm, const float* ape,
                                                 const float* index_norm, const float* index_ape,
                                                 const float* frequencies, float eps, int entries, uint8_t* codes,
                                                 float* scales, void* keys, float* rows, void* index_keys,
                                                 float* index_rows) {
  await_previous();
  const int s = blockIdx.y, position = positions[s];
  y += s * N;
  __nv_bfloat16* own_keys = static_cast<__nv_bfloat16*>(keys) + int64_t(s) * (WINDOW + entries) * D;
  if (blockIdx.x == 0) {
    float squares = 0;
    for (int i = threadIdx.x; i < Q; i += blockDim.x) squares += y[i] * y[i];
    const float factor = rsqrtf(block_sum(squares) / Q + eps);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int block = warp; block < Q / kActBlock; block += blockDim.x >> 5) {
      float x[4], amax = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = block * kActBlock + 4 * lane + i;
        x[i] = bf16_round(y[at] * factor * q_norm[at]);
        amax = fmaxf(amax, fabsf(x[i]));
      }
      const Fp8Scale scale(lanes_max<32>(amax));
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) word |= scale.code(x[i]) << (8 * i);
      *reinterpret_cast<uint32_t*>(codes + s * Q + block * kActBlock + 4 * lane) = word;
      if (lane == 0) scales[s * (Q / kActBlock) + block] = scale.scale;
    }
  } else if (blockIdx.x == 1) {
    Pair v{0, 0};
    if (has_pair<D>()) v = Pair{y[Q + 2 * threadIdx.x], y[Q + 2 * threadIdx.x + 1]};
    v = rope<D, R>(rms_norm<D>(v, kv_norm, eps), position, frequencies);
    store_key<D, R>(v, own_keys + int64_t(position % WINDOW) * D);
  } else if constexpr (RATIO > 0) {
    const bool closes = (position + 1) % RATIO == 0;
    if (blockIdx.x == 2) {
      using Own = Compressor<RATIO, D>;
      float* own = rows + s * 2 * Own::ROWS * Own::WIDTH;
      Own::add(y + Q + D, ape, own, position);
      if (!closes) return;
      const Pair v = entry<RATIO, D, R>(own, norm, eps, position, frequencies);
      store_key<D, R>(v, own_keys + int64_t(WINDOW + position / RATIO) * D);
      Own::advance(own);
    } else if constexpr (RATIO == 4) {
      using Own = Compressor<RATIO, ID>;
      float* own = index_rows + s * 2 * Own::ROWS * Own::WIDTH;
      Own::add(y + Q + D + 2 * Compressor<RATIO, D>::WIDTH, index_ape, own, position);
      if (!closes) return;
      const Pair v = hadamard_fp4<ID>(entry<RATIO, ID, R>(own, index_norm, eps, position, frequencies));
      if (has_pair<ID>()) {
        reinterpret_cast<__nv_bfloat162*>(index_keys)[(int64_t(s) * entries + position / RATIO) * (ID / 2) + threadIdx.x] =
            __floats2bfloat162_rn(v.x, v.y);
      }
      Own::advance(own);
    }
  }
}

constexpr int kChunk = 64;  // keys of one block: the vendor's kernel rounds probabilities against maxima of 64

// Which row of `keys` entry i of the key list is, or -1: the window first, then compressed entries, all of them or,
// where there are more than TOPK and an indexer chooses, those in `chosen`.
template <int WINDOW, int RATIO, int TOPK>
__device__ __forceinline__ int key_row(int i, int position, const int* chosen) {
  if (i < WINDOW) return i <= position ? i : -1;
  if constexpr (RATIO == 0) return -1;
  const int entry = i - WINDOW, count = (position + 1) / (RATIO ? RATIO : 1);
  if (TOPK && count > TOPK) return entry < TOPK ? WINDOW + chosen[entry] : -1;
  return entry < count ? WINDOW + entry : -1;
}

// 8 heads (or all, if fewer) against one chunk of the key list: block (heads, chunk, token).
// q: float [S, H * D], as the linear left it; sums: float [S, chunks, H, D], not normalised, tops, denominators:
// float [S, chunks, H].
template <int H, int D, int R, int WINDOW, int RATIO, int TOPK>
__device__ __forceinline__ void attend_chunk(const float* q, int q_stride, const int* positions, const void* keys,
                                             int entries, const int* chosen, const float* frequencies, float eps,
                                             float scale, float* sums, float* tops, float* denominators) {
  constexpr int HEADS = H < 8 ? H : 8;
  constexpr int PER_LANE = D / 32;
  __shared__ __align__(16) __nv_bfloat16 query[HEADS][D];
  __shared__ float scores[HEADS][kChunk];
  __shared__ __align__(16) float probabilities[kChunk][8];
  __shared__ int rows[kChunk];
  await_previous();
  const int s = blockIdx.z, head0 = blockIdx.x * HEADS, chunk = blockIdx.y, position = positions[s];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const __nv_bfloat16* own_keys = static_cast<const __nv_bfloat16*>(keys) + int64_t(s) * (WINDOW + entries) * D;
  float* own_sums = sums + ((int64_t(s) * gridDim.y + chunk) * H + head0) * D;
  const int64_t own_head = (int64_t(s) * gridDim.y + chunk) * H + head0;
  if (threadIdx.x < kChunk) {
    rows[threadIdx.x] = key_row<WINDOW, RATIO, TOPK>(chunk * kChunk + threadIdx.x, position, chosen + s * TOPK);
  }
  const int any = __syncthreads_or(threadIdx.x < kChunk && rows[threadIdx.x] >= 0);
  if (!any) {  // beyond what the sequence has so far
    if (threadIdx.x < HEADS) {
      tops[own_head + threadIdx.x] = -INFINITY;
      denominators[own_head + threadIdx.x] = 0;
    }
    return;
  }
  // The norm of each head, in bf16 at every step, and its rotation.
  for (int head = warp; head < HEADS; head += blockDim.x >> 5) {
    const float* from = q + int64_t(s) * q_stride + (head0 + head) * D + lane * PER_LANE;
    float x[PER_LANE], squares = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      x[i] = from[i];
      squares += bf16_round(x[i] * x[i]);
    }
    const float mean = bf16_round(bf16_round(warp_sum(squares) / D) + eps);
    const float factor = bf16_round(rsqrtf(mean));
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
      const int pair = (lane * PER_LANE + i - (D - R)) / 2;
      float2 v = make_float2(bf16_round(x[i] * factor), bf16_round(x[i + 1] * factor));
      if (lane * PER_LANE + i >= D - R) v = Rotation(position, frequencies[pair]).turn(v.x, v.y);
      *reinterpret_cast<__nv_bfloat162*>(&query[head][lane * PER_LANE + i]) = __floats2bfloat162_rn(v.x, v.y);
    }
  }
  __syncthreads();
  if (warp < kChunk / 16) {  // keys are the A operand, heads its columns
    const Lane at;
    const int top = rows[warp * 16 + at.g], bottom = rows[warp * 16 + at.g + 8];
    const __nv_bfloat16* row = own_keys + int64_t(top < 0 ? 0 : top) * D + 8 * at.t;
    const __nv_bfloat16* row8 = own_keys + int64_t(bottom < 0 ? 0 : bottom) * D + 8 * at.t;
    const __nv_bfloat16* column = &query[at.g < HEADS ? at.g : 0][8 * at.t];
    float c[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int k = 0; k < D; k += 32) {
      const uint4 a = load16(row + k), b = load16(row8 + k), v = load16(column + k);
      mma_bf16(c, a.x, b.x, a.y, b.y, v.x, v.y);
      mma_bf16(c, a.z, b.z, a.w, b.w, v.z, v.w);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * at.t + i;
      if (head < HEADS) {
        scores[head][warp * 16 + at.g] = top < 0 ? -INFINITY : c[i] * scale;
        scores[head][warp * 16 + at.g + 8] = bottom < 0 ? -INFINITY : c[2 + i] * scale;
      }
    }
  }
  __syncthreads();
  for (int head = warp; head < HEADS; head += blockDim.x >> 5) {
    const float a = scores[head][lane], b = scores[head][lane + 32];
    const float top = lanes_max<32>(fmaxf(a, b));
    const float pa = expf(a - top), pb = expf(b - top);
    const float denominator = warp_sum(pa + pb);
    probabilities[lane][head] = bf16_round(pa);
    probabilities[lane + 32][head] = bf16_round(pb);
    if (lane == 0) {
      tops[own_head + head] = top;
      denominators[own_head + head] = denominator;
    }
  }
  __syncthreads();
  for (int pair = threadIdx.x; pair < D / 2; pair += blockDim.x) {
    float2 acc[HEADS];
#pragma unroll
    for (int head = 0; head < HEADS; ++head) acc[head] = make_float2(0, 0);
#pragma unroll 4
    for (int i = 0; i < kChunk; ++i) {
      const int row = rows[i] < 0 ? 0 : rows[i];  // its probability is 0
      const float2 v = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(own_keys + int64_t(row) * D)[pair]);
#pragma unroll
      for (int head = 0; head < HEADS; ++head) {
        acc[head].x += probabilities[i][head] * v.x;
        acc[head].y += probabilities[i][head] * v.y;
      }
    }
#pragma unroll
    for (int head = 0; head < HEADS; ++head) reinterpret_cast<float2*>(own_sums + head * D)[pair] = acc[head];
  }
}

// The chunks of a head together, with its sink, rotated back: block (head, token), a thread a pair of D. o: bf16 [S, H * D].
template <int H, int D, int R, int CHUNKS>
__device__ __forceinline__ void attend_combine(const float* sums, const float* tops, const float* denominators,
                                               const float* sink, const int* positions, const float* frequencies,
                                               void* o) {
  await_previous();
  const int head = blockIdx.x, s = blockIdx.y;
  tops += s * CHUNKS * H + head;
  denominators += s * CHUNKS * H + head;
  float top = -INFINITY;
  for (int i = 0; i < CHUNKS; ++i) top = fmaxf(top, tops[i * H]);
  float denominator = expf(sink[head] - top);
  float2 acc = make_float2(0, 0);
  for (int i = 0; i < CHUNKS; ++i) {
    const float factor = expf(tops[i * H] - top);
    if (factor == 0.0f) continue;  // nothing was written for a chunk without keys
    denominator += denominators[i * H] * factor;
    const float2 v = reinterpret_cast<const float2*>(sums + ((int64_t(s) * CHUNKS + i) * H + head) * D)[threadIdx.x];
    acc.x += v.x * factor;
    acc.y += v.y * factor;
  }
  float2 v = make_float2(bf16_round(acc.x / denominator), bf16_round(acc.y / denominator));
  const int pair = int(threadIdx.x) - (D - R) / 2;
  if (pair >= 0) v = Rotation(positions[s], frequencies[pair]).turn_back(v.x, v.y);
  reinterpret_cast<__nv_bfloat162*>(o)[(int64_t(s) * H + head) * (D / 2) + threadIdx.x] = __floats2bfloat162_rn(v.x, v.y);
}

}  // namespace icebox
