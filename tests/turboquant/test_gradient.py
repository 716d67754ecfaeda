"""The operator and the cache writer are forward-only, and say so instead of giving zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import turboquant_store
from tests.turboquant.calls import Shape, arrays_of, codebook, function_of, make_call

CALL = make_call(Shape(), sinks=np.zeros(6, np.float32), softmax_scale=np.array(0.3, np.float32))
FLOATS = ["query", "rotation", "centroids", "sinks", "softmax_scale"]


def refused(name):
    return pytest.raises(NotImplementedError, match=rf"{name}.*forward-only.*stop_gradient")


def _loss(**changed):
    out, lse = function_of(CALL)(**arrays_of(CALL) | changed)
    return jnp.sum(out) + jnp.sum(lse)


@pytest.mark.parametrize("name", FLOATS)
def test_attention(name):
    with refused("turboquant_attention"):
        jax.grad(lambda x: _loss(**{name: x}))(CALL[name])


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, q: jax.jvp(f, (q,), (q,)),
        lambda f, q: jax.linearize(f, q),
        lambda f, q: jax.jit(jax.grad(f))(q),
        lambda f, q: jax.grad(jax.jit(f))(q),
        lambda f, q: jax.grad(jax.checkpoint(f))(q),
        lambda f, q: jax.grad(lambda q: jax.vmap(f)(q).sum())(jnp.stack([q, q])),
    ],
    ids=["jvp", "linearize", "jit of grad", "grad of jit", "checkpoint", "grad of vmap"],
)
def test_in_every_way(differentiate):
    with refused("turboquant_attention"):
        differentiate(lambda q: _loss(query=q), CALL["query"])


@pytest.mark.parametrize("key_bits", [4, 8])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["", "jit"])
def test_store(key_bits, which, transform):
    """Bytes have no tangents: without a refusal the gradient of a round trip is zero."""
    format = Shape(key_bits=key_bits).format
    cache = np.zeros(format.cache_shape(2), np.uint8)
    store = functools.partial(turboquant_store, format=format, **codebook(format))
    tokens = [np.ones((1, 2, 16), np.float32)] * 2

    def loss(x):
        changed = [x if n == which else y for n, y in enumerate(tokens)]
        return jnp.sum(store(cache, *changed, np.array([1])).astype(jnp.float32))

    with refused("turboquant_store"):
        jax.grad(transform(loss))(tokens[which])


def test_stop_gradient_and_gradients_beside_the_operator():
    def loss(q):
        out, _ = function_of(CALL)(**arrays_of(CALL) | {"query": jax.lax.stop_gradient(q)})
        return (q * out).sum(), out

    grad, out = jax.grad(loss, has_aux=True)(jnp.asarray(CALL["query"]))
    np.testing.assert_array_equal(grad, out)
