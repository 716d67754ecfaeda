"""The operator is forward-only, and says so instead of giving zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import beam_decode_attn
from tests.beam_decode.calls import Shape, dense_call

CALL = dense_call(
    Shape(),
    attn_sink=np.zeros(4, np.float32),
    softmax_scale=np.array(0.3, np.float32),
)
FLOATS = ["q", "k_context", "v_context", "k_beam", "v_beam", "attn_sink", "softmax_scale"]

refused = functools.partial(
    pytest.raises, NotImplementedError, match="beam_decode_attn is forward-only.*stop_gradient"
)


def _loss(q, **rest):
    return beam_decode_attn(q, **CALL | rest).sum()


def _of(name):
    """The loss as a function of one operand, and that operand."""

    def loss(x):
        return beam_decode_attn(**CALL | {name: x}).sum()

    return loss, CALL[name]


@pytest.mark.parametrize("name", FLOATS)
def test_grad(name):
    loss, x = _of(name)
    with refused():
        jax.grad(loss)(x)


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda loss, x: jax.vjp(loss, x),
        lambda loss, x: jax.jvp(loss, (x,), (x,)),
        lambda loss, x: jax.linearize(loss, x),
        lambda loss, x: jax.value_and_grad(loss)(x),
        lambda loss, x: jax.jacfwd(loss)(x),
        lambda loss, x: jax.hessian(loss)(x),
        lambda loss, x: jax.jit(jax.grad(loss))(x),
        lambda loss, x: jax.grad(jax.jit(loss))(x),
        lambda loss, x: jax.grad(jax.checkpoint(loss))(x),
        lambda loss, x: jax.vmap(jax.grad(loss))(jnp.stack([x, x])),
        lambda loss, x: jax.grad(lambda x: jax.vmap(loss)(x).sum())(jnp.stack([x, x])),
        lambda loss, x: jax.grad(
            lambda x: jax.lax.scan(lambda c, _: (c + loss(x), None), 0.0, length=2)[0]
        )(x),
        lambda loss, x: jax.eval_shape(jax.grad(loss), x),
    ],
    ids=[
        "vjp",
        "jvp",
        "linearize",
        "value_and_grad",
        "jacfwd",
        "hessian",
        "jit of grad",
        "grad of jit",
        "checkpoint",
        "vmap of grad",
        "grad of vmap",
        "scan",
        "eval_shape",
    ],
)
def test_every_way(differentiate):
    with refused():
        differentiate(*_of("q"))


def test_of_the_lse_alone():
    with refused():
        jax.grad(lambda q: beam_decode_attn(**CALL | {"q": q}, return_lse=True)[1].sum())(CALL["q"])


def test_of_an_empty_call():
    """Also where nothing is computed, so that a shape does not decide."""
    call = dense_call(Shape(context=0, steps=0))
    with refused():
        jax.grad(lambda q: beam_decode_attn(**call | {"q": q}).sum())(call["q"])


def test_stop_gradient():
    def loss(q):
        return (3 * q).sum() + beam_decode_attn(**CALL | {"q": jax.lax.stop_gradient(q)}).sum()

    np.testing.assert_array_equal(jax.grad(loss)(CALL["q"]), np.full_like(CALL["q"], 3))


def test_gradients_beside_the_operator():
    """Only what is differentiated matters, not what the operator is called with."""

    def loss(x):
        return (x * jnp.asarray(beam_decode_attn(**CALL))).sum()

    want = np.asarray(beam_decode_attn(**CALL))
    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones_like(want)), want)
