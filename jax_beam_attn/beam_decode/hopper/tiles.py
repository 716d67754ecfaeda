"""What all roles of the Hopper kernel share: its compile-time constants and its ring."""

# The device code is CuTe-DSL, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Int32

from jax_beam_attn.beam_decode.hopper.device import COLUMNS, ROWS, WARPGROUP


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The kernel's compile-time constants.

    Attributes:
        head_dim: D.
        warpgroups: Consumers, of 64 queries each.
        block_n: Context tokens in a tile.
        stages: Tiles of K, and of V, in flight.
        context: Whether there is a context.
        beam: Whether there are beam rows.
        shared: Whether the queries of a KV head that belong to one beam share its ancestors, and
            64 queries belong to whole beams.
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
        return ROWS * self.warpgroups

    @property
    def block_d(self) -> int:
        """D with the columns that tiles in shared memory are made of filled up."""
        return -(-self.head_dim // COLUMNS) * COLUMNS

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return WARPGROUP * (1 + self.warpgroups)

    @property
    def halves(self) -> int:
        """Tiles of 64 gathered rows that a stage holds."""
        return self.block_n // ROWS

    @cute.jit
    def _next(self, stage, phase):
        """The ring's next stage, and its barriers' phase."""
        stage += 1
        if stage == self.stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def _beam_tiles(self, steps, share):
        """Tiles of gathered rows, of all warpgroups."""
        return (steps + share.divisor - 1) // share.divisor * self.warpgroups
