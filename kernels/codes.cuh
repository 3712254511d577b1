// Stored codes as bfloat16, exact, in registers.
//
// e4m3 and bfloat16 differ in their exponents: moved into bfloat16's bits, a code reads 2^120 times too small, subnormals
// included. e2m1 has eight magnitudes: a byte permutation is the table of their high bytes, and one of their low bytes.

namespace icebox_codes {

__device__ __forceinline__ unsigned multiply(unsigned a, unsigned b) {
  unsigned product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// 2^(e - 127) of a ue8m0 byte, twice; e = 0 is a subnormal.
__device__ __forceinline__ unsigned decode_scale(unsigned char e) {
  const unsigned bits = e ? unsigned(e) << 7 : 0x40u;
  return bits | bits << 16;
}

// e4m3 codes in bytes 0 and 2.
__device__ __forceinline__ unsigned e4m3x2(unsigned codes, unsigned scale) {
  const unsigned bits = (codes & 0x00800080u) << 8 | (codes & 0x007f007fu) << 4;
  return multiply(multiply(bits, 0x7b807b80u), scale);
}

// Four e2m1 codes: their low three bits in the low nibbles of `magnitudes`, the fourth at the top of bytes of `signs`.
__device__ __forceinline__ void e2m1x4(unsigned* out, unsigned magnitudes, unsigned signs, unsigned scale) {
  const unsigned high = __byte_perm(0x3f3f3f00u, 0x40404040u, magnitudes) | (signs & 0x80808080u);
  const unsigned low = __byte_perm(0xc0800000u, 0xc0804000u, magnitudes);
  out[0] = multiply(__byte_perm(low, high, 0x5140), scale);
  out[1] = multiply(__byte_perm(low, high, 0x7362), scale);
}

}  // namespace icebox_codes

// values: bfloat16 [16]; codes: e4m3 [16]; one scale for all.
__device__ __forceinline__ void fp8_to_bf16(void* values, const void* codes, unsigned char scale) {
  unsigned* pairs = static_cast<unsigned*>(values);
  const unsigned* words = static_cast<const unsigned*>(codes);
  const unsigned factor = icebox_codes::decode_scale(scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = icebox_codes::e4m3x2(__byte_perm(words[i], 0, 0x4140), factor);
    pairs[2 * i + 1] = icebox_codes::e4m3x2(__byte_perm(words[i], 0, 0x4342), factor);
  }
}

// values: bfloat16 [32]; codes: e2m1 [32], the low nibble of a byte first; one scale for all.
__device__ __forceinline__ void fp4_to_bf16(void* values, const void* codes, unsigned char scale) {
  unsigned* pairs = static_cast<unsigned*>(values);
  const unsigned* words = static_cast<const unsigned*>(codes);
  const unsigned factor = icebox_codes::decode_scale(scale);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned magnitudes = words[i] & 0x77777777u;
    const unsigned even_signs = words[i] << 4;  // the odd codes' signs are at the top of their bytes already
    icebox_codes::e2m1x4(pairs + 4 * i, magnitudes, __byte_perm(even_signs, words[i], 0x5140), factor);
    icebox_codes::e2m1x4(pairs + 4 * i + 2, magnitudes >> 16, __byte_perm(even_signs, words[i], 0x7362), factor);
  }
}

// 16 bytes, or one, at an address that came as a number.
__device__ __forceinline__ void load_16(void* out, long long address) {
  *static_cast<uint4*>(out) = __ldg(reinterpret_cast<const uint4*>(address));
}

__device__ __forceinline__ unsigned char load_1(long long address) {
  return __ldg(reinterpret_cast<const unsigned char*>(address));
}
