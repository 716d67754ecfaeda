// Narrow floating-point numbers as the cache writers round them, for host and device.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JAX_BEAM_ATTN_HOST_DEVICE __host__ __device__
#else
#define JAX_BEAM_ATTN_HOST_DEVICE
#endif

namespace jax_beam_attn {

JAX_BEAM_ATTN_HOST_DEVICE inline uint32_t Bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

JAX_BEAM_ATTN_HOST_DEVICE inline float FromBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Elements as f32: a bf16 is the upper half of one.
struct Bf16 {
  uint16_t bits;
};
JAX_BEAM_ATTN_HOST_DEVICE inline float ToFloat(float x) { return x; }
JAX_BEAM_ATTN_HOST_DEVICE inline float ToFloat(Bf16 x) {
  return FromBits(static_cast<uint32_t>(x.bits) << 16);
}

// CPUs that run XLA's code take subnormal floats for 0, so that those of 16 bits are counted.
struct F16 {
  uint16_t bits;
};
JAX_BEAM_ATTN_HOST_DEVICE inline float ToFloat(F16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, size = x.bits & 0x7fffu;
  if (size < 0x400) return FromBits(sign | 0x3f800000) * (size * 0x1p-24f);
  // The exponent's bias goes from 15 to 127, and that of infinity and NaN to the largest.
  return FromBits(sign | ((size << 13) + ((size < 0x7c00 ? 112u : 224u) << 23)));
}

// Sizes are compared as integers: their order is that of the numbers, with NaN above infinity.
inline constexpr uint32_t kInfinity = 0x7f800000, kQuietNan = 0x7fc00000;
JAX_BEAM_ATTN_HOST_DEVICE inline uint32_t SizeBits(float x) { return Bits(x) & 0x7fffffff; }

// Adds what makes cutting off the lower bits round to nearest, ties to even.
JAX_BEAM_ATTN_HOST_DEVICE inline uint32_t RoundAwayBits(uint32_t bits, int shift) {
  return (bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift;
}

JAX_BEAM_ATTN_HOST_DEVICE inline uint16_t ToBf16(float x) {
  return SizeBits(x) > kInfinity ? kQuietNan >> 16 : RoundAwayBits(Bits(x), 16);
}

JAX_BEAM_ATTN_HOST_DEVICE inline uint16_t ToF16(float x) {
  constexpr uint32_t kTooLargeBits = 0x47800000, kSmallestNormalBits = 0x38800000;  // 2**16, 2**-14
  const uint32_t size = SizeBits(x), sign = Bits(x) >> 16 & 0x8000;
  if (size > kInfinity) return 0x7e00;
  if (size >= kTooLargeBits) return sign | 0x7c00;
  if (size >= kSmallestNormalBits) return sign | (RoundAwayBits(size, 13) - (112 << 10));
  // Subnormals count steps of 2**-24, which is the last bit of a float from 0.5 on.
  return sign | (Bits(FromBits(size) + 0.5f) - Bits(0.5f));
}

// Saturates at 448, the largest e4m3.
JAX_BEAM_ATTN_HOST_DEVICE inline uint8_t ToE4m3(float x) {
  constexpr uint32_t kNan = 0x7f, kLargest = 0x7e;
  constexpr uint32_t kLargestBits = 0x43e00000, kSmallestNormalBits = 0x3c800000;  // 448, 2**-6
  const uint32_t size = SizeBits(x), sign = Bits(x) >> 24 & 0x80;
  if (size > kInfinity) return kNan;
  if (size >= kLargestBits) return sign | kLargest;
  // Three bits of mantissa are left, and the exponent's bias goes from 127 to 7.
  if (size >= kSmallestNormalBits) return sign | (RoundAwayBits(size, 20) - (120 << 3));
  // Subnormals count steps of 2**-9, which is the last bit of a float from 2**14 on.
  constexpr float kSteps = 16384.0f;
  return sign | (Bits(FromBits(size) + kSteps) - Bits(kSteps));
}

}  // namespace jax_beam_attn
