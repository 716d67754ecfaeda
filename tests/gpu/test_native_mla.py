"""The native cache writer and schedule on the GPU: bit for bit what `jax.numpy` computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import append_mla_cache, mla_schedule, pack_mla_cache
from jax_beam_attn._core import native
from jax_beam_attn.sparse_mla.schedule import ScheduleStatic
from tests.pairwise import covering_rows
from tests.sparse_mla.oracle import BF16, E4M3, HEAD_DIM, TOKEN_BYTES
from tests.sparse_mla.writers import (
    KINDS,
    assert_append_equal,
    assert_schedule_equal,
    keys_of,
)

pytestmark = pytest.mark.usefixtures("registered")

INT32 = np.iinfo(np.int32)

APPEND = covering_rows(
    {
        "format": ["v32", "model1", "bf16", "bf16 512"],
        "key_dtype": [np.float32, BF16],
        "cache_dtype": [np.uint8, np.int8, E4M3],
        "page_size": [64, 1, 3, 7, 256],
        "padding": [None, 0, 24],
        "count": [1, 3, 4, 5, 1000],
        "kind": KINDS,
    },
    at_least=60,
)
SCHEDULE = covering_rows(
    {
        "groups": [1, 3],
        "batch": [0, 1, 31, 32, 129, 512, 4096, 4097, 8193, 40_000],
        "seqlen_q": [1, 0, 2],
        "topk": [2048, 1, 64, 100_000],
        "extra_topk": [0, 192],
        "lengths": ["main", "extra", "both"],
        "per_token": [False, True],
        "num_parts": [1, 2, 132, 160, 2000],
        "spread": ["any", "equal", "one long", "zero", "extreme"],
    },
    at_least=80,
)


@pytest.mark.parametrize("seed, row", list(enumerate(APPEND)), ids=str)
def test_append(seed, row):
    format, page_size, count = row["format"].split()[0], row["page_size"], row["count"]
    rng = np.random.default_rng(seed)
    blocks = -(-count // page_size) + 2
    if format == "bf16":
        head_dim = 512 if "512" in row["format"] else 576
        shape, width, dtype = (blocks, page_size, 1, head_dim), 2, BF16
    else:
        head_dim, width, dtype = HEAD_DIM[format], 1, row["cache_dtype"]
        shape = (blocks, page_size, 1, TOKEN_BYTES[format])
        if row["padding"] is not None:
            alignment = {"v32": 16, "model1": 8}[format]
            padding = row["padding"] // alignment * alignment
            shape = (blocks, page_size * TOKEN_BYTES[format] + padding)
    cache = rng.integers(0, 256, width * int(np.prod(shape)), np.uint8).view(dtype).reshape(shape)
    outside = [-1, blocks * page_size, INT32.min, INT32.max]
    slots = rng.permutation(np.array([*range(blocks * page_size), *outside]))[:count]
    keys = keys_of(row["kind"], seed, count, head_dim, row["key_dtype"])
    assert_append_equal(cache, keys, slots.astype(np.int32), format, page_size)


@pytest.mark.parametrize("format", HEAD_DIM)
def test_a_gpu_and_a_cpu_write_the_same_bytes(format):
    """A quotient near a tie of e4m3 rounds the same way: one in a million is near one."""
    keys = np.random.default_rng(0).standard_normal((64, 64, 1, HEAD_DIM[format]), np.float32)
    pack = jax.jit(lambda keys: pack_mla_cache(keys, format))
    want = pack(jax.device_put(keys, jax.devices("cpu")[0]))
    np.testing.assert_array_equal(pack(keys), want)
    flat = keys.reshape(-1, HEAD_DIM[format])
    slots = np.arange(len(flat), dtype=np.int32)
    got = append_mla_cache(jnp.zeros(want.shape, jnp.uint8), flat, slots, format)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", ["v32", "model1", "bf16"])
def test_append_past_2_to_the_31_bytes(format):
    token = {"v32": 656, "model1": 584, "bf16": 576}[format]
    dtype = jnp.bfloat16 if format == "bf16" else jnp.uint8
    blocks = 2**31 // (64 * token) + 100
    keys = keys_of("normal", 0, 2, HEAD_DIM.get(format, 576), np.float32)
    slots = np.array([64 * blocks - 1, 0], np.int32)
    append = jax.jit(lambda c, k, s: append_mla_cache(c, k, s, format), donate_argnums=0)
    cache = append(jnp.zeros((blocks, 64, 1, token), dtype), keys, slots)
    got = np.asarray(jnp.concatenate([cache[-1:], cache[:1]])).view(np.uint8)
    small = np.zeros((2, 64, 1, token), dtype)
    want = append_mla_cache(small, keys, np.array([63, 64], np.int32), format)
    np.testing.assert_array_equal(got, np.asarray(want).view(np.uint8))


def test_append_is_in_place_when_donated():
    cache = jnp.full((64, 64, 1, 656), 7, jnp.uint8)

    def append(cache):
        return append_mla_cache(cache, jnp.ones((1, 576)), jnp.array([2]), "v32")

    kept = jax.jit(append)(cache)
    assert (np.asarray(cache) == 7).all()
    pointer = cache.unsafe_buffer_pointer()
    donated = jax.jit(append, donate_argnums=0)(cache)
    assert donated.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(donated, kept)


def test_append_in_the_carry_of_scan():
    keys, slots = keys_of("normal", 0, 5, 512, BF16), np.array([0, 9, -1, 130, 77], np.int32)
    cache = np.zeros((64, 3, 1, 584), np.uint8)

    def step(cache, x):
        return append_mla_cache(cache, x[0][None], x[1][None], "model1"), None

    loop = jax.jit(lambda c, *xs: jax.lax.scan(step, c, xs)[0], donate_argnums=0)
    got = loop(jnp.asarray(cache), keys, slots)
    np.testing.assert_array_equal(got, append_mla_cache(cache, keys, slots, "model1"))


def _lengths(spread, rng, shape, topk):
    if spread == "any":
        return rng.integers(0, topk + 1, shape)
    if spread == "extreme":
        return rng.choice(np.array([INT32.min, -1, 0, 1, topk - 1, topk + 1, INT32.max]), shape)
    lengths = np.full(shape, {"equal": topk // 2, "one long": 1, "zero": 0}[spread])
    if spread == "one long" and lengths.size:
        lengths.flat[rng.integers(lengths.size)] = topk
    return lengths


@pytest.mark.parametrize("seed, row", list(enumerate(SCHEDULE)), ids=str)
def test_schedule(seed, row):
    batch, seqlen_q = row["batch"], row["seqlen_q"]
    shape = (row["groups"], batch, seqlen_q) if row["per_token"] else (row["groups"], batch)
    rng = np.random.default_rng(seed)
    lengths = {}
    if row["lengths"] != "extra":
        lengths["topk_length"] = _lengths(row["spread"], rng, shape, row["topk"])
    if row["lengths"] != "main":
        lengths["extra_topk_length"] = _lengths(row["spread"], rng, shape, row["extra_topk"])
    lengths = {name: each.astype(np.int32) for name, each in lengths.items()}
    static = ScheduleStatic(batch, seqlen_q, row["topk"], row["extra_topk"], row["num_parts"])
    assert_schedule_equal(lengths, static)


def test_schedule_at_the_limit_of_int32():
    lengths = np.array([[INT32.max, 700_000_000, 1]], np.int32)
    static = ScheduleStatic(3, 1, 700_000_000, 700_000_000, 132)
    assert_schedule_equal({"topk_length": lengths}, static)


def test_native_is_what_a_gpu_runs():
    append = jax.jit(lambda c, k, s: append_mla_cache(c, k, s, "v32"))
    keys = np.ones((1, 576), np.float32)
    lowered = append.lower(np.zeros((2, 4, 1, 656), np.uint8), keys, np.zeros(1, np.int32))
    assert native.APPEND_MLA in lowered.as_text()
    make = jax.jit(lambda x: mla_schedule(x, batch=3, seqlen_q=1, num_heads=8, topk=640))
    assert native.MLA_SCHEDULE in make.lower(np.zeros(3, np.int32)).as_text()
