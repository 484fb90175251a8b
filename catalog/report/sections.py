"""The building blocks of a section (tables, notes, figures, galleries) and number formats.

Invariant: a number that is unknown or undefined is a dash, never a zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from catalog.report.canvas import Figure
from catalog.report.gallery import Gallery, Neighbourhood

METRIC_NAMES: Final = {
    "mutual_knn": "mutual k-NN",
    "cycle_knn": "cycle k-NN",
    "lcs_knn": "LCS k-NN",
    "edit_distance_knn": "edit-distance k-NN",
    "cka": "CKA",
    "unbiased_cka": "unbiased CKA",
    "cknna": "CKNNA",
    "svcca": "SVCCA",
    "recall@1": "R@1",
    "recall@5": "R@5",
    "recall@10": "R@10",
    "median_rank": "median rank",
    "probe_linear": "linear probe",
    "probe_knn": "k-NN probe",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells are text. numeric: places of the columns that are set to the right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Note:
    """A sentence or two between figures and tables."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Neighbourhoods:
    """Scenes with their neighbours."""

    members: Sequence[Neighbourhood]
    anchor: str
    "Label of the encoder that the others are compared with."


Piece: TypeAlias = Table | Figure | Note | Gallery | Neighbourhoods


@dataclass(frozen=True, kw_only=True)
class Section:
    """anchor: of its heading. lead: what the section is about. query: SQL that gives its rows."""

    anchor: str
    title: str
    lead: str
    pieces: Sequence[Piece]
    query: str
    absent: str
    "Shown when there are no pieces."


def metric_name(row: Mapping[str, Any]) -> str:
    """As people say it: `mutual 10-NN`, `R@1`."""
    metric, k = str(row["metric"]), row["k"]
    name = METRIC_NAMES.get(metric, metric)
    return name.replace("k-NN", f"{k}-NN") if k is not None else name


def number(value: float | None, digits: int = 3) -> str:
    """Fixed digits; a dash for what is not known or not defined."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def count(value: int | None) -> str:
    """With thousands separators; a dash for what is not known."""
    return "–" if value is None else f"{value:,}"


def interval(row: Mapping[str, Any], *, sign: str = "") -> str:
    """`low to high`; sign `+` writes the sign of positive ends too."""
    low, high = row["low"], row["high"]
    return "–" if low is None or high is None else f"{low:{sign}.3f} to {high:{sign}.3f}"


def table(caption: str, columns: Sequence[tuple[str, Callable[[Any], str]]], items: Iterable[Any]) -> Table:
    """A table with a row an item. Columns of numbers are set to the right; columns of dashes alone are left out."""
    members = list(items)
    filled = [(name, [cell(item) for item in members]) for name, cell in columns]
    kept = [(name, cells) for name, cells in filled if any(text not in ("", "–") for text in cells)]
    numeric = frozenset(i for i, (_, cells) in enumerate(kept) if all(_is_numeric(text) for text in cells))
    return Table(
        caption=caption,
        columns=[name for name, _ in kept],
        rows=[[cells[i] for _, cells in kept] for i in range(len(members))],
        numeric=numeric,
    )


def _is_numeric(text: str) -> bool:
    return not text.strip("0123456789.,-+–% ") or text[:1].isdigit() and " to " in text


def versions_text(versions: Mapping[str, str]) -> str:
    """`dataset@version`, with commas."""
    return ", ".join(f"{name}@{version}" for name, version in sorted(versions.items()))
