"""PyTorch's attention over a plain bf16 cache, timed as `bench.timing` times JAX.

N calls are captured into one CUDA graph, which is replayed back to back. Arrays are shared with JAX
through DLPack, not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from bench.timing import Inputs, L2State, Settings, Timing, input_sets, timing_of

_CALLS = 8
_SHARED = ("query", "k_dense", "v_dense")


def _torch() -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotImplementedError("PyTorch is not installed") from error
    if not torch.cuda.is_available():
        raise NotImplementedError("PyTorch sees no GPU")
    return torch


def attend(tensors: Mapping[str, Any]) -> Any:
    """Attention of the queries [B * Sq, Hq, D] over [B, T, Hkv, D], causal if Sq = T.

    By cuDNN or, where that does not serve the call, FlashAttention. A decoding query's heads of one
    KV head are made a sequence of queries, so that keys and values are read once for all of them.
    """
    torch = _torch()
    attention = torch.nn.attention
    backends = [attention.SDPBackend.CUDNN_ATTENTION, attention.SDPBackend.FLASH_ATTENTION]
    k, v = (tensors[name].transpose(1, 2) for name in ("k_dense", "v_dense"))
    query = tensors["query"]
    batch, kv_heads = k.shape[:2]
    prefill = query.shape[0] > batch
    if prefill:
        q = query.unflatten(0, (batch, -1)).transpose(1, 2)
    else:
        q = query.unflatten(1, (kv_heads, -1))
    with attention.sdpa_kernel(backends, set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=prefill, enable_gqa=prefill
        )
    if prefill:
        out = out.transpose(1, 2)
    return out.reshape(query.shape)


def time_call(
    function: Callable[[Mapping[str, Any]], Any],
    inputs: Inputs,
    *,
    l2: L2State,
    nbytes: int,
    settings: Settings,
) -> tuple[Timing, list[jax.Array]]:
    """Times `function(tensors)`; see `bench.timing.time_call`.

    Raises:
        NotImplementedError: Without PyTorch or a GPU.
    """
    torch = _torch()
    shared = {name: inputs[name] for name in _SHARED}
    sets = [
        {name: torch.from_dlpack(array) for name, array in each.items()}
        for each in input_sets(shared, l2, nbytes)
    ]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for each in sets:  # libraries are initialised and kernels chosen outside of the graph
            function(each)
    stream.synchronize()
    calls = max(_CALLS, len(sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = [function(sets[i % len(sets)]) for i in range(calls)]

    def replay(times: int) -> float:
        """Microseconds a replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / times

    replay(3)
    wall_us = replay(5)
    replay(max(1, math.ceil(settings.warm_up_us / wall_us)))
    times = max(2, math.ceil(settings.sample_us / wall_us))
    walls = [replay(times) for _ in range(settings.samples)]
    # A replay is enqueued as a whole, and events do not see the host.
    timing = timing_of(walls, l2, calls, enqueue_share=0.0)
    return timing, [jax.numpy.from_dlpack(output.contiguous()) for output in outputs]
