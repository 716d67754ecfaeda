#include "mla_schedule.h"

#include <algorithm>

#include "abi.h"

namespace jax_beam_attn {
namespace {

void Cut(const MlaSchedule& schedule, int64_t problem) {
  int32_t total = 0;
  for (int32_t row = 0; row < schedule.rows; ++row) total += schedule.Cost(problem, row);
  const int32_t length = (total + schedule.parts - 1) / schedule.parts;
  const Divider by_length(std::max(length, 1));  // without rows there is nothing to divide
  int32_t* begin = schedule.begin + problem * 2 * (schedule.parts + 1);
  int32_t* first_slot = schedule.first_slot + problem * (schedule.rows + 1);

  int32_t part = 0, start = 0, slot = 0;
  for (int32_t row = 0; row < schedule.rows; ++row) {
    const int32_t end = start + schedule.Cost(problem, row);
    for (; part <= schedule.parts && part * length < end; ++part) {
      *begin++ = row;
      *begin++ = BlockAt(part * length, start);
    }
    *first_slot++ = slot;
    slot += 1 + CutsInside(start, end, by_length);
    start = end;
  }
  *first_slot = slot;
  for (; part <= schedule.parts; ++part) {  // what begins at the very end
    *begin++ = schedule.rows;
    *begin++ = 0;
  }
}

xla::ffi::Error Schedule(Lengths topk_length, Lengths extra_topk_length, int64_t seqlen_q,
                         int64_t topk, int64_t extra_topk, xla::ffi::Result<Begin> begin,
                         xla::ffi::Result<FirstSlot> first_slot) {
  const auto schedule =
      ScheduleOf(topk_length, extra_topk_length, seqlen_q, topk, extra_topk, begin, first_slot);
  if (schedule.has_error()) return schedule.error();
  for (int64_t problem = 0; problem < schedule->problems; ++problem) Cut(*schedule, problem);
  return xla::ffi::Error::Success();
}

}  // namespace
}  // namespace jax_beam_attn

JAX_BEAM_ATTN_HANDLER(jax_beam_attn_mla_schedule, jax_beam_attn::Schedule,
                      xla::ffi::Ffi::Bind()
                          .Arg<jax_beam_attn::Lengths>()
                          .Arg<jax_beam_attn::Lengths>()
                          .Attr<int64_t>("seqlen_q")
                          .Attr<int64_t>("topk")
                          .Attr<int64_t>("extra_topk")
                          .Ret<jax_beam_attn::Begin>()
                          .Ret<jax_beam_attn::FirstSlot>());
