"""The join of two embedding sets: two tables whose row i is one scene.

Invariant: rows are joined by scene_key and never by position; `rule` names how several captions became one vector.

Rules for several rows a scene:
  mean: each at length 1, averaged, at length 1 again; for frames too
  hash: one caption, the first of the scene's seeded permutation; the first by index would prefer short captions where a
        dataset sorts them by length

N rows of a set, S scenes, D dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from infra import seeds
from infra.errors import InputError, UsageError
from infra.home import Home
from infra.vectors import Ids, Table, mean_of_unit_rows

Keys: TypeAlias = npt.NDArray[np.object_]

RULES: Final = ("mean", "hash")
ONE_A_SCENE: Final = "one vector a scene"


@dataclass(frozen=True, kw_only=True)
class SceneVectors:
    """One embedding set, one vector a scene.

    keys_S: sorted. layers: number -> (S, D). items_S: caption or frame of the vector; -1 where several were averaged.
    """

    record: EmbeddingRecord
    keys_S: Keys
    layers: Mapping[int, Table]
    items_S: Ids
    rule: str

    def take(self, rows: npt.NDArray[np.integer]) -> SceneVectors:
        """Only these rows."""
        layers = {number: x[rows] for number, x in self.layers.items()}
        return replace(self, keys_S=self.keys_S[rows], layers=layers, items_S=self.items_S[rows])

    @property
    def last(self) -> Table:
        """Rows of the highest layer that was read."""
        return self.layers[max(self.layers)]


@dataclass(frozen=True, kw_only=True)
class JoinConfig:
    """How the vectors of several captions become one."""

    captions: str = "mean"
    "Rule for several captions a scene: mean or hash."
    seed: int = 0
    "Seed of the rule hash."

    def __post_init__(self) -> None:
        if self.captions not in RULES:
            raise UsageError(
                f"There is no rule {self.captions!r} for several captions a scene; there are {' and '.join(RULES)}."
            )


def scene_vectors(
    home: Home, record: EmbeddingRecord, layers: Sequence[int] | None, config: JoinConfig
) -> SceneVectors:
    """One vector a scene of an embedding set. layers: None for the last.

    Raises InputError when the set has no such layer, IntegrityError when a file is not what its record says.
    """
    numbers = [record.layers[-1]] if layers is None else list(layers)
    keys = embeddings.read_keys(home, record)
    names_N = keys["scene_key"].to_numpy(zero_copy_only=False).astype(object)
    items_N = keys["item"].to_numpy().astype(np.int64)
    if not len(names_N):
        raise InputError(f"Embedding set {record.name!r} is empty. Embed a split that holds scenes.")
    # Rows are in canonical order, so the rows of a scene are adjacent.
    starts_S = np.flatnonzero(np.concatenate([[True], names_N[1:] != names_N[:-1]]))
    tables = {number: embeddings.read_layer(home, record, number) for number in numbers}
    every = SceneVectors(record=record, keys_S=names_N, layers=tables, items_S=items_N, rule=ONE_A_SCENE)
    if len(starts_S) == len(names_N):
        return every
    if config.captions == "mean" or record.observation != "captions":
        means = {number: mean_of_unit_rows(x, starts_S) for number, x in tables.items()}
        rule, items_S = f"mean of the unit {record.observation} of a scene", np.full(len(starts_S), -1)
        return replace(every, keys_S=names_N[starts_S], layers=means, items_S=items_S, rule=rule)
    places_N = seeds.permutation_places(seeds.hash_keys(names_N.tolist()), items_N, config.seed)
    drawn = every.take(np.flatnonzero(places_N == 0))
    return replace(drawn, rule=f"one caption a scene, drawn by hash (seed {config.seed})")


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Two sets over the same scenes. left_only, right_only: scenes that the other side lacks."""

    left: SceneVectors
    right: SceneVectors
    left_only: int
    right_only: int

    @property
    def keys_S(self) -> Keys:
        """Scene keys, sorted."""
        return self.left.keys_S

    def take(self, rows: npt.NDArray[np.integer]) -> Joined:
        """Only these scenes."""
        return replace(self, left=self.left.take(rows), right=self.right.take(rows))

    @property
    def rule(self) -> str:
        """The rules of both sides."""
        return f"left: {self.left.rule}; right: {self.right.rule}"


def join(left: SceneVectors, right: SceneVectors, *, least: int = 3) -> Joined:
    """The scenes that both sides have.

    Raises InputError, with the counts, when the two are of different datasets or share fewer than `least` scenes.
    """
    a, b = left.record, right.record
    if a.dataset is not None and b.dataset is not None and a.dataset != b.dataset:
        raise InputError(
            f"{a.name!r} is of dataset {a.dataset} and {b.name!r} of {b.dataset}; "
            "equal keys there name different scenes. Embed both models on one dataset."
        )
    rows_left, rows_right = common_rows(left.keys_S, right.keys_S)
    if len(rows_left) < least:
        raise InputError(
            f"{a.name!r} has {len(left.keys_S):,} scenes ({_where(a)}), {b.name!r} has {len(right.keys_S):,} "
            f"({_where(b)}), and {len(rows_left):,} are in both; a score needs {least} or more. "
            "Embed the same split with both models."
        )
    return Joined(
        left=left.take(rows_left),
        right=right.take(rows_right),
        left_only=len(left.keys_S) - len(rows_left),
        right_only=len(right.keys_S) - len(rows_right),
    )


def on_common_scenes(one: Joined, other: Joined) -> tuple[Joined, Joined]:
    """Both joins, reduced to the scenes that both have."""
    rows, others = common_rows(one.keys_S, other.keys_S)
    return one.take(rows), other.take(others)


def common_rows(a_S: Keys, b_S: Keys) -> tuple[Ids, Ids]:
    """Rows, in either list of sorted unique keys, of the keys that both lists hold."""
    places = pc.index_in(pa.array(a_S, pa.large_string()), pa.array(b_S, pa.large_string()))
    found = pc.fill_null(places, -1).to_numpy().astype(np.int64)
    rows_a = np.flatnonzero(found >= 0)
    return rows_a, found[rows_a]


def _where(record: EmbeddingRecord) -> str:
    return f"split {record.split} of {record.dataset}" if record.dataset else "imported, of no named dataset"
