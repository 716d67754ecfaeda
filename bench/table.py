"""The table that ends a run, and the one of the floors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.peers import peers_by_id
from bench.results import Row
from bench.shapes import Shape

_COLUMNS = (
    "id", "implementation", "us (p10..p90)", "L2", "floor", "x floor", "bar", "aim", "verdict",
    "error",
)  # fmt: skip


def targets(row: Row, others: Iterable[Row]) -> tuple[float, float] | None:
    """Bar and aim of a row in microseconds, or None where there are none.

    Args:
        row: The row.
        others: Where to find the row that a relative target refers to.
    """
    peers = peers_by_id().get(row.id)
    if peers is None:
        return None
    if peers.relative_to is None:
        return peers.bar, peers.aim
    for other in others:
        if other.key == (peers.relative_to, row.implementation):
            return peers.bar * other.us, peers.aim * other.us
    return None


def verdict(row: Row, bar_and_aim: tuple[float, float] | None) -> str:
    """WRONG, then "aim", "bar" or "slow" by what the time reaches, "-" without a target."""
    if not row.correct:
        return "WRONG"
    if bar_and_aim is None:
        return "-"
    bar, aim = bar_and_aim
    if row.us <= aim:
        return "aim"
    return "bar" if row.us <= bar else "slow"


def format_table(rows: Sequence[Row], others: Iterable[Row] = ()) -> str:
    """The rows as a text table; `others` are further rows for relative targets."""
    others = [*rows, *others]
    lines = [_COLUMNS, *(_cells(row, others) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cells(row: Row, others: Sequence[Row]) -> tuple[str, ...]:
    bar_and_aim = targets(row, others)
    bar, aim = (f"{each:.1f}" for each in bar_and_aim) if bar_and_aim else ("-", "-")
    return (
        row.id,
        row.implementation,
        f"{row.us:.1f} ({row.us_p10:.1f}..{row.us_p90:.1f})",
        row.l2,
        f"{row.floor_us:.1f}",
        f"{row.us / row.floor_us:.2f}",
        bar,
        aim,
        verdict(row, bar_and_aim),
        f"{row.error:.1e}",
    )


def format_floors(shapes: Iterable[Shape]) -> str:
    """What each row's floor is made of, as a Markdown table."""
    lines = [
        "| id | GFLOP | MB | FLOP floor, us | bytes floor, us | floor, us | bound by |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        floor = shape.floor
        lines.append(
            f"| {shape.id} | {shape.flop / 1e9:.3f} | {shape.nbytes / 1e6:.2f} "
            f"| {floor.flop_us:.2f} | {floor.bytes_us:.2f} | {floor.us:.2f} "
            f"| {'FLOP' if floor.flop_us > floor.bytes_us else 'bytes'} |"
        )
    return "\n".join(lines)
