"""How a call is cut into thread blocks."""

from __future__ import annotations

import dataclasses
import math

from jax_beam_attn._core import checks
from jax_beam_attn.sparse_mla.cache import ROPE_DIM, VALUE_DIM
from jax_beam_attn.sparse_mla.schedule import BLOCK

SCHEDULED = 0  # as `num_splits` of a complete plan: rows are cut by the schedule


@dataclasses.dataclass(frozen=True)
class SparseMlaPlan:
    """Launch choices of `sparse_mla_decode`; a field left None is chosen.

    Attributes:
        num_splits: Pieces into which each query's tokens are cut, instead of by the schedule.
        block_h: Heads in a tile.
        block_n: Tokens in a tile.
        num_warps: Warps in a thread block.
        num_stages: Tiles of tokens in shared memory: one in use, the others on their way.
        blocks_per_sm: Thread blocks that an SM's registers have to suffice for.
        width: Dimensions of a tile that are dequantised at a time, before they are multiplied.

    Example:
        >>> SparseMlaPlan(num_splits=2).num_splits
        2
    """

    num_splits: int | None = None
    block_h: int | None = None
    block_n: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    blocks_per_sm: int | None = None
    width: int | None = None

    def __post_init__(self):
        checks.plan_fields(self)
        checks.one_of("plan.block_h", self.block_h, (None, 16, 32, 64))
        # A tile lies within a block of the schedule, and so within one of the two caches.
        checks.one_of("plan.block_n", self.block_n, (None, 16, 32, BLOCK))
        checks.one_of("plan.num_warps", self.num_warps, (None, 4, 8, 16))
        checks.one_of("plan.width", self.width, (None, 128, 256, VALUE_DIM))


@dataclasses.dataclass(frozen=True)
class TritonPlan:
    """A complete plan of the Triton kernels.

    Attributes:
        num_splits: Equal pieces of each row; 1 for none, `SCHEDULED` for those of the schedule.
        num_parts: Parts of a schedule that the call makes itself.
    """

    num_splits: int
    num_parts: int
    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int
    width: int


# (most heads, block_h, block_n, num_warps, num_stages, blocks_per_sm, width): the first entry that
# holds all heads, else the last. On Hopper a tile of 64 heads is what its matrix instructions want;
# of other architectures the widest tile whose output fits into registers.
_TILES_OF_HOPPER = (
    (16, 16, 64, 4, 2, 1, 512),
    (32, 32, 64, 8, 2, 1, 256),
    (64, 64, 64, 8, 2, 1, 256),
)
_TILES = (
    (16, 16, 32, 4, 2, 1, 256),
    (32, 32, 32, 8, 2, 1, 256),
)
# Rows are left whole where there are more than so many for every thread block that fits: cutting
# them would balance nothing, and the partial results of all of them would fill the memory.
_MOST_WAVES = 8
# So are rows of equal length that keep this share of the GPU busy: there is nothing to merge.
_FULL = 0.95


def resolve_triton(operands, call) -> TritonPlan:
    """Fills in what the caller's plan leaves open.

    Args:
        operands: Avals by name, see `op.py`.
        call: The call with its plan and target.
    """
    given = call.plan or SparseMlaPlan()
    batch, seqlen_q, heads, _ = operands["q"].shape
    tiles = _TILES_OF_HOPPER if call.target.compute_capability == 90 else _TILES
    limit = given.block_h or heads
    _, block_h, block_n, num_warps, num_stages, blocks_per_sm, width = next(
        (tile for tile in tiles if limit <= tile[0]), tiles[-1]
    )
    block_h = given.block_h or block_h
    block_n = given.block_n or block_n
    num_stages = given.num_stages or num_stages
    if given.num_warps not in (None, num_warps):
        blocks_per_sm = 1  # what the registers suffice for is known of the table's tiles only
    blocks_per_sm = given.blocks_per_sm or blocks_per_sm
    room = call.target.block_shared_bytes
    while _shared_bytes(operands, call, block_h, block_n, num_stages) > room:
        if given.block_n is None and block_n > 16:
            block_n //= 2
        elif given.num_stages is None and num_stages > 1:
            num_stages -= 1
        else:
            break

    head_tiles = -(-heads // block_h)
    at_once = call.target.num_sms * blocks_per_sm
    num_splits = given.num_splits
    if num_splits is None:
        waves = batch * seqlen_q * head_tiles / at_once
        equal = "topk_length" not in operands and "extra_topk_length" not in operands
        full = equal and waves >= _FULL * math.ceil(waves)
        num_splits = 1 if full or waves > _MOST_WAVES else SCHEDULED
    listed = [operands[name].shape[2] for name in ("indices", "extra_indices") if name in operands]
    num_splits = min(num_splits, sum(-(-topk // BLOCK) for topk in listed))
    return TritonPlan(
        num_splits=num_splits,
        num_parts=max(1, at_once // head_tiles),
        block_h=block_h,
        block_n=block_n,
        num_warps=given.num_warps or num_warps,
        num_stages=num_stages,
        blocks_per_sm=blocks_per_sm,
        width=given.width or width,
    )


def triton_unsupported(operands, call) -> str | None:
    """The reason why the GPU has no room for the plan, or None."""
    plan = resolve_triton(operands, call)
    needed = _shared_bytes(operands, call, plan.block_h, plan.block_n, plan.num_stages)
    if needed > call.target.block_shared_bytes:
        return (
            f"plan needs {needed} bytes of shared memory (block_h={plan.block_h}, "
            f"block_n={plan.block_n}, num_stages={plan.num_stages}), and a block of "
            f"{call.target.name} has at most {call.target.block_shared_bytes}"
        )
    if plan.block_h == 64 and call.target.compute_capability // 10 in (10, 11):
        return f"plan.block_h=64 needs more tensor memory than a block of {call.target.name} has"
    return None


def _shared_bytes(operands, call, block_h: int, block_n: int, num_stages: int) -> int:
    """The query tile, the tiles of every stage, the dequantised tile, weights, small things."""
    head_dim = operands["q"].shape[3]
    query = 2 * block_h * head_dim
    # Hopper's matrix instructions, for tiles of 64 heads, take weights from registers.
    weights = 2 * block_h * block_n if block_h < 64 else 0
    if call.static.format == "bf16":
        # They may still be reading a tile of keys when the next one is due.
        tiles = 2 * (num_stages + (block_h == 64)) * block_n * head_dim
    else:
        tiles = block_n * (VALUE_DIM * (num_stages + 2) + 2 * ROPE_DIM * num_stages)
    return query + tiles + weights + 4096
