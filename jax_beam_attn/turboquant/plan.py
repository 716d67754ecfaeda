"""How a call is cut into thread blocks."""

from __future__ import annotations

import dataclasses

from jax_beam_attn._core import checks

_POWERS_OF_TWO = tuple(2**i for i in range(10))


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
        rotation: "fused" rotates queries in the attention kernel, "separate" before it.

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

    def __post_init__(self):
        checks.one_of("plan.rotation", self.rotation, (None, "fused", "separate"))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "rotation" and value is not None:
                checks.at_least_one(f"plan.{field.name}", value)
        for name, smallest in (("block_m", 16), ("block_n", 16), ("num_warps", 1)):
            allowed = [size for size in _POWERS_OF_TWO if size >= smallest]
            checks.one_of(f"plan.{name}", getattr(self, name), (None, *allowed))

    @classmethod
    def source(
        cls, *, group: int, max_query_len: int, max_seq_len: int, num_kv_splits: int = 16
    ) -> TurboQuantPlan:
        """The source system's rules.

        "3D", that is with a fixed number of splits, for one token of each request and at least
        1024 cached tokens; else "2D", without splits. Its rotation is fused.

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
        return cls(
            num_splits=max(1, min(num_kv_splits, -(-max_seq_len // tile))) if split else 1,
            block_m=max(128 if is_prefill else 16, _next_power_of_two(group)),
            block_n=tile,
            num_warps=4,
            num_stages=2,
            rotation="fused",
        )


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
