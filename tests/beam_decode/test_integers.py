"""Integers of every kind: 64-bit values are clamped, never wrapped into 32 bits.

Wrapped, 2**32 would be row 0 and 2**32 + 1 row 1: valid ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import beam_decode_attn
from tests.beam_decode.calls import Shape, check, dense_call, jagged, paged

SHAPE = Shape(width=2, context=4, beam_rows=3, steps=3)
BEYOND = [2**32, 2**32 + 1, -(2**32)]


def _eager(call):
    return beam_decode_attn(return_lse=True, **call)


MODES = {
    "numpy": (False, _eager),  # NumPy arrays as they come, without x64
    "x64": (True, lambda call: jax.jit(_eager)(call)),  # int64 tracers
}


@pytest.fixture(params=MODES)
def checked(request):
    """Checks a call in one of the modes."""
    x64, function = MODES[request.param]

    def check_call(call):
        with jax.enable_x64(x64):
            result = function(call)
        check(call, result)

    return check_call


def _call(**more):
    """A call whose integers are all int64, none beyond the range of int32 so far."""
    call = dense_call(SHAPE, seqused_k=np.array([4, 2]), attn_sink=np.zeros(4, np.float32))
    call["topk_indices"] = call["topk_indices"].astype(np.int64)
    return call | {"decode_nums": np.array([3, 2])} | more


def test_int64(checked):
    checked(_call())


def test_topk_indices(checked):
    call = _call()
    call["topk_indices"][0, 0, 0, :, 0] = BEYOND
    checked(call)


@pytest.mark.parametrize("decode_nums", [2**32 + 1, 2**32, -(2**32) + 2, np.array([2**32, -1])])
def test_decode_nums(checked, decode_nums):
    checked(_call(decode_nums=decode_nums))


def test_seqused_k(checked):
    checked(_call(seqused_k=np.array([2**32, -(2**32) + 3])))


def test_cu_seqlens_k(checked):
    call = jagged(_call(), filler=1.0)
    checked(call | {"cu_seqlens_k": np.array([-(2**32) + 2, 3, 2**32])})


def test_block_tables(checked):
    call = paged(_call(), page_size=2, filler=1.0)
    checked(call | {"block_tables": np.array([[2**32, 1], [3, -(2**32)]])})


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_other_widths(dtype, make):
    """The top of an unsigned range is past the end, not -1."""
    call = _call()
    call["topk_indices"] = call["topk_indices"].astype(dtype)
    call["topk_indices"][..., 0] = np.iinfo(dtype).max
    check(call, _eager(call | {"topk_indices": make(call["topk_indices"])}))


def test_lists():
    call = _call(seqused_k=[4, 1], decode_nums=[2, 3], attn_sink=[0.0, 1.0, 2.0, 3.0])
    check(call, _eager(call))


@pytest.mark.parametrize("form", ["dense", "jagged", "paged"])
def test_x64_mode_computes_the_same(form):
    """float32 stays float32, with float64 sinks and scales converted; one trace for all lengths."""
    traces = []

    @jax.jit
    def function(call):
        traces.append(1)
        return beam_decode_attn(return_lse=True, logits_soft_cap=3.0, **call)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for lengths in ([4, 2], [0, 3]):
            call = _call(seqused_k=np.array(lengths), softmax_scale=np.array(0.3))
            call = {"dense": dict, "jagged": jagged, "paged": lambda c: paged(c, 2)}[form](call)
            result = function(call | {"attn_sink": np.zeros(4)})
            assert [x.dtype for x in result] == [jnp.float32, jnp.float32]
            check(call | {"logits_soft_cap": 3.0}, result)
    assert len(traces) == 1


def test_x64_mode_under_vmap():
    call = _call()
    with jax.enable_x64(True):
        axes = {name: 0 if name in ("q", "topk_indices") else None for name in call}
        mapped = {name: x[None] if axes[name] == 0 else x for name, x in call.items()}
        out, lse = jax.vmap(_eager, (axes,))(mapped)
    check(call, (out[0], lse[0]))
