import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import timing
from bench.timing import QUICK, ChainError, Settings, time_call


def inputs():
    return {
        "q": jnp.linspace(0.0, 1.0, 64, dtype=jnp.float32).reshape(8, 8),
        "k": jnp.linspace(1.0, 2.0, 64, dtype=jnp.float32).reshape(8, 8),
    }


def two_products(x):
    # The second product does not depend on q.
    return x["q"] @ x["k"] + x["k"] @ x["k"]


def compiled_chain(call, sets, calls):
    outputs = [jnp.zeros((8, 8)) for _ in range(calls)]
    chain = jax.jit(timing.unroll(jax.jit(call), calls), donate_argnums=0, keep_unused=True)
    return chain.lower(outputs, sets).compile(), outputs


def test_each_execution_computes_every_call():
    executed = []

    def count(q):
        executed.append(1)
        return q

    # A pure callback is fair game for every simplification that a custom call is.
    def call(x):
        return jax.pure_callback(count, jax.ShapeDtypeStruct((8, 8), jnp.float32), x["q"])

    chain, outputs = compiled_chain(call, [inputs()], 12)
    outputs = chain(outputs, [inputs()])
    jax.block_until_ready(chain(outputs, [inputs()]))
    assert len(executed) == 24


@pytest.mark.parametrize("copies", [1, 3])
def test_work_is_neither_merged_nor_shared_between_calls(copies):
    chain, _ = compiled_chain(two_products, [inputs()] * copies, 9)
    hlo = chain.as_text()
    assert hlo is not None
    assert hlo.count(" dot(") == 2 * 9
    assert " copy(" not in hlo
    counts = timing.operations_by_call(hlo)
    assert set(counts) == set(range(9))
    assert min(counts.values()) >= 2
    timing.check_all_calls_are_there(hlo, 9)


def test_inputs_are_arguments_and_outputs_are_donated():
    chain, outputs = compiled_chain(two_products, [inputs()] * 2, 4)
    assert len(jax.tree.leaves(chain.in_avals)) == 4 + 2 * 2
    addresses = [each.unsafe_buffer_pointer() for each in outputs]
    outputs = jax.block_until_ready(chain(outputs, [inputs()] * 2))
    assert [each.unsafe_buffer_pointer() for each in outputs] == addresses


def untied(x):
    outputs = []
    for i in range(4):
        with jax.named_scope(f"timed_call_{i}"):
            outputs.append(jax.jit(two_products)(x))
    return outputs


def tied_but_dead(x):
    out = x["q"]
    for i in range(4):
        x, _ = jax.lax.optimization_barrier((x, out))
        with jax.named_scope(f"timed_call_{i}"):
            out = jax.jit(two_products)(x)
    return out


@pytest.mark.parametrize("chain", [untied, tied_but_dead])
def test_a_chain_that_lost_calls_is_found(chain):
    hlo = jax.jit(chain).lower(inputs()).compile().as_text()
    assert hlo is not None
    with pytest.raises(ChainError):
        timing.check_all_calls_are_there(hlo, 4)


def test_timing_and_outputs():
    measured, outputs = time_call(two_products, inputs(), l2="warm", nbytes=768, settings=QUICK)
    assert measured.calls >= 8
    assert len(outputs) == measured.calls
    for out in outputs:
        np.testing.assert_allclose(out, two_products(inputs()), rtol=1e-6)
    assert 0 < measured.us_min <= measured.us_p10 <= measured.us <= measured.us_p90
    assert measured.samples == QUICK.samples


def test_short_chains_are_lengthened():
    settings = Settings(samples=2, sample_us=10, warm_up_us=0, chain_us=1e6)
    measured, _ = time_call(two_products, inputs(), l2="warm", nbytes=768, settings=settings)
    assert measured.calls == 256


def test_time_is_that_of_one_call():
    def slow(x):
        return jax.lax.fori_loop(0, 2000, lambda _, q: jnp.sin(q) @ x["k"], x["q"])

    def slower(x):
        return jax.lax.fori_loop(0, 20000, lambda _, q: jnp.sin(q) @ x["k"], x["q"])

    times = [
        time_call(call, inputs(), l2="warm", nbytes=768, settings=QUICK)[0].us_min
        for call in (slow, slower)
    ]
    assert 4 < times[1] / times[0] < 25  # 10, on a busy machine


def test_cold_inputs_are_enough_copies():
    sets = timing.input_sets(inputs(), "cold", nbytes=50_000_000)
    # Between two uses of a set, at least three times the 60 MB of the cache are touched.
    assert (len(sets) - 1) * 50 >= 180
    pointers = {each["q"].unsafe_buffer_pointer() for each in sets}
    assert len(pointers) == len(sets)
    measured, _ = time_call(two_products, inputs(), l2="cold", nbytes=15_000_000, settings=QUICK)
    assert measured.l2 == "cold"
    assert measured.calls >= 13


def test_too_little_data_for_a_cold_cache():
    with pytest.raises(ValueError, match="cold"):
        timing.input_sets(inputs(), "cold", nbytes=1000)


def test_doubts():
    times = {"us": 10.0, "us_p10": 9.0, "us_p90": 11.0, "us_min": 9.0}
    good = timing.Timing(**times, l2="warm", calls=50, samples=5, enqueue_share=0.2)
    assert good.doubts == []
    short = timing.Timing(**times, l2="warm", calls=8, samples=5, enqueue_share=0.2)
    assert "chain" in short.doubts[0]
    host = timing.Timing(**times, l2="warm", calls=50, samples=5, enqueue_share=0.95)
    assert "enqueueing" in host.doubts[0]
