#include "mla_schedule.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "abi.h"
#include "cuda/launch.h"

namespace jax_beam_attn {
namespace {

constexpr int kMaxThreads = 1024, kWarp = 32;
constexpr int kRowsPerThread = 4;
// Ends of rows that shared memory holds. Where there are more, they are kept in `first_slot` until
// the slots themselves are known.
constexpr int kSharedRows = 2 * kMaxThreads * kRowsPerThread;

// The sum of a warp's values up to and with this lane.
__device__ int32_t WarpScan(int32_t value) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int32_t other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// Turns the values of a tile, kRowsPerThread consecutive ones in each thread, into the sums up to
// and with each of them, on top of `carry`. Returns the last sum of the tile.
__device__ int32_t TileScan(int32_t (&values)[kRowsPerThread], int32_t carry) {
  __shared__ int32_t warp_sums[kMaxThreads / kWarp];
#pragma unroll
  for (int i = 1; i < kRowsPerThread; ++i) values[i] += values[i - 1];
  const int32_t own = values[kRowsPerThread - 1];
  const int32_t in_warp = WarpScan(own);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  __syncthreads();  // the sums of the scan before have been read
  if (lane == kWarp - 1) warp_sums[warp] = in_warp;
  __syncthreads();
  // Every warp adds up all of them: cheaper than to wait for one that does.
  const int32_t sums = WarpScan(lane < warps ? warp_sums[lane] : 0);
  const int32_t before_warp = __shfl_sync(~0u, sums, max(warp - 1, 0));
  const int32_t before = carry + (warp > 0 ? before_warp : 0) + in_warp - own;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) values[i] += before;
  return carry + __shfl_sync(~0u, sums, warps - 1);
}

// The first of `rows` ends that lies behind a position.
__device__ int32_t RowAt(const int32_t* ends, int32_t rows, int32_t position) {
  int32_t low = 0, high = rows;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (ends[middle] > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// A thread block for each problem.
__global__ void __launch_bounds__(kMaxThreads) Cut(MlaSchedule schedule) {
  __shared__ int32_t shared_ends[kSharedRows];
  const int64_t problem = blockIdx.x;
  const int32_t rows = schedule.rows, parts = schedule.parts;
  int32_t* const begin = schedule.begin + problem * 2 * (parts + 1);
  int32_t* const first_slot = schedule.first_slot + problem * (rows + 1);
  int32_t* const ends = rows <= kSharedRows ? shared_ends : first_slot + 1;
  const int32_t tile_rows = blockDim.x * kRowsPerThread, own = threadIdx.x * kRowsPerThread;

  int32_t total = 0;
  for (int32_t tile = 0; tile < rows; tile += tile_rows) {
    int32_t values[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int32_t row = tile + own + i;
      values[i] = row < rows ? schedule.Cost(problem, row) : 0;
    }
    total = TileScan(values, total);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (tile + own + i < rows) ends[tile + own + i] = values[i];
    }
  }
  __syncthreads();

  const int32_t length = (total + parts - 1) / parts;
  for (int32_t part = threadIdx.x; part <= parts; part += blockDim.x) {
    const int32_t position = min(part * length, total);
    const int32_t row = RowAt(ends, rows, position);
    begin[2 * part] = row;
    begin[2 * part + 1] = row < rows ? BlockAt(position, row > 0 ? ends[row - 1] : 0) : 0;
  }

  const Divider by_length(max(length, 1));  // without rows there is nothing to divide
  int32_t slots = 0;
  int32_t tile_start = 0;  // in the line, not in rows
  if (threadIdx.x == 0) first_slot[0] = 0;
  for (int32_t tile = 0; tile < rows; tile += tile_rows) {
    int32_t values[kRowsPerThread];
    int32_t start = own == 0 ? tile_start : tile + own <= rows ? ends[tile + own - 1] : 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int32_t row = tile + own + i;
      const int32_t end = row < rows ? ends[row] : 0;
      values[i] = row < rows ? 1 + CutsInside(start, end, by_length) : 0;
      start = end;
    }
    tile_start = tile + tile_rows <= rows ? ends[tile + tile_rows - 1] : 0;
    slots = TileScan(values, slots);  // waits for all to have read their ends
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (tile + own + i < rows) first_slot[tile + own + i + 1] = values[i];
    }
  }
}

xla::ffi::Error Schedule(cudaStream_t stream, Lengths topk_length, Lengths extra_topk_length,
                         int64_t seqlen_q, int64_t topk, int64_t extra_topk,
                         xla::ffi::Result<Begin> begin, xla::ffi::Result<FirstSlot> first_slot) {
  const auto schedule =
      ScheduleOf(topk_length, extra_topk_length, seqlen_q, topk, extra_topk, begin, first_slot);
  if (schedule.has_error()) return schedule.error();
  if (schedule->problems == 0) return xla::ffi::Error::Success();
  const int64_t wanted = std::max<int64_t>(schedule->rows / kRowsPerThread, schedule->parts) + 1;
  const auto warps = std::min<int64_t>((wanted + kWarp - 1) / kWarp, kMaxThreads / kWarp);
  Cut<<<static_cast<unsigned>(schedule->problems), static_cast<unsigned>(warps * kWarp), 0,
        stream>>>(*schedule);
  return LaunchStatus("jax_beam_attn_mla_schedule");
}

}  // namespace
}  // namespace jax_beam_attn

JAX_BEAM_ATTN_HANDLER(jax_beam_attn_mla_schedule, jax_beam_attn::Schedule,
                      xla::ffi::Ffi::Bind()
                          .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                          .Arg<jax_beam_attn::Lengths>()
                          .Arg<jax_beam_attn::Lengths>()
                          .Attr<int64_t>("seqlen_q")
                          .Attr<int64_t>("topk")
                          .Attr<int64_t>("extra_topk")
                          .Ret<jax_beam_attn::Begin>()
                          .Ret<jax_beam_attn::FirstSlot>(),
                      {xla::ffi::Traits::kCmdBufferCompatible});
