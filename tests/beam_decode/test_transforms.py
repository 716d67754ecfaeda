"""The operator inside jit, scan, while_loop and eval_shape, and its executables."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import beam_decode_attn
from tests.beam_decode.calls import Shape, check, dense_call, expected, jagged, paged
from tests.tolerances import TOLERANCES, assert_lse_close, assert_out_close

SHAPE = Shape()
F32 = TOLERANCES[jnp.dtype(jnp.float32)]


def _counting_jit():
    """The operator in jit, and a list that grows by one with every trace."""
    traces = []

    def function(call):
        traces.append(1)
        return beam_decode_attn(return_lse=True, **call)

    return jax.jit(function), traces


@pytest.mark.parametrize("form", ["dense", "jagged", "paged"])
def test_one_executable_for_all_lengths(form):
    step, traces = _counting_jit()
    for lengths in ([5, 5], [0, 3], [2, 0]):
        call = dense_call(SHAPE, seqused_k=np.array(lengths, np.int32))
        call = {"dense": dict, "jagged": jagged, "paged": lambda c: paged(c, 3)}[form](call)
        check(call, step(call))
    assert len(traces) == 1


@pytest.mark.parametrize("batched", [False, True])
def test_one_executable_for_all_steps_sinks_and_scales(batched):
    step, traces = _counting_jit()
    for decoded in (0, 1, 6, 7):
        call = dense_call(SHAPE, softmax_scale=np.array(0.1 * (1 + decoded), np.float32))
        call["attn_sink"] = np.full(4, decoded - 3, np.float32)
        call["decode_nums"] = np.array([decoded, 2], np.int32) if batched else decoded
        check(call, step(call))
    assert len(traces) == 1


def test_a_python_loop_compiles_once(caplog):
    """Eager calls with decode_nums as Python int: the value is no part of the program."""
    call = dense_call(Shape(width=5))

    def compilations(decoded):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            result = beam_decode_attn(return_lse=True, **call | {"decode_nums": decoded})
        check(call | {"decode_nums": decoded}, result)
        return sum("Compiling" in record.getMessage() for record in caplog.records)

    assert compilations(1) > 0
    assert [compilations(decoded) for decoded in (2, 3, 0, 2**40)] == [0, 0, 0, 0]


def test_in_scan():
    """A decode loop over steps as scan."""
    call = dense_call(SHAPE)
    others = {name: x for name, x in call.items() if name != "decode_nums"}

    @jax.jit
    def decode(others):
        def step(decoded, _):
            result = beam_decode_attn(decode_nums=decoded, return_lse=True, **others)
            return decoded + 1, result

        return jax.lax.scan(step, jnp.int32(0), length=4)[1]

    out, lse = decode(others)
    for decoded in range(4):
        check(call | {"decode_nums": decoded}, (out[decoded], lse[decoded]))


def test_in_while_loop_that_writes_its_cache():
    """Each step writes its rows and then attends to them; rows not yet written are NaN."""
    steps, width = 4, 3
    shape = Shape(width=width, steps=steps, beam_rows=steps * width)
    call = dense_call(shape)
    call["topk_indices"] = np.arange(steps * width, dtype=np.int32).reshape(1, 1, 1, steps, width)
    call["topk_indices"] = np.repeat(call["topk_indices"], 2, axis=0)
    last = 2

    @jax.jit
    def decode(call, last):
        def body(carry):
            step, k, v, *_ = carry
            start = step * width
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(
                    cache, jax.lax.dynamic_slice_in_dim(rows, start, width, axis=1), start, axis=1
                )
                for cache, rows in ((k, call["k_beam"]), (v, call["v_beam"]))
            )
            caches = {"k_beam": k, "v_beam": v, "decode_nums": step + 1}
            return step + 1, k, v, *beam_decode_attn(return_lse=True, **call | caches)

        unwritten = jnp.full_like(call["k_beam"], jnp.nan)
        out = jnp.zeros_like(call["q"])
        start = (jnp.int32(0), unwritten, unwritten, out, jnp.zeros(out.shape[:-1]))
        return jax.lax.while_loop(lambda carry: carry[0] < last, body, start)[3:]

    check(call | {"decode_nums": last}, decode(call, last))


def test_transposed_and_sliced_operands():
    """Inside jit an operand may come in any layout; the operator asks for row-major."""
    call = dense_call(Shape(heads=6, kv_heads=2))
    call["attn_sink"] = np.arange(6, dtype=np.float32)

    def wrap(x):
        """Reversed axes, every second element of a longer last axis, an odd start."""
        wide = np.repeat(np.asarray(x), 2, axis=-1)
        padded = np.pad(wide, [(1, 0)] * x.ndim, constant_values=7)
        return padded.T

    def unwrap(x):
        return x.T[(slice(1, None),) * x.ndim][..., ::2]

    wrapped = {name: wrap(x) for name, x in call.items() if x.ndim}

    @jax.jit
    def function(wrapped):
        operands = {name: unwrap(x) for name, x in wrapped.items()}
        return beam_decode_attn(decode_nums=6, return_lse=True, **operands)

    check(call, function(wrapped))


def test_under_disable_jit():
    call = dense_call(SHAPE, attn_sink=np.zeros(4, np.float32))
    with jax.disable_jit():
        check(call, beam_decode_attn(return_lse=True, **call))


def test_eval_shape():
    call = dense_call(SHAPE, "bfloat16")
    out, lse = jax.eval_shape(functools.partial(beam_decode_attn, return_lse=True), **call)
    assert (out.shape, out.dtype) == ((2, 1, 3, 4, 8), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 1, 3, 4), jnp.float32)
    assert jax.eval_shape(beam_decode_attn, **call).shape == out.shape


def test_the_reference_asks_for_full_precision():
    """A GPU's default for float32 is TF32; an oracle has to say no to that."""
    call = dense_call(SHAPE)
    program = jax.jit(lambda call: beam_decode_attn(implementation="reference", **call))
    products = [x for x in program.lower(call).as_text().splitlines() if "dot_general" in x]
    assert products
    assert all("[HIGHEST, HIGHEST]" in product for product in products)


def test_outputs_are_not_weakly_typed():
    """Or bf16 results would silently take the dtype of what they meet."""
    call = dense_call(SHAPE, "bfloat16", softmax_scale=0.5)
    for result in beam_decode_attn(return_lse=True, **call):
        assert not result.weak_type


def test_caches_stay_alive_unless_donated():
    call = {name: jnp.asarray(x) for name, x in dense_call(SHAPE).items()}
    want = expected(call)

    @functools.partial(jax.jit, donate_argnames="q")
    def function(q, rest):
        return beam_decode_attn(q, return_lse=True, **rest)

    rest = {name: x for name, x in call.items() if name != "q"}
    for _ in range(2):
        out, lse = function(call["q"] + 0, rest)
        assert_out_close(out, want[0], F32)
        assert_lse_close(lse, want[1], F32)


def test_under_strict_promotion_rules():
    """Nothing in the operator relies on implicit promotion of dtypes or ranks."""
    call = dense_call(Shape(batch=4, width=5), attn_sink=np.zeros(4, np.float32))
    call["seqused_k"] = np.array([5, 0, 3, 1], np.int32)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for form in (dict, jagged, lambda call: paged(call, 2)):
            traced = form(call) | {"logits_soft_cap": 2.0}
            check(traced, beam_decode_attn(return_lse=True, **traced))
