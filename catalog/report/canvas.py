"""The look of the report's figures: canvas, colours, placing of labels, SVG and PNG bytes.

Invariant: the same numbers give the same bytes. No global state of matplotlib changes (no pyplot, rcParams only inside
a context), no date or random id is written, and text from outside is never read as mathematics.
"""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

INK, QUIET, FAINT = "#1f2328", "#5b6470", "#d5d9de"
# Okabe and Ito's palette, which colour-blind readers can tell apart.
ARM_COLOURS: Final = {"good": "#0072b2", "bad": "#d55e00", "next-token": "#009e73", "caption-pair": "#aa4499"}
OTHER_COLOURS: Final = ("#56b4e9", "#e69f00", "#7f7f7f", "#332288", "#882255", "#117733")
WIDTH_IN: Final = 7.2
PNG_DPI: Final = 160

_STYLE: Final[dict[str, Any]] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.hashsalt": "goodviews",
    "svg.fonttype": "path",
    "text.parse_math": False,
    "figure.facecolor": "white",
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawn figure. name: of its files; alt: text for readers who cannot see it; caption: how to read it."""

    name: str
    alt: str
    caption: str
    svg: bytes
    png: bytes


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures, inside this context only."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        for name, value in _STYLE.items():
            mpl.rcParams[name] = value  # type: ignore[index]  # matplotlib lists its names as literals
        # A name in a script that the font lacks is drawn as boxes; the page itself shows it as text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        yield


def canvas(height_in: float) -> Canvas:
    """An empty figure that is laid out when it is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    made = Canvas(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(made)
    return made


def finished(drawn: Canvas, *, name: str, alt: str, caption: str) -> Figure:
    """The figure as SVG and PNG bytes; call inside `style`."""
    svg, png = io.BytesIO(), io.BytesIO()
    # Laid out once and not once a format.
    drawn.draw_without_rendering()
    # `None` and not "none": for any engine, even that of no layout, savefig draws the figure once more.
    drawn.set_layout_engine(None)
    for axes in drawn.axes:
        # The layout solver's last bits depend on memory addresses, and ids inside an SVG are digests of coordinates.
        left, bottom, width, height = (round(float(side), 6) for side in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))
    drawn.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    drawn.savefig(png, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return Figure(name=name, alt=alt, caption=caption, svg=svg.getvalue(), png=png.getvalue())


class Palette:
    """One colour for each name: an arm's own, else the next that is free."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def __call__(self, name: str, arm: str | None) -> str:
        """Colour of that name, always the same one on a page."""
        if name not in self._given:
            own = ARM_COLOURS.get(arm or "")
            taken = set(self._given.values())
            free = [colour for colour in OTHER_COLOURS if colour not in taken]
            fallback = free[0] if free else OTHER_COLOURS[len(self._given) % len(OTHER_COLOURS)]
            self._given[name] = own if own is not None and own not in taken else fallback
        return self._given[name]


def spaced(wanted: Sequence[float], least: float) -> list[float]:
    """Places at least `least` apart, in the same order of size, moved as little as a single sweep can."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    for before, i in itertools.pairwise(order):
        placed[i] = max(placed[i], placed[before] + least)
    # Shift everything back by the mean push, so that the labels stay centred on their curves.
    push = sum(new - old for new, old in zip(placed, wanted, strict=True)) / max(1, len(wanted))
    return [place - push for place in placed]


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the right of the plot, at the height of their curves' ends. ends: (x, y, name, colour)."""
    if not ends:
        return
    low, high = axes.get_ylim()
    height = high - low or 1.0
    shares = spaced([(y - low) / height for _, y, _, _ in ends], least=0.075)
    for (x, y, name, colour), share in zip(ends, shares, strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xycoords="data",
            xytext=(1.02, share),
            textcoords="axes fraction",
            va="center",
            color=INK,
            fontsize=9.5,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.9, "shrinkA": 1, "shrinkB": 2},
            annotation_clip=False,
        )
