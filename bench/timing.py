"""The time of one call inside one compiled program.

A jitted call started from Python costs tens of microseconds, more than many of the kernels
measured here. So N calls are unrolled into one program, a chain, which XLA turns into CUDA
graphs, and several executions of it are enqueued back to back. While the device works longer
on a chain than the host needs to enqueue one, the host's share is hidden, and

    wall time / (executions * N)

is the device time of one call together with the gap to the next one.

What keeps XLA from computing less than N calls:

- `optimization_barrier` ties the inputs of a call to the output of the call before: all inputs,
  for work on the keys alone would be shared too. The barrier costs no device work; it is gone
  when the schedule is fixed. Until then calls on the same buffers cannot be merged and nothing
  moves from one call to another.
- Every output is returned by the program. With the barrier alone they are dead: XLA drops
  barrier operands that nobody uses, and with them all calls but the last. Returning a few
  elements of each instead would add a kernel a call.
- With the barriers gone the calls are independent, and a CUDA graph could run them side by side:
  the program is compiled to graphs that keep the order.
- `check_all_calls_are_there` counts each call's operations in the compiled program.

Inputs are arguments of the program, never constants.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

L2State = Literal["warm", "cold"]
Inputs = Mapping[str, jax.Array]

_L2_BYTES = 60e6  # H200
# Between two uses of one input set, this much else passes through the cache.
_COLD_BYTES = 3 * _L2_BYTES
_PILOT_CALLS = 8
_MAX_CALLS = 256
_SCOPE = "timed_call_"
# Below this, enqueueing a chain (40-50 us, and more for its many outputs) may not be hidden.
_MIN_CHAIN_US = 300.0


class ChainError(RuntimeError):
    """A chain was compiled to something else than N times the call."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        samples: Number of measurements that median and percentiles are taken of.
        sample_us: Device time of one sample at least, so that waiting for its end is little of it.
        warm_up_us: Executing before the first sample: an idle GPU runs at a low clock.
        chain_us: Device time of a chain to go for.
    """

    samples: int = 25
    sample_us: float = 10_000
    warm_up_us: float = 100_000
    chain_us: float = 500


QUICK = Settings(samples=3, sample_us=500, warm_up_us=0, chain_us=0)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one call in microseconds, over all samples.

    Attributes:
        calls: Length of the chain.
        enqueue_share: Host time to enqueue a chain over the wall time of a chain; near 1 the
            host was measured, not the device.
    """

    us: float
    us_p10: float
    us_p90: float
    us_min: float
    l2: L2State
    calls: int
    samples: int
    enqueue_share: float

    @property
    def doubts(self) -> list[str]:
        """Reasons not to take the numbers for device times."""
        doubts = []
        if self.us * self.calls < _MIN_CHAIN_US:
            doubts.append(f"a chain takes only {self.us * self.calls:.0f} us")
        if self.enqueue_share > 0.8:
            doubts.append(f"enqueueing takes {self.enqueue_share:.0%} of the wall time")
        return doubts


def time_call(
    function: Callable[[Inputs], jax.Array],
    inputs: Inputs,
    *,
    l2: L2State,
    nbytes: int,
    settings: Settings,
) -> tuple[Timing, list[jax.Array]]:
    """Times `function(inputs)`.

    Args:
        function: What to time; traced once for each call of a chain.
        inputs: Arrays by name.
        l2: "warm": all calls read the same buffers, which may stay in the L2 cache as far as they
            fit. "cold": calls rotate among copies, so that none is in the cache when it is read.
        nbytes: What one call reads and writes, for the number of copies.
        settings: How long to measure.

    Returns:
        The timing, and the outputs of all calls of the last execution.

    Raises:
        ChainError: If the compiled chain is not N times the call.
        ValueError: If there is too little data for a cold cache.
    """
    sets = input_sets(inputs, l2, nbytes)
    calls = max(_PILOT_CALLS, len(sets))
    chain = _Chain(function, sets, calls)
    wall_us, _ = chain.execute(times=5)
    wanted = math.ceil(settings.chain_us / (wall_us / calls))
    # The pilot chain may be bound by the host and so look longer than it is: once more if needed.
    while calls < min(wanted, _MAX_CALLS):
        calls = min(wanted, _MAX_CALLS)
        chain = _Chain(function, sets, calls)
        wall_us, _ = chain.execute(times=5)
        wanted = math.ceil(settings.chain_us / (wall_us / calls))

    chain.execute(times=max(1, math.ceil(settings.warm_up_us / wall_us)))
    times = max(2, math.ceil(settings.sample_us / wall_us))
    samples = [chain.execute(times) for _ in range(settings.samples)]
    enqueue_share = float(np.median([enqueue / wall for wall, enqueue in samples]))
    timing = timing_of([wall for wall, _ in samples], l2, calls, enqueue_share)
    return timing, chain.outputs


def timing_of(walls_us: Sequence[float], l2: L2State, calls: int, enqueue_share: float) -> Timing:
    """The timing of one call, from samples of a chain's time in microseconds."""
    per_call = np.array(walls_us) / calls
    return Timing(
        us=float(np.median(per_call)),
        us_p10=float(np.percentile(per_call, 10)),
        us_p90=float(np.percentile(per_call, 90)),
        us_min=float(np.min(per_call)),
        l2=l2,
        calls=calls,
        samples=len(walls_us),
        enqueue_share=enqueue_share,
    )


def input_sets(inputs: Inputs, l2: L2State, nbytes: int) -> list[Inputs]:
    """The inputs, and as many copies as a cold cache needs."""
    count = 1 if l2 == "warm" else 1 + math.ceil(_COLD_BYTES / nbytes)
    if count > _MAX_CALLS:
        raise ValueError(
            f"l2='cold': a call of {nbytes} bytes would need {count} input sets, "
            f"more than the {_MAX_CALLS} calls of the longest chain"
        )
    copies = [jax.tree.map(jnp.copy, inputs) for _ in range(count - 1)]
    return jax.block_until_ready([inputs, *copies])


class _Chain:
    """A compiled chain of calls with its inputs and its latest outputs.

    Each execution writes over the outputs of the one before (they are donated): with buffers at
    the same addresses a captured CUDA graph is launched again as it is.
    """

    def __init__(self, function: Callable[[Inputs], jax.Array], sets: list[Inputs], calls: int):
        call = jax.jit(function)
        out = jax.eval_shape(call, sets[0])
        self.outputs = [jnp.zeros(out.shape, out.dtype) for _ in range(calls)]
        self._sets = sets
        chain = jax.jit(unroll(call, calls), donate_argnums=0, keep_unused=True)
        # XLA's default keeps the order too (as of JAX 0.11.2); a benchmark should not rely on it.
        on_gpu = jax.default_backend() == "gpu"
        options = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"} if on_gpu else None
        self._compiled = chain.lower(self.outputs, sets).compile(compiler_options=options)
        check_all_calls_are_there(self._compiled.as_text() or "", calls)
        self.execute(times=3)  # graphs are captured and instantiated by the first executions

    def execute(self, times: int) -> tuple[float, float]:
        """Executes the chain and returns microseconds an execution: all, and to enqueue it."""
        start = time.perf_counter()
        for _ in range(times):
            self.outputs = self._compiled(self.outputs, self._sets)
        enqueued = time.perf_counter()
        jax.block_until_ready(self.outputs)
        end = time.perf_counter()
        return (end - start) * 1e6 / times, (enqueued - start) * 1e6 / times


def unroll(call: Callable[[Inputs], jax.Array], calls: int):
    """The function `(donated outputs, input sets) -> outputs` of N dependent calls."""

    def chain(_, sets):
        outputs = []
        for i in range(calls):
            inputs = sets[i % len(sets)]
            if outputs:
                inputs, outputs[-1] = jax.lax.optimization_barrier((inputs, outputs[-1]))
            with jax.named_scope(f"{_SCOPE}{i}"):
                outputs.append(call(inputs))
        outputs[-1] = jax.lax.optimization_barrier(outputs[-1])  # the last is as the others are
        return outputs

    return chain


def check_all_calls_are_there(hlo: str, calls: int) -> None:
    """Raises unless every call has the same number of operations in the compiled program.

    The first may have more: what depends on no input (an iota, say) is computed once.
    """
    counts = operations_by_call(hlo)
    expected = counts[min(1, calls - 1)]
    if expected == 0 or any(counts[i] != expected for i in range(1, calls)) or counts[0] < expected:
        raise ChainError(f"operations of each of the {calls} calls: {dict(sorted(counts.items()))}")


def operations_by_call(hlo: str) -> collections.Counter[int]:
    """Counts the operations of each call of a chain in the entry computation of compiled HLO."""
    counts = collections.Counter()
    _, _, entry = hlo.partition("\nENTRY ")
    for line in entry.partition("\n}")[0].splitlines():
        operation = re.match(r"\s+(?:ROOT )?%?\S+ = .*? ([a-z][\w-]*)\(", line)
        scope = re.search(rf'op_name="[^"]*/{_SCOPE}(\d+)/', line)
        if operation and scope and operation[1] not in _NO_WORK:
            counts[int(scope[1])] += 1
    return counts


_NO_WORK = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
