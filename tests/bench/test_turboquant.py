import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as command
from bench import shapes, turboquant
from bench.check import relative_error

IDS = [shape.id for shape in shapes.TURBOQUANT_QUICK]


@pytest.mark.parametrize("shape", shapes.TURBOQUANT_QUICK, ids=IDS)
def test_inputs_read_what_the_floor_counts(shape):
    inputs = turboquant.make_inputs(shape)
    queries = shape.batch * (shape.context if shape.prefill else 1)
    assert inputs["query"].shape == (queries, shape.heads, shape.head_dim)
    assert inputs["query"].dtype == jnp.bfloat16
    num_blocks, block_size, kv_heads, slot_bytes = inputs["kv_cache"].shape
    assert (block_size, kv_heads, slot_bytes) == (16, shape.kv_heads, shape.slot_bytes)
    # Every block is read once, by one request.
    np.testing.assert_array_equal(np.sort(inputs["block_table"], axis=None), np.arange(num_blocks))
    assert (np.asarray(inputs["seq_lens"]) == shape.context).all()
    whole = shape.batch * -(-shape.context // block_size) * block_size
    cache = inputs["kv_cache"].size * shape.batch * shape.context // whole
    assert shape.nbytes == cache + (4 * inputs["query"].size if shape.prefill else 0)
    assert turboquant.format_of(inputs).slot_bytes == shape.slot_bytes


@pytest.mark.parametrize("shape", turboquant.SUITE.shapes, ids=lambda shape: shape.id)
def test_presets_have_the_published_bytes(shape):
    sizes = {"head_dim": shape.head_dim, "num_kv_heads": shape.kv_heads, "block_size": 16}
    format = turboquant.TurboQuantFormat.preset(shape.preset, **sizes)
    assert format.slot_bytes == shape.slot_bytes


@pytest.mark.parametrize("shape", shapes.TURBOQUANT_QUICK, ids=IDS)
def test_the_dense_cache_is_the_same(shape, monkeypatch):
    inputs = turboquant.make_inputs(shape)
    assert inputs["k_dense"].shape == inputs["v_dense"].shape
    assert inputs["k_dense"].shape[:2] == (shape.batch, shape.context)  # some peers take no lengths
    expected = turboquant.reference(inputs)
    assert expected.dtype == jnp.float32
    assert relative_error(turboquant.xla_dense(inputs), expected) < 1e-2
    # XLA's attention in cuDNN's place.
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *arrays, implementation, **options: attention(*arrays, **options),
    )
    assert relative_error(turboquant.cudnn_dense(inputs), expected) < 1e-2
    assert relative_error(turboquant.cudnn_dequantized(inputs), expected) < 1e-2


def test_a_prefill_sees_half_of_what_is_there():
    shape = next(shape for shape in shapes.TURBOQUANT_QUICK if shape.prefill)
    assert shape.flop == 4 * 2 * 4 * 64 * sum(range(1, 49))


def test_command(capsys):
    quick = ["--suite", "turboquant", "--quick", "--commit", "cccc", "--ids", "quick-4bit_nc"]
    quick += ["--l2", "warm", "--implementations", "reference", "triton", "torch_sdpa", "xla_dense"]
    assert command.main(quick) == 0
    printed = capsys.readouterr().out
    assert "quick-4bit_nc-warm triton\n  skipped: turboquant_attention" in printed
    assert "quick-4bit_nc-warm torch_sdpa\n  skipped: PyTorch" in printed
    assert printed.rstrip().splitlines()[-1].startswith("quick-4bit_nc-warm")
