"""The kernel for Hopper (sm_90a): warp-specialised, with TMA and wgmma.

A thread block is (query tile, KV head, slot), as in `kernel_triton.py`; its warpgroups are

    0      the producer: fills a ring of K and V tiles in shared memory
    1, 2   consumers of 64 queries each: QK, softmax and PV

The ring first carries the context, loaded by TMA, then the beam part: a tile of 64 rows, row i
being the ancestor of query i at one step, gathered by asynchronous copies. Of its 64 x 64 scores
only the diagonal counts, so the same MMAs serve both parts, and the gather hides behind the
context loop. `kernel_hopper.md` counts the cycles.
"""

# The device code is CuTe-DSL, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
import numpy as np
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers

from jax_beam_attn._core.cute_call import cute_call
from jax_beam_attn._core.merge_triton import merge_slots
from jax_beam_attn.beam_decode.plan import resolve_hopper

_WARP = 32
_WARPGROUP = 128
_ROWS = 64  # of a consumer warpgroup
_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_VECTOR = 8  # elements of 16 bits in the widest load
_COLUMNS = 64  # of a swizzled row of shared memory: 128 bytes

_OPTIONAL = ("seqused", "cu_seqlens", "block_tables", "scale", "sink")


def run(operands, call):
    """One launch, and a merge where the context is split."""
    plan = resolve_hopper(operands, call)
    static = call.static
    q = operands["q"]
    batch, width, heads, head_dim = q.shape
    slots = plan.slots(batch)
    split = plan.num_splits > 1
    optional = {name: operands[name] for name in _OPTIONAL if name in operands}
    merged = plan.cluster == 1 and split
    if merged:
        optional.pop("sink", None)  # counts once, in the merge
    flat = {"scale": (-1,), "cu_seqlens": (-1,), "sink": (-1, heads)}
    optional = {n: x.reshape(flat[n]) if n in flat else x for n, x in optional.items()}
    kernel = Attend(
        head_dim=head_dim,
        warpgroups=plan.block_m // _ROWS,
        block_n=plan.block_n,
        stages=plan.num_stages,
        context=static.capacity > 0 and 0 not in operands["k_context"].shape,
        beam=0 not in (*operands["topk_indices"].shape, *operands["k_beam"].shape),
        shared=operands["topk_indices"].shape[1] != heads,
        split=split,
        ragged=plan.ragged,
        cluster=plan.cluster,
        soft_cap=static.soft_cap is not None,
        optional=tuple(optional),
    )
    part = jax.ShapeDtypeStruct(
        (slots if merged else batch, width, heads, head_dim), jnp.float32 if merged else q.dtype
    )
    out, lse, first_slot = cute_call(
        kernel,
        [
            q,
            operands["k_context"],
            operands["v_context"],
            operands["k_beam"],
            operands["v_beam"],
            operands["topk_indices"],
            operands["decode_nums"].reshape(-1),
            *optional.values(),
        ],
        [
            part,
            jax.ShapeDtypeStruct(part.shape[:3], jnp.float32),
            jax.ShapeDtypeStruct((batch + 1,), jnp.int32),
        ],
        numbers=(
            static.capacity,
            plan.chunk,
            plan.num_splits,
            _bits(static.scale),
            _bits(static.soft_cap),
        ),
        target=call.target,
    )
    if not merged:
        return out, lse
    return merge_slots(
        out,
        lse,
        batch=batch,
        rows=(width, heads),
        dtype=q.dtype,
        target=call.target,
        first_slot=first_slot if plan.ragged else None,
        sink=operands.get("sink"),
    )


def _bits(number: float | None) -> int:
    """The bits of a positive float32, or of 1."""
    return int(np.float32(1.0 if number is None else number).view(np.int32))


@dataclasses.dataclass(frozen=True)
class Attend:
    """The launcher and the kernel for one set of compile-time constants.

    Attributes:
        head_dim: D.
        warpgroups: Consumers, of 64 queries each.
        block_n: Context tokens in a tile.
        stages: Tiles of K, and of V, in flight.
        context: Whether there is a context.
        beam: Whether there are beam rows.
        shared: Whether the queries of a KV head that belong to one beam share its ancestors.
        split: Whether slots are chunks of contexts; otherwise a slot is a sample.
        ragged: Whether slots are dealt to samples by their lengths.
        cluster: Thread blocks of a cluster, which merge the splits of a sample among themselves;
            1 where splits are merged by another kernel, or there are none.
        soft_cap: Whether logits are capped.
        optional: Names of the optional operands that are there, in their order.
    """

    head_dim: int
    warpgroups: int
    block_n: int
    stages: int
    context: bool
    beam: bool
    shared: bool
    split: bool
    ragged: bool
    cluster: int
    soft_cap: bool
    optional: tuple[str, ...]

    @property
    def block_m(self) -> int:
        """Queries of a thread block."""
        return _ROWS * self.warpgroups

    @property
    def block_d(self) -> int:
        """D with the columns that tiles in shared memory are made of filled up."""
        return -(-self.head_dim // _COLUMNS) * _COLUMNS

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return _WARPGROUP * (1 + self.warpgroups)

    @property
    def halves(self) -> int:
        """Tiles of 64 gathered rows that a stage holds."""
        return self.block_n // _ROWS

    @cute.jit
    def __call__(self, stream, *tensors):
        """Launches the kernel, see `run` for the tensors."""
        q, k, v, k_beam, v_beam, topk, decode_nums = tensors[:7]
        optional = dict(zip(self.optional, tensors[7:-4], strict=True))
        out, lse, first_slot, numbers = tensors[-4:]
        kv_heads = k_beam.shape[2]
        group = q.shape[2] // kv_heads
        m_tiles = cute.ceil_div(q.shape[1] * group, self.block_m)
        pool_rows = k.shape[0]
        page_size = Int32(1)
        if const_expr(cute.rank(k) == 4):
            pool_rows = k.shape[0] * k.shape[1]
            page_size = k.shape[1]

        # K as [rows, D, heads], V as [D, rows, heads]: what B operands of QK and PV look like.
        row_stride = cute.assume(Int64(kv_heads) * self.head_dim, divby=self.head_dim)
        k_rows = cute.make_tensor(
            k.iterator,
            cute.make_layout(
                (pool_rows, self.head_dim, kv_heads), stride=(row_stride, 1, self.head_dim)
            ),
        )
        v_rows = cute.make_tensor(
            v.iterator,
            cute.make_layout(
                (self.head_dim, pool_rows, kv_heads), stride=(1, row_stride, self.head_dim)
            ),
        )
        dtype = q.element_type
        layouts = self._shared_layouts(dtype)
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_k, k_tiles = cpasync.make_tiled_tma_atom(
            load, k_rows, cute.slice_(layouts[1], (None, None, 0)), (self.block_n, self.block_d)
        )
        load_v, v_tiles = cpasync.make_tiled_tma_atom(
            load, v_rows, cute.slice_(layouts[2], (None, None, 0)), (self.block_d, self.block_n)
        )
        # The queries of a unit share their ancestors; 64 queries are of so many units at most.
        share = group if self.shared else Int32(1)
        units = cutlass.select_(_ROWS % share == 0, _ROWS // share, (_ROWS - 1) // share + 2)
        slots = out.shape[0] * self.cluster
        self._kernel(
            load_k, k_tiles, load_v, v_tiles, q, k_beam, v_beam, topk, decode_nums,
            optional.get("seqused"), optional.get("cu_seqlens"), optional.get("block_tables"),
            optional.get("scale"), optional.get("sink"), out, lse, first_slot,
            pool_rows, page_size, cute.FastDivmodDivisorV2(m_tiles),
            cute.FastDivmodDivisorV2(kv_heads), cute.FastDivmodDivisorV2(group),
            cute.FastDivmodDivisorV2(share), cute.FastDivmodDivisorV2(units),
            numbers.shape[1], numbers.shape[2], numbers.shape[3], numbers.shape[4],
            numbers.shape[5],
        ).launch(
            grid=[m_tiles * kv_heads * slots, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def _shared_layouts(self, dtype):
        """Swizzled layouts of a warpgroup's queries, and of the K and V tiles of all stages."""
        kind = warpgroup.SmemLayoutAtomKind
        k_major = warpgroup.make_smem_layout_atom(kind.K_SW128, dtype)
        mn_major = warpgroup.make_smem_layout_atom(kind.MN_SW128, dtype)
        q = cute.tile_to_shape(k_major, (_ROWS, self.block_d, self.warpgroups), (0, 1, 2))
        k = cute.tile_to_shape(k_major, (self.block_n, self.block_d, self.stages), (0, 1, 2))
        v = cute.tile_to_shape(mn_major, (self.block_d, self.block_n, self.stages), (1, 0, 2))
        return q, k, v

    @cute.kernel
    def _kernel(
        self,
        load_k: cute.CopyAtom,
        k_tiles: cute.Tensor,
        load_v: cute.CopyAtom,
        v_tiles: cute.Tensor,
        q: cute.Tensor,
        k_beam: cute.Tensor,
        v_beam: cute.Tensor,
        topk: cute.Tensor,
        decode_nums: cute.Tensor,
        seqused: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        block_tables: cute.Tensor | None,
        scale: cute.Tensor | None,
        sink: cute.Tensor | None,
        out: cute.Tensor,
        lse: cute.Tensor,
        first_slot: cute.Tensor,
        pool_rows: Int32,
        page_size: Int32,
        m_tiles: cute.FastDivmodDivisorV2,
        kv_heads: cute.FastDivmodDivisorV2,
        group: cute.FastDivmodDivisorV2,
        share: cute.FastDivmodDivisorV2,
        units: cute.FastDivmodDivisorV2,
        capacity: Int32,
        chunk: Int32,
        splits_per_sample: Int32,
        scale_bits: Int32,
        cap_bits: Int32,
    ):
        dtype = q.element_type
        batch, heads = q.shape[0], q.shape[2]
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        rank = block % self.cluster
        others, tile = divmod(block // self.cluster, m_tiles)
        slot, kv_head = divmod(others, kv_heads)

        # Shared memory.
        q_layout, k_layout, v_layout = self._shared_layouts(dtype)
        memory = cutlass.memory.SmemAllocator()
        s_q = memory.allocate_tensor(dtype, q_layout.outer, 1024, swizzle=q_layout.inner)
        s_k = memory.allocate_tensor(dtype, k_layout.outer, 1024, swizzle=k_layout.inner)
        s_v = memory.allocate_tensor(dtype, v_layout.outer, 1024, swizzle=v_layout.inner)
        present = memory.allocate_tensor(
            Int32, cute.make_layout((self.block_n if self.beam else 1, self.stages))
        )
        full_k = memory.allocate_array(Int64, self.stages)
        full_v = memory.allocate_array(Int64, self.stages)
        empty_k = memory.allocate_array(Int64, self.stages)
        empty_v = memory.allocate_array(Int64, self.stages)
        full_beam = memory.allocate_array(Int64, self.stages)
        of_cluster = self.block_m if self.cluster > 1 else 1
        part_peak = memory.allocate_tensor(Float32, cute.make_layout(of_cluster))
        part_total = memory.allocate_tensor(Float32, cute.make_layout(of_cluster))

        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full_k + stage, 1)
                    cute.arch.mbarrier_init(full_v + stage, 1)
                    cute.arch.mbarrier_init(empty_k + stage, 4 * self.warpgroups)
                    cute.arch.mbarrier_init(empty_v + stage, 4 * self.warpgroups)
                    cute.arch.mbarrier_init(full_beam + stage, 2 * _WARPGROUP)
            cute.arch.mbarrier_init_fence()
            cpasync.prefetch_descriptor(load_k)
            cpasync.prefetch_descriptor(load_v)
        cute.arch.sync_threads()

        # Which part of which sample.
        sample, split, splits = slot, Int32(0), Int32(1)
        if const_expr(self.cluster > 1):
            split, splits = rank, Int32(self.cluster)
        elif const_expr(self.split):
            if const_expr(self.ragged):
                sample, split, splits = self._deal_slot(
                    slot, block, lane, warp, batch, capacity, chunk, pool_rows,
                    seqused, cu_seqlens, first_slot,
                )  # fmt: skip
            else:
                sample = slot // splits_per_sample
                split = slot % splits_per_sample
                splits = splits_per_sample
        if sample < batch:
            length, start = self._bounds(sample, batch, capacity, pool_rows, seqused, cu_seqlens)
            low = Int32(0)
            high = length
            if const_expr(self.split):
                if const_expr(self.cluster > 1):
                    tiles = (length + self.block_n - 1) // self.block_n
                    chunk = (tiles + self.cluster - 1) // self.cluster * self.block_n
                low = split * chunk
                high = cutlass.min(length, low + chunk)
            num_tiles = Int32(0)
            if const_expr(self.context):
                num_tiles = (cutlass.max(high - low, 0) + self.block_n - 1) // self.block_n

            # Scores q.k are compared as they are and scaled inside the exponent, by `to_log2` > 0:
            # a traced scale's sign goes to the query, and 0 becomes next to nothing.
            softmax_scale = _float(scale_bits)
            sign = Float32(1.0)
            if const_expr(scale is not None):
                softmax_scale = scale[sample if scale.shape[0] > 1 else 0]
                if softmax_scale < 0.0:
                    sign = Float32(-1.0)
                softmax_scale = cutlass.max(softmax_scale, -softmax_scale)
                softmax_scale = cutlass.max(softmax_scale, 1e-30)
            to_log2 = softmax_scale * _LOG2E
            to_cap = softmax_scale
            if const_expr(self.soft_cap):
                cap = _float(cap_bits)
                to_log2 = cap * _LOG2E
                to_cap = softmax_scale / cap

            # The sample's steps are dealt to its splits in turn.
            steps = Int32(0)
            if const_expr(self.beam):
                steps = cutlass.min(
                    decode_nums[sample if decode_nums.shape[0] > 1 else 0], topk.shape[2]
                )
                steps = cutlass.max(steps - split + splits - 1, 0) // splits

            if warp < 4:
                if const_expr(self.warpgroups == 2):
                    cute.arch.setmaxregister_decrease(56)
                if const_expr(self.context):
                    if warp == 0:
                        self._load_context(
                            load_k, k_tiles, load_v, v_tiles, s_k, s_v, full_k, full_v, empty_k,
                            empty_v, start, low, num_tiles, sample, kv_head, page_size, pool_rows,
                            block_tables,
                        )  # fmt: skip
                if const_expr(self.beam):
                    self._gather_beams(
                        k_beam, v_beam, topk, s_k, s_v, present, full_beam, empty_k, empty_v,
                        thread, tile * self.block_m, num_tiles, sample, split, splits, steps,
                        kv_head, heads, group, share, units,
                    )  # fmt: skip
                if const_expr(self.cluster > 1):
                    for _ in cutlass.range_constexpr(2):  # as the consumers do
                        cute.arch.cluster_arrive()
                        cute.arch.cluster_wait()
            else:
                if const_expr(self.warpgroups == 2):
                    cute.arch.setmaxregister_increase(224)
                self._consume(
                    q, s_q, s_k, s_v, full_k, full_v, empty_k, empty_v, full_beam, present,
                    part_peak, part_total, out, lse, sink, thread - _WARPGROUP, tile, slot, sample,
                    rank, kv_head, group, share, units, low, high, num_tiles, steps, page_size,
                    pool_rows, block_tables, sign, to_log2, to_cap,
                )  # fmt: skip

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
            _wait(empty_k + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full_k + stage, bytes_of_tile)
            cute.copy(load_k, from_k[None, at], to_k[None, stage], tma_bar_ptr=full_k + stage)
            _wait(empty_v + stage, phase)
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
    def _next(self, stage, phase):
        """The ring's next stage, and its barriers' phase."""
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def _gather_beams(
        self, k_beam, v_beam, topk, s_k, s_v, present, full_beam, empty_k, empty_v, thread,
        first_row, num_tiles, sample, split, splits, steps, kv_head, heads, group, share, units,
    ):  # fmt: skip
        """Gathers the tiles of the beam part; all warps of the producer take part.

        Tile e is for the queries of warpgroup e % warpgroups. It holds the rows of their units at
        one step, and after them those at the next steps as far as they fit into 64. Each warp
        copies 16 rows.
        """
        warp = cute.arch.make_warp_uniform(thread // _WARP)
        lane = thread % _WARP
        rows_of_warp = _ROWS // 4
        pool, kv_heads = k_beam.shape[1], k_beam.shape[2]
        row_bytes = kv_heads * self.head_dim * 2
        stage_bytes = self.block_n * self.block_d * 2
        # The lanes of a row: first those that copy 16 bytes of K each, then those of V.
        vectors = self.block_d // _VECTOR
        vector, of_k = lane % vectors, lane % (2 * vectors) < vectors
        tiles = self._beam_tiles(steps, units)
        stages = (tiles + self.halves - 1) // self.halves
        stage = num_tiles % self.stages
        phase = 1 ^ num_tiles // self.stages % 2
        ancestors = cute.make_rmem_tensor(self.halves, Int32)
        if warp > 0:
            # Long before the ring has room for them, the rows are called into the L2 cache.
            for i in cutlass.range(thread - _WARP, tiles * _ROWS, _WARPGROUP - _WARP, unroll=1):
                ancestor = self._ancestor(
                    topk, i // _ROWS, i % _ROWS, first_row, sample, split, splits, steps, kv_head,
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
        cute.arch.barrier(barrier_id=6, number_of_threads=_WARPGROUP)
        for at in cutlass.range(stages, unroll=1):
            _wait(empty_k + stage, phase)
            _wait(empty_v + stage, phase)
            if lane < rows_of_warp:
                for half in cutlass.range_constexpr(self.halves):
                    present[half * _ROWS + warp * rows_of_warp + lane, stage] = ancestors[half]
            # Passes of 32 lanes over the columns, and over the rows.
            for first in cutlass.range_constexpr(0, 2 * vectors, _WARP):
                if const_expr(2 * vectors > _WARP):
                    vector, of_k = (first + lane) % vectors, first + lane < vectors
                of_sample = (Int64(sample) * pool * kv_heads + kv_head) * self.head_dim * 2
                source = k_beam.iterator.toint() if of_k else v_beam.iterator.toint()
                source += of_sample + vector * 16
                in_head = vector * _VECTOR < self.head_dim
                to = s_k.iterator.toint() if of_k else s_v.iterator.toint()
                to += stage * stage_bytes
                to += vector // 8 * (self.block_n * 128) + warp * (rows_of_warp * 128)
                rows_of_pass = max(1, _WARP // (2 * vectors))
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
                                to + (half * _ROWS + mine) * 128 + swizzle,
                                from_row,
                                size,
                            ],
                        )
            cute.arch.cp_async_mbarrier_arrive_noinc(full_beam + stage)
            cute.arch.mbarrier_arrive(full_beam + stage)
            stage, phase = self._next(stage, phase)
            self._look_up(
                ancestors, topk, (at + 1) * self.halves, tiles, first_row, warp, lane, sample,
                split, splits, steps, kv_head, heads, group, share, units, pool,
            )  # fmt: skip

    @cute.jit
    def _beam_tiles(self, steps, units):
        """Tiles of gathered rows, of all warpgroups."""
        steps_of_tile = _ROWS // units.divisor
        return (steps + steps_of_tile - 1) // steps_of_tile * self.warpgroups

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
                    topk, first_tile + half, warp * (_ROWS // 4) + lane % (_ROWS // 4), first_row,
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
        steps_of_tile = _ROWS // units.divisor
        step = tile // self.warpgroups * steps_of_tile + step_of_tile
        unit += (first_row + tile % self.warpgroups * _ROWS) // share
        beam, of_group = divmod(unit * share.divisor, group)
        result = Int32(-1)
        if beam < width and step < steps and step_of_tile < steps_of_tile:
            head = kv_head * group.divisor + of_group
            at = (Int64(sample) * index_heads + head * index_heads // heads) * max_steps
            at += split + step * splits
            result = (topk.iterator + (at * width + beam)).load()
            if result >= pool:
                result = Int32(-1)
        return result

    @cute.jit
    def _consume(
        self, q, s_q, s_k, s_v, full_k, full_v, empty_k, empty_v, full_beam, present, part_peak,
        part_total, out, lse, sink, thread, tile, slot, sample, rank, kv_head, group, share, units,
        low, high, num_tiles, steps, page_size, pool_rows, block_tables, sign, to_log2, to_cap,
    ):  # fmt: skip
        """A warpgroup's 64 queries: the context loop, the beam part, the stores."""
        dtype = q.element_type
        group_index = cute.arch.make_warp_uniform(thread // _WARPGROUP)
        thread = thread % _WARPGROUP
        lane = thread % _WARP
        first_row = tile * self.block_m + group_index * _ROWS
        qk = self._qk(dtype, self.block_n)
        pv = self._pv(dtype)
        qk_thread, pv_thread = qk.get_slice(thread), pv.get_slice(thread)
        q_fragment = qk_thread.make_fragment_A(qk_thread.partition_A(s_q))[
            None, None, None, group_index
        ]
        k_fragment = qk_thread.make_fragment_B(qk_thread.partition_B(s_k))
        v_fragment = pv_thread.make_fragment_B(pv_thread.partition_B(s_v))
        scores = qk_thread.make_fragment_C(qk_thread.partition_shape_C((_ROWS, self.block_n)))
        acc = pv_thread.make_fragment_C(pv_thread.partition_shape_C((_ROWS, self.block_d)))
        weights = pv_thread.make_fragment_A(pv_thread.partition_shape_A((_ROWS, self.block_n)))
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
            _wait(full_k + stage, phase)
            self._start(qk, scores, q_fragment, k_fragment[None, None, None, stage], False)
            warpgroup.wait_group(0)
            self._release(empty_k + stage, lane)
            valid = cutlass.min(high - low - at * self.block_n, self.block_n)
            if const_expr(block_tables is not None):
                valid = self._valid_in_page(
                    valid, low + at * self.block_n, sample, page_size, pool_rows, block_tables
                )
            self._cap_all(scores, to_cap)
            self._mask(scores, valid, lane)
            self._softmax(scores, peak, total, shrink, to_log2)
            _convert(scores, weights)
            _wait(full_v + stage, phase)
            if valid < self.block_n:
                # A masked row of V may be NaN, and 0 * NaN is NaN.
                self._zero_rows(s_v, stage, valid, thread + group_index * _WARPGROUP)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=3, number_of_threads=self.warpgroups * _WARPGROUP)
            if const_expr(self.warpgroups == 2):
                if group_index == 0:
                    self._hand_over(1)
            for i in cutlass.range(num_tiles - 1, unroll=1):
                at = num_tiles - 2 - i
                v_stage, v_phase = stage, phase
                stage, phase = self._next(stage, phase)
                _wait(full_k + stage, phase)
                if const_expr(self.warpgroups == 2):
                    self._take_turn(group_index)
                self._start(qk, scores, q_fragment, k_fragment[None, None, None, stage], False)
                _wait(full_v + v_stage, v_phase)
                self._start(pv, acc, weights, v_fragment[None, None, None, v_stage], True)
                if const_expr(self.warpgroups == 2):
                    self._hand_over(1 - group_index)
                warpgroup.wait_group(1)
                self._release(empty_k + stage, lane)
                self._cap_all(scores, to_cap)
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
                _convert(scores, weights)
            _wait(full_v + stage, phase)
            self._start(pv, acc, weights, v_fragment[None, None, None, stage], True)
            if const_expr(self.warpgroups == 2):
                if group_index == 1:
                    self._take_turn(group_index)  # one turn more was handed over than taken
            warpgroup.wait_group(0)
            self._release(empty_v + stage, lane)
            stage, phase = self._next(stage, phase)
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
            cute.arch.barrier(barrier_id=3, number_of_threads=self.warpgroups * _WARPGROUP)
            warp = group_index * 4 + thread // _WARP
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
                acc, peak, total, out, lse, sink, lane, thread // _WARP, first_row, slot, sample,
                kv_head, group, to_log2,
            )  # fmt: skip

    def _qk(self, dtype, keys):
        major = cute.nvgpu.OperandMajorMode
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, major.K, major.K, Float32, (1, 1, 1), (_ROWS, keys)
        )

    def _pv(self, dtype):
        major = cute.nvgpu.OperandMajorMode
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, major.K, major.MN, Float32, (1, 1, 1), (_ROWS, self.block_d),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip

    @cute.jit
    def _attend_beams(
        self, q_fragment, s_k, s_v, full_beam, empty_k, empty_v, present, acc, peak, total, shrink,
        dtype, thread, group_index, first_row, num_tiles, steps, share, units, to_log2, to_cap,
    ):  # fmt: skip
        """Attends to the tiles of gathered rows; of a tile, a query sees its own unit's."""
        lane, warp = thread % _WARP, thread // _WARP
        qk, pv = self._qk(dtype, _ROWS), self._pv(dtype)
        qk_thread, pv_thread = qk.get_slice(thread), pv.get_slice(thread)
        scores = qk_thread.make_fragment_C(qk_thread.partition_shape_C((_ROWS, _ROWS)))
        weights = pv_thread.make_fragment_A(pv_thread.partition_shape_A((_ROWS, _ROWS)))
        own = [
            (first_row + warp * 16 + lane // 4 + 8 * r) // share - first_row // share
            for r in (0, 1)
        ]
        stage, phase = num_tiles % self.stages, Int32(0)
        tiles = self._beam_tiles(steps, units)
        for at in cutlass.range((tiles + self.halves - 1) // self.halves, unroll=1):
            # Each stage's barrier counts from its first gathered tile on.
            _wait(full_beam + stage, at // self.stages % 2)
            # The copies wrote through the generic proxy, wgmma reads through the other.
            cute.arch.fence_view_async_shared()
            for half in cutlass.range_constexpr(self.halves):
                tile = at * self.halves + half
                if tile < tiles and tile % self.warpgroups == group_index:
                    k_half = cute.local_tile(s_k, (_ROWS, self.block_d, self.stages), (half, 0, 0))
                    v_half = cute.local_tile(s_v, (self.block_d, _ROWS, self.stages), (0, half, 0))
                    k_fragment = qk_thread.make_fragment_B(qk_thread.partition_B(k_half))
                    v_fragment = pv_thread.make_fragment_B(pv_thread.partition_B(v_half))
                    self._start(qk, scores, q_fragment, k_fragment[None, None, None, stage], False)
                    warpgroup.wait_group(0)
                    self._cap_all(scores, to_cap)
                    for j in cutlass.range_constexpr(_ROWS // 8):
                        for c in cutlass.range_constexpr(2):
                            column = 8 * j + 2 * (lane % 4) + c
                            there = present[half * _ROWS + column, stage] >= 0
                            unit = column % units
                            for r in cutlass.range_constexpr(2):
                                i = 4 * j + 2 * r + c
                                scores[i] = cutlass.select_(
                                    there and unit == own[r], scores[i], -Float32.inf
                                )
                    self._softmax(scores, peak, total, shrink, to_log2)
                    self._scale(acc, shrink)
                    _convert(scores, weights)
                    self._start(pv, acc, weights, v_fragment[None, None, None, stage], True)
                    warpgroup.wait_group(0)
            self._release(empty_k + stage, lane)
            self._release(empty_v + stage, lane)
            stage, phase = self._next(stage, phase)

    @cute.jit
    def _take_turn(self, group_index):
        """Waits until the other warpgroup's MMAs are under way.

        So that one computes its softmax while the other uses the tensor cores.
        """
        cute.arch.barrier(barrier_id=1 + group_index, number_of_threads=2 * _WARPGROUP)

    @cute.jit
    def _hand_over(self, group_index):
        cute.arch.barrier_arrive(barrier_id=1 + group_index, number_of_threads=2 * _WARPGROUP)

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
        vectors = self.block_d // _VECTOR
        first = Int64(sample) * width * heads + kv_head * group.divisor
        for i in cutlass.range_constexpr(_ROWS * vectors // _WARPGROUP):
            index = i * _WARPGROUP + thread
            row, vector = index // vectors, index % vectors
            beam, of_group = divmod(first_row + row, group)
            value = cute.make_rmem_tensor(_VECTOR, q.element_type)
            value.fill(0.0)
            if beam < width and vector * _VECTOR < self.head_dim:
                at = first + beam * heads + of_group
                value.store(
                    (_vector(q, at, self.head_dim, vector * _VECTOR).load().to(Float32) * sign).to(
                        q.element_type
                    )
                )
            to = cute.local_tile(s_q[None, None, group_index], (1, _VECTOR), (row, vector))
            cute.autovec_copy(value, cute.group_modes(to, 0, 2))
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=4 + group_index, number_of_threads=_WARPGROUP)

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
    def _capped(self, score, to_cap):
        """tanh(score * to_cap) where logits are capped, in units of the cap; else the score."""
        result = score
        if const_expr(self.soft_cap):
            result = 2.0 / (1.0 + _exp2(score * (-2.0 * _LOG2E * to_cap))) - 1.0
        return result

    @cute.jit
    def _cap_all(self, scores, to_cap):
        if const_expr(self.soft_cap):
            for i in cutlass.range_constexpr(cute.size(scores)):
                scores[i] = self._capped(scores[i], to_cap)

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
            base.append((Float32(0.0) if new_peak[r] == -Float32.inf else new_peak[r]) * to_log2)
            shrink[r] = _exp2(peak[r] * to_log2 - base[r])
            peak[r] = new_peak[r]
        for i in cutlass.range_constexpr(count):
            r = i // 2 % 2
            scores[i] = _exp2(scores[i] * to_log2 - base[r])
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
        for i in cutlass.range(thread, count, self.warpgroups * _WARPGROUP, unroll=1):
            s_v[i % self.block_d, valid + i // self.block_d, stage] = s_v.element_type(0.0)

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
                    _store_pair(out, at * self.head_dim + 8 * j + 2 * (lane % 4), pair)
                if lane % 4 == 0:
                    (lse.iterator + at).store(log_total)

    @cute.jit
    def _norm(self, peak, total, sink, sample, head, to_log2):
        """What a row is to be multiplied by, and its LSE."""
        log_total = peak * to_log2 * _LN2 + cute.math.log(total)
        norm = 1.0 / total
        if total == 0.0:
            log_total = -Float32.inf
            norm = Float32(0.0)
        if const_expr(sink is not None):
            of_sink = sink[sample if sink.shape[0] > 1 else 0, head]
            if norm != 0.0:
                norm /= 1.0 + _exp2((of_sink - log_total) * _LOG2E)
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
        parts = [_of_block(s_k.iterator.toint(), c) for c in range(self.cluster)]
        peaks = [_of_block(part_peak.iterator.toint(), c) for c in range(self.cluster)]
        totals = [_of_block(part_total.iterator.toint(), c) for c in range(self.cluster)]
        for row in cutlass.range(
            rank + warp * self.cluster,
            self.block_m,
            4 * self.warpgroups * self.cluster,
            unroll=1,
        ):
            beam, of_group = divmod(first_row + row, group)
            head = kv_head * group.divisor + of_group
            if beam < width:
                peak_of = [_load_remote(peaks[c] + row * 4, 1)[0] for c in range(self.cluster)]
                total_of = [_load_remote(totals[c] + row * 4, 1)[0] for c in range(self.cluster)]
                peak = peak_of[0]
                for c in cutlass.range_constexpr(1, self.cluster):
                    peak = cute.arch.fmax(peak, peak_of[c])
                base = (Float32(0.0) if peak == -Float32.inf else peak) * to_log2
                total = Float32(0.0)
                weight = []
                for c in cutlass.range_constexpr(self.cluster):
                    weight.append(_exp2(peak_of[c] * to_log2 - base))
                    total += weight[c] * total_of[c]
                norm, log_total = self._norm(peak, total, sink, sample, head, to_log2)
                at = (Int64(sample) * width + beam) * heads + head
                for j in cutlass.range_constexpr(self.block_d // 64):
                    column = 64 * j + 2 * lane
                    pair = cute.make_rmem_tensor(2, Float32)
                    pair.fill(0.0)
                    for c in cutlass.range_constexpr(self.cluster):
                        of_part = _load_remote(parts[c] + self._part_bytes(row, column), 2)
                        pair[0] += of_part[0] * (weight[c] * norm)
                        pair[1] += of_part[1] * (weight[c] * norm)
                    if column < self.head_dim:
                        _store_pair(out, at * self.head_dim + column, pair)
                if lane == 0:
                    (lse.iterator + at).store(log_total)

    @cute.jit
    def _bounds(self, sample, batch, capacity, pool_rows, seqused, cu_seqlens):
        """A sample's length and its first row in the pool."""
        length = capacity
        start = sample * capacity
        if const_expr(cu_seqlens is not None):
            # Bounds of `per_group` samples each, and one more bound than samples in a group.
            groups = cu_seqlens.shape[0] - batch
            at = sample + sample // (batch // groups)
            start = cutlass.min(cutlass.max(cu_seqlens[at], 0), pool_rows)
            end = cutlass.min(cutlass.max(cu_seqlens[at + 1], 0), pool_rows)
            length = cutlass.min(length, end - start)
        if const_expr(seqused is not None):
            length = cutlass.min(length, seqused[sample])
        return cutlass.max(length, 0), start

    @cute.jit
    def _deal_slot(
        self, slot, block, lane, warp, batch, capacity, chunk, pool_rows, seqused, cu_seqlens,
        first_slot,
    ):  # fmt: skip
        """The sample, split and number of splits of a slot, dealt by the samples' lengths.

        Each sample has one slot per chunk of its length, and at least one, for its beam part. The
        first block also writes each sample's first slot for the merge.
        """
        sample, split, splits = Int32(0), Int32(0), Int32(1)
        dealt = Int32(0)
        for start in cutlass.range(0, batch, _WARP, unroll=1):
            index = start + lane
            count = Int32(0)
            if index < batch:
                length, _ = self._bounds(index, batch, capacity, pool_rows, seqused, cu_seqlens)
                count = cutlass.max((length + chunk - 1) // chunk, 1)
            end = count
            for level in cutlass.range_constexpr(5):
                before = cute.arch.shuffle_sync_up(end, offset=1 << level, mask_and_clamp=0)
                if lane >= 1 << level:
                    end += before
            end += dealt
            if block == 0 and warp == 0 and index < batch:
                first_slot[index + 1] = end
            past = cute.arch.vote_ballot_sync(index < batch and end <= slot)
            sample += cute.arch.popc(past)
            here = cute.arch.vote_ballot_sync(index < batch and end > slot and end - count <= slot)
            if here != 0:
                owner = cute.arch.popc(here - 1)
                split = slot - cute.arch.shuffle_sync(end - count, offset=owner)
                splits = cute.arch.shuffle_sync(count, offset=owner)
            dealt = cute.arch.shuffle_sync(end, offset=_WARP - 1)
        if block == 0 and warp == 0 and lane == 0:
            first_slot[0] = 0
        return sample, split, splits


@cute.jit
def _vector(tensor, row, head_dim: cutlass.Constexpr, column):
    """8 columns of a row, `row` counting all leading axes together."""
    offset = cute.assume(Int64(row) * head_dim + column, divby=_VECTOR)
    return cute.make_tensor(tensor.iterator + offset, cute.make_layout(_VECTOR))


@cute.jit
def _convert(scores, weights):
    weights.store(cute.make_tensor(scores.iterator, weights.layout).load().to(weights.element_type))


@cute.jit
def _store_pair(tensor, offset, pair):
    to = cute.make_tensor(tensor.iterator + cute.assume(offset, divby=2), cute.make_layout(2))
    to.store(pair.load().to(tensor.element_type))


def _of_block(address, block):
    """The address of another thread block's shared memory, in the cluster's window."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(block)],
    )


def _load_remote(address, count):
    """1 or 2 float32 at such an address."""
    if count == 1:
        return [
            cute.arch.inline_ptx(
                "ld.shared::cluster.f32 {$w0}, [{$r0}];",
                write_only_types=[Float32],
                read_only_args=[address],
            )
        ]
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[address],
    )


def _wait(barrier, phase):
    """Waits for a barrier's phase.

    `cute.arch.mbarrier_wait` compiles to a sleep of up to 10 ms that an arrival ends late.
    """
    cute.arch.inline_ptx(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1};\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}",
        read_only_args=[barrier, Int32(phase)],
    )


def _exp2(x):
    return cute.math.exp2(x, fastmath=True)


def _float(bits):
    """The float32 with these bits."""
    return Float32(cutlass._mlir.dialects.llvm.bitcast(Float32.mlir_type, bits.ir_value()))
