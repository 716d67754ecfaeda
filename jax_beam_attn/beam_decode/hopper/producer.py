"""The warps that fill the ring: the context by TMA, the beam part by gathers."""

# The device code is CuTe-DSL, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from jax_beam_attn.beam_decode.hopper.device import (
    ROWS,
    VECTOR,
    WARP,
    WARPGROUP,
    wait,
)
from jax_beam_attn.beam_decode.hopper.tiles import Tiles


class Producer(Tiles):
    """Methods of the producer warpgroup."""

    @cute.jit
    def _load_context(
        self, load_k, k_tiles, load_v, v_tiles, s_k, s_v, full_k, full_v, empty_k, empty_v, start,
        low, num_tiles, sample, kv_head, page_size, pool_rows, block_tables,
    ):  # fmt: skip
        """Loads the context's tiles of K and V, the last first."""
        bytes_of_tile = self.block_n * self.block_d * 2
        first = start + low if const_expr(block_tables is None) else Int32(0)
        k_of_head = cute.domain_offset((first, 0), k_tiles[None, None, kv_head])
        v_of_head = cute.domain_offset((0, first), v_tiles[None, None, kv_head])
        one = cute.make_layout(1)
        to_k, from_k = cpasync.tma_partition(
            load_k, 0, one, cute.group_modes(s_k, 0, 2),
            cute.group_modes(
                cute.local_tile(k_of_head, (self.block_n, self.block_d), (None, 0)), 0, 2
            ),
        )  # fmt: skip
        to_v, from_v = cpasync.tma_partition(
            load_v, 0, one, cute.group_modes(s_v, 0, 2),
            cute.group_modes(
                cute.local_tile(v_of_head, (self.block_d, self.block_n), (0, None)), 0, 2
            ),
        )  # fmt: skip
        stage, phase = Int32(0), Int32(1)
        for i in cutlass.range(num_tiles, unroll=1):
            at = num_tiles - 1 - i
            if const_expr(block_tables is not None):
                at = self._page_tile(
                    low + at * self.block_n, sample, page_size, pool_rows, block_tables
                )
            wait(empty_k + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full_k + stage, bytes_of_tile)
            cute.copy(load_k, from_k[None, at], to_k[None, stage], tma_bar_ptr=full_k + stage)
            wait(empty_v + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full_v + stage, bytes_of_tile)
            cute.copy(load_v, from_v[None, at], to_v[None, stage], tma_bar_ptr=full_v + stage)
            stage, phase = self._next(stage, phase)

    @cute.jit
    def _page_tile(self, position, sample, page_size, pool_rows, block_tables):
        """The tile of the pool that holds a position, one behind its end where there is none."""
        entry = block_tables[sample, position // page_size]
        tile = pool_rows // self.block_n
        if entry >= 0 and entry < pool_rows // page_size:
            tile = entry * (page_size // self.block_n) + (position % page_size) // self.block_n
        return tile

    @cute.jit
    def _gather_beams(
        self, k_beam, v_beam, topk, s_k, s_v, present, full_beam, empty_k, empty_v, thread,
        first_row, num_tiles, sample, split, splits, steps, kv_head, heads, group, share, units,
    ):  # fmt: skip
        """Gathers the tiles of the beam part; all warps of the producer take part.

        Tile e is for the queries of warpgroup e % warpgroups. It holds the rows of their units at
        one step and then those at the following steps, 64 in all. Each warp copies 16 rows.
        """
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        rows_of_warp = ROWS // 4
        pool, kv_heads = k_beam.shape[1], k_beam.shape[2]
        row_bytes = kv_heads * self.head_dim * 2
        stage_bytes = self.block_n * self.block_d * 2
        # The lanes of a row: first those that copy 16 bytes of K each, then those of V.
        vectors = self.block_d // VECTOR
        vector, of_k = lane % vectors, lane % (2 * vectors) < vectors
        tiles = self._beam_tiles(steps, share)
        stages = (tiles + self.halves - 1) // self.halves
        stage = num_tiles % self.stages
        phase = 1 ^ num_tiles // self.stages % 2
        ancestors = cute.make_rmem_tensor(self.halves, Int32)
        if warp > 0:
            # Long before the ring has room for them, the rows are called into the L2 cache.
            for i in cutlass.range(thread - WARP, tiles * ROWS, WARPGROUP - WARP, unroll=1):
                ancestor = self._ancestor(
                    topk, i // ROWS, i % ROWS, first_row, sample, split, splits, steps, kv_head,
                    heads, group, share, units, pool,
                )  # fmt: skip
                if ancestor >= 0:
                    at = (Int64(sample) * pool + ancestor) * row_bytes
                    at += kv_head * self.head_dim * 2
                    for beam_cache in (k_beam, v_beam):
                        cute.arch.inline_ptx(
                            "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
                            read_only_args=[
                                beam_cache.iterator.toint() + at,
                                Int32(self.head_dim * 2),
                            ],
                        )
        self._look_up(
            ancestors, topk, 0, tiles, first_row, warp, lane, sample, split, splits, steps,
            kv_head, heads, group, share, units, pool,
        )  # fmt: skip
        # The phases of the ring are those of this place only after the context.
        cute.arch.barrier(barrier_id=6, number_of_threads=WARPGROUP)
        for at in cutlass.range(stages, unroll=1):
            wait(empty_k + stage, phase)
            wait(empty_v + stage, phase)
            if lane < rows_of_warp:
                for half in cutlass.range_constexpr(self.halves):
                    present[half * ROWS + warp * rows_of_warp + lane, stage] = ancestors[half]
            # Passes of 32 lanes over the columns, and over the rows.
            rows_of_pass = max(1, WARP // (2 * vectors))
            for first in cutlass.range_constexpr(0, 2 * vectors, WARP):
                if const_expr(2 * vectors > WARP):
                    vector, of_k = (first + lane) % vectors, first + lane < vectors
                of_sample = (Int64(sample) * pool * kv_heads + kv_head) * self.head_dim * 2
                source = k_beam.iterator.toint() if of_k else v_beam.iterator.toint()
                source += of_sample + vector * 16
                in_head = vector * VECTOR < self.head_dim
                to = s_k.iterator.toint() if of_k else s_v.iterator.toint()
                to += stage * stage_bytes
                to += vector // 8 * (self.block_n * 128) + warp * (rows_of_warp * 128)
                takes_part = None
                if const_expr(first + WARP > 2 * vectors * rows_of_pass):
                    # Lanes that are left over would copy what others do.
                    takes_part = first + lane < 2 * vectors * rows_of_pass
                for half in cutlass.range_constexpr(self.halves):
                    for row in cutlass.range_constexpr(0, rows_of_warp, rows_of_pass):
                        mine = row
                        if const_expr(rows_of_pass > 1):
                            mine = row + lane // (2 * vectors)
                        ancestor = cute.arch.shuffle_sync(ancestors[half], offset=mine)
                        # Where there is no row, or no column of it, the copy writes zeros.
                        size = Int32(16 if ancestor >= 0 and in_head else 0)
                        from_row = source + Int64(ancestor if size != 0 else 0) * row_bytes
                        swizzle = ((vector % 8) ^ (mine % 8)) * 16
                        cute.arch.inline_ptx(
                            "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                            read_only_args=[
                                to + (half * ROWS + mine) * 128 + swizzle,
                                from_row,
                                size,
                            ],
                            predicate=takes_part,
                        )
            cute.arch.cp_async_mbarrier_arrive_noinc(full_beam + stage)
            cute.arch.mbarrier_arrive(full_beam + stage)
            stage, phase = self._next(stage, phase)
            self._look_up(
                ancestors, topk, (at + 1) * self.halves, tiles, first_row, warp, lane, sample,
                split, splits, steps, kv_head, heads, group, share, units, pool,
            )  # fmt: skip

    @cute.jit
    def _look_up(
        self, ancestors, topk, first_tile, tiles, first_row, warp, lane, sample, split, splits,
        steps, kv_head, heads, group, share, units, pool,
    ):  # fmt: skip
        """The row that a lane copies in each tile of a stage."""
        for half in cutlass.range_constexpr(self.halves):
            ancestors[half] = Int32(-1)
            if first_tile + half < tiles:
                ancestors[half] = self._ancestor(
                    topk, first_tile + half, warp * (ROWS // 4) + lane % (ROWS // 4), first_row,
                    sample, split, splits, steps, kv_head, heads, group, share, units, pool,
                )  # fmt: skip

    @cute.jit
    def _ancestor(
        self, topk, tile, row, first_row, sample, split, splits, steps, kv_head, heads, group,
        share, units, pool,
    ):  # fmt: skip
        """Which row of the beam cache belongs into a tile's row, -1 where there is none."""
        index_heads, max_steps, width = topk.shape[1], topk.shape[2], topk.shape[3]
        step_of_tile, unit = divmod(row, units)
        step = tile // self.warpgroups * share.divisor + step_of_tile
        unit += (first_row + tile % self.warpgroups * ROWS) // share
        beam, of_group = divmod(unit * share.divisor, group)
        result = Int32(-1)
        if beam < width and step < steps:
            head = kv_head * group.divisor + of_group
            at = (Int64(sample) * index_heads + head * index_heads // heads) * max_steps
            at += split + step * splits
            result = (topk.iterator + (at * width + beam)).load()
            if result >= pool:
                result = Int32(-1)
        return result
