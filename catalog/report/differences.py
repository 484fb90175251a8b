"""Tables of paired differences: two systems scored on the same items, and by how much one is ahead.

Owns: these tables. Does not own: how a difference is made (`indexing`), or the scores it is made of (`scored`, `mapped`).
Invariant: each number is one of the catalog.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from catalog.report.scores import Score
from catalog.report.sections import Piece, count, metric_name, number, table
from catalog.rows.alignments import DIFFERENCE


def paired(name: str, differences: Sequence[Score]) -> list[Piece]:
    """One table, largest difference first; none without a difference."""
    if not differences:
        return []
    columns = [
        ("metric", lambda s: metric_name({**s.row, "metric": s.metric.removesuffix(DIFFERENCE)})),
        ("of", lambda s: str(s.row["left_name"])),
        ("minus", lambda s: str(s.row["details"]["rival_name"])),
        ("against", lambda s: str(s.row["right_name"])),
        ("difference", lambda s: f"{s.value:+.3f}"),
        ("95 % interval", _interval),
        ("scores", lambda s: " and ".join(number(value) for value in s.row["details"]["values"])),
        ("n", lambda s: count(s.row["n"])),
        ("selection", lambda s: str(s.row["selection"] or "")),
    ]
    ordered = sorted(differences, key=lambda s: (s.metric, -s.value))
    return [table(f"{name}: paired differences, both systems on the same items", columns, ordered)]


def _interval(score: Score) -> str:
    row: Any = score.row
    return "–" if row["low"] is None or row["high"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}"
