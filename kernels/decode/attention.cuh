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
  const int s = blockIdx.y, position = peek_system(positions + s);
  if (blockIdx.x == 0) {
    prefetch_row(q_norm, Q);
  } else if (blockIdx.x == 1) {
    prefetch_row(kv_norm, D);
  } else if constexpr (RATIO > 0) {
    constexpr int WIDTH = Compressor<RATIO, D>::WIDTH, INDEX_WIDTH = Compressor<RATIO, ID>::WIDTH;
    if (blockIdx.x == 2) prefetch_row(ape + position % RATIO * WIDTH, WIDTH);
    else prefetch_row(index_ape + position % RATIO * INDEX_WIDTH, INDEX_WIDTH);
  }
  await_previous();
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

// A head of the query as `attend_chunk` wants it: normed, in bf16 at every step, and rotated. A warp makes one, each lane
// D / 32 neighbours.
template <int D, int R>
struct QueryLane {
  static constexpr int N = D / 32;
  static_assert((D - R) % N == 0, "a lane's inputs rotate together or not at all");
  const int first = (threadIdx.x & 31) * N;
  float2 turns[N / 2];  // cosine and sine

  __device__ QueryLane(int position, const float* frequencies) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if (first < D - R) continue;
      const Rotation rotation(position, frequencies[(first - (D - R)) / 2 + i]);
      turns[i] = make_float2(rotation.c, rotation.s);
    }
  }

  __device__ void prepare(const float* from, float eps, __nv_bfloat16* to) const {
    float x[N], squares = 0;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + first + i);
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) squares += bf16_round(x[i] * x[i]);
    const float mean = bf16_round(bf16_round(warp_sum(squares) / D) + eps);
    const float factor = bf16_round(rsqrtf(mean));
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      float2 v = make_float2(bf16_round(x[i] * factor), bf16_round(x[i + 1] * factor));
      if (first >= D - R) v = Rotation(turns[i / 2]).turn(v.x, v.y);
      *reinterpret_cast<__nv_bfloat162*>(to + first + i) = __floats2bfloat162_rn(v.x, v.y);
    }
  }
};

// All keys of a chunk at a slice of 64 of D, in the registers of one warp: as the A operand of scores, and transposed as
// that of the sums. A lane has 8 neighbouring inputs of two keys in every tile of 16 keys and stretch of 32 inputs.
struct KeySlice {
  static constexpr int WIDTH = 64, TILES = kChunk / 16, STEPS = WIDTH / 32;
  uint4 top[TILES][STEPS], bottom[TILES][STEPS];

  __device__ void load(const __nv_bfloat16* keys, int d, const int (&rows)[kChunk]) {
    const Lane lane;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const int row = max(0, rows[tile * 16 + lane.g]), row8 = max(0, rows[tile * 16 + lane.g + 8]);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        top[tile][step] = peek16(keys + int64_t(row) * d + step * 32 + 8 * lane.t);
        bottom[tile][step] = peek16(keys + int64_t(row8) * d + step * 32 + 8 * lane.t);
      }
    }
  }

  // The slice's part of the scores of HEADS heads; query: a row of STRIDE values a head.
  template <int HEADS>
  __device__ void score(const __nv_bfloat16* query, int stride, float (&scores)[HEADS][kChunk]) const {
    const Lane lane;
    const __nv_bfloat16* column = query + (lane.g < HEADS ? lane.g : 0) * stride + 8 * lane.t;
    uint4 v[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) v[step] = load16(column + step * 32);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const uint4 a = top[tile][step], b = bottom[tile][step];
        mma_bf16(c, a.x, b.x, a.y, b.y, v[step].x, v[step].y);
        mma_bf16(c, a.z, b.z, a.w, b.w, v[step].z, v[step].w);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = 2 * lane.t + i;
        if (head >= HEADS) continue;
        scores[head][tile * 16 + lane.g] = c[i];
        scores[head][tile * 16 + lane.g + 8] = c[2 + i];
      }
    }
  }

  // The keys weighted by a row of STRIDE probabilities a head, summed. sums: float, D a head.
  template <int HEADS>
  __device__ void sum(const __nv_bfloat16* probabilities, int stride, float* sums, int d) const {
    const Lane lane;
    const __nv_bfloat16* column = probabilities + (lane.g < HEADS ? lane.g : 0) * stride + 2 * lane.t;
    uint32_t p[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) p[tile][i] = *reinterpret_cast<const uint32_t*>(column + tile * 16 + 8 * i);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // words x and y, then z and w: rows g and g + 8 of the product
        float c[4] = {0, 0, 0, 0};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const uint4 a = top[tile][step], b = bottom[tile][step];
          mma_bf16(c, transposed(half ? a.z : a.x), transposed(half ? a.w : a.y), transposed(half ? b.z : b.x),
                   transposed(half ? b.w : b.y), p[tile][0], p[tile][1]);
        }
        const int at = step * 32 + 8 * (lane.g / 2) + 4 * half + lane.g % 2;  // of row g; that of g + 8 is 2 further
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int head = 2 * lane.t + i;
          if (head >= HEADS) continue;
          sums[head * d + at] = c[i];
          sums[head * d + at + 2] = c[2 + i];
        }
      }
    }
  }
};

// 8 heads (or all, if fewer) against one chunk of the key list: block (heads, chunk, token), a warp a slice of D. Keys are
// loaded ahead of the kernel before, so that must not be the one that stores them.
// q: float [S, H * D], as the linear left it; sums: float [S, chunks, H, D], not normalised, tops, denominators:
// float [S, chunks, H].
template <int H, int D, int R, int WINDOW, int RATIO, int TOPK>
__device__ __forceinline__ void attend_chunk(const float* q, int q_stride, const int* positions, const void* keys,
                                             int entries, const int* chosen, const float* frequencies, float eps,
                                             float scale, float* sums, float* tops, float* denominators) {
  constexpr int HEADS = H < 8 ? H : 8, SLICES = D / KeySlice::WIDTH;
  static_assert(D % KeySlice::WIDTH == 0);
  constexpr int QUERY = D + 8, PROBABILITIES = kChunk + 8;  // strides that keep heads apart in banks
  __shared__ __align__(16) __nv_bfloat16 query[HEADS][QUERY];
  __shared__ __align__(16) __nv_bfloat16 probabilities[HEADS][PROBABILITIES];
  __shared__ float scores[SLICES][HEADS][kChunk];
  __shared__ int rows[kChunk];
  const int s = blockIdx.z, head0 = blockIdx.x * HEADS, chunk = blockIdx.y, position = peek_system(positions + s);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const __nv_bfloat16* own_keys = static_cast<const __nv_bfloat16*>(keys) + int64_t(s) * (WINDOW + entries) * D;
  const int64_t own_head = (int64_t(s) * gridDim.y + chunk) * H + head0;
  if (TOPK && (chunk + 1) * kChunk > WINDOW) await_previous();  // which may be the one that chooses
  if (threadIdx.x < kChunk) {
    rows[threadIdx.x] = key_row<WINDOW, RATIO, TOPK>(chunk * kChunk + threadIdx.x, position, chosen + s * TOPK);
  }
  const int any = __syncthreads_or(threadIdx.x < kChunk && rows[threadIdx.x] >= 0);
  if (!any) {  // beyond what the sequence has so far
    await_previous();
    if (threadIdx.x < HEADS) {
      tops[own_head + threadIdx.x] = -INFINITY;
      denominators[own_head + threadIdx.x] = 0;
    }
    return;
  }
  KeySlice slice;
  if (warp < SLICES) slice.load(own_keys + warp * KeySlice::WIDTH, D, rows);
  const QueryLane<D, R> own(position, frequencies);
  await_previous();
  for (int head = warp; head < HEADS; head += blockDim.x >> 5) {
    own.prepare(q + int64_t(s) * q_stride + (head0 + head) * D, eps, query[head]);
  }
  __syncthreads();
  if (warp < SLICES) slice.score(query[0] + warp * KeySlice::WIDTH, QUERY, scores[warp]);
  __syncthreads();
  for (int head = warp; head < HEADS; head += blockDim.x >> 5) {
    float a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < SLICES; ++i) {
      a += scores[i][head][lane];
      b += scores[i][head][lane + 32];
    }
    a = rows[lane] < 0 ? -INFINITY : a * scale;
    b = rows[lane + 32] < 0 ? -INFINITY : b * scale;
    const float top = lanes_max<32>(fmaxf(a, b));
    const float pa = expf(a - top), pb = expf(b - top);
    const float denominator = warp_sum(pa + pb);
    probabilities[head][lane] = __float2bfloat16_rn(pa);
    probabilities[head][lane + 32] = __float2bfloat16_rn(pb);
    if (lane == 0) {
      tops[own_head + head] = top;
      denominators[own_head + head] = denominator;
    }
  }
  __syncthreads();
  if (warp < SLICES) {
    slice.sum<HEADS>(probabilities[0], PROBABILITIES, sums + own_head * D + warp * KeySlice::WIDTH, D);
  }
}

// The chunks of a head together, with its sink, rotated back: block (head, token), a thread a pair of D. o: bf16 [S, H * D].
template <int H, int D, int R, int CHUNKS>
__device__ __forceinline__ void attend_combine(const float* sums, const float* tops, const float* denominators,
                                               const float* sink, const int* positions, const float* frequencies,
                                               void* o) {
  const int head = blockIdx.x, s = blockIdx.y, pair = int(threadIdx.x) - (D - R) / 2;
  const float own_sink = sink[head];
  const Rotation rotation(peek_system(positions + s), pair >= 0 ? frequencies[pair] : 0.0f);
  await_previous();
  tops += s * CHUNKS * H + head;
  denominators += s * CHUNKS * H + head;
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) top = fmaxf(top, tops[i * H]);
  float denominator = expf(own_sink - top);
  float2 acc = make_float2(0, 0);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const float factor = expf(tops[i * H] - top);
    const float2* from = reinterpret_cast<const float2*>(sums + ((int64_t(s) * CHUNKS + i) * H + head) * D);
    const float2 v = factor == 0.0f ? make_float2(0, 0) : from[threadIdx.x];  // a chunk without keys left nothing
    denominator += denominators[i * H] * factor;
    acc.x += v.x * factor;
    acc.y += v.y * factor;
  }
  float2 v = make_float2(bf16_round(acc.x / denominator), bf16_round(acc.y / denominator));
  if (pair >= 0) v = rotation.turn_back(v.x, v.y);
  reinterpret_cast<__nv_bfloat162*>(o)[(int64_t(s) * H + head) * (D / 2) + threadIdx.x] = __floats2bfloat162_rn(v.x, v.y);
}

}  // namespace icebox
