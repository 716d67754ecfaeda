"""The operator and the cache writers are forward-only, and say so instead of giving zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import (
    append_mla_cache,
    pack_mla_cache,
    sparse_mla_decode,
    unpack_mla_cache,
)
from tests.sparse_mla.calls import Shape, make_call
from tests.sparse_mla.oracle import E4M3
from tests.tolerances import MLA_OUT_RELATIVE

CALL = make_call(
    Shape(format="bf16", extra_topk=2),
    attn_sink=np.zeros(4, np.float32),
    softmax_scale=np.array(0.05, np.float32),
)
FLOATS = ["q", "kv_cache", "extra_kv_cache", "attn_sink", "softmax_scale"]
KEYS = np.ones((2, 3, 1, 576), np.float32)
FLOAT8 = np.zeros((2, 3, 1, 656), np.uint8).view(E4M3)


def refused(name):
    return pytest.raises(NotImplementedError, match=rf"{name}.*forward-only.*stop_gradient")


def _total(x):
    return jnp.sum(x.astype(jnp.float32))


@pytest.mark.parametrize("name", FLOATS)
def test_decode(name):
    with refused("sparse_mla_decode"):
        jax.grad(lambda x: _total(sparse_mla_decode(**CALL | {name: x})))(CALL[name])


def _loss(q):
    return _total(sparse_mla_decode(**CALL | {"q": q}))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda q: jax.jvp(_loss, (q,), (q,)),
        lambda q: jax.linearize(_loss, q),
        lambda q: jax.jit(jax.grad(_loss))(q),
        lambda q: jax.grad(jax.jit(_loss))(q),
        lambda q: jax.grad(jax.checkpoint(_loss))(q),
        lambda q: jax.grad(lambda q: jax.vmap(_loss)(q).sum())(jnp.stack([q, q])),
    ],
    ids=["jvp", "linearize", "jit of grad", "grad of jit", "checkpoint", "grad of vmap"],
)
def test_decode_in_every_way(differentiate):
    with refused("sparse_mla_decode"):
        differentiate(CALL["q"])


def test_of_the_lse_alone_and_of_an_empty_call():
    with refused("sparse_mla_decode"):
        jax.grad(lambda q: sparse_mla_decode(**CALL | {"q": q}, return_lse=True)[1].sum())(
            CALL["q"]
        )
    call = make_call(Shape(topk=0))
    with refused("sparse_mla_decode"):
        jax.grad(lambda q: _total(sparse_mla_decode(**call | {"q": q})))(call["q"])


@pytest.mark.parametrize("format, dqk", [("v32", 576), ("model1", 512)])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap], ids=["", "jit", "vmap"])
def test_pack(format, dqk, transform):
    """Bytes have no tangents: without a refusal the gradient of a round trip is zero."""

    def loss(keys):
        return unpack_mla_cache(pack_mla_cache(keys, format), format).sum()

    keys = KEYS[None, ..., :dqk] if transform is jax.vmap else KEYS[..., :dqk]
    with refused("pack_mla_cache"):
        jax.grad(lambda keys: jnp.sum(transform(loss)(keys)))(keys)


@pytest.mark.parametrize("format, dtype", [("v32", np.uint8), ("v32", E4M3), ("bf16", None)])
def test_append(format, dtype):
    cache = np.zeros((2, 3, 1, 576), jnp.bfloat16) if dtype is None else FLOAT8.view(dtype)
    append = functools.partial(append_mla_cache, slot_mapping=np.array([1]), format=format)
    with refused("append_mla_cache"):
        jax.grad(lambda key: _total(append(cache, key)))(np.ones((1, 576), np.float32))
    if dtype != np.uint8:
        with refused("append_mla_cache"):
            jax.grad(lambda cache: _total(append(cache, np.ones((1, 576), np.float32))))(cache)


def test_a_float8_cache():
    """JAX calls float8 a float, and the derivative of its bits zero."""
    call = make_call(Shape())
    with refused("sparse_mla_decode"):
        jax.grad(lambda cache: _total(sparse_mla_decode(**call | {"kv_cache": cache})))(
            call["kv_cache"].view(E4M3)
        )
    with refused("unpack_mla_cache"):
        jax.grad(lambda cache: unpack_mla_cache(cache, "v32").sum())(FLOAT8)


def test_stop_gradient_and_gradients_beside_the_operator():
    def loss(x):
        q = jax.lax.stop_gradient(x)
        cache = pack_mla_cache(jax.lax.stop_gradient(jnp.asarray(KEYS)), "v32")
        out = sparse_mla_decode(q, cache, np.zeros((1, 1, 1), np.int32))
        return (x[..., :512] * out.astype(jnp.float32)).sum().astype(jnp.float32)

    q = jnp.ones((1, 1, 2, 576), jnp.bfloat16)
    grad = jax.grad(lambda q: loss(q))(q)
    np.testing.assert_allclose(np.asarray(grad[..., :512], np.float32), 1, rtol=MLA_OUT_RELATIVE)
