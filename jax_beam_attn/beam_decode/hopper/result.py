"""What becomes of a thread block's result: stored, or first merged within its cluster."""

# The device code is CuTe-DSL, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from jax_beam_attn.beam_decode.hopper.device import (
    LN2,
    LOG2E,
    exp2,
    load_remote,
    of_block,
    store_pair,
)
from jax_beam_attn.beam_decode.hopper.tiles import Tiles


class Result(Tiles):
    """Methods that end a consumer warpgroup's work."""

    @cute.jit
    def _store(
        self, acc, peak, total, out, lse, sink, lane, warp, first_row, slot, sample, kv_head,
        group, to_log2,
    ):  # fmt: skip
        """Normalises and stores a warpgroup's result."""
        width, heads = out.shape[1], out.shape[2]
        for r in cutlass.range_constexpr(2):
            beam, of_group = divmod(first_row + warp * 16 + lane // 4 + 8 * r, group)
            head = kv_head * group.divisor + of_group
            if beam < width:
                norm, log_total = self._norm(peak[r], total[r], sink, sample, head, to_log2)
                at = (Int64(slot) * width + beam) * heads + head
                for j in cutlass.range_constexpr(self.head_dim // 8):
                    pair = cute.make_rmem_tensor(2, Float32)
                    for c in cutlass.range_constexpr(2):
                        pair[c] = acc[4 * j + 2 * r + c] * norm
                    store_pair(out, at * self.head_dim + 8 * j + 2 * (lane % 4), pair)
                if lane % 4 == 0:
                    (lse.iterator + at).store(log_total)

    @cute.jit
    def _norm(self, peak, total, sink, sample, head, to_log2):
        """What a row is to be multiplied by, and its LSE."""
        log_total = peak * to_log2 * LN2 + cute.math.log(total)
        norm = 1.0 / total
        if total == 0.0:
            log_total = -Float32.inf
            norm = Float32(0.0)
        if const_expr(sink is not None):
            of_sink = sink[sample if sink.shape[0] > 1 else 0, head]
            if norm != 0.0:
                norm /= 1.0 + exp2((of_sink - log_total) * LOG2E)
        return norm, log_total

    @cute.jit
    def _share_part(self, acc, peak, total, s_k, part_peak, part_total, lane, warp):
        """Leaves a warpgroup's result in shared memory, in place of the ring.

        Groups of 8 columns are permuted among neighbouring rows, so that the 4 rows that are
        written at once meet no bank twice.
        """
        for r in cutlass.range_constexpr(2):
            row = warp * 16 + lane // 4 + 8 * r
            for j in cutlass.range_constexpr(self.block_d // 8):
                to = self._part_bytes(row, 8 * j + 2 * (lane % 4))
                cute.arch.inline_ptx(
                    "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};",
                    read_only_args=[
                        s_k.iterator.toint() + to,
                        acc[4 * j + 2 * r],
                        acc[4 * j + 2 * r + 1],
                    ],
                )
            if lane % 4 == 0:
                part_peak[row] = peak[r]
                part_total[row] = total[r]

    def _part_bytes(self, row, column):
        return (row * self.block_d + (column ^ ((row % 4) * 8))) * 4

    @cute.jit
    def _merge_parts(
        self, s_k, part_peak, part_total, out, lse, sink, lane, warp, first_row, sample, rank,
        kv_head, group, to_log2,
    ):  # fmt: skip
        """Merges the parts of the cluster; block r has rows r, r + cluster, ..."""
        width, heads = out.shape[1], out.shape[2]
        parts = [of_block(s_k.iterator.toint(), c) for c in range(self.cluster)]
        peaks = [of_block(part_peak.iterator.toint(), c) for c in range(self.cluster)]
        totals = [of_block(part_total.iterator.toint(), c) for c in range(self.cluster)]
        for row in cutlass.range(
            rank + warp * self.cluster,
            self.block_m,
            4 * self.warpgroups * self.cluster,
            unroll=1,
        ):
            beam, of_group = divmod(first_row + row, group)
            head = kv_head * group.divisor + of_group
            if beam < width:
                peak_of = [load_remote(peaks[c] + row * 4, 1)[0] for c in range(self.cluster)]
                total_of = [load_remote(totals[c] + row * 4, 1)[0] for c in range(self.cluster)]
                peak = peak_of[0]
                for c in cutlass.range_constexpr(1, self.cluster):
                    peak = cute.arch.fmax(peak, peak_of[c])
                base = (Float32(0.0) if peak == -Float32.inf else peak) * to_log2
                total = Float32(0.0)
                weight = []
                for c in cutlass.range_constexpr(self.cluster):
                    weight.append(exp2(peak_of[c] * to_log2 - base))
                    total += weight[c] * total_of[c]
                norm, log_total = self._norm(peak, total, sink, sample, head, to_log2)
                at = (Int64(sample) * width + beam) * heads + head
                for j in cutlass.range_constexpr(self.block_d // 64):
                    column = 64 * j + 2 * lane
                    pair = cute.make_rmem_tensor(2, Float32)
                    pair.fill(0.0)
                    for c in cutlass.range_constexpr(self.cluster):
                        of_part = load_remote(parts[c] + self._part_bytes(row, column), 2)
                        pair[0] += of_part[0] * (weight[c] * norm)
                        pair[1] += of_part[1] * (weight[c] * norm)
                    if column < self.head_dim:
                        store_pair(out, at * self.head_dim + column, pair)
                if lane == 0:
                    (lse.iterator + at).store(log_total)
