"""How a call is cut into thread blocks."""

from __future__ import annotations

import dataclasses
import functools

from jax_beam_attn._core import checks


@dataclasses.dataclass(frozen=True)
class TurboQuantPlan:
    """Launch choices of TurboQuant attention; a field left None is chosen.

    Attributes:
        num_splits: Pieces into which the longest request is cut; shorter ones have fewer.
        block_m: Queries in a tile: tokens times the query heads that share a KV head.
        block_n: Cached tokens in a tile.
        num_warps: Warps in a thread block.
        num_stages: Depth of the pipeline of loads.
        blocks_per_sm: Thread blocks that an SM's registers have to suffice for.
        rotation: "fused" rotates queries in the attention kernel, "separate" before it; always
            "separate" for 64 queries or more as rows, see `swapped`.
        swapped: Whether cached tokens are the rows of the matrix products, and queries the columns.
        dequantize: Whether all cached tokens are dequantised before, into room for as many as the
            block table can hold; never for f32 queries.

    Example:
        >>> TurboQuantPlan(num_splits=4).num_splits
        4
    """

    num_splits: int | None = None
    block_m: int | None = None
    block_n: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    blocks_per_sm: int | None = None
    rotation: str | None = None
    swapped: bool | None = None
    dequantize: bool | None = None

    def __post_init__(self):
        for name in ("swapped", "dequantize"):
            checks.one_of(f"plan.{name}", getattr(self, name), (None, False, True))
        checks.one_of("plan.rotation", self.rotation, (None, "fused", "separate"))
        checks.plan_fields(self, block_m=8, block_n=16, num_warps=1)

    @classmethod
    def source(
        cls, *, group: int, max_query_len: int, max_seq_len: int, num_kv_splits: int = 16
    ) -> TurboQuantPlan:
        """The source system's rules.

        "3D", that is with a fixed number of splits, for one token of each request and at least
        1024 cached tokens; else "2D", without splits. Its rotation is always fused, here for less
        than 64 queries only.

        Args:
            group: Query heads that share a KV head.
            max_query_len: The most new tokens of a request.
            max_seq_len: The longest request.
            num_kv_splits: The most splits.

        Returns:
            The plan.

        Source: `triton_turboquant_unified_attention` of vLLM.

        Example:
            >>> TurboQuantPlan.source(group=4, max_query_len=1, max_seq_len=8192).num_splits
            16
        """
        is_prefill = max_query_len > 1
        tile = 32 if is_prefill else 16
        split = not is_prefill and max_seq_len >= 1024
        block_m = max(128 if is_prefill else 16, _next_power_of_two(group))
        return cls(
            num_splits=max(1, min(num_kv_splits, -(-max_seq_len // tile))) if split else 1,
            block_m=block_m,
            block_n=tile,
            num_warps=4,
            num_stages=2,
            rotation="fused" if block_m < _WIDE else "separate",
            swapped=False,
            dequantize=False,
        )


@dataclasses.dataclass(frozen=True)
class TritonPlan:
    """A complete plan of the Triton kernels.

    Attributes:
        block_q: Tokens of a request in a tile.
        tiles: Query tiles, at most.
        chunk: Cached tokens of a split, a multiple of block_n; the last split takes all others.
        packed: Whether codes become numbers a few at a time, in registers.
        shared_bytes: The most shared memory that a thread block may need.
    """

    num_splits: int
    chunk: int
    block_q: int
    tiles: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int
    rotation: str
    swapped: bool
    dequantize: bool
    packed: bool
    shared_bytes: int


# (most rows, block_m, block_n, num_warps, num_stages, blocks_per_sm): the first entry that holds
# all queries of a KV head, else the last.
_TILES = (
    (8, 8, 128, 4, 3, 3),
    (16, 16, 128, 4, 3, 3),
    (32, 32, 64, 4, 3, 3),
    (64, 64, 64, 4, 3, 2),
    (128, 128, 64, 8, 3, 1),
)

# What a thread block does before and behind its tiles, and what the merge does for every 16
# splits, as the number of tiles that take as long; estimates.
_BLOCK_OVERHEAD = 4
_MERGE_OVERHEAD = 1

# With as many queries as rows, products are wgmma's. Queries that were made in registers would be
# its operands there, and ptxas (12.9, 13.0) gives their registers away inside the loop where there
# are few left; those that are loaded as they are go through shared memory.
_WIDE = 64

_MOST_SCRATCH = 2**30  # bytes of dequantised tokens


def resolve_triton(operands, call) -> TritonPlan:
    """Fills in what the caller's plan leaves open.

    Args:
        operands: Avals by name, see `op.py`.
        call: The call with its plan and target.
    """
    given, static = call.plan or TurboQuantPlan(), call.static
    tokens, heads, head_dim = operands["q"].shape
    requests = operands["seq_lens"].shape[0]
    kv_heads = static.format.num_kv_heads
    group = heads // kv_heads
    itemsize = operands["q"].dtype.itemsize
    packed = _can_be_packed(static.format, itemsize)
    # What a tile needs of registers and shared memory: more for a head size above 128, for float32,
    # and for codes that are taken apart one by one.
    weight = -(-head_dim // 128) * itemsize // 2 * (1 if packed else 2)

    rows = max(1, static.max_query_len) * group
    tiles_that_fit = [t for t in _TILES if t[0] * weight <= 128]
    _, block_m, block_n, num_warps, num_stages, blocks_per_sm = next(
        (t for t in tiles_that_fit if (given.block_m or rows) <= t[0]), tiles_that_fit[-1]
    )
    block_m = given.block_m or max(block_m, _next_power_of_two(group))
    block_n = given.block_n or max(16, block_n // weight)
    num_stages = given.num_stages or num_stages
    blocks_per_sm = given.blocks_per_sm or max(1, blocks_per_sm // weight)
    dequantize = _dequantize_before(operands, call, block_m)
    bytes_of = functools.partial(
        _shared_bytes, static.format, itemsize, packed, dequantize, block_m
    )
    while bytes_of(block_n, num_stages) > call.target.block_shared_bytes:
        if given.block_n is None and block_n > 16:
            block_n //= 2
        elif given.num_stages is None and num_stages > 1:
            num_stages -= 1
        else:
            break
    block_q = max(1, block_m // group)
    tiles = busy = requests
    if "query_start" in operands:
        # Each segment between two bounds may end with a tile that is not full.
        tiles = tokens // block_q + operands["query_start"].size + 1
        busy = requests * -(-max(1, static.max_query_len) // block_q)

    span = static.max_seq_len
    if static.window is not None:
        span = min(span, static.window + block_q + block_n)
    steps = max(1, -(-span // block_n))
    num_splits = given.num_splits or _choose_splits(
        min(tiles, busy) * kv_heads, call.target.num_sms * blocks_per_sm, steps
    )
    chunk = -(-steps // num_splits) * block_n
    swapped = block_m <= 32 if given.swapped is None else given.swapped
    return TritonPlan(
        num_splits=given.num_splits or -(-steps * block_n // chunk),
        chunk=chunk,
        block_q=block_q,
        tiles=tiles,
        block_m=block_m,
        block_n=block_n,
        num_warps=given.num_warps or num_warps,
        num_stages=num_stages,
        blocks_per_sm=blocks_per_sm,
        rotation=given.rotation or ("fused" if swapped or block_m < _WIDE else "separate"),
        swapped=swapped,
        dequantize=dequantize,
        packed=packed,
        shared_bytes=bytes_of(block_n, num_stages),
    )


def _dequantize_before(operands, call, block_m: int) -> bool:
    """Whether the tokens are dequantised once, where several query tiles meet each of them."""
    given, static = call.plan and call.plan.dequantize, call.static
    if operands["q"].dtype.itemsize == 4:
        return False
    if given is not None:
        return given
    format = static.format
    tokens = operands["block_table"].size * format.block_size
    scratch = 4 * tokens * format.num_kv_heads * format.head_dim
    rows = static.max_query_len * operands["q"].shape[1] // format.num_kv_heads
    return rows >= 4 * block_m >= 4 * 64 and scratch <= _MOST_SCRATCH


def _choose_splits(blocks: int, slots: int, steps: int) -> int:
    """The number of splits that ends first: blocks run in waves of as many as there are slots."""

    def duration(splits: int) -> float:
        waves = -(-blocks * splits // slots)
        merge = _MERGE_OVERHEAD * (1 + splits / 16) if splits > 1 else 0
        return waves * (-(-steps // splits) + _BLOCK_OVERHEAD) + merge

    return min(range(1, min(steps, 128) + 1), key=duration)


def _can_be_packed(format, itemsize: int) -> bool:
    """Whether a format's codes lie so that registers hold whole groups of them."""
    if itemsize == 4 or format.head_dim < 32:
        return False
    # Registers are filled by words; 32 codes of 3 bits are three of them.
    whole = 32 if 3 in (format.key_bits, format.value_bits) else 8
    sizes = (format.key_bytes, format.value_bytes, format.block_bytes)
    return format.head_dim % whole == 0 and all(size % 4 == 0 for size in sizes)


def triton_unsupported(operands, call) -> str | None:
    """The reason why the kernels cannot serve the plan, or None."""
    plan, static = resolve_triton(operands, call), call.static
    group = operands["q"].shape[1] // static.format.num_kv_heads
    if group > plan.block_m:
        return f"plan.block_m = {plan.block_m} is less than the {group} query heads of a KV head"
    if plan.rotation == "fused" and not plan.swapped and plan.block_m >= _WIDE:
        return f"plan.rotation = 'fused' needs swapped=True or block_m < {_WIDE}"
    if plan.shared_bytes <= call.target.block_shared_bytes:
        return None
    return (
        f"plan needs {plan.shared_bytes} bytes of shared memory (block_m={plan.block_m}, "
        f"block_n={plan.block_n}, num_stages={plan.num_stages}), and a block of "
        f"{call.target.name} has at most {call.target.block_shared_bytes}"
    )


def _shared_bytes(
    format, itemsize: int, packed: bool, dequantize: bool, block_m: int, block_n: int, stages: int
) -> int:
    """Query tile, weights, keys and values as numbers, and what is loaded ahead: an upper bound."""
    block_d = max(16, _next_power_of_two(format.head_dim))
    queries_and_weights = block_m * (block_d + block_n)
    if dequantize:
        return 2 * queries_and_weights + stages * block_n * 4 * block_d
    # Codes that are taken apart one by one come as two bytes for each.
    codes = block_d * (format.key_bits + format.value_bits) // 8 if packed else 4 * block_d
    numbers = queries_and_weights + 2 * block_n * block_d
    return numbers * itemsize + stages * block_n * (codes + 2 * format.num_fields)


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
