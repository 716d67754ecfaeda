"""The schedule: all work, once, in fair shares, from lengths that nobody has to know."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_beam_attn import MlaSchedule, mla_schedule

BLOCK, OVERHEAD = 64, 5  # tokens; and what starting a row costs, in blocks
CHEAP = settings.default.max_examples * 5  # examples that share their compilations
TOPK, EXTRA = 2048, 192
BATCH, SEQLEN = 5, 2


@functools.cache
def _jitted(batch, seqlen_q, topk, extra_topk, num_parts):
    return jax.jit(
        functools.partial(
            mla_schedule,
            batch=batch,
            seqlen_q=seqlen_q,
            num_heads=64,
            topk=topk,
            extra_topk=extra_topk,
            num_parts=num_parts,
        )
    )


def blocks_of(lengths, batch, seqlen_q, topk):
    """Blocks of every row: of the clamped length, which is the same for all tokens if 1-D."""
    rows = []
    for b in range(batch):
        for s in range(seqlen_q):
            length = topk if lengths is None else np.asarray(lengths)[b]
            length = int(length if np.ndim(length) == 0 else length[s])
            rows.append(-(-min(max(length, 0), topk) // BLOCK))
    return rows


def shares_of(schedule, blocks):
    """For each part the list of (row, first block, end block) from its beginning to the next's."""
    begin = np.asarray(schedule.begin).tolist()
    assert begin == sorted(begin)
    assert begin[0] == [0, 0]
    assert begin[-1] == [len(blocks), 0]
    shares = []
    for (row, block), (end_row, end_block) in itertools.pairwise(begin):
        share = []
        while (row, block) < (end_row, end_block):
            end = end_block if row == end_row else max(blocks[row], block)
            share.append((row, block, end))
            row, block = (row + 1, 0) if row < end_row else (row, end)
        shares.append(share)
    return shares


def check(schedule, blocks):
    """Every block of every row once, a slot for each share, and no part with too much."""
    shares = shares_of(schedule, blocks)
    taken = [[] for _ in blocks]
    cost = []
    for share in shares:
        cost.append(sum(end - first + OVERHEAD for _, first, end in share))
        for row, first, end in share:
            taken[row].append((first, end))
    for row, pieces in enumerate(taken):
        assert pieces, f"nobody writes row {row}"
        bounds = [bound for piece in pieces for bound in piece]
        assert (bounds[0], bounds[-1]) == (0, blocks[row])
        assert bounds[1:-1:2] == bounds[2::2]
        if blocks[row]:
            assert all(first < end for first, end in pieces)
    slots = [len(pieces) for pieces in taken]
    np.testing.assert_array_equal(schedule.first_slot, np.append(0, np.cumsum(slots)))
    # A part pays for starting a row that another part has already started, hence the overhead.
    ideal = sum(n + OVERHEAD for n in blocks) / len(shares)
    assert max(cost, default=0) <= ideal + OVERHEAD + 1


INT32 = np.iinfo(np.int32)
LENGTHS = st.one_of(
    st.integers(0, TOPK),
    st.sampled_from([-1, 0, 1, 63, 64, 65, TOPK, TOPK + 1, INT32.min, INT32.max]),
)


@settings(max_examples=CHEAP)
@given(
    st.lists(LENGTHS, min_size=BATCH * SEQLEN, max_size=BATCH * SEQLEN),
    st.lists(LENGTHS, min_size=BATCH, max_size=BATCH),
    st.sampled_from([1, 7, 132]),
)
def test_any_lengths(lengths, extra_lengths, num_parts):
    lengths = np.array(lengths, np.int32).reshape(BATCH, SEQLEN)
    extra_lengths = np.array(extra_lengths, np.int32)
    make = _jitted(BATCH, SEQLEN, TOPK, EXTRA, num_parts)
    blocks = np.add(
        blocks_of(lengths, BATCH, SEQLEN, TOPK), blocks_of(extra_lengths, BATCH, SEQLEN, EXTRA)
    )
    check(make(lengths, extra_topk_length=extra_lengths), blocks.tolist())


@given(
    st.integers(0, 9),
    st.integers(0, 3),
    st.sampled_from([0, 1, 64, 100, 1000]),
    st.integers(1, 40),
    st.randoms(),
)
def test_any_shape(batch, seqlen_q, topk, num_parts, random):
    lengths = np.array([random.randint(0, topk) for _ in range(batch)], np.int32)
    schedule = _jitted(batch, seqlen_q, topk, 0, num_parts)(lengths)
    assert schedule.num_parts == num_parts
    assert schedule.begin.shape == (num_parts + 1, 2)
    assert schedule.first_slot.shape == (batch * seqlen_q + 1,)
    check(schedule, blocks_of(lengths, batch, seqlen_q, topk))


@pytest.mark.parametrize("num_parts", [2, 16, 132])
@pytest.mark.parametrize("place", [0, 40, 73])
def test_one_request_far_longer_than_the_others(num_parts, place):
    lengths = np.full(74, 64, np.int32)
    lengths[place] = 64 * 2048
    schedule = _jitted(74, 1, 64 * 2048, 0, num_parts)(lengths)
    check(schedule, blocks_of(lengths, 74, 1, 64 * 2048))
    pieces = np.diff(schedule.first_slot)
    assert pieces[place] >= num_parts // 2
    assert pieces.sum() <= 74 + num_parts - 1


def test_many_rows():
    lengths = np.random.default_rng(0).integers(0, 2049, 4096).astype(np.int32)
    check(_jitted(4096, 1, TOPK, 0, 132)(lengths), blocks_of(lengths, 4096, 1, TOPK))


def test_lengths_of_requests_and_of_tokens():
    """[B] is the same as [B, Sq] with equal columns; None is topk for all."""
    make = _jitted(3, 2, 640, 0, 8)
    lengths = np.array([10, 640, 300], np.int32)
    want = make(lengths)
    for other in (np.stack([lengths] * 2, axis=1), lengths.astype(np.int64), lengths.tolist()):
        got = make(other) if not isinstance(other, list) else make.__wrapped__(other)
        jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(np.testing.assert_array_equal, make(), make(np.full(3, 640, np.int32)))
    jax.tree.map(np.testing.assert_array_equal, make(), make(np.full(3, 2**31 - 1, np.int32)))


def test_int64_lengths_are_clamped_and_not_wrapped():
    make = _jitted(3, 1, 640, 0, 8).__wrapped__
    want = make(np.array([640, 0, 640], np.int32))
    lengths = np.array([2**32, -(2**32) + 640, 2**40])
    jax.tree.map(np.testing.assert_array_equal, make(lengths), want)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        got = jax.jit(make)(jnp.asarray(lengths))
        assert [x.dtype for x in jax.tree.leaves(got)] == [jnp.int32] * 2
        constant = jax.jit(make)()
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(np.testing.assert_array_equal, constant, make())


def test_without_lengths_it_is_a_constant():
    """Nothing is left to compute in the program, also where it meets traced values."""
    make = _jitted(7, 2, 1000, 64, 132).__wrapped__
    program = jax.jit(lambda x: (make(), x + 1)).lower(1.0).as_text()
    assert "while" not in program
    assert "custom_call" not in program
    assert "reduce" not in program
    computed = [
        line
        for line in program.splitlines()
        if "stablehlo." in line and "constant" not in line and "add" not in line
    ]
    assert not computed
    of_lengths = jax.jit(make).lower(np.zeros(7, np.int32)).as_text()
    assert "while" in of_lengths or "custom_call" in of_lengths


def test_one_executable_for_all_lengths():
    traces = []

    @jax.jit
    def make(lengths):
        traces.append(1)
        return mla_schedule(lengths, batch=2, seqlen_q=1, num_heads=4, topk=640, num_parts=4)

    for lengths in ([64, 640], [640, 0], [-1, 999]):
        lengths = np.array(lengths, np.int32)
        check(make(lengths), blocks_of(lengths, 2, 1, 640))
    assert len(traces) == 1


def test_it_is_a_pytree():
    """It passes through jit, scan and vmap, and its shape is part of its type."""
    schedule = mla_schedule(batch=2, seqlen_q=3, num_heads=4, topk=640, num_parts=5)
    assert len(jax.tree.leaves(schedule)) == 2
    passed = jax.jit(lambda s: s)(schedule)
    assert isinstance(passed, MlaSchedule)
    names = ("batch", "seqlen_q", "num_heads", "topk", "extra_topk", "num_parts")
    assert [getattr(passed, n) for n in names] == [2, 3, 4, 640, 0, 5]
    jax.tree.map(np.testing.assert_array_equal, passed, schedule)
    carried, _ = jax.lax.scan(lambda s, _: (s, None), schedule, length=2)
    jax.tree.map(np.testing.assert_array_equal, carried, schedule)
    other = mla_schedule(batch=2, seqlen_q=3, num_heads=8, topk=640, num_parts=5)
    assert jax.tree.structure(other) != jax.tree.structure(schedule)


def test_vmap():
    lengths = np.array([[64, 640], [0, 1], [640, 640]], np.int32)
    make = _jitted(2, 1, 640, 0, 4).__wrapped__
    stacked = jax.vmap(make)(lengths)
    assert stacked.num_parts == 4
    for n in range(3):
        one = jax.tree.map(lambda x, n=n: x[n], stacked)
        jax.tree.map(np.testing.assert_array_equal, one, make(lengths[n]))


@pytest.mark.parametrize("as_argument", [True, False])
def test_export(as_argument):
    """As argument and as result of exported programs; `register_pytree_node_serialization`."""
    lengths = np.array([64, 640], np.int32)
    make = _jitted(2, 1, 640, 0, 4)
    schedule = make(lengths)
    function, argument = (lambda s: s, schedule) if as_argument else (make, lengths)
    exported = jax.export.export(jax.jit(function))(argument)
    got = jax.export.deserialize(exported.serialize()).call(argument)
    assert jax.tree.structure(got) == jax.tree.structure(schedule)
    jax.tree.map(np.testing.assert_array_equal, got, schedule)


SHAPE = {"batch": 2, "seqlen_q": 3, "num_heads": 4, "topk": 640}


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"batch": -1}, ValueError, "batch: got -1, expected >= 0"),
        ({"seqlen_q": 1.0}, TypeError, "seqlen_q: got float, expected an integer"),
        ({"num_heads": 0}, ValueError, "num_heads: got 0, expected >= 1"),
        ({"topk": "640"}, TypeError, "topk: got str, expected an integer"),
        ({"extra_topk": -64}, ValueError, "extra_topk: got -64, expected >= 0"),
        ({"num_parts": 0}, ValueError, "num_parts: got 0, expected >= 1"),
        ({"topk": 2**36}, ValueError, "topk: got 68719476736 with extra_topk = 0 for 6 rows"),
        ({"batch": 2**20, "topk": 2**16}, ValueError, "expected less than 2**31 blocks"),
        ({"topk_length": np.zeros(3, np.int32)}, ValueError, "topk_length: got shape (3,), exp"),
        ({"topk_length": np.zeros((2, 2), np.int32)}, ValueError, "topk_length: got shape (2, 2)"),
        ({"topk_length": np.int32(5)}, ValueError, "topk_length: got shape (), expected [2, 3]"),
        ({"topk_length": np.zeros(2)}, TypeError, "topk_length: got dtype float64, expected int32"),
        ({"extra_topk_length": np.zeros(3, np.int32)}, ValueError, "extra_topk_length: got shape"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error) as caught:
        mla_schedule(**SHAPE | arguments)
    assert message in str(caught.value)
