import numpy as np
import pytest

from jax_beam_attn.demo.beam_search import Finished, History, SearchResult
from jax_beam_attn.demo.cli import TREE_SUFFIXES
from jax_beam_attn.demo.hypotheses import read_hypotheses

tree = pytest.importorskip("jax_beam_attn.demo.tree")

# Two beams, three steps. Step 0: a, b. Step 1: c after a, d after b. Step 2: EOS after d is the
# best hypothesis; e and f after c are live to the end, and e is the second best.
EOS = 9
RESULT = SearchResult(
    finished=Finished(
        scores=np.array([[-1.0, -1.5]], np.float32),
        log_probs=np.array([[-3.0, -4.5]], np.float32),
        rows=np.array([[3, 4]], np.int32),
        eos=np.array([[True, False]]),
    ),
    history=History(
        tokens=np.array([[[0, 1], [2, 3], [4, 5]]], np.int32),
        parents=np.array([[[0, 0], [0, 1], [0, 0]]], np.int32),
        log_probs=np.array([[[-1.0, -2.0], [-2.0, -2.5], [-4.5, -5.0]]], np.float32),
    ),
    num_steps=np.int32(3),
)
TEXTS = {**dict(enumerate("abcdef")), EOS: "<end>"}


def placed_nodes():
    hypotheses = read_hypotheses(RESULT, 0, EOS)
    columns = tree._place_nodes(RESULT, 0, hypotheses, TEXTS.__getitem__)
    return [{node.text: node for node in column} for column in columns]


def test_hypotheses_keep_their_rows():
    first, second, third = placed_nodes()
    assert [first["b"].row, second["d"].row, third["<end>"].row] == [0, 0, 0]
    assert [first["a"].row, second["c"].row, third["e"].row] == [1, 1, 1]
    assert third["f"].row == 2
    assert third["f"].parent_row == third["e"].parent_row == second["c"].row
    assert third["<end>"].parent_row == second["d"].row


def test_styles_and_labels():
    columns = placed_nodes()
    styles = {text: node.style for column in columns for text, node in column.items()}
    assert {text for text, style in styles.items() if style is tree._BEST} == {"b", "d", "<end>"}
    assert {text for text, style in styles.items() if style is tree._PRUNED} == {"f"}
    labels = {text: node.label for column in columns for text, node in column.items()}
    assert {text for text, label in labels.items() if label} == {"<end>", "e"}
    assert labels["<end>"] == "#1 −1.000"


def test_no_two_boxes_share_a_place():
    for column in placed_nodes():
        rows = [node.row for node in column.values()]
        assert len(rows) == len(set(rows))


@pytest.mark.parametrize("suffix", TREE_SUFFIXES)
def test_file(tmp_path, suffix):
    path = tmp_path / f"tree{suffix}"
    texts = {**TEXTS, 5: "\n", 4: " $\U0010ffff<&>"}  # no mathematics, no glyph, no markup
    tree.draw_tree(path, RESULT, 0, read_hypotheses(RESULT, 0, EOS), texts.__getitem__, "Once")
    content = path.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    else:
        text = content.decode()
        for expected in ("Once", "&lt;end&gt;", "↵", "·$□&lt;&amp;&gt;", "#2 −1.500"):
            assert expected in text


def test_long_trees_are_split_into_balanced_panels():
    node = placed_nodes()[0]["a"]
    columns = [[node]] * 100
    panels = tree._split_into_panels(columns)
    assert [column for panel in panels for column in panel] == columns
    lengths = [sum(map(tree._column_width, panel)) for panel in panels]
    assert len(panels) > 1
    assert max(lengths) <= tree._PANEL_WIDTH + tree._column_width([node])
    assert min(lengths) > 0.9 * max(lengths)
