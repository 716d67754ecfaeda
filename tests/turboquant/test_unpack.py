"""The inline assembly of the kernels on all kinds of words, through a small PTX interpreter."""

import re

import ml_dtypes
import numpy as np
import pytest

from jax_beam_attn._core import availability
from jax_beam_attn._core.target import TARGETS
from tests.ptx import execute
from tests.turboquant.oracle import E4M3

_NO_TRITON = availability.triton_unavailable(TARGETS["h200"])
pytestmark = pytest.mark.skipif(_NO_TRITON is not None, reason=str(_NO_TRITON))

WORDS = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
WORDS[:3] = 0, 2**32 - 1, 0x89ABCDEF


def assembly(name):
    from jax_beam_attn.turboquant import unpack_triton

    return getattr(unpack_triton, name).value


def halves(results, dtype):
    """Operands $0, $1, ... as numbers [words, operands]."""
    numbers = [results[n].astype(np.uint16).view(dtype) for n in range(len(results))]
    return np.stack(numbers, axis=1)


def codes(words, bits):
    return (words[:, None] >> (bits * np.arange(8, dtype=np.uint32))) & (2**bits - 1)


def tables(codebook):
    """Byte tables of an fp16 codebook as words: low bytes, then high bytes."""
    bits = codebook.view(np.uint16)
    parts = ((bits & 255).astype(np.uint8), (bits >> 8).astype(np.uint8))
    return [word for part in parts for word in part.view("<u4")]


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_keys(bits, seed):
    codebook = np.random.default_rng(seed).standard_normal(2**bits).astype(np.float16)
    inputs = {8: WORDS} | {9 + n: word for n, word in enumerate(tables(codebook))}
    got = halves(execute(assembly(f"_KEYS_OF_{bits}_BITS"), inputs), np.float16)
    np.testing.assert_array_equal(got, codebook[codes(WORDS, bits)])


def test_values_of_4_bits():
    """The even ones first."""
    got = halves(execute(assembly("_VALUES_OF_4_BITS"), {8: WORDS}), ml_dtypes.bfloat16)
    want = codes(WORDS, 4)[:, [0, 2, 4, 6, 1, 3, 5, 7]].astype(int) - 8
    np.testing.assert_array_equal(got.astype(int), want)


def test_the_columns_of_values():
    from jax_beam_attn.turboquant.unpack_triton import dimension_of_value

    dimensions = dimension_of_value.fn(np.arange(16))
    np.testing.assert_array_equal(dimensions[:8], [0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(dimensions[8:], dimensions[:8] + 8)


def test_values_of_3_bits():
    """What is above the 24 bits does not matter."""
    got = halves(execute(assembly("_VALUES_OF_3_BITS"), {8: WORDS}), ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got.astype(int), codes(WORDS, 3).astype(int) - 4)


def test_keys_of_8_bits():
    got = halves(execute(assembly("_KEYS_OF_8_BITS"), {4: WORDS}), np.float16)
    want = WORDS.view(E4M3).reshape(-1, 4).astype(np.float32)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[finite].astype(np.float32) * 256, want[finite])


@pytest.mark.parametrize("name", ["keys_of_4_bits", "values_of_4_bits", "keys_of_8_bits"])
def test_constraints_match_operands(name):
    """Each operand of the assembly has a constraint, outputs first."""
    import inspect

    from jax_beam_attn.turboquant import unpack_triton

    source = inspect.getsource(getattr(unpack_triton, name).fn)
    constraints = re.search(r'"(=h[^"]*)"', source)[1].split(",")
    used = re.findall(r"\$(\d+)", assembly(f"_{name.upper()}"))
    assert len(constraints) == 1 + max(map(int, used))
    assert constraints.count("=h") == constraints.index("r")
