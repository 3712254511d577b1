// Products of 16 rows of a weight with a few tokens' activations, by one warp, with mma.sync (PTX ISA, "mma").
//
// A weight is the A operand as it lies in memory: lane (g, t) = (lane / 4, lane % 4) loads 16 bytes of rows g and g + 8
// at the same place, and every word of them becomes a fragment register. That permutes the sum over k against the
// operand's nominal order, which does not matter as long as the activations are taken in the same order.
// Columns of the B operand are tokens; those beyond `S` repeat a token and are ignored.
#include <cstdint>

#include <cuda_fp8.h>
#include <cuda_bf16.h>

namespace icebox {

constexpr int kActBlock = 128;  // activations share a scale over so many inputs

// Weights pass once: not worth a line of L1. Volatile, so that loads stay ahead of what is done meanwhile; and not "nc", which
// the assembler moves behind await_previous, and which wants memory that nobody writes: slots are filled while kernels wait.
__device__ __forceinline__ uint4 stream16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Past L1: what older kernels wrote, read before await_previous.
__device__ __forceinline__ uint4 peek16(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t peek4(const void* p) {
  uint32_t v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ uint4 load16(const void* p) { return *reinterpret_cast<const uint4*>(p); }

__device__ __forceinline__ void mma_e4m3(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of 16-bit values, two neighbours of a row in each lane's word, with rows and columns exchanged.
__device__ __forceinline__ uint32_t transposed(uint32_t word) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(word));
  return r;
}

// 2^(e - 127) of the ue8m0 byte e, the I-th of a word; e = 0 is a subnormal float.
template <int I>
__device__ __forceinline__ float decode_scale(uint32_t word) {
  const uint32_t exponent = (I < 3 ? word << (23 - 8 * I) : word >> 1) & 0x7F800000u;
  return __uint_as_float(max(exponent, 0x400000u));
}

// Two e4m3 values of the low 16 bits as bf16, exact.
__device__ __forceinline__ uint32_t e4m3x2_to_bf16x2(uint32_t pair) {
  __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  float2 f = __half22float2(__half2(h));
  __nv_bfloat162 b = __float22bfloat162_rn(f);
  return *reinterpret_cast<uint32_t*>(&b);
}

// Where a lane's rows lie and which token its column is.
struct Lane {
  int g, t;
  __device__ Lane() : g((threadIdx.x & 31) >> 2), t(threadIdx.x & 3) {}
};

// 16 rows of FP8 weights at a block of 128 inputs: what a lane has of them.
struct Fp8Block {
  uint4 top[2], bottom[2];
  __device__ void load(const uint8_t* row, int w_stride) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = stream16(row + 64 * h);
      bottom[h] = stream16(row + 8 * w_stride + 64 * h);
    }
  }
};

// load(step) and multiply(step) of every step in turn. `prepare` runs once, while the first weights are on their way, and
// may make the inputs; it stands apart from the loop, in which inputs come together with weights.
template <int STEPS, typename Load, typename Multiply, typename Prepare>
__device__ __forceinline__ void stream_rows(Load load, Multiply multiply, Prepare prepare) {
  load(0);
  prepare();
  multiply(0);
#pragma unroll 1
  for (int step = 1; step < STEPS; ++step) {
    load(step);
    multiply(step);
  }
}

// FP8 weights, FP8 activations. out[2 * s], out[2 * s + 1]: rows g and g + 8 of token s, in lanes with t = s / 2.
// w: the first of 16 rows at the first of K inputs; scale: one ue8m0 byte for 128 inputs of these rows; x: e4m3 [S, ...];
// x_scale: float for 128 inputs. UNROLL blocks of 128 inputs are loaded together; prepare: see stream_rows.
template <int K, int S, int UNROLL, typename Prepare>
__device__ __forceinline__ void fp8_rows(const uint8_t* w, int w_stride, const uint8_t* scale, const uint8_t* x,
                                         int x_stride, const float* x_scale, int x_scale_stride, float* acc,
                                         Prepare prepare) {
  const Lane lane;
  const uint8_t* row = w + int64_t(lane.g) * w_stride + 16 * lane.t;
  const uint8_t* token = x + (lane.g < S ? lane.g : 0) * x_stride + 16 * lane.t;
  const int left = 2 * lane.t < S ? 2 * lane.t : 0, right = 2 * lane.t + 1 < S ? 2 * lane.t + 1 : 0;
  Fp8Block a[UNROLL];
  const auto load = [&](int step) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) a[u].load(row + (step * UNROLL + u) * kActBlock, w_stride);
  };
  const auto multiply = [&](int step) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int block = step * UNROLL + u;
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 v = load16(token + block * kActBlock + 64 * h), top = a[u].top[h], bottom = a[u].bottom[h];
        mma_e4m3(c, top.x, bottom.x, top.y, bottom.y, v.x, v.y);
        mma_e4m3(c, top.z, bottom.z, top.w, bottom.w, v.z, v.w);
      }
      const float s = decode_scale<0>(scale[block]);
      const float s0 = s * x_scale[left * x_scale_stride + block], s1 = s * x_scale[right * x_scale_stride + block];
      acc[0] += c[0] * s0;
      acc[1] += c[2] * s0;
      acc[2] += c[1] * s1;
      acc[3] += c[3] * s1;
    }
  };
  stream_rows<K / kActBlock / UNROLL>(load, multiply, prepare);
}

// FP8 weights, bf16 activations that are not quantised. Results, UNROLL and prepare as in fp8_rows.
template <int K, int S, int UNROLL, typename Prepare>
__device__ __forceinline__ void fp8_rows_bf16(const uint8_t* w, int w_stride, const uint8_t* scale, const void* x,
                                              int x_stride, float* acc, Prepare prepare) {
  const Lane lane;
  const uint8_t* row = w + int64_t(lane.g) * w_stride + 16 * lane.t;
  const uint16_t* token = static_cast<const uint16_t*>(x) + (lane.g < S ? lane.g : 0) * x_stride + 16 * lane.t;
  Fp8Block a[UNROLL];
  const auto load = [&](int step) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) a[u].load(row + (step * UNROLL + u) * kActBlock, w_stride);
  };
  const auto multiply = [&](int step) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int block = step * UNROLL + u;
      float c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 a0 = a[u].top[h], a1 = a[u].bottom[h];
        const uint32_t top[4] = {a0.x, a0.y, a0.z, a0.w}, bottom[4] = {a1.x, a1.y, a1.z, a1.w};
        const uint16_t* at = token + block * kActBlock + 64 * h;
        const uint4 v0 = load16(at), v1 = load16(at + 8);
        const uint32_t v[8] = {v0.x, v0.y, v0.z, v0.w, v1.x, v1.y, v1.z, v1.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mma_bf16(c, e4m3x2_to_bf16x2(top[i] & 0xFFFF), e4m3x2_to_bf16x2(bottom[i] & 0xFFFF),
                   e4m3x2_to_bf16x2(top[i] >> 16), e4m3x2_to_bf16x2(bottom[i] >> 16), v[2 * i], v[2 * i + 1]);
        }
      }
      const float s = decode_scale<0>(scale[block]);
      acc[0] += c[0] * s;
      acc[1] += c[2] * s;
      acc[2] += c[1] * s;
      acc[3] += c[3] * s;
    }
  };
  stream_rows<K / kActBlock / UNROLL>(load, multiply, prepare);
}

// bf16 weights and activations; UNROLL stretches of 32 inputs are loaded together. Results and prepare as in fp8_rows.
template <int K, int S, int UNROLL, typename Prepare>
__device__ __forceinline__ void bf16_rows(const void* w, int w_stride, const void* x, int x_stride, float* acc,
                                          Prepare prepare) {
  const Lane lane;
  const uint16_t* row = static_cast<const uint16_t*>(w) + int64_t(lane.g) * w_stride + 8 * lane.t;
  const uint16_t* token = static_cast<const uint16_t*>(x) + (lane.g < S ? lane.g : 0) * x_stride + 8 * lane.t;
  uint4 a[UNROLL], b[UNROLL];
  float c[4] = {0, 0, 0, 0};
  const auto load = [&](int step) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      a[u] = stream16(row + 32 * (step * UNROLL + u));
      b[u] = stream16(row + 8 * w_stride + 32 * (step * UNROLL + u));
    }
  };
  const auto multiply = [&](int step) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const uint4 v = load16(token + 32 * (step * UNROLL + u));
      mma_bf16(c, a[u].x, b[u].x, a[u].y, b[u].y, v.x, v.y);
      mma_bf16(c, a[u].z, b[u].z, a[u].w, b[u].w, v.z, v.w);
    }
  };
  stream_rows<K / 32 / UNROLL>(load, multiply, prepare);
  acc[0] += c[0];
  acc[1] += c[2];
  acc[2] += c[1];
  acc[3] += c[3];
}

// Inputs of FP4 weights are float16, which holds e4m3 codes exactly: the weights become float16 with few operations, and a
// GPU without FP8 products would convert both. In eight neighbours, input i lies at kPlace(i), so that a word has the inputs
// of codes i and i + 4, which a mask takes out of a word of codes together.
__host__ __device__ constexpr int fp4_place(int i) { return i / 8 * 8 + (i % 8 < 4 ? 2 * (i % 8) : 2 * (i % 8 - 4) + 1); }

// Bits of a where the mask has ones, of b where it has zeros: one instruction, into which the compiler would not put it.
template <uint32_t MASK>
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(r) : "r"(a), "r"(b), "n"(MASK));
  return r;
}

// The eight codes of a word as float16 of 2^-14 of their value, exact: pairs[i] holds codes i and i + 4. Sign goes to sign,
// exponent and mantissa to the lowest exponent bits and the highest mantissa bit, where a zero exponent means subnormal in
// both formats. Instructions are what limits us on sm_90: odd codes move together by one shift to the right, even ones
// by one to the left.
__device__ __forceinline__ void fp4_pairs(uint32_t w, uint32_t (&pairs)[4]) {
  constexpr uint32_t kHalf = 0x8E008E00u;
  const uint32_t odd = select_bits<0x80808080u>(w, w >> 3), even = select_bits<0x40404040u>(w << 3, w);
  pairs[0] = (even << 9) & kHalf;
  pairs[1] = (odd << 8) & kHalf;
  pairs[2] = (even << 1) & kHalf;
  pairs[3] = odd & kHalf;
}

// Rows of a matrix in tiles of 16: bytes from a row to the next, and from a tile to the next.
struct Tiles {
  const uint8_t* first;
  int stride, tile_stride;
};

// FP4 weights, FP8 activations, TILES times 16 rows. Lane t holds the t-th of four blocks of 32 inputs, each with a scale
// of its own: column 4 * s + block of the product takes only that block's inputs of token s, so the blocks' sums stay
// apart. acc[tile][2 * p], acc[tile][2 * p + 1]: this lane's share of rows g and g + 8 of token 2 * p + t / 2, to be summed
// over t & 1. w: packed codes; scale: ue8m0, one for 32 inputs; x: float16, in the order of fp4_place;
// prepare: as above. The weights of AHEAD blocks of 128 inputs are always on their way.
template <int K, int S, int TILES, int AHEAD, typename Prepare>
__device__ __forceinline__ void fp4_rows(const Tiles& w, const Tiles& scale, const void* x, int x_stride,
                                         const float* x_scale, int x_scale_stride,
                                         float (&acc)[TILES][2 * ((S + 1) / 2)], Prepare prepare) {
  constexpr int PAIRS = (S + 1) / 2, BLOCKS = K / kActBlock, STEPS = BLOCKS / AHEAD, WORDS = (BLOCKS + 3) / 4;
  static_assert(4 % AHEAD == 0, "steps do not span words of scales");
  const Lane lane;
  const uint8_t* row = w.first + int64_t(lane.g) * w.stride + 16 * lane.t;
  const bool is_mine = (lane.g & 3) == lane.t;  // this lane's column takes this lane's block
  const uint16_t* inputs[PAIRS];
  const float* input_scales[PAIRS];
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) {
    const int column = 2 * p + (lane.g >> 2), token = 2 * p + (lane.t >> 1);
    inputs[p] = static_cast<const uint16_t*>(x) + (column < S ? column : 0) * x_stride + 32 * lane.t;
    input_scales[p] = x_scale + (token < S ? token : 0) * x_scale_stride;
    asm volatile("" : "+l"(inputs[p]), "+l"(input_scales[p]));  // or the compiler works them out anew for every load
  }
  // A lane has the scales of every fourth block of its rows, and gives them to the other three.
  uint32_t words[WORDS][TILES][2];
#pragma unroll
  for (int n = 0; n < WORDS; ++n) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int block = 4 * n + lane.t;
        const uint8_t* at = scale.first + tile * scale.tile_stride + (lane.g + 8 * i) * scale.stride + 4 * block;
        words[n][tile][i] = block < BLOCKS ? peek4(at) : 0;
      }
    }
  }
  uint4 a[AHEAD][TILES][2];
  const auto load = [&](int u, int block) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) a[u][tile][i] = stream16(row + tile * w.tile_stride + 8 * i * w.stride + block * 64);
    }
  };
#pragma unroll
  for (int u = 0; u < AHEAD; ++u) load(u, u);
  prepare();
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int u = 0; u < AHEAD; ++u) {
      uint32_t scales[TILES][2];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scales[tile][i] = __shfl_sync(0xFFFFFFFFu, words[0][tile][i], (step * AHEAD + u) & 3, 4) >> 16 * (lane.t & 1);
        }
      }
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = is_mine ? load16(inputs[p] + u * kActBlock + 8 * i) : make_uint4(0, 0, 0, 0);
        const float s = 16384.0f * input_scales[p][u];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const uint4 top = a[u][tile][0], bottom = a[u][tile][1];
          const uint32_t tops[4] = {top.x, top.y, top.z, top.w}, bottoms[4] = {bottom.x, bottom.y, bottom.z, bottom.w};
          float c[4] = {0, 0, 0, 0};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            uint32_t t[4], b[4];
            fp4_pairs(tops[i], t);
            fp4_pairs(bottoms[i], b);
            mma_f16(c, t[0], b[0], t[1], b[1], v[i].x, v[i].y);
            mma_f16(c, t[2], b[2], t[3], b[3], v[i].z, v[i].w);
          }
          const uint32_t s_top = scales[tile][0], s_bottom = scales[tile][1];
          acc[tile][2 * p] += (c[0] * decode_scale<0>(s_top) + c[1] * decode_scale<1>(s_top)) * s;
          acc[tile][2 * p + 1] += (c[2] * decode_scale<0>(s_bottom) + c[3] * decode_scale<1>(s_bottom)) * s;
        }
      }
      if (step + 1 < STEPS) load(u, AHEAD + u);
    }
    row += 64 * AHEAD;
    if (WORDS > 1 && (step + 1) * AHEAD % 4 == 0) {
#pragma unroll
      for (int n = 1; n < WORDS; ++n) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          words[n - 1][tile][0] = words[n][tile][0];
          words[n - 1][tile][1] = words[n][tile][1];
        }
      }
    }
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      inputs[p] += kActBlock * AHEAD;
      input_scales[p] += AHEAD;
    }
  }
}

}  // namespace icebox
