"""How a call is cut into thread blocks."""

from __future__ import annotations

import dataclasses

from jax_beam_attn._core import checks


@dataclasses.dataclass(frozen=True)
class SparseMlaPlan:
    """Launch choices of `sparse_mla_decode`; a field left None is chosen.

    Attributes:
        num_splits: Pieces into which each query's tokens are cut, instead of by the schedule;
            for kernels, of which there are none yet.

    Example:
        >>> SparseMlaPlan(num_splits=2).num_splits
        2
    """

    num_splits: int | None = None

    def __post_init__(self):
        if self.num_splits is not None:
            checks.at_least_one("plan.num_splits", self.num_splits)
