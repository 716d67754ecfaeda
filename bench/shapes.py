"""The measured shapes by id, and the time that no program can beat for each of them.

The floor of a row is the larger of two times: its arithmetic at the rate of a large bf16 matrix
product, and its compulsory bytes (keys, values, query and output, each once) at the rate of a
large read. Index and block tables are left out: they are under 1% of any row.
"""

from __future__ import annotations

import dataclasses
import random

# Ceilings measured on one H200, in units per microsecond.
BF16_FLOP_PER_US = 790e6
READ_BYTES_PER_US = 4.55e6
# The published floors of the TurboQuant rows use the upper end of the measured read rates.
TURBOQUANT_READ_BYTES_PER_US = 4.6e6

_BF16_BYTES = 2


@dataclasses.dataclass(frozen=True)
class Floor:
    """The two times, in microseconds, under which a row cannot go."""

    flop_us: float
    bytes_us: float

    @property
    def us(self) -> float:
        """The larger of both."""
        return max(self.flop_us, self.bytes_us)


@dataclasses.dataclass(frozen=True)
class BeamShape:
    """One call of `beam_decode_attn`, bf16.

    Attributes:
        context: Length of the context cache, and of every sample in it unless `lengths` is given.
        steps: Decoded steps, each with one row of the beam cache for each beam.
        lengths: Valid context tokens of each sample (`seqused_k`).
    """

    id: str
    batch: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    steps: int
    lengths: tuple[int, ...] | None = None

    @property
    def context_tokens(self) -> int:
        """Valid context tokens of all samples."""
        return sum(self.lengths) if self.lengths else self.batch * self.context

    @property
    def flop(self) -> int:
        """Operations of QK and PV, two for each multiply-add."""
        # For every query head against every key it attends to.
        keys = self.context_tokens + self.batch * self.steps
        return 4 * self.width * self.heads * self.head_dim * keys

    @property
    def nbytes(self) -> int:
        """Compulsory bytes."""
        query_and_output = 2 * self.batch * self.width * self.heads * self.head_dim
        rows = self.context_tokens + self.batch * self.width * self.steps
        keys_and_values = 2 * rows * self.kv_heads * self.head_dim
        return _BF16_BYTES * (query_and_output + keys_and_values)

    @property
    def floor(self) -> Floor:
        """Both floors."""
        return Floor(self.flop / BF16_FLOP_PER_US, self.nbytes / READ_BYTES_PER_US)


@dataclasses.dataclass(frozen=True)
class MlaShape:
    """One call of `sparse_mla_decode`, indices drawn from `context` cached tokens a request.

    Attributes:
        schedule_in_call: Whether the schedule is made in the call, else it is an argument.
    """

    id: str
    format: str
    batch: int
    seqlen_q: int
    heads: int
    topk: int
    extra_topk: int
    context: int = 32768
    page_size: int = 64
    schedule_in_call: bool = False

    @property
    def key_dim(self) -> int:
        """Dimensions of query and key; the value has 512."""
        return {"v32": 576, "model1": 512}[self.format]

    @property
    def token_bytes(self) -> int:
        """Bytes of one cached token."""
        return {"v32": 656, "model1": 584}[self.format]

    @property
    def flop(self) -> int:
        """Operations of QK and PV, two for each multiply-add."""
        rows = self.heads * self.batch * self.seqlen_q
        return 2 * rows * (self.topk + self.extra_topk) * (self.key_dim + 512)

    @property
    def nbytes(self) -> int:
        """Compulsory bytes."""
        queries = self.batch * self.seqlen_q
        query_and_output = _BF16_BYTES * queries * self.heads * (self.key_dim + 512)
        return query_and_output + queries * (self.topk + self.extra_topk) * self.token_bytes

    @property
    def floor(self) -> Floor:
        """Both floors."""
        return Floor(self.flop / BF16_FLOP_PER_US, self.nbytes / READ_BYTES_PER_US)


@dataclasses.dataclass(frozen=True)
class TurboQuantShape:
    """One call of TurboQuant attention.

    Attributes:
        slot_bytes: Bytes of one token and head.
        prefill: Whether all tokens are new, each seeing those before it; else one of a request.
    """

    id: str
    preset: str
    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    slot_bytes: int
    block_size: int = 16
    prefill: bool = False

    @property
    def flop(self) -> int:
        """Operations of QK and PV, two for each multiply-add."""
        seen = self.context * (self.context + 1) // 2 if self.prefill else self.context
        return 4 * self.batch * self.heads * self.head_dim * seen

    @property
    def nbytes(self) -> int:
        """Compulsory bytes."""
        cache = self.batch * self.context * self.kv_heads * self.slot_bytes
        if not self.prefill:
            return cache  # query and output are under 1% of it in every row
        return cache + 2 * _BF16_BYTES * self.batch * self.context * self.heads * self.head_dim

    @property
    def floor(self) -> Floor:
        """Both floors."""
        return Floor(self.flop / BF16_FLOP_PER_US, self.nbytes / TURBOQUANT_READ_BYTES_PER_US)


Shape = BeamShape | MlaShape | TurboQuantShape


def _ragged_lengths(samples: int, seed: int) -> tuple[int, ...]:
    """Lengths of 256 to 8192 tokens, uniform in their logarithm.

    From `random.Random`, whose sequence Python guarantees for all versions (NumPy does not).
    """
    draw = random.Random(seed)
    return tuple(round(2 ** draw.uniform(8, 13)) for _ in range(samples))


# This seed gives a mean of 2899, a sum that eight equal samples can share, and no length that is
# a multiple of a tile.
RAGGED_LENGTHS = _ragged_lengths(samples=8, seed=2992)

BEAM = (
    BeamShape("beam-0", 8, 256, 4, 4, 128, 4096, 8),
    BeamShape("beam-1", 4, 256, 16, 8, 128, 1000, 3),
    BeamShape("beam-2", 1, 256, 16, 8, 128, 4096, 4),
    BeamShape("beam-3", 4, 4, 32, 8, 128, 8192, 8),
    BeamShape("beam-4", 1, 8, 64, 8, 128, 32768, 16),
    BeamShape("beam-5", 4, 512, 16, 8, 64, 2048, 3),
    BeamShape("beam-6", 16, 64, 32, 8, 128, 2048, 4),
    BeamShape("beam-7", 1, 1024, 16, 4, 128, 8192, 2),
    BeamShape("beam-8", 1, 4, 9, 3, 64, 512, 16),
    BeamShape("beam-9", 8, 128, 16, 8, 128, 8192, 4, lengths=RAGGED_LENGTHS),
    # As many tokens as beam-9 in samples of one length: what beam-9 is held against.
    BeamShape("beam-9-dense", 8, 128, 16, 8, 128, sum(RAGGED_LENGTHS) // 8, 4),
)

# Small enough for a CPU: they show that a suite runs, not how fast.
BEAM_QUICK = (
    BeamShape("quick-dense", 2, 8, 4, 2, 32, 70, 3),
    BeamShape("quick-ragged", 2, 4, 4, 1, 32, 70, 2, lengths=(5, 67)),
)

MLA = (
    MlaShape("mla-v32-b1-q1-h128", "v32", 1, 1, 128, 2048, 0),
    MlaShape("mla-v32-b2-q1-h128", "v32", 2, 1, 128, 2048, 0),
    MlaShape("mla-v32-b2-q2-h128", "v32", 2, 2, 128, 2048, 0),
    MlaShape("mla-v32-b64-q1-h128", "v32", 64, 1, 128, 2048, 0),
    MlaShape("mla-v32-b128-q1-h128", "v32", 128, 1, 128, 2048, 0),
    MlaShape("mla-v32-b128-q2-h128", "v32", 128, 2, 128, 2048, 0),
    MlaShape("mla-v32-b1-q1-h64", "v32", 1, 1, 64, 2048, 0),
    MlaShape("mla-v32-b64-q1-h64", "v32", 64, 1, 64, 2048, 0),
    MlaShape("mla-v32-b128-q1-h64", "v32", 128, 1, 64, 2048, 0),
    MlaShape("mla-v32-b128-q2-h64", "v32", 128, 2, 64, 2048, 0),
    MlaShape("mla-v32-b128-q1-h16", "v32", 128, 1, 16, 2048, 0),
    MlaShape("mla-model1-b2-q1-h64-x512", "model1", 2, 1, 64, 128, 512),
    MlaShape("mla-model1-b128-q1-h64-x512", "model1", 128, 1, 64, 128, 512),
    MlaShape("mla-model1-b128-q1-h64-x1024", "model1", 128, 1, 64, 128, 1024),
    MlaShape("mla-model1-b2-q1-h128-x1024", "model1", 2, 1, 128, 128, 1024),
    MlaShape("mla-model1-b64-q1-h128-x1024", "model1", 64, 1, 128, 128, 1024),
    MlaShape("mla-model1-b128-q1-h128-x1024", "model1", 128, 1, 128, 128, 1024),
)
MLA_ALL = tuple(
    dataclasses.replace(shape, id=f"{shape.id}-all", schedule_in_call=True) for shape in MLA
)

MLA_QUICK = (
    MlaShape("quick-v32", "v32", 2, 1, 4, 70, 0, 128),
    MlaShape("quick-model1-all", "model1", 2, 2, 4, 20, 70, 128, schedule_in_call=True),
)

TURBOQUANT = (
    TurboQuantShape("tq-64x32768-4bit_nc", "4bit_nc", 64, 32768, 32, 8, 128, 134),
    TurboQuantShape("tq-64x32768-3bit_nc", "3bit_nc", 64, 32768, 32, 8, 128, 102),
    TurboQuantShape("tq-64x32768-k8v4", "k8v4", 64, 32768, 32, 8, 128, 196),
    TurboQuantShape("tq-16x8192-4bit_nc", "4bit_nc", 16, 8192, 32, 8, 128, 134),
    TurboQuantShape("tq-16x8192-k8v4", "k8v4", 16, 8192, 32, 8, 128, 196),
    TurboQuantShape("tq-1x131072-4bit_nc", "4bit_nc", 1, 131072, 32, 8, 128, 134),
    TurboQuantShape("tq-1x131072-k8v4", "k8v4", 1, 131072, 32, 8, 128, 196),
    TurboQuantShape("tq-1x8192-4bit_nc", "4bit_nc", 1, 8192, 32, 8, 128, 134),
    TurboQuantShape("tq-64x8192-d64-4bit_nc", "4bit_nc", 64, 8192, 64, 8, 64, 70),
)

# Their bar is another implementation's time in the same run, see `bench.turboquant`.
TURBOQUANT_PREFILL = (
    TurboQuantShape("tq-prefill-4x4096-4bit_nc", "4bit_nc", 4, 4096, 32, 8, 128, 134, prefill=True),
    TurboQuantShape("tq-prefill-4x4096-k8v4", "k8v4", 4, 4096, 32, 8, 128, 196, prefill=True),
)

# One has a length that is no multiple of a block.
TURBOQUANT_QUICK = (
    TurboQuantShape("quick-4bit_nc", "4bit_nc", 2, 50, 4, 2, 64, 70),
    TurboQuantShape("quick-3bit_nc", "3bit_nc", 1, 64, 4, 1, 64, 54),
    TurboQuantShape("quick-k8v4", "k8v4", 2, 33, 4, 2, 32, 52),
    TurboQuantShape("quick-prefill", "4bit_nc", 2, 48, 4, 2, 64, 70, prefill=True),
)

_ALL: tuple[tuple[Shape, ...], ...] = (
    *(BEAM, BEAM_QUICK, MLA, MLA_ALL, MLA_QUICK),
    *(TURBOQUANT, TURBOQUANT_PREFILL, TURBOQUANT_QUICK),
)
BY_ID: dict[str, Shape] = {shape.id: shape for shapes in _ALL for shape in shapes}
