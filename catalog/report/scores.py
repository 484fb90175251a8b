"""Scores of the catalog, grouped so that only comparable ones stand together.

Invariant: rows of one group differ in the scored encoder and in nothing else that changes a score: not in the metric,
k, n, scenes, map, number of pairs, direction, protocol, selection or anchor.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from catalog.lake.answers import printable
from catalog.lake.lake import Lake
from catalog.report.encoders import Encoder, unknown
from catalog.rows.alignments import CHECKPOINT_COLUMNS, JSON_COLUMNS

CONTROLS: Final = ("random", "shuffled")
"Maps that saw no pair, or the wrong ones."
NOUNS: Final = {"captions": "captions", "scenes": "captions", "images": "pictures"}
"What an embedding set holds, in words; the vector of a scene is the mean of its captions'."


@dataclass(frozen=True, kw_only=True)
class Score:
    """One row of `alignments`. subject: the encoder in question; anchor: what it is scored against, None for a probe.

    side: `left` or `right`, where the subject stands in the row.
    """

    row: Mapping[str, Any]
    subject: Encoder
    side: str
    anchor: Encoder | None
    direction: str | None
    "In words: `captions find pictures`."

    @property
    def value(self) -> float:
        """NaN where the score is not defined."""
        return float(self.row["value"])

    @property
    def metric(self) -> str:
        """As the catalog names it."""
        return str(self.row["metric"])

    @property
    def against(self) -> str:
        """Label of the anchor, or what a probe reads."""
        probed = printable(str(self.row["right_name"])).removeprefix("states:")
        return self.anchor.label if self.anchor is not None else probed


@dataclass(frozen=True, kw_only=True)
class Group:
    """Scores that may be compared, best first (`median_rank`: lowest first)."""

    scores: tuple[Score, ...]

    @property
    def first(self) -> Score:
        """Any one, for what all have in common."""
        return self.scores[0]

    @property
    def chance(self) -> float | None:
        """What an encoder that knows nothing reads; None where rows do not say, or not the same."""
        found = {round(float(c), 9) for s in self.scores if (c := s.row["chance"]) is not None and math.isfinite(c)}
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One system over its seeds. lowest, highest: the ends of all seeds' intervals together, None without any."""

    label: str
    seeds: int
    mean: float
    deviation: float | None
    lowest: float | None
    highest: float | None
    untrained: float | None
    first_epoch: float | None


def read_scores(reader: Lake, encoders: Mapping[str, Encoder]) -> list[Score]:
    """All scores, oldest first."""
    rows = reader.records("SELECT * FROM main.alignments ORDER BY created_at, alignment_id", decode=JSON_COLUMNS)
    return [_score(row, encoders) for row in rows]


def group(scores: Iterable[Score]) -> list[Group]:
    """Groups in the order of their oldest row."""
    found: dict[tuple[Any, ...], list[Score]] = defaultdict(list)
    for score in scores:
        found[_group_key(score)].append(score)
    return [Group(scores=tuple(sorted(members, key=_rank))) for members in found.values()]


def spreads(members: Group) -> list[Spread]:
    """One line a system that was trained here, best mean first."""
    systems: dict[str, list[Score]] = defaultdict(list)
    for score in members.scores:
        if score.subject.is_trained_here and math.isfinite(score.value):
            systems[score.subject.system].append(score)
    return [_spread(found) for found in systems.values()]


def is_lower_better(metric: str) -> bool:
    """Ranks count from the top."""
    return metric == "median_rank"


def _score(row: Mapping[str, Any], encoders: Mapping[str, Encoder]) -> Score:
    left = encoders.get(row["left_id"]) or unknown(str(row["left_name"]))
    if row["right_id"] is None:
        return Score(row=row, subject=left, side="left", anchor=None, direction=None)
    right = encoders.get(row["right_id"]) or unknown(str(row["right_name"]))
    # A set of a run is the one in question, on whichever side it stands.
    turned = left.run_id is None and right.run_id is not None
    subject, anchor = (right, left) if turned else (left, right)
    ends = {"left_to_right": (left, right), "right_to_left": (right, left)}.get(row["direction"] or "")
    direction = None if ends is None else f"{_noun(ends[0])} find {_noun(ends[1])}"
    side = "right" if turned else "left"
    return Score(row=row, subject=subject, side=side, anchor=anchor, direction=direction)


def _noun(encoder: Encoder) -> str:
    return NOUNS.get(encoder.observation or "", encoder.label)


def _group_key(score: Score) -> tuple[Any, ...]:
    names = ("metric", "map", "k", "n", "dataset", "version", "split", "protocol", "selection", "pairs")
    anchor = score.row["right_name"] if score.anchor is None else score.anchor.name
    return (*(score.row[name] for name in names), anchor, score.direction)


def _rank(score: Score) -> tuple[bool, float, str]:
    value = score.value if is_lower_better(score.metric) else -score.value
    return (math.isnan(value), 0.0 if math.isnan(value) else value, score.subject.label)


def _spread(found: Sequence[Score]) -> Spread:
    values = [score.value for score in found]

    def mean(column: str) -> float | None:
        known = [float(score.row[column]) for score in found if score.row[column] is not None]
        return statistics.fmean(known) if len(known) == len(found) else None

    lows, highs = ([score.row[end] for score in found] for end in ("low", "high"))
    whole = None not in lows and None not in highs
    return Spread(
        label=found[0].subject.label,
        # Two rows of one run (of other bootstrap seeds) are one seed.
        seeds=len({score.subject.run_id for score in found}),
        mean=statistics.fmean(values),
        deviation=statistics.stdev(values) if len(values) > 1 else None,
        lowest=min(lows) if whole else None,
        highest=max(highs) if whole else None,
        untrained=mean("untrained_value"),
        first_epoch=mean("first_epoch_value"),
    )


def checkpoint_points(
    scores: Iterable[Score], encoders: Iterable[Encoder]
) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(label, run id) -> (samples, value) of one group's runs, from scored sets and from the columns beside them."""
    samples_of = {(e.run_id, e.checkpoint): e.samples for e in encoders if e.run_id is not None}
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for score in scores:
        run_id = score.subject.run_id
        if run_id is None or not score.subject.is_trained_here:
            continue
        points = found[score.subject.label, run_id]
        for column, checkpoint in CHECKPOINT_COLUMNS.items():
            samples = samples_of.get((run_id, checkpoint))
            if score.row[column] is not None and samples is not None:
                points[samples] = float(score.row[column])
        if score.subject.samples is not None and math.isfinite(score.value):
            points[score.subject.samples] = score.value
    return {key: sorted(points.items()) for key, points in found.items() if len(points) > 1}
