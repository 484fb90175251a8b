"""Kinds of chart that sections fill with numbers: dots with intervals, curves and bars.

Invariant: every mark is a number of the catalog; nothing is smoothed, fitted or omitted unless the caption says so.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from catalog.report import canvas
from catalog.report.canvas import INK, QUIET, Figure
from infra.models import checkpoints

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_IN: Final = 0.42
FRAME_IN: Final = 1.25
TITLE_LETTERS: Final = 84
"A line of a title."


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One score. marks: other numbers of the same encoder, by what they are (see MARKS)."""

    row: str
    "Name of the line it stands in; several seeds of one system share a line."
    colour: str
    value: float
    low: float | None
    high: float | None
    marks: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Dots that share an axis."""

    title: str
    axis: str
    dots: Sequence[Dot]
    chance: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points (x, y) in order of x, with intervals where they are known. Curves of one name are seeds of one system."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float] | None] = ()


_HOLLOW: Final = {"facecolors": "white", "edgecolors": QUIET, "linewidths": 1.2}
MARKS: Final[Mapping[str, Mapping[str, Any]]] = {
    checkpoints.label(checkpoints.UNTRAINED): {**_HOLLOW, "marker": "o", "s": 34},
    checkpoints.label(checkpoints.FIRST_EPOCH): {**_HOLLOW, "marker": "D", "s": 26},
    "random rotation": {"marker": "x", "c": QUIET, "s": 30, "linewidths": 1.3},
    "shuffled pairs": {"marker": "+", "c": QUIET, "s": 46, "linewidths": 1.3},
}


def dots(name: str, alt: str, caption: str, panels: Sequence[Panel]) -> Figure:
    """Panels one below the other, a line an encoder, a dot a score with its interval, chance as a dashed line."""
    rows = [_rows(panel) for panel in panels]
    heights = [ROW_IN * max(1, len(r)) + FRAME_IN for r in rows]
    with canvas.style():
        figure = canvas.canvas(sum(heights) + 0.3)
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for axes, panel, names in zip(grid[:, 0], panels, rows, strict=True):
            _dot_panel(axes, panel, names)
        _legend(figure, panels)
        return canvas.finished(figure, name=name, alt=alt, caption=caption)


def _rows(panel: Panel) -> list[str]:
    return list(dict.fromkeys(dot.row for dot in panel.dots))


def _dot_panel(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    if panel.chance is not None:
        axes.axvline(panel.chance, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    for place, name in enumerate(names):
        members = [dot for dot in panel.dots if dot.row == name]
        for i, dot in enumerate(members):
            y = place + (i - (len(members) - 1) / 2) * min(0.2, 0.6 / len(members))
            if dot.low is not None and dot.high is not None:
                axes.plot([dot.low, dot.high], [y, y], color=dot.colour, linewidth=2.2, solid_capstyle="butt", zorder=2)
            axes.scatter([dot.value], [y], s=36, color=dot.colour, zorder=4)
            for what, value in dot.marks.items():
                axes.scatter([value], [y], zorder=3, **MARKS[what])
        mean = sum(dot.value for dot in members) / len(members)
        # In a column of its own: beside a dot it would lie under the marks of another.
        axes.annotate(f"{mean:.3f}", (1.015, place), xycoords=("axes fraction", "data"), va="center", fontsize=9.5)
    axes.set_yticks(range(len(names)), labels=list(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(panel.axis)
    _title(axes, textwrap.fill(panel.title, TITLE_LETTERS))
    # Scores begin at 0, so that a length can be read.
    low, high = axes.get_xlim()
    axes.set_xlim(min(0.0, low), high)


def _title(axes: Axes, text: str) -> None:
    """A title that begins at the edge of the figure: beside long names the axes are too narrow for it."""
    # Blank lines in the title's own place keep the room.
    axes.set_title("\n".join(" " for _ in text.splitlines()))
    place: dict[str, Any] = {"xycoords": ("figure fraction", "axes fraction"), "textcoords": "offset points"}
    axes.annotate(
        text, (0.0, 1.0), xytext=(2, 5), fontsize=10.5, va="bottom", annotation_clip=False, **place
    ).set_in_layout(False)


def _legend(figure: Any, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D

    used = {what for panel in panels for dot in panel.dots for what in dot.marks}
    handles = [Line2D([], [], marker="o", color=INK, linewidth=2.2, markersize=6, label="score, 95 % interval")]
    for what, look in MARKS.items():
        if what in used:
            colour = look.get("edgecolors", look.get("c"))
            size = math.sqrt(float(look["s"]))
            handles.append(
                Line2D(
                    [],
                    [],
                    linestyle="none",
                    marker=look["marker"],
                    color=colour,
                    markerfacecolor="white",
                    markersize=size,
                    label=what,
                )
            )
    if any(panel.chance is not None for panel in panels):
        handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), linewidth=1.0, label="chance"))
    figure.legend(handles=handles, loc="outside upper left", ncols=min(4, len(handles)), frameon=False, fontsize=9.5)


@dataclass(frozen=True, kw_only=True)
class CurvePanel:
    """Curves that share axes. chance: a dashed line."""

    title: str
    x_axis: str
    y_axis: str
    curves: Sequence[Curve]
    chance: float | None = None
    is_log: bool = False


def curves(name: str, alt: str, caption: str, panels: Sequence[CurvePanel]) -> Figure:
    """Panels one below the other; names stand at the ends of their curves."""
    with canvas.style():
        figure = canvas.canvas(2.9 * len(panels))
        grid = figure.subplots(len(panels), 1, squeeze=False)
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            _curve_panel(axes, panel)
        return canvas.finished(figure, name=name, alt=alt, caption=caption)


def _curve_panel(axes: Axes, panel: CurvePanel) -> None:
    from matplotlib.ticker import FuncFormatter

    ends: dict[str, tuple[float, float, str, str]] = {}
    for curve in panel.curves:
        xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
        few = len(xs) <= 12
        axes.plot(xs, ys, color=curve.colour, linewidth=1.6, marker="o" if few else "", markersize=4.5)
        for (x, _), ends_of in zip(curve.points, curve.intervals, strict=False):
            if ends_of is not None:
                axes.plot([x, x], list(ends_of), color=curve.colour, linewidth=1.1)
        if xs and (curve.name not in ends or xs[-1] >= ends[curve.name][0]):
            ends[curve.name] = (xs[-1], ys[-1], curve.name, curve.colour)
    if panel.chance is not None:
        axes.axhline(panel.chance, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
        place = (0.995, panel.chance)
        axes.annotate(
            "chance", place, xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points", ha="right",
            fontsize=9, color=QUIET,
        )  # fmt: skip
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    if panel.is_log:
        axes.set_xscale("log")
        numbers = sorted({x for curve in panel.curves for x, _ in curve.points})
        axes.set_xticks(_apart(numbers))
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _count(x)))
    axes.set_title(textwrap.fill(panel.title, TITLE_LETTERS))
    axes.set_xlabel(panel.x_axis)
    axes.set_ylabel(panel.y_axis)
    canvas.label_ends(axes, list(ends.values()))


def _apart(numbers: Sequence[float]) -> list[float]:
    """Of sorted numbers, those whose labels have room on a logarithmic axis."""
    kept: list[float] = []
    for number in reversed(numbers):
        if not kept or number * 1.35 <= kept[-1]:
            kept.append(number)
    return kept[::-1]


def _count(x: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(x) >= unit:
            return f"{x / (1e3 if name == 'k' else unit):g} {name}"
    return f"{x:,.6g}"


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Counts by name, of one data set or in one split."""

    title: str
    axis: str
    counts: Sequence[tuple[str, int]]


def bars(name: str, alt: str, caption: str, panels: Sequence[Bars]) -> Figure:
    """Horizontal bars with their counts, panels one below the other."""
    heights = [0.32 * len(panel.counts) + 0.95 for panel in panels]
    with canvas.style():
        figure = canvas.canvas(sum(heights))
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            names, counts = [n for n, _ in panel.counts], [c for _, c in panel.counts]
            axes.barh(range(len(names)), counts, height=0.66, color="#56b4e9")
            for place, count in enumerate(counts):
                axes.annotate(
                    f"{count:,}", (count, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9.5
                )
            axes.set_yticks(range(len(names)), labels=names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xlim(0, max(1, *counts) * 1.15)
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
            axes.xaxis.set_major_formatter(lambda x, _: _count(x))
            axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
            axes.set_xlabel(panel.axis)
            axes.set_title(textwrap.fill(panel.title, TITLE_LETTERS))
        return canvas.finished(figure, name=name, alt=alt, caption=caption)
