"""Scores of a saved map on other sets: `goodviews rotate --apply`.

Invariant: a map is applied to the models, layers and pooling that it was fitted for, and never scored on its fit pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from catalog.rows import embeddings
from catalog.rows.alignments import digest_of, record_alignments
from catalog.rows.embeddings import EmbeddingRecord
from indexing.rotate.job import LEAST_SCORED, all_captions
from indexing.rotate.maps import MapRecord, StoredMap, load_map
from indexing.rotate.outcomes import Setting, rows_of, trial_of
from indexing.rotate.rotation import FittedMap, MapConfig, random_rotation
from indexing.scores.records import plain
from indexing.sets.joins import JoinConfig, Joined, join, scene_vectors
from indexing.sets.leakage import leakage
from indexing.sets.spaces import ORIGIN, differing_facts, space_of
from indexing.uncertainty.bootstrap import BootstrapConfig
from infra.errors import InputError
from infra.home import Home
from infra.vectors import Ids

CONTROLS = ("random", "shuffled")


def apply_map(
    home: Home, map_id: str, sets: tuple[str, str], join_config: JoinConfig, bootstrap: BootstrapConfig
) -> list[dict[str, Any]]:
    """Score a saved map between two sets and record it beside its controls; plain objects.

    Raises InputError when the map was fitted for other models, or when nothing is left besides its fit pairs.
    """
    stored = load_map(home, map_id)
    left, right = (embeddings.find(home, name) for name in sets)
    layers = [_layer(record, side, stored.record) for record, side in ((left, "left"), (right, "right"))]
    joined = join(
        scene_vectors(home, left, layers[:1], join_config),
        scene_vectors(home, right, layers[1:], join_config),
        least=LEAST_SCORED,
    )
    rows = _rows_to_score(joined, stored)
    captions = all_captions(home, joined)
    maps = {stored.record.kind: stored.fitted, "random": _random(stored.fitted), "shuffled": stored.shuffled}
    trials = [
        replace(
            trial_of(kind, stored.record.pairs, [(fitted, rows)], joined, captions, bootstrap), brief=kind in CONTROLS
        )
        for kind, fitted in maps.items()
    ]
    fitted_on = f"{stored.record.dataset or stored.record.left['name']}, split {stored.record.split}"
    setting = Setting(
        joined=joined,
        selection=f"map {map_id} fitted on {fitted_on} ({stored.record.rule}); {joined.rule}",
        scored=digest_of(joined.keys_S[rows]),
        seed=bootstrap.seed,
        divisions=1,
        map_id=map_id,
        is_applied=True,
        leaked=leakage(home, [left, right], joined.keys_S.tolist()),
    )
    found = [row for trial in trials for row in rows_of(setting, trial)]
    record_alignments(home, found)
    return [plain(row) for row in found]


def _layer(record: EmbeddingRecord, side: str, stored: MapRecord) -> int:
    """The layer to read. The same model under another pooling, or after another export, is another space."""
    wanted = stored.left if side == "left" else stored.right
    if "space" not in wanted:
        raise InputError(
            f"Map {stored.map_id} was saved by a release that kept no digests of its models, so it is not known "
            f"whether {record.name!r} is of its space. Fit it again with `goodviews rotate`."
        )
    differ = differing_facts(wanted["model"], wanted["space"], record)
    differ += [fact for fact in ("pooling", "dims") if fact not in differ and getattr(record, fact) != wanted[fact]]
    if differ:
        fact = differ[0]
        if fact in wanted:
            needed, own = f"{fact} {wanted[fact]!r}", f"has {getattr(record, fact)!r}"
        elif fact == ORIGIN:
            needed, own = wanted["model"], f"differs in {fact}"
        else:
            needed = f"{wanted['model']} with {fact} {str(wanted['space'][fact])[:12]}"
            own = f"has {str((space_of(record) or {})[fact])[:12]}"
        raise InputError(
            f"Map {stored.map_id} was fitted for {needed} on the {side} side, and {record.name!r} {own}. "
            "Its directions mean nothing there; fit a map for these sets."
        )
    return int(wanted["layer"])


def _rows_to_score(joined: Joined, stored: StoredMap) -> Ids:
    datasets = {joined.left.record.dataset, joined.right.record.dataset} - {None}
    same = stored.record.dataset is None or not datasets or stored.record.dataset in datasets
    fitted_on = stored.fit_keys if same else frozenset[str]()
    rows = np.flatnonzero([key not in fitted_on for key in joined.keys_S])
    if len(rows) < LEAST_SCORED:
        raise InputError(
            f"Of {len(joined.keys_S):,} common scenes {len(rows):,} are no fit pairs of map {stored.record.map_id}; "
            "a map knows the answers it was fitted on. Apply it to other scenes."
        )
    return rows.astype(np.int64)


def _random(fitted: FittedMap) -> FittedMap:
    weights = {"w": random_rotation(len(fitted.x_mean_D), len(fitted.y_mean_E), fitted.config.seed)}
    config = MapConfig(kind="random", centre=fitted.config.centre, unit=fitted.config.unit, seed=fitted.config.seed)
    return FittedMap(config=config, x_mean_D=fitted.x_mean_D, y_mean_E=fitted.y_mean_E, weights=weights)
