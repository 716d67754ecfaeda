"""The native cache writer and schedule on the CPU: bit for bit what `jax.numpy` computes."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jax_beam_attn
from jax_beam_attn import (
    GpuTarget,
    append_mla_cache,
    gpu_target,
    info,
    mla_schedule,
    pack_mla_cache,
)
from jax_beam_attn._core import native
from jax_beam_attn._core.operator import Implementation, Operator, Output
from jax_beam_attn.sparse_mla.cache import FORMATS, AppendStatic, append
from jax_beam_attn.sparse_mla.schedule import ScheduleStatic, schedule
from tests.sparse_mla.oracle import BF16, E4M3, HEAD_DIM, TOKEN_BYTES
from tests.sparse_mla.writers import (
    KINDS,
    assert_append_equal,
    assert_schedule_equal,
    keys_of,
)

INT32 = np.iinfo(np.int32)
BLOCKS, COUNT = 3, 6
# Format, page size, padding behind a block's tokens (None: no padded blocks), dtype.
FORMS = [
    ("v32", 4, None, np.uint8),
    ("v32", 3, 48, np.int8),
    ("model1", 3, None, E4M3),
    ("model1", 1, None, np.uint8),
    ("model1", 5, 24, np.uint8),
    ("bf16", 3, None, BF16),
]


@pytest.fixture(autouse=True)
def cpu(request):
    if "without_native" not in request.fixturenames:
        request.getfixturevalue("built")("cpu")


@pytest.fixture
def without_native(monkeypatch, tmp_path):
    """An installation that found no compiler."""
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    monkeypatch.setattr(native, "_libraries", {})
    monkeypatch.setattr(native, "_handlers", {})


def old_cache(form, seed=0):
    """A cache of random bytes."""
    format, page_size, padding, dtype = form
    rng = np.random.default_rng(seed)
    if format == "bf16":
        shape, width = (BLOCKS, page_size, 1, 576), 2
    elif padding is None:
        shape, width = (BLOCKS, page_size, 1, TOKEN_BYTES[format]), 1
    else:
        block_bytes = -(-page_size * TOKEN_BYTES[format] // 16) * 16 + padding
        shape, width = (BLOCKS, block_bytes), 1
    data = rng.integers(0, 256, width * int(np.prod(shape)), np.uint8)
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@given(st.sampled_from(KINDS), st.integers(0, 2**32 - 1), st.randoms())
def test_append(dtype, form, kind, seed, random):
    """Any floats into any slots: each slot once, and some outside the cache."""
    format, page_size, _, _ = form
    slots = [*range(BLOCKS * page_size), -1, BLOCKS * page_size, INT32.min, INT32.max, -7, -64]
    slots = np.array(random.sample(slots, COUNT), np.int32)
    keys = keys_of(kind, seed, COUNT, HEAD_DIM.get(format, 576), dtype)
    assert_append_equal(old_cache(form, seed), keys, slots, format, page_size)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_append_writes_what_pack_does(format, kind):
    for dtype in (np.float32, BF16):
        keys = keys_of(kind, 1, 12, HEAD_DIM[format], dtype)
        packed = pack_mla_cache(keys.reshape(4, 3, 1, -1), format)
        empty = np.zeros(packed.shape, np.uint8)
        got = assert_append_equal(empty, keys, np.arange(12, dtype=np.int32), format, 3)
        np.testing.assert_array_equal(got, packed)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
def test_every_nan_is_written_as_the_same(bits):
    key = np.ones((1, 576), np.float32)
    key[0, [5, 530]] = np.array([bits], np.uint32).view(np.float32)
    cache = np.zeros((1, 1, 1, 656), np.uint8)
    got = assert_append_equal(cache, key, np.zeros(1, np.int32), "v32", 1)[0, 0, 0]
    assert (got[:128] == 0x7F).all() and (got[128:512] == got[128]).all()
    assert got[512:516].view(np.uint32) == 0x7FC00000
    rope = got[528:].view(np.uint16)
    assert rope[530 - 512] == 0x7FC0 and (np.delete(rope, 530 - 512) == 0x3F80).all()


LENGTH = st.one_of(
    st.integers(0, 640),
    st.sampled_from([-1, 0, 1, 63, 64, 65, 639, 640, 641, INT32.min, INT32.max]),
)
# G, B, Sq, topk, extra_topk, num_parts
PROBLEMS = [
    (1, 1, 1, 640, 0, 132),
    (1, 5, 1, 640, 100, 132),
    (2, 4, 3, 640, 0, 7),
    (3, 2, 2, 64, 640, 1),
    (1, 60, 1, 640, 0, 4),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("which", ["topk_length", "extra_topk_length", "both"])
@given(st.data())
def test_schedule(problem, per_token, which, data):
    groups, batch, seqlen_q, topk, extra, parts = problem
    shape = (groups, batch, seqlen_q) if per_token else (groups, batch)
    size = int(np.prod(shape))
    numbers = st.lists(LENGTH, min_size=size, max_size=size)
    names = ["topk_length", "extra_topk_length"] if which == "both" else [which]
    lengths = {name: np.array(data.draw(numbers), np.int32).reshape(shape) for name in names}
    assert_schedule_equal(lengths, ScheduleStatic(batch, seqlen_q, topk, extra, parts))


@pytest.mark.parametrize("batch", [0, 1, 31, 32, 33, 1000, 4096, 20_000])
@pytest.mark.parametrize("seqlen_q", [0, 1, 3])
@pytest.mark.parametrize("parts", [1, 132, 5000])
def test_schedule_of_any_size(batch, seqlen_q, parts):
    lengths = np.random.default_rng(batch).integers(-5, 2100, (1, batch)).astype(np.int32)
    static = ScheduleStatic(batch, seqlen_q, 2048, 0, parts)
    assert_schedule_equal({"topk_length": lengths}, static)


def test_schedule_at_the_limit_of_int32():
    rows, topk = 3, 700_000_000
    lengths = np.array([[INT32.max, topk, 1]], np.int32)
    assert_schedule_equal({"topk_length": lengths}, ScheduleStatic(rows, 1, topk, topk, 132))
    longest = ScheduleStatic(1, 1, INT32.max, 0, 132)
    assert_schedule_equal({"topk_length": np.array([[INT32.max]], np.int32)}, longest)


def _append_one(cache):
    return append_mla_cache(cache, jnp.ones((1, 576)), jnp.array([2]), "v32")


def _make_schedule(lengths):
    return mla_schedule(lengths, batch=3, seqlen_q=1, num_heads=8, topk=640)


CALLS = [
    (_append_one, np.zeros((2, 4, 1, 656), np.uint8), native.APPEND_MLA),
    (_make_schedule, np.array([10, 640, 0], np.int32), native.MLA_SCHEDULE),
]


@pytest.mark.parametrize("function, argument, name", CALLS)
def test_native_is_what_a_cpu_runs(function, argument, name):
    assert name in jax.jit(function).lower(argument).as_text()


@pytest.mark.parametrize("function, argument, name", CALLS)
def test_without_native_code_jnp_serves(function, argument, name, without_native):
    lowered = jax.jit(lambda x: function(x)).lower(argument)
    assert name not in lowered.as_text()
    want = function(argument)  # compiled eagerly, from another cache than the jitted one
    jax.tree.map(np.testing.assert_array_equal, lowered.compile()(argument), want)


def test_asking_for_what_is_not_built_says_so(without_native):
    static = ScheduleStatic(2, 1, 64, 0, 3)
    run = functools.partial(schedule, static=static, implementation="native")
    with pytest.raises(ValueError, match=r"mla_schedule: implementation='native' .*not built"):
        jax.jit(run)({"topk_length": np.zeros((1, 2), np.int32)})


@pytest.mark.parametrize("function, argument, name", CALLS)
def test_exported_for_a_cpu_it_needs_no_native_code(function, argument, name):
    exported = jax.export.export(jax.jit(function))(argument)
    assert name not in exported.mlir_module()
    got = jax.export.deserialize(exported.serialize()).call(argument)
    jax.tree.map(np.testing.assert_array_equal, got, function(argument))


@pytest.mark.parametrize("function, argument, name", CALLS)
def test_exported_for_a_gpu_it_is_native(built, function, argument, name):
    built("cuda")
    checks = jax_beam_attn.export_disabled_checks()
    with gpu_target("h200"):
        export = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
        exported = jax.export.deserialize(export(argument).serialize())
    assert name in exported.mlir_module()
    with gpu_target(GpuTarget("V100", 70, 80, 2**22)):
        old = jax.export.export(jax.jit(function), platforms=["cuda"])(argument)
    assert name not in old.mlir_module()


def test_a_kernel_may_call_an_operator_for_its_own_gpu(built):
    """The target is the kernel's also where the program is lowered after it was traced."""
    built("cuda")
    static = ScheduleStatic(2, 1, 640, 0, 3)
    outer = Operator(
        "outer",
        reference=lambda operands, _: (operands["x"],),
        outputs=lambda operands, _: (Output((1, 3), jnp.int32),),
        fold=lambda *_: pytest.fail("no vmap here"),
        empty=lambda *_: False,
        cost=lambda *_: {"flops": 0, "bytes_accessed": 0},
        instead="nothing",
    )
    outer.implementations = [
        Implementation(
            "triton",
            unavailable=lambda target: None,
            unsupported=lambda operands, call: None,
            run=lambda operands, call: (schedule({"topk_length": operands["x"]}, static)[1],),
        )
    ]
    with gpu_target("a100"):
        traced = jax.jit(lambda x: outer({"x": x}, None)).trace(np.zeros((1, 2), np.int32))
    assert native.MLA_SCHEDULE in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_another_process_runs_an_exported_native_call(tmp_path):
    static = ScheduleStatic(2, 1, 640, 0, 3)
    run = functools.partial(schedule, static=static, implementation="native")
    lengths = {"topk_length": np.array([[64, 640]], np.int32)}
    checks = jax_beam_attn.export_disabled_checks()
    exported = jax.export.export(jax.jit(run), disabled_checks=checks)(lengths)
    (tmp_path / "exported").write_bytes(exported.serialize())
    code = f"""
import jax, numpy as np, jax_beam_attn, pathlib
jax_beam_attn.register_native_handlers()
data = pathlib.Path({str(tmp_path)!r}, "exported").read_bytes()
exported = jax.export.deserialize(bytearray(data))
begin, _ = exported.call({{"topk_length": np.array([[64, 640]], np.int32)}})
print(begin.tolist())
"""
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(jax.jit(run)(lengths)[0].tolist())


def test_in_place_when_donated_and_a_copy_when_not():
    cache = jnp.asarray(np.full((64, 4, 1, 656), 7, np.uint8))
    kept = jax.jit(_append_one)(cache)
    assert (np.asarray(cache) == 7).all()
    pointer = cache.unsafe_buffer_pointer()
    donated = jax.jit(_append_one, donate_argnums=0)(cache)
    assert donated.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(donated, kept)


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_vmap_over_pools(implementation):
    """A pool each: slots past the end of one write nothing into the next."""
    caches = np.stack([old_cache(FORMS[2], seed) for seed in range(3)])
    keys = keys_of("normal", 0, 2, 512, np.float32)
    slots = np.array([[0, 9], [-1, 8], [10, 4]], np.int32)

    def run(cache, slots):
        operands = {"cache": cache, "kv": keys, "slots": slots}
        return append(operands, AppendStatic("model1", 3), implementation=implementation)[0]

    got = np.asarray(jax.jit(jax.vmap(run))(caches, slots))
    for n in range(3):
        want = assert_append_equal(caches[n], keys, slots[n], "model1", 3)
        np.testing.assert_array_equal(got[n].view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("transform", ["scan", "shard_map"])
def test_schedules_in_a_transformation(transform):
    lengths = np.random.default_rng(0).integers(0, 640, (8, 3)).astype(np.int32)
    if transform == "scan":
        got = jax.lax.scan(lambda _, x: (None, _make_schedule(x)), None, lengths)[1]
    else:
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("x")
        each = jax.shard_map(jax.vmap(_make_schedule), mesh=mesh, in_specs=spec, out_specs=spec)
        got = jax.jit(each)(lengths)
    for n in range(8):
        want = _make_schedule(lengths[n])
        np.testing.assert_array_equal(got.begin[n], want.begin)
        np.testing.assert_array_equal(got.first_slot[n], want.first_slot)


def call_append(cache, keys, slots, format, page_size, aliases):
    result = jax.ShapeDtypeStruct(cache.shape, cache.dtype)
    call = jax.ffi.ffi_call(native.APPEND_MLA, result, input_output_aliases=aliases)
    return call(cache, keys, slots, format=format, page_size=np.int64(page_size))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"aliases": {}}, "the result is not the cache"),
        ({"keys": np.zeros((2, 576), np.float16)}, "neither F32 nor BF16"),
        ({"keys": np.zeros((3, 576), np.float32)}, "as many keys"),
        ({"keys": np.zeros((2, 512), np.float32)}, "keys are 512 wide, expected 576"),
        ({"format": "v33"}, "in format v33"),
        ({"page_size": 5}, "no 2 blocks of 5 tokens"),
        ({"page_size": -1}, "no 2 blocks of -1 tokens"),
    ],
)
def test_append_refuses(change, message):
    assert native.register(native.APPEND_MLA, "cpu").available
    call = {
        "cache": np.zeros((2, 4, 1, 656), np.uint8),
        "keys": np.zeros((2, 576), np.float32),
        "slots": np.zeros(2, np.int32),
        "format": "v32",
        "page_size": 4,
        "aliases": {0: 0},
    } | change
    arrays = [call.pop(name) for name in ("cache", "keys", "slots")]
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.jit(functools.partial(call_append, **call))(*arrays))


@pytest.mark.parametrize(
    "lengths, rows, topk, message",
    [
        ((1, 5), 6, 64, "lengths are neither"),
        ((2, 6), 6, 64, "lengths are neither"),
        ((1, 6), 6, -1, "topk, extra_topk or seqlen_q out of range"),
        ((1, 6), -1, 64, "results are not"),
    ],
)
def test_schedule_refuses(lengths, rows, topk, message):
    assert native.register(native.MLA_SCHEDULE, "cpu").available
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 4, 2), (1, rows + 1))]
    call = functools.partial(
        jax.ffi.ffi_call(native.MLA_SCHEDULE, results),
        seqlen_q=np.int64(2),
        topk=np.int64(topk),
        extra_topk=np.int64(0),
    )
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(
            jax.jit(call)(np.zeros(lengths, np.int32), np.zeros((1, 0), np.int32))
        )


@pytest.mark.parametrize("name", ["append_mla_cache", "mla_schedule"])
def test_info_lists_it(name):
    lines = info.report()
    assert lines[lines.index(name) + 1 :][:2] == ["  native: available", "  reference: available"]


def test_info_says_why_not(without_native):
    lines = info.report()
    assert lines[lines.index("mla_schedule") + 1].startswith("  native: not built")
