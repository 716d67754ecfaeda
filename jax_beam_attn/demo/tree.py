"""Draws the tree of all live beams of a beam search.

Every returned hypothesis has a row of its own, on which it stays from where it branches off a
better one; pruned beams take the rows that are free in their step. Long trees go on in further
panels below.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.ft2font import FT2Font
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve
from matplotlib.text import Text

from jax_beam_attn.demo.beam_search import SearchResult
from jax_beam_attn.demo.hypotheses import Hypothesis

# All lengths are in points: one unit of the axes is one point, the unit of font sizes.
_FONT = "DejaVu Sans Mono"  # comes with matplotlib
_ASPECT = 0.602  # of its characters, width to font size
_TEXT_SIZE, _SCORE_SIZE, _LABEL_SIZE = 9.0, 6.5, 8.0
_BOX_HEIGHT, _BOX_PADDING = 23.0, 5.0
_ROW_PITCH, _COLUMN_GAP = 31.0, 22.0
_MARGIN, _LABEL_WIDTH, _HEADER, _PANEL_GAP = 20.0, 66.0, 62.0, 26.0
_PANEL_WIDTH = 1250.0
_HEADING_SIZE, _LEGEND_SIZE = 11.0, 7.5
_LEGEND = (
    "A box: token and log-probability so far. Dark: the best hypothesis. "
    "Light: the others returned. Grey: pruned. At the end: rank and score."
)


@dataclasses.dataclass(frozen=True)
class _Style:
    line: str
    line_width: float
    fill: str
    text: str
    layer: int


_BEST = _Style(line="#1f5fa8", line_width=2.2, fill="#1f5fa8", text="white", layer=3)
_RETURNED = _Style(line="#7aa7d6", line_width=1.2, fill="#e3eefa", text="#16324f", layer=2)
_PRUNED = _Style(line="#d0d0d0", line_width=0.8, fill="white", text="#999999", layer=1)


@dataclasses.dataclass(frozen=True)
class _Node:
    row: int
    parent_row: int
    text: str
    log_prob: str
    style: _Style
    label: str  # what is written beside the last node of a hypothesis

    @property
    def box_width(self) -> float:
        text_width = _ASPECT * max(len(self.text) * _TEXT_SIZE, len(self.log_prob) * _SCORE_SIZE)
        return text_width + 2 * _BOX_PADDING


def draw_tree(
    path: Path,
    result: SearchResult,
    sample: int,
    hypotheses: Sequence[Hypothesis],
    token_text: Callable[[int], str],
    prompt: str,
) -> None:
    """Draws one sample's beam search into an SVG or PNG file, as the suffix says.

    Args:
        path: The file, which ends in .svg or .png.
        result: The search, with all live beams of all steps.
        sample: Which sample of the batch.
        hypotheses: What was returned, best first, at least one.
        token_text: The text of a token.
        prompt: For the heading.
    """
    columns = _place_nodes(result, sample, hypotheses, token_text)
    panels = _split_into_panels(columns)
    # Where each panel begins, and where the last one ends.
    tops = list(itertools.accumulate(map(_panel_height, panels), initial=_HEADER))
    panel_width = max(sum(map(_column_width, panel)) for panel in panels) + _LABEL_WIDTH
    width = 2 * _MARGIN + max(panel_width, _ASPECT * _LEGEND_SIZE * len(_LEGEND))
    height = tops[-1]

    figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    heading = _shorten(_printable(prompt), int((width - 2 * _MARGIN) / (_ASPECT * _HEADING_SIZE)))
    _write(axes, _MARGIN, 20, heading, _HEADING_SIZE, _RETURNED.text)
    _write(axes, _MARGIN, 38, _LEGEND, _LEGEND_SIZE, "#777777")
    next_columns = [*(panel[0] for panel in panels[1:]), []]
    for panel, next_column, top in zip(panels, next_columns, tops, strict=False):
        _draw_panel(axes, panel, next_column, top)
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, dpi=144)


def _place_nodes(
    result: SearchResult,
    sample: int,
    hypotheses: Sequence[Hypothesis],
    token_text: Callable[[int], str],
) -> list[list[_Node]]:
    """The nodes of every step."""
    tokens, parents, log_probs = (np.asarray(field)[sample] for field in result.history)
    rank_of = _ranks_of_beams(hypotheses)
    lanes = _lanes(hypotheses, rank_of)
    columns: list[list[_Node]] = []
    rows: dict[tuple[int, int], int] = {}  # of (step, beam)

    def add_node(row: int, parent: tuple[int, int], token: int, log_prob: float, rank: int | None):
        label = ""
        if rank is not None and len(hypotheses[rank].tokens) == len(columns):
            label = f"#{rank + 1} {_number(hypotheses[rank].score, 3)}"
        columns[-1].append(
            _Node(
                row=row,
                parent_row=rows.get(parent, 0),  # the prompt is to the left of row 0
                text=_printable(token_text(token)).replace(" ", "·"),
                log_prob=_number(log_prob, 2),
                style=_PRUNED if rank is None else _RETURNED if rank else _BEST,
                label=label,
            )
        )

    for step in range(int(result.num_steps)):
        columns.append([])
        taken = {lane.row for lane in lanes if step in lane.steps}
        free_rows = (row for row in itertools.count() if row not in taken)
        parent = {beam: (step - 1, int(parents[step, beam])) for beam in range(tokens.shape[1])}
        for beam in sorted(parent, key=lambda beam: rows.get(parent[beam], 0)):
            if np.isneginf(log_probs[step, beam]):
                continue
            rank = rank_of.get((step, beam))
            row = next(free_rows) if rank is None else lanes[rank].row
            rows[step, beam] = row
            token, log_prob = int(tokens[step, beam]), float(log_probs[step, beam])
            add_node(row, parent[beam], token, log_prob, rank)
        for rank, hypothesis in enumerate(hypotheses):
            if len(hypothesis.path) == step < len(hypothesis.tokens):  # its EOS is in no beam
                parent_of_eos = (step - 1, hypothesis.path[-1] if hypothesis.path else 0)
                add_node(
                    lanes[rank].row, parent_of_eos, hypothesis.tokens[-1], hypothesis.log_prob, rank
                )
    return columns


def _ranks_of_beams(hypotheses: Sequence[Hypothesis]) -> dict[tuple[int, int], int]:
    """The rank of the best hypothesis that goes through (step, beam), where there is one."""
    best_last = reversed(list(enumerate(hypotheses)))
    return {node: rank for rank, hypothesis in best_last for node in enumerate(hypothesis.path)}


class _Lane(NamedTuple):
    row: int
    steps: range  # while the row is this hypothesis' own: from its branch to its label


def _lanes(hypotheses: Sequence[Hypothesis], rank_of: dict[tuple[int, int], int]) -> list[_Lane]:
    """One lane for each hypothesis, in order of rank."""
    # The best rank at each step, then the own one: sorted by that, what branches off together
    # stays together, and no two lanes cross.
    branches = [
        [*(rank_of[node] for node in enumerate(hypothesis.path)), rank]
        for rank, hypothesis in enumerate(hypotheses)
    ]
    order = sorted(branches)
    return [
        _Lane(order.index(branch), range(branch.index(rank), len(hypothesis.tokens) + 1))
        for rank, (branch, hypothesis) in enumerate(zip(branches, hypotheses, strict=True))
    ]


def _column_width(column: Sequence[_Node]) -> float:
    return max(node.box_width for node in column) + _COLUMN_GAP


def _panel_height(panel: Sequence[list[_Node]]) -> float:
    return (1 + max(node.row for column in panel for node in column)) * _ROW_PITCH + _PANEL_GAP


def _split_into_panels(columns: Sequence[list[_Node]]) -> list[list[list[_Node]]]:
    """As few panels as the longest width allows, about equally long."""
    ends = list(itertools.accumulate(map(_column_width, columns)))
    num_panels = math.ceil(ends[-1] / _PANEL_WIDTH)
    panel_of = [min(int(end / ends[-1] * num_panels), num_panels - 1) for end in ends]
    numbered = zip(panel_of, columns, strict=True)
    return [
        [column for _, column in group]
        for _, group in itertools.groupby(numbered, lambda pair: pair[0])
    ]


def _draw_panel(
    axes: Axes, panel: Sequence[list[_Node]], next_column: Sequence[_Node], top: float
) -> None:
    """Draws some columns, and the lines that lead on to the next panel's first column."""

    def height(row: int) -> float:
        return top + row * _ROW_PITCH + _BOX_HEIGHT / 2

    x, line_starts = _MARGIN + _COLUMN_GAP, {}
    for column in panel:
        for node in column:
            start = (line_starts.get(node.parent_row, _MARGIN), height(node.parent_row))
            _draw_line(axes, start, (x, height(node.row)), node.style)
            _draw_box(axes, node, x, height(node.row))
        line_starts = {node.row: x + node.box_width for node in column}
        x += _column_width(column)
    for node in next_column:
        y = height(node.parent_row)
        _draw_line(axes, (line_starts[node.parent_row], y), (x, y), node.style)


def _draw_line(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], style: _Style
) -> None:
    """An S-shaped line that leaves and arrives horizontally."""
    bend = end[0] - _COLUMN_GAP / 2
    points = [start, (end[0] - _COLUMN_GAP, start[1]), (bend, start[1]), (bend, end[1]), end]
    codes = [Curve.MOVETO, Curve.LINETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    line = PathPatch(
        Curve(points, codes),
        fill=False,
        edgecolor=style.line,
        linewidth=style.line_width,
        zorder=style.layer,
    )
    axes.add_patch(line)


def _draw_box(axes: Axes, node: _Node, x: float, y: float) -> None:
    style = node.style
    box = FancyBboxPatch(
        (x, y - _BOX_HEIGHT / 2),
        node.box_width,
        _BOX_HEIGHT,
        boxstyle="round,pad=0,rounding_size=4",
        facecolor=style.fill,
        edgecolor=style.line,
        linewidth=0.8,
        zorder=style.layer + 3,  # above all lines
    )
    axes.add_patch(box)
    middle = x + node.box_width / 2
    _write(axes, middle, y - 4.5, node.text, _TEXT_SIZE, style.text, "center")
    _write(axes, middle, y + 6, node.log_prob, _SCORE_SIZE, style.text, "center")
    label = _write(axes, x + node.box_width + 5, y, node.label, _LABEL_SIZE, _BEST.line)
    label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # over passing lines


def _write(
    axes: Axes, x: float, y: float, text: str, size: float, color: str, align: str = "left"
) -> Text:
    return axes.text(
        x,
        y,
        text,
        size=size,
        color=color,
        family=[_FONT, "monospace"],  # an SVG viewer may have another one only
        ha=align,
        va="center_baseline",
        parse_math=False,
        zorder=7,
    )


def _printable(text: str) -> str:
    """One line of text, with a box in place of what the font lacks."""
    text = text.replace("\n", "↵").replace("\t", "→")
    return "".join(c if _font().get_char_index(ord(c)) else "□" for c in text)


@functools.cache
def _font() -> FT2Font:
    return get_font(findfont(_FONT))


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
