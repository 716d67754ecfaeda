// `jax_beam_attn_mla_schedule`: cuts the rows of sparse MLA decode into parts of equal cost, as
// jax_beam_attn/sparse_mla/schedule.py describes it, for G problems of the same shape.
//
//   topk_length, extra_topk_length   s32 [G, B], [G, rows], or without elements: topk for all rows
//   begin                            s32 [G, num_parts + 1, 2], row and block
//   first_slot                       s32 [G, rows + 1]
//   seqlen_q, topk, extra_topk       rows = B * seqlen_q
//
// Python makes sure that all costs together, and num_parts on top, stay below 2**31.
#pragma once

#include <cstdint>
#include <string>

#include "mla_format.h"
#include "xla/ffi/api/ffi.h"

namespace jax_beam_attn {

using Lengths = xla::ffi::Buffer<xla::ffi::S32, 2>;
using Begin = xla::ffi::Buffer<xla::ffi::S32, 3>;
using FirstSlot = xla::ffi::Buffer<xla::ffi::S32, 2>;

inline constexpr int32_t kBlock = 64;   // tokens
inline constexpr int32_t kOverhead = 5;  // what starting a row costs, in blocks

// Divides many numbers in [0, 2**31) by the same one, faster than a GPU divides two integers.
class Divider {
 public:
  JAX_BEAM_ATTN_HOST_DEVICE explicit Divider(int32_t divisor)
      : divisor_(divisor), inverse_(~0u / divisor_) {}

  JAX_BEAM_ATTN_HOST_DEVICE int32_t operator()(int32_t number) const {
    // inverse / 2**32 is less than 1 / divisor, by at most 2**-32: the quotient is one short at
    // most.
    const auto n = static_cast<uint32_t>(number);
    const auto quotient = static_cast<uint32_t>(static_cast<uint64_t>(n) * inverse_ >> 32);
    return static_cast<int32_t>(quotient + (n - quotient * divisor_ >= divisor_));
  }

 private:
  uint32_t divisor_, inverse_;
};

// The lengths in one of the two caches.
struct ListedTokens {
  const int32_t* lengths;  // null where all rows have `topk` tokens
  int32_t per_problem, topk;
  Divider rows_per_length;

  JAX_BEAM_ATTN_HOST_DEVICE int32_t Blocks(int64_t problem, int32_t row) const {
    int32_t length = topk;
    if (lengths != nullptr) {
      length = lengths[problem * per_problem + rows_per_length(row)];
      length = length < 0 ? 0 : length < topk ? length : topk;
    }
    return length == 0 ? 0 : (length - 1) / kBlock + 1;
  }
};

struct MlaSchedule {
  ListedTokens main, extra;
  int64_t problems;
  int32_t rows, parts;
  int32_t* begin;
  int32_t* first_slot;

  JAX_BEAM_ATTN_HOST_DEVICE int32_t Cost(int64_t problem, int32_t row) const {
    return main.Blocks(problem, row) + extra.Blocks(problem, row) + kOverhead;
  }
};

// Rows lie end to end on a line; this one covers [start, end). Parts begin at multiples of
// `length`, and a part that begins behind the row's first block shares the row with the part before
// it: the number of such cuts.
JAX_BEAM_ATTN_HOST_DEVICE inline int32_t CutsInside(int32_t start, int32_t end,
                                                    const Divider& by_length) {
  const int32_t first_block = start + kOverhead;
  return first_block < end ? by_length(end - 1) - by_length(first_block) : 0;
}

// The block within a row [start, end) at a position in it; one in its overhead is its first block.
JAX_BEAM_ATTN_HOST_DEVICE inline int32_t BlockAt(int32_t position, int32_t start) {
  const int32_t block = position - start - kOverhead;
  return block < 0 ? 0 : block;
}

inline xla::ffi::ErrorOr<MlaSchedule> ScheduleOf(
    const Lengths& topk_length, const Lengths& extra_topk_length, int64_t seqlen_q, int64_t topk,
    int64_t extra_topk, xla::ffi::Result<Begin> begin, xla::ffi::Result<FirstSlot> first_slot) {
  const auto refuse = [](const char* what) {
    return xla::ffi::Unexpected(xla::ffi::Error::InvalidArgument(
        std::string("jax_beam_attn_mla_schedule: ") + what));
  };
  const auto parts = begin->dimensions(), slots = first_slot->dimensions();
  if (parts[0] != slots[0] || parts[1] < 2 || parts[2] != 2 || slots[1] < 1) {
    return refuse("results are not [G, num_parts + 1, 2] and [G, rows + 1]");
  }
  const auto rows = static_cast<int32_t>(slots[1] - 1);
  if (topk < 0 || topk > INT32_MAX || extra_topk < 0 || extra_topk > INT32_MAX || seqlen_q < 0) {
    return refuse("topk, extra_topk or seqlen_q out of range");
  }
  ListedTokens listed[2] = {{nullptr, 0, static_cast<int32_t>(topk), Divider(1)},
                            {nullptr, 0, static_cast<int32_t>(extra_topk), Divider(1)}};
  const Lengths* const lengths[2] = {&topk_length, &extra_topk_length};
  for (int i = 0; i < 2; ++i) {
    if (rows == 0 || lengths[i]->element_count() == 0) continue;
    const auto shape = lengths[i]->dimensions();
    if (shape[0] != slots[0] || (shape[1] != rows && shape[1] * seqlen_q != rows)) {
      return refuse("lengths are neither [G, B] nor [G, rows]");
    }
    listed[i].lengths = lengths[i]->typed_data();
    listed[i].per_problem = static_cast<int32_t>(shape[1]);
    if (shape[1] != rows) listed[i].rows_per_length = Divider(static_cast<int32_t>(seqlen_q));
  }
  return MlaSchedule{listed[0],
                     listed[1],
                     slots[0],
                     rows,
                     static_cast<int32_t>(parts[1] - 1),
                     begin->typed_data(),
                     first_slot->typed_data()};
}

}  // namespace jax_beam_attn
