"""Axes of size zero: the right shapes, zeros and -inf, and nothing launched for nothing."""

import jax
import numpy as np
import pytest

from jax_beam_attn import beam_decode_attn
from tests.beam_decode.calls import CONTEXT, Shape, check, dense_call, jagged, paged, run

ZERO = {
    "no sample": {"batch": 0},
    "no beam": {"width": 0},
    "no context": {"context": 0},
    "no beam rows": {"beam_rows": 0},
    "no steps": {"steps": 0},
}
NOTHING_TO_ATTEND_TO = {
    "no context, no steps": {"context": 0, "steps": 0},
    "no context, no beam rows": {"context": 0, "beam_rows": 0},
}
SINK = np.array([0.0, np.inf, -np.inf, 3e38], np.float32)


@pytest.mark.parametrize("sizes", ZERO.values(), ids=ZERO)
def test_dense(sizes):
    check(dense_call(Shape(**sizes), "bfloat16", attn_sink=SINK))


@pytest.mark.parametrize("sizes", NOTHING_TO_ATTEND_TO.values(), ids=NOTHING_TO_ATTEND_TO)
@pytest.mark.parametrize("form", [dict, jagged, lambda call: paged(call, page_size=2)])
def test_nothing_to_attend_to(sizes, form):
    call = form(dense_call(Shape(**sizes), "float16", attn_sink=SINK))
    out, lse = run(call)
    np.testing.assert_array_equal(out, np.zeros((2, 1, 3, 4, 8), np.float16))
    np.testing.assert_array_equal(lse, np.full((2, 1, 3, 4), -np.inf, np.float32))


def test_nothing_is_computed_for_nothing():
    """The program of an empty call holds constants only; a full one multiplies matrices."""

    def program(**sizes):
        call = dense_call(Shape(**sizes))
        return jax.jit(lambda call: beam_decode_attn(**call)).lower(call).as_text()

    assert "dot_general" in program()
    for sizes in (*NOTHING_TO_ATTEND_TO.values(), {"batch": 0}, {"width": 0}):
        assert "dot_general" not in program(**sizes)


@pytest.mark.parametrize("with_beams", [True, False])
@pytest.mark.parametrize(
    "pool, max_pages",
    [((0, 2), 3), ((4, 0), 3), ((4, 2), 0), ((0, 0), 0)],
    ids=["no page in the pool", "pages of no token", "tables of no page", "nothing at all"],
)
def test_paged_context_of_nothing(pool, max_pages, with_beams):
    call = dense_call(Shape(steps=2 if with_beams else 0))
    for name in CONTEXT:
        call[name] = np.ones((*pool, *call[name].shape[2:]), np.float32)
    call["block_tables"] = np.zeros((2, max_pages), np.int32)
    call["seqused_k"] = np.array([1, 4], np.int32)
    check(call)


@pytest.mark.parametrize("with_beams", [True, False])
def test_jagged_context_of_nothing(with_beams):
    call = dense_call(Shape(context=0, steps=2 if with_beams else 0))
    call = jagged(call, margin=0)
    assert call["k_context"].shape[0] == 0
    check(call)


def test_jagged_context_without_samples():
    check(jagged(dense_call(Shape(batch=0))))


def test_no_beams_with_operands_that_others_have():
    """decode_nums may be positive though no step has indices."""
    check(dense_call(Shape(steps=0), decode_nums=3, seqused_k=np.array([2, 0], np.int32)))
