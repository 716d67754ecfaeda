"""The kernel for Hopper (sm_90a): warp-specialised, with TMA and wgmma.

A thread block is (query tile, KV head, slot), as in `kernel_triton.py`; its warpgroups are

    0      the producer: fills a ring of K and V tiles in shared memory
    1, 2   consumers of 64 queries each: QK, softmax and PV

The ring first carries the context, loaded by TMA, then the beam part: tiles of 64 rows of the beam
cache, gathered by asynchronous copies, of which each query sees its own ancestors only. So the
same MMAs serve both parts, and the gather hides behind the context loop. `kernel_hopper.md` tells
more, and counts the cycles; `hopper/` has the roles.
"""

# The device code is CuTe-DSL, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
import jax
import jax.numpy as jnp
import numpy as np
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from jax_beam_attn._core.cute_call import cute_call
from jax_beam_attn._core.merge_triton import merge_slots
from jax_beam_attn.beam_decode.hopper.consumer import Consumer
from jax_beam_attn.beam_decode.hopper.device import LOG2E, ROWS, WARP, WARPGROUP, float_of_bits
from jax_beam_attn.beam_decode.hopper.producer import Producer
from jax_beam_attn.beam_decode.hopper.result import Result
from jax_beam_attn.beam_decode.plan import resolve_hopper

_OPTIONAL = ("seqused", "cu_seqlens", "block_tables", "scale", "sink")


def run(operands, call):
    """One launch, and a merge where the context is split."""
    plan = resolve_hopper(operands, call)
    static = call.static
    q = operands["q"]
    batch, width, heads, head_dim = q.shape
    kv_heads = operands["k_beam"].shape[2]
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
        warpgroups=plan.block_m // ROWS,
        block_n=plan.block_n,
        stages=plan.num_stages,
        context=static.capacity > 0 and 0 not in operands["k_context"].shape,
        beam=0 not in (*operands["topk_indices"].shape, *operands["k_beam"].shape),
        shared=operands["topk_indices"].shape[1] != heads and ROWS % (heads // kv_heads) == 0,
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
class Attend(Producer, Consumer, Result):
    """The launcher and the kernel for one set of compile-time constants, see `Tiles`."""

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
        # The queries of a unit share their ancestors; 64 queries are so many units.
        share = group if self.shared else Int32(1)
        units = ROWS // share
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
        q = cute.tile_to_shape(k_major, (ROWS, self.block_d, self.warpgroups), (0, 1, 2))
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
                    cute.arch.mbarrier_init(full_beam + stage, 2 * WARPGROUP)
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
                sample, split, splits, chunk = self._deal_slot(
                    slot, out.shape[0], block, lane, warp, batch, capacity, chunk, pool_rows,
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
                low = split * chunk
                high = cutlass.min(length, low + chunk)
            num_tiles = Int32(0)
            if const_expr(self.context):
                num_tiles = (cutlass.max(high - low, 0) + self.block_n - 1) // self.block_n

            # Scores q.k are compared as they are and scaled inside the exponent, by `to_log2` > 0:
            # a traced scale's sign goes to the query, and 0 becomes next to nothing.
            softmax_scale = float_of_bits(scale_bits)
            sign = Float32(1.0)
            if const_expr(scale is not None):
                softmax_scale = scale[sample if scale.shape[0] > 1 else 0]
                if softmax_scale < 0.0:
                    sign = Float32(-1.0)
                softmax_scale = cutlass.max(softmax_scale, -softmax_scale)
                softmax_scale = cutlass.max(softmax_scale, 1e-30)
            to_log2 = softmax_scale * LOG2E
            to_cap = softmax_scale
            if const_expr(self.soft_cap):
                cap = float_of_bits(cap_bits)
                to_log2 = cap * LOG2E
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
                    part_peak, part_total, out, lse, sink, thread - WARPGROUP, tile, slot, sample,
                    rank, kv_head, group, share, units, low, high, num_tiles, steps, page_size,
                    pool_rows, block_tables, sign, to_log2, to_cap,
                )  # fmt: skip

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
        self, slot, slots, block, lane, warp, batch, capacity, chunk, pool_rows, seqused,
        cu_seqlens, first_slot,
    ):  # fmt: skip
        """The sample, split, number of splits and chunk of a slot, dealt by the samples' lengths.

        Each sample has one slot per chunk of its length, and at least one, for its beam part. The
        first block also writes each sample's first slot for the merge. Bounds that are out of
        order can name more tokens than there are, and so need more slots than there are: then
        each sample has one.
        """
        sample, split, splits = Int32(0), Int32(0), Int32(1)
        dealt = Int32(0)
        for start in cutlass.range(0, batch, WARP, unroll=1):
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
            dealt = cute.arch.shuffle_sync(end, offset=WARP - 1)
        if block == 0 and warp == 0 and lane == 0:
            first_slot[0] = 0
        if dealt > slots:
            sample, split, splits, chunk = slot, Int32(0), Int32(1), capacity
            if block == 0 and warp == 0:
                cute.arch.sync_warp()  # other lanes have stored the same entries above
                for index in cutlass.range(lane, batch + 1, WARP, unroll=1):
                    first_slot[index] = index
        return sample, split, splits, chunk
