"""The compiled search never copies, gathers or reorders a KV cache; and this test would notice."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn.demo import beam_search as demo
from jax_beam_attn.demo.padding import pad_tokens
from tests.demo.tiny import tiny_config, tiny_params

# No other array of the loop has as many elements as a beam cache with these.
WIDTH, STEPS = 3, 7
CONFIG = tiny_config()
CACHE_SIZE = STEPS * WIDTH * CONFIG.num_kv_heads * CONFIG.head_dim

# What may produce an array as large as a cache: names for one, and the update in place.
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "dynamic-update-slice"}


def compile_search(dtype=jnp.float32, on_step=None) -> str:
    params = jax.tree.map(lambda x: x.astype(dtype), tiny_params(CONFIG))
    tokens, lengths = pad_tokens([[1, 2, 3]], CONFIG.context_length)
    context = demo.prefill(params, tokens, lengths, config=CONFIG)
    # Not the module's own jit, which may remember what its functions were before.
    search = functools.partial(
        demo.beam_search.__wrapped__,
        config=CONFIG,
        num_beams=WIDTH,
        max_new_tokens=STEPS,
        on_step=on_step,
    )
    hlo = jax.jit(search).lower(params, context, 0, 1.0).compile().as_text()
    assert hlo is not None
    return hlo


def parse_computations(hlo: str) -> dict[str, list[tuple[bool, int, str, str]]]:
    """Per computation: (is root, number of elements or -1 for a tuple, operation, line)."""
    computations, current = {}, None
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?(%\S+) .*\{$", line):
            current = computations.setdefault(header[1], [])
        elif instruction := re.match(r"  (ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\(", line):
            root, shape, operation = instruction.groups()
            dims = re.match(r"\w+\[([\d,]*)\]", shape)
            size = int(np.prod([int(n) for n in dims[1].split(",") if n])) if dims else -1
            current.append((bool(root), size, operation, line))
    return computations


def moved_caches(hlo: str) -> list[str]:
    """Instructions of the loop that make an array as large as a beam cache, but not in place."""
    computations = parse_computations(hlo)
    lines = [line for body in computations.values() for *_, line in body]
    bodies = [match[1] for line in lines if (match := re.search(r"body=(%[\w.-]+)", line))]
    assert bodies, "no while loop"
    reachable, todo, moved, updates = set(), bodies, [], 0
    while todo:
        name = todo.pop()
        if name in reachable:
            continue
        reachable.add(name)
        for _, size, operation, line in computations[name]:
            called = re.findall(r"(?:calls|to_apply|body|condition)=(%[\w.-]+)", line)
            todo += called
            if size != CACHE_SIZE:
                continue
            if operation in ("fusion", "call"):  # judged by what it calls
                updates += 1
            elif operation not in IN_PLACE:
                moved.append(line.strip())
            updates += operation == "dynamic-update-slice"
    assert updates >= 2 * CONFIG.num_layers, "the caches are not where this test looks for them"
    return moved


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_caches_stay_where_they_are(dtype):
    assert moved_caches(compile_search(dtype=dtype)) == []


def test_a_progress_callback_changes_nothing():
    assert moved_caches(compile_search(on_step=lambda step: None)) == []


def reorder_cache(cache, state):
    """What a search without `topk_indices` does: moves each beam's past to its new place."""
    parents = state.history.parents[:, state.step - 1]
    steps = cache.reshape(1, STEPS, WIDTH, *cache.shape[2:])
    return jnp.take_along_axis(steps, parents[:, None, :, None, None], 2).reshape(cache.shape)


def rewrite_cache(cache, state):
    """Clears the next step's rows by a select over the whole cache."""
    step = jnp.arange(STEPS * WIDTH)[:, None, None] // WIDTH
    return jnp.where(step == state.step, 0, cache)


@pytest.mark.parametrize("change_cache", [reorder_cache, rewrite_cache])
def test_a_search_that_moves_caches_is_noticed(monkeypatch, change_cache):
    select_beams = demo._select_beams

    def select_and_move(*args, **kwargs):
        state = select_beams(*args, **kwargs)
        return state._replace(k_beam=tuple(change_cache(x, state) for x in state.k_beam))

    monkeypatch.setattr(demo, "_select_beams", select_and_move)
    assert moved_caches(compile_search())


def test_the_context_goes_to_the_operator_and_nowhere_else():
    params = tiny_params(CONFIG)
    tokens, lengths = pad_tokens([[1, 2, 3]], CONFIG.context_length)
    context = demo.prefill(params, tokens, lengths, config=CONFIG)
    search = functools.partial(
        demo.beam_search, config=CONFIG, num_beams=WIDTH, max_new_tokens=STEPS
    )
    (search_eqn,) = jax.make_jaxpr(search)(params, context, 0, 1.0).eqns
    (loop,) = (eqn for eqn in search_eqn.params["jaxpr"].eqns if eqn.primitive.name == "while")
    users = {
        eqn.primitive.name
        for eqn in loop.params["body_jaxpr"].eqns
        for var in (*eqn.invars, *eqn.outvars)
        if var.aval.shape == context.keys[0].shape
    }
    assert users == {"beam_decode_attn"}
