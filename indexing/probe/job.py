"""The job behind `goodviews probe`: probe an embedding set for labels, and record the accuracies in the catalog.

Invariant: a scene without a label, and a label without a scene, are counted and never guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from catalog.rows import embeddings
from catalog.rows.alignments import AlignmentRow, digest_of, record_alignments
from catalog.rows.embeddings import EmbeddingRecord
from indexing.probe.labels import name_of, read_labels
from indexing.probe.probes import Probe, ProbeConfig, probe
from indexing.scores.records import columns_of, plain, shared_columns
from indexing.sets.joins import RULES, JoinConfig, scene_vectors
from infra.errors import InputError, UsageError
from infra.home import Home
from infra.vectors import Table

EACH: Final = "each"


@dataclass(frozen=True, kw_only=True)
class ProbingConfig:
    """One call of `goodviews probe`. captions: mean, hash, or each: every caption is an item of its scene."""

    name: str
    labels: str
    key: str = "scene_key"
    label: str = "label"
    layer: int | None = None
    captions: str = "mean"
    probe: ProbeConfig = field(default_factory=ProbeConfig)

    def __post_init__(self) -> None:
        if self.captions not in (*RULES, EACH):
            raise UsageError(f"There is no rule {self.captions!r} for captions; there are mean, hash and each.")


def probe_set(home: Home, config: ProbingConfig) -> list[dict[str, Any]]:
    """Probe, record in the catalog, and return a plain object for each probe.

    Raises InputError for a set or labels that are not there, or that share too few scenes.
    """
    record = embeddings.find(home, config.name)
    labels = read_labels(home, config.labels, record, (config.key, config.label))
    layer = record.layers[-1] if config.layer is None else config.layer
    scenes, x_ND, rule = _items(home, record, layer, config)
    known = np.flatnonzero([scene in labels for scene in scenes])
    if not len(known):
        raise InputError(
            f"None of the {len(scenes):,} items of {record.name!r} has one of the {len(labels):,} labels of "
            f"{config.labels}; the first keys are {scenes[0]!r} and {next(iter(labels))!r}. Label by scene_key."
        )
    chosen = [scenes[row] for row in known]
    found = probe(x_ND[known], [labels[scene] for scene in chosen], chosen, config.probe)
    name = name_of(config.labels, (config.key, config.label))
    common: dict[str, Any] = {
        **columns_of(record, record, None),
        "right_id": None,
        "right_name": name,
        "left_layer": layer,
        "map": "none",
        "protocol": f"{config.probe.folds}-fold",
        "selection": f"labels {name}; {rule}",
        "seed": config.probe.seed,
        "scored": digest_of(chosen, [labels[scene] for scene in chosen]),
    }
    counts = {"items_without_label": len(scenes) - len(known), "labels_without_item": len(set(labels) - set(scenes))}
    rows = [_row(one, config, counts, common) for one in found]
    record_alignments(home, rows)
    return [plain(row) for row in rows]


def _items(home: Home, record: EmbeddingRecord, layer: int, config: ProbingConfig) -> tuple[list[str], Table, str]:
    if config.captions == EACH:
        keys = embeddings.read_keys(home, record)["scene_key"].to_pylist()
        return keys, embeddings.read_layer(home, record, layer), f"each of the {record.observation} is an item"
    join = JoinConfig(captions=config.captions, seed=config.probe.seed)
    vectors = scene_vectors(home, record, [layer], join)
    return [str(key) for key in vectors.keys_S], vectors.last, vectors.rule


def _row(found: Probe, config: ProbingConfig, counts: dict[str, int], common: dict[str, Any]) -> AlignmentRow:
    return AlignmentRow(
        metric=f"probe_{found.kind}",
        chance=found.chance,
        k=config.probe.k if found.kind == "knn" else None,
        n=found.n,
        details={**counts, "classes": found.classes, "dropped": found.dropped, "labels": config.labels, "alarms": []},
        **shared_columns(found.accuracy),
        **common,
    )
