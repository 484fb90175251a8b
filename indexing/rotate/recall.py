"""Recall and median rank through a map, in both directions, over one or many divisions.

Invariant: a scene counts once in an interval, however many captions it has and in however many divisions it was scored.

  single   one vector a scene on both sides
  multi    every caption by itself, with the map as it was fitted on one vector a scene: an image finds any of its
           captions, a caption finds its image

S scenes that can be scored, R of them in one division, C captions of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from indexing.rotate.retrieval import Ranks, mean_by_label, rank
from indexing.rotate.rotation import FittedMap
from indexing.sets.joins import Joined
from indexing.uncertainty.bootstrap import BootstrapConfig, ratio_interval
from infra.vectors import Floats, Ids, Table

Key: TypeAlias = tuple[str, str]
"""Protocol and direction."""

RECALLS: Final = (1, 5, 10)
FORWARD, BACKWARD = "left_to_right", "right_to_left"


@dataclass(frozen=True, kw_only=True)
class Captions:
    """All captions of the scored scenes. side: left or right. vectors: (C, D). scenes_C: rows in the joined table."""

    side: str
    vectors: Table
    scenes_C: Ids
    items_C: Ids


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Ranks of M queries. scenes_M, found_G: scene (0 .. R - 1) of each query and gallery row; items alike."""

    ranks: Ranks
    scenes_M: Ids
    found_G: Ids
    items_M: Ids
    items_G: Ids


def retrieve(joined: Joined, captions: Captions | None, fitted: FittedMap, rows_R: Ids) -> dict[Key, Queries]:
    """Both directions, single and (with captions) multi, among the scenes of these rows."""
    part = joined.take(rows_R)
    mapped, targets = fitted.map_rows(part.left.last), fitted.target_rows(part.right.last)
    places = np.arange(len(rows_R))
    lefts, rights = (mapped, places, part.left.items_S), (targets, places, part.right.items_S)
    out = {("single", FORWARD): _queries(lefts, rights), ("single", BACKWARD): _queries(rights, lefts)}
    if captions is not None:
        own = np.full(len(joined.keys_S), -1)
        own[rows_R] = places
        kept = np.flatnonzero(own[captions.scenes_C] >= 0)
        place = fitted.map_rows if captions.side == "left" else fitted.target_rows
        many = (place(captions.vectors[kept]), own[captions.scenes_C[kept]], captions.items_C[kept])
        if captions.side == "left":
            lefts = many
        else:
            rights = many
        out |= {("multi", FORWARD): _queries(lefts, rights), ("multi", BACKWARD): _queries(rights, lefts)}
    return out


def _queries(asking: tuple[Floats, Ids, Ids], found: tuple[Floats, Ids, Ids]) -> Queries:
    ranks = rank(asking[0], found[0], asking[1], found[1])
    return Queries(ranks=ranks, scenes_M=asking[1], found_G=found[1], items_M=asking[2], items_G=found[2])


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One number over all divisions.

    hits_S: sum of the hits of each scene; None for the median. counts_S: divisions that scored it. value: all hits over
    all counts, which is the mean over divisions. spread: standard deviation over divisions, None for one. expected: the
    recall when ties are broken at random.
    """

    protocol: str
    direction: str
    metric: str
    value: float
    chance: float | None
    ties: float
    gallery: int
    spread: float | None
    counts_S: Floats
    k: int | None = None
    low: float | None = None
    high: float | None = None
    expected: float | None = None
    hits_S: Floats | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Protocol, direction and metric."""
        return self.protocol, self.direction, self.metric


class Tally:
    """Outcomes of divisions, summed by scene. scenes: S."""

    def __init__(self, scenes: int) -> None:
        self._scenes = scenes
        self._counts: dict[Key, Floats] = {}
        self._hits: dict[tuple[Key, int], Floats] = {}
        self._each: dict[tuple[Key, str], list[float]] = {}

    def add(self, outcome: Mapping[Key, Queries], rows_R: Ids) -> None:
        """Count one division, whose scored scenes are these rows."""
        for key, queries in outcome.items():
            ranks, n = queries.ranks, len(rows_R)
            self._counts.setdefault(key, np.zeros(self._scenes))[rows_R] += 1
            for k in RECALLS:
                # Captions of a scene are averaged first, so that it counts once.
                means = mean_by_label(ranks.hits(k), queries.scenes_M, n)
                self._hits.setdefault((key, k), np.zeros(self._scenes))[rows_R] += means
                self._note(key, f"recall@{k}", float(means.mean()))
                self._note(key, f"chance@{k}", ranks.chance(k))
                self._note(key, f"expected@{k}", float(ranks.expected_hits(k).mean()))
            self._note(key, "median_rank", ranks.median_rank)
            self._note(key, "ties", ranks.tie_rate)
            self._note(key, "gallery", float(ranks.gallery))
            self._note(key, "right", float(ranks.right_M.max()))

    def _note(self, key: Key, name: str, value: float) -> None:
        self._each.setdefault((key, name), []).append(value)

    def measures(self, config: BootstrapConfig) -> list[Measure]:
        """Recalls with intervals over scenes, and median ranks, in the order of the outcomes."""
        return [
            one for key in self._counts for one in (*(self._recall(key, k, config) for k in RECALLS), self._median(key))
        ]

    def _recall(self, key: Key, k: int, config: BootstrapConfig) -> Measure:
        hits_S = self._hits[key, k]
        interval = ratio_interval(hits_S, self._counts[key], config)
        return Measure(
            k=k,
            value=interval.value,
            low=interval.low,
            high=interval.high,
            chance=self._mean(key, f"chance@{k}"),
            expected=self._mean(key, f"expected@{k}"),
            hits_S=hits_S,
            **self._common(key, f"recall@{k}"),
        )

    def _median(self, key: Key) -> Measure:
        common = self._common(key, "median_rank")
        # With several right rows a query, the median rank of the best one has no simple chance; recall has its own.
        chance = (common["gallery"] + 1) / 2 if self._mean(key, "right") == 1 else None
        return Measure(value=self._mean(key, "median_rank"), chance=chance, **common)

    def _common(self, key: Key, metric: str) -> dict[str, Any]:
        """What recalls and medians have alike."""
        each = self._each[key, metric]
        return {
            "protocol": key[0],
            "direction": key[1],
            "metric": metric,
            "ties": self._mean(key, "ties"),
            "gallery": round(self._mean(key, "gallery")),
            "spread": float(np.std(each, ddof=1)) if len(each) > 1 else None,
            "counts_S": self._counts[key],
        }

    def _mean(self, key: Key, name: str) -> float:
        return float(np.mean(self._each[key, name]))
