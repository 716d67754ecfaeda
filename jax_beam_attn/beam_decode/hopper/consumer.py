"""The warpgroups that compute: QK, softmax and PV."""

# The device code is CuTe-DSL, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

from jax_beam_attn.beam_decode.hopper.device import (
    LOG2E,
    ROWS,
    VECTOR,
    WARP,
    WARPGROUP,
    convert,
    exp2,
    vector_of,
    wait,
)
from jax_beam_attn.beam_decode.hopper.tiles import Tiles


class Consumer(Tiles):
    """Methods of a consumer warpgroup."""

    @cute.jit
    def _consume(
        self, q, s_q, s_k, s_v, full_k, full_v, empty_k, empty_v, full_beam, present, part_peak,
        part_total, out, lse, sink, thread, tile, slot, sample, rank, kv_head, group, share, units,
        low, high, num_tiles, steps, page_size, pool_rows, block_tables, sign, to_log2, to_cap,
    ):  # fmt: skip
        """A warpgroup's 64 queries: the context loop, the beam part, the stores."""
        dtype = q.element_type
        group_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        thread = thread % WARPGROUP
        lane = thread % WARP
        first_row = tile * self.block_m + group_index * ROWS
        qk = self._qk(dtype, self.block_n)
        pv = self._pv(dtype)
        qk_thread, pv_thread = qk.get_slice(thread), pv.get_slice(thread)
        q_fragment = qk_thread.make_fragment_A(qk_thread.partition_A(s_q))[
            None, None, None, group_index
        ]
        k_fragment = qk_thread.make_fragment_B(qk_thread.partition_B(s_k))
        v_fragment = pv_thread.make_fragment_B(pv_thread.partition_B(s_v))
        scores = qk_thread.make_fragment_C(qk_thread.partition_shape_C((ROWS, self.block_n)))
        acc = pv_thread.make_fragment_C(pv_thread.partition_shape_C((ROWS, self.block_d)))
        weights = pv_thread.make_fragment_A(pv_thread.partition_shape_A((ROWS, self.block_n)))
        acc.fill(0.0)
        peak = cute.make_rmem_tensor(2, Float32)
        total = cute.make_rmem_tensor(2, Float32)
        shrink = cute.make_rmem_tensor(2, Float32)
        peak.fill(-Float32.inf)
        total.fill(0.0)

        self._load_queries(q, s_q, group_index, thread, first_row, sample, kv_head, group, sign)
        stage, phase = Int32(0), Int32(0)
        if num_tiles > 0:
            at = num_tiles - 1
            wait(full_k + stage, phase)
            self._start(qk, scores, q_fragment, k_fragment[None, None, None, stage], False)
            warpgroup.wait_group(0)
            self._release(empty_k + stage, lane)
            valid = cutlass.min(high - low - at * self.block_n, self.block_n)
            if const_expr(block_tables is not None):
                valid = self._valid_in_page(
                    valid, low + at * self.block_n, sample, page_size, pool_rows, block_tables
                )
            self._cap(scores, to_cap)
            self._mask(scores, valid, lane)
            self._softmax(scores, peak, total, shrink, to_log2)
            convert(scores, weights)
            wait(full_v + stage, phase)
            if valid < self.block_n:
                # A masked row of V may be NaN, and 0 * NaN is NaN.
                self._zero_rows(s_v, stage, valid, thread + group_index * WARPGROUP)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=3, number_of_threads=self.warpgroups * WARPGROUP)
            if const_expr(self.warpgroups == 2):
                if group_index == 0:
                    self._hand_over(1)
            for i in cutlass.range(num_tiles - 1, unroll=1):
                at = num_tiles - 2 - i
                v_stage, v_phase = stage, phase
                stage, phase = self._next(stage, phase)
                wait(full_k + stage, phase)
                if const_expr(self.warpgroups == 2):
                    self._take_turn(group_index)
                self._start(qk, scores, q_fragment, k_fragment[None, None, None, stage], False)
                wait(full_v + v_stage, v_phase)
                self._start(pv, acc, weights, v_fragment[None, None, None, v_stage], True)
                if const_expr(self.warpgroups == 2):
                    self._hand_over(1 - group_index)
                warpgroup.wait_group(1)
                self._release(empty_k + stage, lane)
                self._cap(scores, to_cap)
                if const_expr(block_tables is not None):
                    self._mask(
                        scores,
                        self._valid_in_page(
                            self.block_n,
                            low + at * self.block_n,
                            sample,
                            page_size,
                            pool_rows,
                            block_tables,
                        ),
                        lane,
                    )
                self._softmax(scores, peak, total, shrink, to_log2)
                # Never true. Without a branch on the result, the assembler moves the wait in
                # front of the exponentials, and they no longer overlap with PV.
                if total[0] + total[1] < 0.0:
                    cute.arch.fence_acq_rel_cta()
                warpgroup.wait_group(0)
                self._release(empty_v + v_stage, lane)
                # Mostly no maximum has grown, and there is nothing to scale.
                if cute.arch.vote_any_sync(shrink[0] != 1.0 or shrink[1] != 1.0):
                    self._scale(acc, shrink)
                convert(scores, weights)
            wait(full_v + stage, phase)
            self._start(pv, acc, weights, v_fragment[None, None, None, stage], True)
            if const_expr(self.warpgroups == 2):
                if group_index == 1:
                    self._take_turn(group_index)  # one turn more was handed over than taken
            warpgroup.wait_group(0)
            self._release(empty_v + stage, lane)
        if const_expr(self.beam):
            self._attend_beams(
                q_fragment, s_k, s_v, full_beam, empty_k, empty_v, present, acc, peak, total,
                shrink, dtype, thread, group_index, first_row, num_tiles, steps, share, units,
                to_log2, to_cap,
            )  # fmt: skip
        for r in cutlass.range_constexpr(2):
            for offset in cutlass.range_constexpr(1, 3):
                total[r] += cute.arch.shuffle_sync_bfly(total[r], offset=offset)
        if const_expr(self.cluster > 1):
            cute.arch.barrier(barrier_id=3, number_of_threads=self.warpgroups * WARPGROUP)
            warp = group_index * 4 + thread // WARP
            self._share_part(acc, peak, total, s_k, part_peak, part_total, lane, warp)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            self._merge_parts(
                s_k, part_peak, part_total, out, lse, sink, lane, warp, tile * self.block_m,
                sample, rank, kv_head, group, to_log2,
            )  # fmt: skip
            cute.arch.cluster_arrive()  # none may leave while another reads its part
            cute.arch.cluster_wait()
        else:
            self._store(
                acc, peak, total, out, lse, sink, lane, thread // WARP, first_row, slot, sample,
                kv_head, group, to_log2,
            )  # fmt: skip

    def _qk(self, dtype, keys):
        major = cute.nvgpu.OperandMajorMode
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, major.K, major.K, Float32, (1, 1, 1), (ROWS, keys)
        )

    def _pv(self, dtype):
        major = cute.nvgpu.OperandMajorMode
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, major.K, major.MN, Float32, (1, 1, 1), (ROWS, self.block_d),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    @cute.jit
    def _attend_beams(
        self, q_fragment, s_k, s_v, full_beam, empty_k, empty_v, present, acc, peak, total, shrink,
        dtype, thread, group_index, first_row, num_tiles, steps, share, units, to_log2, to_cap,
    ):  # fmt: skip
        """Attends to the tiles of gathered rows; of a tile, a query sees its own unit's."""
        lane, warp = thread % WARP, thread // WARP
        qk, pv = self._qk(dtype, ROWS), self._pv(dtype)
        qk_thread, pv_thread = qk.get_slice(thread), pv.get_slice(thread)
        scores = qk_thread.make_fragment_C(qk_thread.partition_shape_C((ROWS, ROWS)))
        weights = pv_thread.make_fragment_A(pv_thread.partition_shape_A((ROWS, ROWS)))
        own = [
            (first_row + warp * 16 + lane // 4 + 8 * r) // share - first_row // share
            for r in (0, 1)
        ]
        stage = num_tiles % self.stages
        tiles = self._beam_tiles(steps, share)
        for at in cutlass.range((tiles + self.halves - 1) // self.halves, unroll=1):
            # Each stage's barrier counts from its first gathered tile on.
            wait(full_beam + stage, at // self.stages % 2)
            # The copies wrote through the generic proxy, wgmma reads through the other.
            cute.arch.fence_view_async_shared()
            for half in cutlass.range_constexpr(self.halves):
                tile = at * self.halves + half
                if tile < tiles and tile % self.warpgroups == group_index:
                    k_half = cute.local_tile(s_k, (ROWS, self.block_d, self.stages), (half, 0, 0))
                    v_half = cute.local_tile(s_v, (self.block_d, ROWS, self.stages), (0, half, 0))
                    k_fragment = qk_thread.make_fragment_B(qk_thread.partition_B(k_half))
                    v_fragment = pv_thread.make_fragment_B(pv_thread.partition_B(v_half))
                    self._start(qk, scores, q_fragment, k_fragment[None, None, None, stage], False)
                    warpgroup.wait_group(0)
                    self._cap(scores, to_cap)
                    for j in cutlass.range_constexpr(ROWS // 8):
                        for c in cutlass.range_constexpr(2):
                            column = 8 * j + 2 * (lane % 4) + c
                            there = present[half * ROWS + column, stage] >= 0
                            unit = column % units
                            for r in cutlass.range_constexpr(2):
                                i = 4 * j + 2 * r + c
                                scores[i] = cutlass.select_(
                                    there and unit == own[r], scores[i], -Float32.inf
                                )
                    self._softmax(scores, peak, total, shrink, to_log2)
                    self._scale(acc, shrink)
                    convert(scores, weights)
                    self._start(pv, acc, weights, v_fragment[None, None, None, stage], True)
                    warpgroup.wait_group(0)
            # All have read `present` before the producer may write it again.
            cute.arch.barrier(barrier_id=4 + group_index, number_of_threads=WARPGROUP)
            self._release(empty_k + stage, lane)
            self._release(empty_v + stage, lane)
            stage = (stage + 1) % self.stages

    @cute.jit
    def _take_turn(self, group_index):
        """Waits until the other warpgroup's MMAs are under way.

        So that one computes its softmax while the other uses the tensor cores.
        """
        cute.arch.barrier(barrier_id=1 + group_index, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def _hand_over(self, group_index):
        cute.arch.barrier_arrive(barrier_id=1 + group_index, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def _start(self, mma, acc, a, b, accumulate: cutlass.Constexpr):
        """Issues acc (+)= a b, not waiting for its end."""
        warpgroup.fence()
        # An atom of its own: its flag is a value of this place in the program.
        atom = cute.make_mma_atom(mma.op)
        for i in cutlass.range_constexpr(cute.size(a, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, accumulate or i > 0)
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
        warpgroup.commit_group()

    @cute.jit
    def _release(self, barrier, lane):
        if lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def _load_queries(self, q, s_q, group_index, thread, first_row, sample, kv_head, group, sign):
        """The warpgroup's queries, packed: row = beam * G + query head of the group."""
        width, heads = q.shape[1], q.shape[2]
        vectors = self.block_d // VECTOR
        first = Int64(sample) * width * heads + kv_head * group.divisor
        for i in cutlass.range_constexpr(ROWS * vectors // WARPGROUP):
            index = i * WARPGROUP + thread
            row, vector = index // vectors, index % vectors
            beam, of_group = divmod(first_row + row, group)
            value = cute.make_rmem_tensor(VECTOR, q.element_type)
            value.fill(0.0)
            if beam < width and vector * VECTOR < self.head_dim:
                at = first + beam * heads + of_group
                value.store(
                    (vector_of(q, at, self.head_dim, vector * VECTOR).load().to(Float32) * sign).to(
                        q.element_type
                    )
                )
            to = cute.local_tile(s_q[None, None, group_index], (1, VECTOR), (row, vector))
            cute.autovec_copy(value, cute.group_modes(to, 0, 2))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=4 + group_index, number_of_threads=WARPGROUP)

    @cute.jit
    def _valid_in_page(self, valid, position, sample, page_size, pool_rows, block_tables):
        """How many of a tile's keys are there: none where its page is not."""
        entry = block_tables[sample, position // page_size]
        if entry < 0 or entry >= pool_rows // page_size:
            valid = Int32(0)
        return valid

    @cute.jit
    def _mask(self, scores, valid, lane):
        """Keys from `valid` on are out."""
        if valid < self.block_n:
            limit = valid - 2 * (lane % 4)
            for i in cutlass.range_constexpr(cute.size(scores)):
                scores[i] = cutlass.select_(limit > 8 * (i // 4) + i % 2, scores[i], -Float32.inf)

    @cute.jit
    def _cap(self, scores, to_cap):
        """Turns scores into tanh(score * to_cap), in units of the cap, where logits are capped."""
        if const_expr(self.soft_cap):
            for i in cutlass.range_constexpr(cute.size(scores)):
                x = scores[i] * to_cap
                # The difference loses small values, which matter where the cap is large.
                square = x * x
                series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
                tanh = 2.0 / (1.0 + exp2(x * (-2.0 * LOG2E))) - 1.0
                scores[i] = cutlass.select_(square < 0.01, series, tanh)

    @cute.jit
    def _softmax(self, scores, peak, total, shrink, to_log2):
        """Turns scores into weights; `shrink` is what earlier ones are to be multiplied by.

        Of a thread's elements i, those with i // 2 odd are of its second row.
        """
        count = cute.size(scores)
        # Four maxima at a time and both rows together: chains of dependent instructions are what
        # this takes the time of.
        partial = [[scores[2 * r + c], scores[2 * r + c + 4]] for r in (0, 1) for c in (0, 1)]
        for i in cutlass.range_constexpr(8, count):
            chain = partial[i % 4]
            chain[i // 4 % 2] = cute.arch.fmax(chain[i // 4 % 2], scores[i])
        new_peak, base, added = [], [], [Float32(0.0), Float32(0.0)]
        for r in cutlass.range_constexpr(2):
            own = cute.arch.fmax(
                cute.arch.fmax(*partial[2 * r]), cute.arch.fmax(*partial[2 * r + 1])
            )
            new_peak.append(cute.arch.fmax(peak[r], own))
        for offset in cutlass.range_constexpr(1, 3):
            other = [cute.arch.shuffle_sync_bfly(new_peak[r], offset=offset) for r in (0, 1)]
            new_peak = [cute.arch.fmax(new_peak[r], other[r]) for r in (0, 1)]
        for r in cutlass.range_constexpr(2):
            finite = Float32(0.0) if new_peak[r] == -Float32.inf else new_peak[r]
            base.append(finite * to_log2)
            # Of the difference, so that it is 1 while the peak stays; see `softmax_triton.advance`.
            shrink[r] = exp2((peak[r] - finite) * to_log2)
            peak[r] = new_peak[r]
        for i in cutlass.range_constexpr(count):
            r = i // 2 % 2
            scores[i] = exp2(scores[i] * to_log2 - base[r])
            added[r] += scores[i]
        for r in cutlass.range_constexpr(2):
            total[r] = total[r] * shrink[r] + added[r]

    @cute.jit
    def _scale(self, acc, factor):
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] *= factor[i // 2 % 2]

    @cute.jit
    def _zero_rows(self, s_v, stage, valid, thread):
        """Zeros the tokens from `valid` on; a token's row is a line in each block of columns."""
        count = (self.block_n - valid) * self.block_d
        for i in cutlass.range(thread, count, self.warpgroups * WARPGROUP, unroll=1):
            s_v[i % self.block_d, valid + i // self.block_d, stage] = s_v.element_type(0.0)
