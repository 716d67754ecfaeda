"""Suite `mla-writers`: appending to an MLA cache and making the schedule, native and by jnp.

A call of an append row is a step of 32 layers, each appending its own keys to the same cache: the
cache is an input, so each call begins with a copy of it, and 32 layers make that small. Its time
is that of all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bench.shapes import READ_BYTES_PER_US, Floor
from bench.suite import Implementation, Suite
from bench.timing import Inputs
from jax_beam_attn.sparse_mla.cache import FORMATS, AppendStatic, append
from jax_beam_attn.sparse_mla.schedule import ScheduleStatic, schedule

LAYERS = 32
_PAGE_SIZE = 64
_TOPK = 2048
_PARTS = 132


@dataclasses.dataclass(frozen=True)
class AppendShape:
    """A step of appending `tokens` bf16 keys in each of 32 layers."""

    id: str
    format: str
    tokens: int

    flop = 0

    @property
    def static(self) -> AppendStatic:
        """The operator's static arguments."""
        return AppendStatic(self.format, _PAGE_SIZE)

    @property
    def key_dim(self) -> int:
        """Dimensions of a key."""
        return FORMATS[self.format].head_dim if self.format in FORMATS else 576

    @property
    def token_bytes(self) -> int:
        """Bytes of a cached token."""
        return FORMATS[self.format].token_bytes if self.format in FORMATS else 2 * 576

    @property
    def nbytes(self) -> int:
        """Compulsory bytes."""
        return LAYERS * self.tokens * (2 * self.key_dim + self.token_bytes)

    @property
    def floor(self) -> Floor:
        """That of the bytes; there are next to no operations."""
        return Floor(0.0, self.nbytes / READ_BYTES_PER_US)


@dataclasses.dataclass(frozen=True)
class ScheduleShape:
    """A schedule of `rows` queries with lengths up to 2048."""

    id: str
    rows: int

    flop = 0

    @property
    def static(self) -> ScheduleStatic:
        """The operator's static arguments."""
        return ScheduleStatic(self.rows, 1, _TOPK, 0, _PARTS)

    @property
    def nbytes(self) -> int:
        """Compulsory bytes: a length and a slot a row, a row and a block a part."""
        return 8 * (self.rows + _PARTS + 1)

    @property
    def floor(self) -> Floor:
        """That of the bytes: launching a kernel takes far longer."""
        return Floor(0.0, self.nbytes / READ_BYTES_PER_US)


Shape = AppendShape | ScheduleShape


def make_inputs(shape: Shape) -> Inputs:
    """Random keys into all slots of a cache in random order, or random lengths."""
    rng = np.random.default_rng(0)
    if isinstance(shape, ScheduleShape):
        return {"topk_length": jnp.asarray(rng.integers(0, _TOPK + 1, (1, shape.rows), np.int32))}
    blocks = -(-shape.tokens // _PAGE_SIZE)
    if shape.format in FORMATS:
        cache = jnp.zeros((blocks, _PAGE_SIZE, 1, shape.token_bytes), jnp.uint8)
    else:
        cache = jnp.zeros((blocks, _PAGE_SIZE, 1, shape.key_dim), jnp.bfloat16)
    slots = rng.permutation(blocks * _PAGE_SIZE)[: shape.tokens]
    layers = jax.random.split(jax.random.key(0), LAYERS)
    return {"cache": cache, "slots": jnp.asarray(slots, jnp.int32)} | {
        f"kv {layer}": jax.random.normal(key, (shape.tokens, shape.key_dim), jnp.bfloat16)
        for layer, key in enumerate(layers)
    }


def _run(implementation: str) -> Callable[[Inputs], jax.Array]:
    def run(inputs: Inputs) -> jax.Array:
        shape = _shape_of(inputs)
        if isinstance(shape, ScheduleShape):
            # All of the work is done for the slots, too, so one result will do.
            return schedule(inputs, shape.static, implementation=implementation)[1]
        cache = inputs["cache"]
        for layer in range(LAYERS):
            operands = {"cache": cache, "kv": inputs[f"kv {layer}"], "slots": inputs["slots"]}
            (cache,) = append(operands, shape.static, implementation=implementation)
        return cache

    return run


def _shape_of(inputs: Inputs) -> Shape:
    """The shape that inputs were made for, but for its id."""
    if "cache" not in inputs:
        return ScheduleShape("", inputs["topk_length"].shape[1])
    formats = {each.token_bytes: name for name, each in FORMATS.items()}
    tokens = inputs["slots"].shape[0]
    return AppendShape("", formats.get(inputs["cache"].shape[3], "bf16"), tokens)


SUITE = Suite(
    shapes=(
        *(AppendShape(f"mla-append-v32-b{n}-x32", "v32", n) for n in (1, 64, 512, 4096)),
        AppendShape("mla-append-model1-b64-x32", "model1", 64),
        AppendShape("mla-append-bf16-b64-x32", "bf16", 64),
        *(ScheduleShape(f"mla-schedule-b{n}", n) for n in (1, 64, 128, 512, 4096)),
    ),
    quick_shapes=(
        AppendShape("quick-append", "v32", 3),
        ScheduleShape("quick-schedule", 5),
    ),
    l2="warm",
    make_inputs=make_inputs,
    reference=lambda inputs: jax.jit(_run("reference"))(inputs),
    # The same bits, or wrong.
    implementations={name: Implementation(_run(name), 0.0) for name in ("native", "reference")},
)
