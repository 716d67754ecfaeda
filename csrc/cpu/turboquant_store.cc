// `jax_beam_attn_turboquant_store`: quantises keys and values into their slots, in place.
//
//   cache      u8 [num_blocks, block_size, Hkv, slot_bytes]; the result is the same buffer
//   key        f32, bf16 or f16 [N, Hkv, D]
//   value      likewise
//   slots      s32 [N]; one outside the cache writes nothing
//   rotation   f32 [R, D, D], each for an equal share of the tokens in order; R = 0 for FP8 keys
//   centroids  f32 [R', 2**key_bits], likewise
//
// The bytes are those of jax_beam_attn/turboquant/cache.py, where the arithmetic is explained.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "abi.h"
#include "floats.h"

namespace jax_beam_attn {
namespace {

namespace ffi = xla::ffi;
using ffi::AnyBuffer;
using Cache = ffi::Buffer<ffi::U8, 4>;
using Slots = ffi::Buffer<ffi::S32, 1>;
using Rotation = ffi::Buffer<ffi::F32, 3>;
using Centroids = ffi::Buffer<ffi::F32, 2>;

constexpr float kLargestF16 = 65504.0f;

struct Format {
  int64_t block_size, kv_heads, slot_bytes, head_dim, key_bits, value_bits;
  bool norm_correction;

  bool KeyIsFp8() const { return key_bits == 8; }
  int64_t KeyBytes() const { return head_dim * key_bits / 8; }
  int64_t DataBytes() const { return KeyBytes() + head_dim * value_bits / 8; }
  int64_t Fields() const { return KeyIsFp8() ? 2 : 3; }
  int64_t BlockBytes() const { return block_size * kv_heads * slot_bytes; }
};

// A rotation with its rows as columns, so that the inner loop runs over neighbours, and the
// borders between a codebook's cells.
struct Codebook {
  std::vector<float> rotation, midpoints;
  const float* centroids;
};

Codebook CodebookOf(const float* rotation, const float* centroids, const Format& format) {
  const int64_t dim = format.head_dim, levels = int64_t{1} << format.key_bits;
  Codebook book{std::vector<float>(dim * dim), std::vector<float>(levels - 1), centroids};
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = 0; j < dim; ++j) book.rotation[i * dim + j] = rotation[j * dim + i];
  }
  for (int64_t level = 0; level + 1 < levels; ++level) {
    book.midpoints[level] = (centroids[level + 1] + centroids[level]) / 2;
  }
  return book;
}

void WriteF16(float x, uint8_t* bytes) {
  const uint16_t bits = ToF16(x);
  std::memcpy(bytes, &bits, 2);
}

// Code i begins at bit i * bits.
void WriteCodes(const uint8_t* codes, int64_t count, int64_t bits, uint8_t* bytes) {
  for (int64_t first = 0; first < count; first += 8) {
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<uint32_t>(codes[first + i]) << (i * bits);
    std::memcpy(bytes + first / 8 * bits, &word, bits);
  }
}

// Returns what is stored as the key's norm.
float QuantizeKey(std::vector<float>& key, const Codebook& book, const Format& format,
                  std::vector<float>& rotated, uint8_t* codes) {
  const int64_t dim = format.head_dim;
  float peak = 0;
  for (const float x : key) peak = std::max(peak, std::abs(x));
  const float unit = peak > 1e15f ? peak : 1.0f;
  float squares = 0;
  for (float& x : key) {
    x /= unit;
    squares += x * x;
  }
  float norm = std::sqrt(squares);
  const float length = norm + 1e-8f / unit;
  std::fill(rotated.begin(), rotated.end(), 0.0f);
  for (int64_t i = 0; i < dim; ++i) {
    const float x = key[i] / length;
    const float* const column = book.rotation.data() + i * dim;
    for (int64_t j = 0; j < dim; ++j) rotated[j] += x * column[j];
  }
  float chosen = 0;
  for (int64_t j = 0; j < dim; ++j) {
    codes[j] = 0;
    for (const float midpoint : book.midpoints) codes[j] += rotated[j] >= midpoint;
    const float centroid = book.centroids[codes[j]];
    chosen += centroid * centroid;
  }
  norm *= unit;
  return format.norm_correction ? norm / std::sqrt(chosen + 1e-16f) : norm;
}

struct Range {
  float scale, zero;
};

Range QuantizeValue(const std::vector<float>& value, int64_t bits, uint8_t* codes) {
  const auto [least, most] = std::minmax_element(value.begin(), value.end());
  const int top = (1 << bits) - 1;
  const float zero = std::clamp(*least, -kLargestF16, kLargestF16);
  const float reciprocal = static_cast<float>(1.0 / top);
  const float scale = std::clamp((*most - zero) * reciprocal, 1e-8f, kLargestF16);
  const float halves_per_unit = 2 / scale;
  for (size_t i = 0; i < value.size(); ++i) {
    const float halves = std::floor((value[i] - zero) * halves_per_unit);
    // In this order a NaN becomes 0.
    const float inside = halves > 0 ? std::min(halves, 2.0f * top) : 0.0f;
    codes[i] = static_cast<uint8_t>((static_cast<int>(inside) + 1) >> 1);
  }
  return {scale, zero};
}

template <typename T>
void StoreAll(const T* keys, const T* values, const Slots& slots, const Rotation& rotation,
              const Centroids& centroids, const Format& format, int64_t num_blocks,
              uint8_t* cache) {
  const int64_t tokens = slots.element_count(), dim = format.head_dim;
  const int64_t rotations = rotation.dimensions()[0], codebooks = centroids.dimensions()[0];
  const int64_t groups = std::max(rotations, codebooks);
  Codebook book;
  int64_t group_of_book = -1;
  std::vector<float> row(dim), rotated(dim);
  std::vector<uint8_t> codes(dim);
  for (int64_t n = 0; n < tokens; ++n) {
    const int64_t slot = slots.typed_data()[n];
    if (slot < 0 || slot >= num_blocks * format.block_size) continue;
    if (!format.KeyIsFp8() && n * groups / tokens != group_of_book) {
      group_of_book = n * groups / tokens;
      book = CodebookOf(rotation.typed_data() + group_of_book * rotations / groups * dim * dim,
                        centroids.typed_data() + (group_of_book * codebooks / groups
                                                  << format.key_bits),
                        format);
    }
    uint8_t* const block = cache + slot / format.block_size * format.BlockBytes();
    const int64_t offset = slot % format.block_size;
    for (int64_t head = 0; head < format.kv_heads; ++head) {
      uint8_t* const data = block + (offset * format.kv_heads + head) * format.DataBytes();
      uint8_t* const metadata =
          block + format.block_size * format.kv_heads * format.DataBytes() +
          2 * (head * format.Fields() * format.block_size + offset);
      const auto field = [&](int64_t number) { return metadata + 2 * number * format.block_size; };
      const int64_t first = (n * format.kv_heads + head) * dim;
      for (int64_t i = 0; i < dim; ++i) row[i] = ToFloat(keys[first + i]);
      if (format.KeyIsFp8()) {
        for (int64_t i = 0; i < dim; ++i) data[i] = ToE4m3(row[i]);
      } else {
        const float norm = QuantizeKey(row, book, format, rotated, codes.data());
        WriteCodes(codes.data(), dim, format.key_bits, data);
        WriteF16(std::min(norm, kLargestF16), field(0));
      }
      for (int64_t i = 0; i < dim; ++i) row[i] = ToFloat(values[first + i]);
      const Range range = QuantizeValue(row, format.value_bits, codes.data());
      WriteCodes(codes.data(), dim, format.value_bits, data + format.KeyBytes());
      WriteF16(range.scale, field(format.Fields() - 2));
      WriteF16(range.zero, field(format.Fields() - 1));
    }
  }
}

ffi::Error Store(Cache cache, AnyBuffer key, AnyBuffer value, Slots slots, Rotation rotation,
                 Centroids centroids, int64_t key_bits, int64_t value_bits, bool norm_correction,
                 ffi::Result<Cache> out) {
  const auto refuse = [](const std::string& what) {
    return ffi::Error::InvalidArgument("jax_beam_attn_turboquant_store: " + what);
  };
  const auto shape = key.dimensions(), pages = cache.dimensions();
  const auto tokens = static_cast<int64_t>(slots.element_count());
  if (out->typed_data() != cache.typed_data()) return refuse("the result is not the cache");
  if (shape.size() != 3 || shape[0] != tokens || shape[1] != pages[2] || shape[2] % 8 != 0) {
    return refuse("expected keys [N, Hkv, D] for N slots, D a multiple of 8");
  }
  if (value.element_type() != key.element_type() || value.element_count() != key.element_count()) {
    return refuse("expected as many values as keys, and of their type");
  }
  const Format format{pages[1],   pages[2],       pages[3], shape[2], key_bits,
                      value_bits, norm_correction};
  if (format.DataBytes() + 2 * format.Fields() > format.slot_bytes) {
    return refuse("a slot has " + std::to_string(format.slot_bytes) + " bytes, too few for " +
                  std::to_string(shape[2]) + " dimensions");
  }
  const int64_t rotations = rotation.dimensions()[0], codebooks = centroids.dimensions()[0];
  const int64_t groups = std::max(rotations, codebooks);
  if (!format.KeyIsFp8() &&
      (rotations == 0 || codebooks == 0 || groups % rotations != 0 || groups % codebooks != 0 ||
       tokens % groups != 0 || rotation.dimensions()[1] != shape[2] ||
       rotation.dimensions()[2] != shape[2] || centroids.dimensions()[1] != 1 << key_bits)) {
    return refuse("no rotations [R, D, D] and codebooks [R, 2**key_bits] for these keys");
  }
  const auto store = [&](auto element) {
    using T = decltype(element);
    StoreAll(static_cast<const T*>(key.untyped_data()),
             static_cast<const T*>(value.untyped_data()), slots, rotation, centroids, format,
             pages[0], out->typed_data());
    return ffi::Error::Success();
  };
  switch (key.element_type()) {
    case ffi::F32:
      return store(float{});
    case ffi::BF16:
      return store(Bf16{});
    case ffi::F16:
      return store(F16{});
    default:
      return refuse("keys are neither F32 nor BF16 nor F16");
  }
}

}  // namespace
}  // namespace jax_beam_attn

JAX_BEAM_ATTN_HANDLER(jax_beam_attn_turboquant_store, jax_beam_attn::Store,
                      xla::ffi::Ffi::Bind()
                          .Arg<jax_beam_attn::Cache>()
                          .Arg<xla::ffi::AnyBuffer>()
                          .Arg<xla::ffi::AnyBuffer>()
                          .Arg<jax_beam_attn::Slots>()
                          .Arg<jax_beam_attn::Rotation>()
                          .Arg<jax_beam_attn::Centroids>()
                          .Attr<int64_t>("key_bits")
                          .Attr<int64_t>("value_bits")
                          .Attr<bool>("norm_correction")
                          .Ret<jax_beam_attn::Cache>());
