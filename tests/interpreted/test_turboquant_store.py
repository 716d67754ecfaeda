"""The cache writer's kernel on small shapes, against the oracle."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import TurboQuantFormat
from jax_beam_attn._core.operator import Call
from jax_beam_attn._core.target import TARGETS
from jax_beam_attn.turboquant import cache as cache_module
from tests.turboquant import test_store
from tests.turboquant.calls import FREE, codebook
from tests.turboquant.test_store import check, poisoned, small, tokens


def run_kernel(cache, key, value, slots, format, book, monkeypatch):
    def run(operands, format):
        from jax_beam_attn.turboquant import store_triton

        call = Call(format, None, TARGETS["a100"], {})
        assert store_triton.unsupported(operands, call) is None
        return store_triton.run(operands, call)

    monkeypatch.setattr(cache_module, "store", run)
    arrays = (jnp.asarray(x) for x in (cache, key, value, slots))
    return cache_module.turboquant_store(*arrays, format=format, **book)


@pytest.mark.parametrize("key_bits, value_bits, nc", FREE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 24, 40])
def test_formats(key_bits, value_bits, nc, dtype, head_dim, monkeypatch):
    format = small(key_bits, value_bits, nc, head_dim=head_dim, heads=3, block_size=4)
    slots = np.array([0, 2, 3, 15, -1, 16, 2**31 - 1, -(2**31), 7], np.int32)
    key, value = tokens(len(slots), format, dtype=jnp.dtype(dtype))
    book = codebook(format, 0)
    arguments = poisoned(format), key, value, slots, format, book
    check(*arguments, run_kernel(*arguments, monkeypatch))


@pytest.mark.parametrize("key_bits", [3, 4, 8])
@pytest.mark.parametrize("case", test_store.SATURATING)
def test_finite_in_is_finite_out(key_bits, case, monkeypatch):
    of_key, of_value, offset = test_store.SATURATING[case]
    format = TurboQuantFormat(32, 1, 3, key_bits, 4, True)
    key, value = np.clip(tokens(2, format) / 8, -1, 1)
    key, value = key * np.float32(of_key), value * np.float32(of_value) + np.float32(offset)
    arguments = poisoned(format), key, value, np.array([1, 5], np.int32), format, codebook(format)
    check(*arguments, run_kernel(*arguments, monkeypatch))


def test_every_e4m3(monkeypatch):
    """Numbers at, between and half-way between those of the format, and beyond its largest."""
    numbers = np.arange(0x7F, dtype=np.uint8).view(test_store.oracle.E4M3).astype(np.float32)
    between = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(between, np.float32(x)) for x in (0, np.inf)]
    keys = np.concatenate([numbers, between, *near, [449, 460, 480, 1e9, 3e38]])
    keys = np.concatenate([keys, -keys]).astype(np.float32)
    keys = np.pad(keys, (0, -len(keys) % 16)).reshape(-1, 1, 16)
    format = TurboQuantFormat(16, 1, 8, 8, 4, False)
    slots = np.arange(len(keys), dtype=np.int32)
    book = {"rotation": None, "centroids": None}
    arguments = poisoned(format, -(-len(keys) // 8)), keys, keys, slots, format, book
    check(*arguments, run_kernel(*arguments, monkeypatch))


@pytest.mark.parametrize("bits", [3, 4])
def test_values_between_two_codes(bits, monkeypatch):
    format = small(8, bits, head_dim=64, heads=8, block_size=16)
    key, value = test_store.ties(format, 160)
    book = {"rotation": None, "centroids": None}
    arguments = poisoned(format, 10), key, value, np.arange(160), format, book
    codes = test_store.stored_value_codes(run_kernel(*arguments, monkeypatch), format)
    np.testing.assert_array_equal(codes, test_store.codes_in_float32(value, bits))


def test_without_tokens(monkeypatch):
    format = small()
    key, value = tokens(0, format)
    arguments = poisoned(format), key, value, np.zeros(0, np.int32), format, codebook(format)
    np.testing.assert_array_equal(run_kernel(*arguments, monkeypatch), poisoned(format))
