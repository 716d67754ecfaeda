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

    def __post_init__(self):
        checks.one_of("plan.pipeline", self.pipeline, (None, "fused", "3kernel"))
        for name, smallest in (("block_m", 16), ("block_n", 16), ("num_warps", 1)):
            allowed = [size for size in _POWERS_OF_TWO if size >= smallest]
            checks.one_of(f"plan.{name}", getattr(self, name), (None, *allowed))
        for name in ("num_splits", "num_stages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"plan.{name}: got {value}, expected >= 1 or None")


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
    ragged: bool
    total: int
    use_tma: bool

    @property
    def splits_per_sample(self) -> int:
        return self.num_splits

    def slots(self, batch: int) -> int:
        """Slots of the whole batch: every sample has one for each chunk begun, at least one."""
        if self.num_splits == 1:
            return batch
        if self.ragged:
            return min(batch * self.num_splits, self.total // self.chunk + batch)
        return batch * self.num_splits

    def of_beam_part(self) -> TritonPlan:
        """The launch of the beam part alone: small tiles, so that many gathers are in flight."""
        return dataclasses.replace(self, num_splits=1, block_m=16, num_warps=4, num_stages=1)


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
    wide = q.dtype.itemsize == 4
    rows = width * heads // kv_heads

    block_m = given.block_m or _tile_m(rows, wide, head_dim)
    block_n = given.block_n or (32 if wide else 64 if head_dim > 128 or block_m < 64 else 128)
    if given.block_n is None and "block_tables" in operands:
        # A tile within one page is addressed once and can come by the tensor memory accelerator.
        page_size = k.shape[1]
        block_n = next((n for n in (block_n, 64, 32) if page_size % n == 0 and n <= block_n), 64)
    num_warps = given.num_warps or (8 if block_m >= 128 else 4)
    num_stages = given.num_stages or (1 if wide else 2)

    ragged = "seqused" in operands or "cu_seqlens" in operands
    mean = max(1, call.static.total // max(batch, 1))
    blocks = -(-rows // block_m) * kv_heads * batch
    if given.num_splits is not None:
        chunk = -(-call.static.capacity // given.num_splits)
    else:
        chunk = -(-mean // _splits(blocks, mean, block_n, call.target.num_sms, block_m))
    chunk = max(1, -(-chunk // block_n)) * block_n
    num_splits = max(1, -(-call.static.capacity // chunk))
    return TritonPlan(
        pipeline=given.pipeline or "fused",
        num_splits=num_splits,
        chunk=chunk,
        block_m=block_m,
        block_n=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
        ragged=ragged and num_splits > 1,
        total=call.static.total,
        use_tma=call.target.compute_capability >= 90 and not wide,
    )


def _tile_m(rows: int, wide: bool, head_dim: int) -> int:
    limit = 32 if wide else 64 if head_dim > 128 else 128
    for block_m in (16, 32, 64):
        if rows <= block_m <= limit:
            return block_m
    return limit


def _splits(blocks: int, tokens: int, block_n: int, num_sms: int, block_m: int) -> int:
    """As many splits as fill the GPU once, with at least two tiles each."""
    per_sm = 2 if block_m < 64 else 1
    return max(1, min(per_sm * num_sms // max(blocks, 1), tokens // (2 * block_n)))
