"""How a call is cut into thread blocks."""

from __future__ import annotations

import dataclasses

from jax_beam_attn._core import checks


@dataclasses.dataclass(frozen=True)
class BeamDecodePlan:
    """Launch choices of `beam_decode_attn`; a field left None is chosen.

    Attributes:
        pipeline: "fused" computes context and beam part in one launch (and merges only if the
            context is split), "3kernel" computes them in two launches and merges.
        num_splits: Pieces into which the longest possible context is cut; shorter ones have
            fewer.
        block_m: Queries in a tile: beams times the query heads that share a KV head.
        block_n: Context tokens in a tile.
        num_warps: Warps in a thread block, of the Triton kernels.
        num_stages: Tiles in flight.
        blocks_per_sm: Thread blocks that an SM's registers have to suffice for, Triton kernels.

    Example:
        >>> BeamDecodePlan(num_splits=4).num_splits
        4
    """

    pipeline: str | None = None
    num_splits: int | None = None
    block_m: int | None = None
    block_n: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    blocks_per_sm: int | None = None

    def __post_init__(self):
        checks.one_of("plan.pipeline", self.pipeline, (None, "fused", "3kernel"))
        checks.plan_fields(self, block_m=16, block_n=16, num_warps=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """How contexts are cut into slots, the same for all kernels.

    Attributes:
        num_splits: Slots of the longest possible context.
        chunk: Context tokens of a slot, a multiple of block_n.
        ragged: Whether slots are dealt by the samples' lengths.
        total: Context tokens of all samples together, at most.
        block_m, block_n, num_stages: As in `BeamDecodePlan`.
    """

    num_splits: int
    chunk: int
    ragged: bool
    total: int
    block_m: int
    block_n: int
    num_stages: int

    def slots(self, batch: int) -> int:
        """Slots of the whole batch: every sample has one for each chunk begun, at least one."""
        if self.num_splits == 1:
            return batch
        if self.ragged:
            return min(batch * self.num_splits, self.total // self.chunk + batch)
        return batch * self.num_splits


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonPlan(SlotPlan):
    """A complete plan of the Triton kernels.

    Attributes:
        use_tma: Whether tiles of K and V come by the tensor memory accelerator.
        pipeline, num_warps, blocks_per_sm: As in `BeamDecodePlan`.
    """

    pipeline: str
    num_warps: int
    blocks_per_sm: int
    use_tma: bool

    def of_beam_part(self) -> TritonPlan:
        """The launch of the beam part alone: small tiles, so that many gathers are in flight."""
        return dataclasses.replace(
            self, num_splits=1, block_m=16, num_warps=4, num_stages=1, blocks_per_sm=1
        )


_RAGGED_SPLITS = 4  # of the longest context: 82 us against 112 us unsplit, beam-9 on an H200
# (most rows, block_m, block_n, num_warps, num_stages, blocks_per_sm), from the sweeps on an H200
# in bench/NOTES.md: the first entry that holds all of a KV head's queries, else the last.
_TILES = (
    (16, 16, 64, 4, 3, 2),
    (32, 32, 64, 4, 3, 2),
    (64, 64, 64, 4, 3, 2),
)
# At D <= 64 two blocks of 128 queries fit an SM, each with K and V tiles half the size.
_TILES_OF_SMALL_HEADS = (*_TILES, (128, 128, 64, 8, 2, 2))


def resolve_triton(operands, call) -> TritonPlan:
    """Fills in what the caller's plan leaves open.

    Args:
        operands: Avals by name, see `op.py`.
        call: The call with its plan and target.
    """
    given = call.plan or BeamDecodePlan()
    q, k = operands["q"], operands["k_context"]
    _, width, heads, head_dim = q.shape
    rows = width * heads // k.shape[-2]
    # What a tile costs in registers and shared memory, in units of 128 elements of 16 bits.
    weight = -(-head_dim // 128) * q.dtype.itemsize // 2

    table = _TILES_OF_SMALL_HEADS if head_dim * q.dtype.itemsize <= 128 else _TILES
    tiles = [t for t in table if t[0] * weight <= 128] or [_TILES[0]]
    limit = given.block_m or rows
    _, block_m, block_n, num_warps, num_stages, blocks_per_sm = next(
        (t for t in tiles if limit <= t[0]), tiles[-1]
    )
    block_m = given.block_m or block_m
    block_n = given.block_n or max(16, block_n // weight)
    if "block_tables" in operands and given.block_n is None:
        # A tile within one page is addressed once and can come by the tensor memory accelerator.
        page_size = k.shape[1]
        block_n = next((n for n in (block_n, 32, 16) if page_size % n == 0), block_n)
    num_warps = given.num_warps or num_warps
    blocks_per_sm = given.blocks_per_sm or blocks_per_sm
    while num_stages > 1 and (
        _shared_bytes(block_m, block_n, num_stages, head_dim, q.dtype.itemsize)
        > call.target.block_shared_bytes
    ):
        num_stages -= 1
    num_stages = given.num_stages or num_stages

    return TritonPlan(
        **_slots(operands, call, block_m, block_n, blocks_per_sm),
        pipeline=given.pipeline or "fused",
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        blocks_per_sm=blocks_per_sm,
        use_tma=call.target.compute_capability >= 90 and q.dtype.itemsize == 2,
    )


def _slots(operands, call, block_m: int, block_n: int, blocks_per_sm: int) -> dict:
    """The cut into slots that fills the GPU: `SlotPlan`'s fields that depend on it."""
    q, k = operands["q"], operands["k_context"]
    batch, width, heads, _ = q.shape
    kv_heads = k.shape[-2]
    mean = max(1, call.static.total // max(batch, 1))
    ragged = "seqused" in operands or "cu_seqlens" in operands
    splits = call.plan.num_splits if call.plan else None
    if splits is None:
        # As many as fill the GPU once, with at least two tiles each; of the mean length, so that
        # the ragged have more.
        blocks = -(-width * heads // kv_heads // block_m) * kv_heads * batch
        fill = blocks_per_sm * call.target.num_sms // max(blocks, 1)
        splits = max(1, min(fill, mean // (2 * block_n)))
        splits = max(1, splits * call.static.capacity // mean)
        if ragged:
            # One long context must not keep an SM busy when the others are done.
            splits = max(splits, min(_RAGGED_SPLITS, call.static.capacity // (8 * block_n)))
    chunk = max(1, -(-call.static.capacity // (splits * block_n))) * block_n
    num_splits = max(1, -(-call.static.capacity // chunk))
    return {
        "num_splits": num_splits,
        "chunk": chunk,
        "ragged": ragged and num_splits > 1,
        "total": call.static.total,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperPlan(SlotPlan):
    """A complete plan of the Hopper kernel.

    Attributes:
        cluster: Thread blocks of a cluster, which merges the splits of a sample; 1 if there are
            none, or if another kernel merges them.
    """

    cluster: int


_MAX_CLUSTER = 8  # more are not portable among GPUs


def resolve_hopper(operands, call) -> HopperPlan:
    """Fills in what the caller's plan leaves open, for the Hopper kernel.

    Args:
        operands: Avals by name, see `op.py`.
        call: The call with its plan and target.
    """
    given = call.plan or BeamDecodePlan()
    q, k = operands["q"], operands["k_context"]
    rows = q.shape[1] * q.shape[2] // k.shape[-2]
    head_dim = q.shape[3]
    block_m = given.block_m or (128 if rows > 64 else 64)
    block_n = given.block_n or (128 if block_m == 128 and head_dim <= 128 else 64)
    if "block_tables" in operands and given.block_n is None and k.shape[1] % block_n:
        block_n = 64
    num_stages = given.num_stages
    if num_stages is None:
        num_stages = max(1, hopper_stages(block_m, block_n, head_dim, call.target))
    slots = _slots(operands, call, block_m, block_n, 1)
    blocks = -(-rows // block_m) * k.shape[-2] * q.shape[0]
    return HopperPlan(
        **slots,
        cluster=_cluster(slots, blocks, call, num_stages * block_n >= block_m),
        block_m=block_m,
        block_n=block_n,
        num_stages=num_stages,
    )


def _cluster(slots: dict, blocks: int, call, has_room: bool) -> int:
    """How many splits a cluster merges: all of them, or 1 where another kernel has to.

    The parts lie in the ring's memory, if it has room. A plan's own number of splits is merged in
    the same way whatever the batch, so that a row's bits do not depend on it.

    A cluster needs its thread blocks' SMs within one part of the GPU, and parts differ in size:
    clusters of four that would fill an H200 in one wave took two (beam-2: 46 us, against 28 us
    with a merge kernel). Pairs always find room, and so do the clusters of a small grid.
    """
    splits = slots["num_splits"]
    given = call.plan is not None and call.plan.num_splits is not None
    small = not given and blocks * splits <= call.target.num_sms // 2
    fits = has_room and not slots["ragged"] and splits <= _MAX_CLUSTER
    return splits if fits and (splits == 2 or small) else 1


def hopper_unsupported(operands, call) -> str | None:
    """The reason why the Hopper kernel does not serve a call, or None."""
    q, k = operands["q"], operands["k_context"]
    if q.dtype.itemsize != 2:
        return f"the Hopper kernel is for bf16 and fp16, q is {q.dtype}"
    if call.plan and call.plan.pipeline == "3kernel":
        return "plan.pipeline='3kernel' is served by the Triton kernels"
    plan = resolve_hopper(operands, call)
    if plan.block_m not in (64, 128) or plan.block_n not in (64, 128):
        return (
            f"the Hopper kernel's tiles are 64 or 128 x 64 or 128, the plan's are "
            f"{plan.block_m} x {plan.block_n}"
        )
    if "block_tables" in operands and k.shape[1] % plan.block_n:
        return f"page_size {k.shape[1]} is no multiple of the tile's {plan.block_n} tokens"
    fitting = hopper_stages(plan.block_m, plan.block_n, q.shape[3], call.target)
    if plan.num_stages > fitting:
        return f"plan.num_stages={plan.num_stages}, expected at most {fitting} for these tiles"
    return None


def hopper_stages(block_m: int, block_n: int, head_dim: int, target) -> int:
    """Tiles of K and V that fit into shared memory.

    Beside them are the queries, a word for each row of a stage, two for each query, and barriers.
    """
    columns = -(-head_dim // 64) * 64
    room = target.block_shared_bytes - block_m * (columns * 2 + 8) - 512
    return min(8, room // (block_n * (2 * columns * 2 + 4)))


def triton_unsupported(operands, call) -> str | None:
    """The reason why the GPU has no room for the plan, or None."""
    plan, q = resolve_triton(operands, call), operands["q"]
    needed = _shared_bytes(
        plan.block_m, plan.block_n, plan.num_stages, q.shape[-1], q.dtype.itemsize
    )
    if needed <= call.target.block_shared_bytes:
        return None
    return (
        f"plan needs {needed} bytes of shared memory (block_m={plan.block_m}, "
        f"block_n={plan.block_n}, num_stages={plan.num_stages}), and a block of "
        f"{call.target.name} has at most {call.target.block_shared_bytes}"
    )


def _shared_bytes(block_m: int, block_n: int, num_stages: int, head_dim: int, itemsize: int) -> int:
    """The query tile, the K and V tiles of every stage, and barriers."""
    block_d = max(16, 1 << (head_dim - 1).bit_length())
    return (block_m + 2 * num_stages * block_n) * block_d * itemsize + 1024
