"""How a call is cut into thread blocks."""

from __future__ import annotations

import dataclasses

from jax_beam_attn._core import checks

_POWERS_OF_TWO = tuple(2**i for i in range(10))


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
        num_warps: Warps in a thread block.
        num_stages: Tiles in flight.
        blocks_per_sm: Thread blocks that an SM's registers have to suffice for.

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
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "pipeline" and value is not None:
                checks.at_least_one(f"plan.{field.name}", value)
        for name, smallest in (("block_m", 16), ("block_n", 16), ("num_warps", 1)):
            allowed = [size for size in _POWERS_OF_TWO if size >= smallest]
            checks.one_of(f"plan.{name}", getattr(self, name), (None, *allowed))


@dataclasses.dataclass(frozen=True)
class TritonPlan:
    """A complete plan of the Triton kernels.

    Attributes:
        chunk: Context tokens of a slot, a multiple of block_n.
        num_splits: Slots of the longest possible context.
        ragged: Whether slots are dealt by the samples' lengths.
        total: Context tokens of all samples together, at most.
        use_tma: Whether tiles of K and V come by the tensor memory accelerator.
    """

    pipeline: str
    num_splits: int
    chunk: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int
    ragged: bool
    total: int
    use_tma: bool

    def slots(self, batch: int) -> int:
        """Slots of the whole batch: every sample has one for each chunk begun, at least one."""
        if self.num_splits == 1:
            return batch
        if self.ragged:
            return min(batch * self.num_splits, self.total // self.chunk + batch)
        return batch * self.num_splits

    def of_beam_part(self) -> TritonPlan:
        """The launch of the beam part alone: small tiles, so that many gathers are in flight."""
        return dataclasses.replace(
            self, num_splits=1, block_m=16, num_warps=4, num_stages=1, blocks_per_sm=1
        )


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
    batch, width, heads, head_dim = q.shape
    kv_heads = k.shape[-2]
    rows = width * heads // kv_heads
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

    ragged = "seqused" in operands or "cu_seqlens" in operands
    mean = max(1, call.static.total // max(batch, 1))
    blocks = -(-rows // block_m) * kv_heads * batch
    splits = given.num_splits
    if splits is None:
        # As many as fill the GPU once, with at least two tiles each; of the mean length, so that
        # the ragged have more.
        fill = blocks_per_sm * call.target.num_sms // max(blocks, 1)
        splits = max(1, min(fill, mean // (2 * block_n)))
        splits = max(1, splits * call.static.capacity // mean)
    chunk = max(1, -(-call.static.capacity // (splits * block_n))) * block_n
    num_splits = max(1, -(-call.static.capacity // chunk))
    return TritonPlan(
        pipeline=given.pipeline or "fused",
        num_splits=num_splits,
        chunk=chunk,
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        blocks_per_sm=blocks_per_sm,
        ragged=ragged and num_splits > 1,
        total=call.static.total,
        use_tma=call.target.compute_capability >= 90 and q.dtype.itemsize == 2,
    )


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
