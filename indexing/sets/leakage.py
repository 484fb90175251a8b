"""Leakage of a score: which of the scored scenes the training sets of its encoders hold.

Invariant: unknown is None and never 0. A model whose training set nobody recorded may have seen everything.
The comparison of two datasets itself is `catalog.overlap.leakage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from catalog.overlap.leakage import find_leaks
from catalog.overlap.parts import Part
from catalog.rows.embeddings import EmbeddingRecord
from indexing.sets.joins import Keys
from infra.errors import InputError
from infra.home import Home
from infra.vectors import Mask


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """Scenes that a training set of either side holds.

    leaked: their keys. share: of the scored scenes. counts: by training set, then by kind of `catalog.overlap.leakage`.
    """

    leaked: frozenset[str]
    share: float
    counts: Mapping[str, Mapping[str, int]]

    def kept(self, keys_S: Keys) -> Mask:
        """Which of these scenes did not leak (S,)."""
        return np.array([key not in self.leaked for key in keys_S], np.bool_)


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Why the leakage of a score is not known."""

    reason: str


def leakage(home: Home, sides: Sequence[EmbeddingRecord], scene_keys: Sequence[str]) -> Leakage | Unknown:
    """Which of the scored scenes the known training sets hold.

    A frozen model from elsewhere has no known training set; the answer is then about the other side alone, and `counts`
    names the training sets that were compared.
    """
    scored = next((part for part in (scored_part(record, sides) for record in sides) if part is not None), None)
    training = {part.name: part for part in map(training_part, sides) if part is not None}
    if not training:
        return Unknown(reason="no training set of either model is recorded")
    if scored is None:
        return Unknown(reason="neither side says which dataset it embeds")
    try:
        found = {name: find_leaks(home, part, scored, scene_keys) for name, part in training.items()}
    except InputError as error:
        return Unknown(reason=str(error))
    leaked = frozenset[str]().union(*(one.leaked for one in found.values()))
    return Leakage(
        leaked=leaked, share=len(leaked) / len(scene_keys), counts={name: one.counts for name, one in found.items()}
    )


def training_part(record: EmbeddingRecord) -> Part | None:
    """The training set of the run behind a set, as `goodviews embed` recorded it; None for other models."""
    training: Mapping[str, Any] = record.config.get("training") or {}
    if not training.get("dataset") or not training.get("version"):
        return None
    return Part(
        dataset=training["dataset"],
        version=training["version"],
        split=training.get("split"),
        roles=tuple(training.get("roles") or ()),
    )


def scored_part(record: EmbeddingRecord, sides: Sequence[EmbeddingRecord]) -> Part | None:
    """The dataset that is scored, with the roles of the captions behind either side; all if a side used all."""
    if record.dataset is None or record.version is None:
        return None
    shown = [side.roles for side in sides if side.observation in ("captions", "scenes")]
    roles = {role for one in shown for role in one} if all(shown) else set[str]()
    return Part(dataset=record.dataset, version=record.version, split=record.split, roles=tuple(sorted(roles)))
