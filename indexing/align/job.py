"""The job behind `goodviews align`: score two embedding sets, and record the scores in the catalog.

A row holds leakage, the scores of earlier checkpoints of the run, and the paired difference to a baseline.
Invariant: the baseline and the earlier checkpoints are scored on the same scenes and with the same config.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from catalog.rows import embeddings
from catalog.rows.alignments import (
    CHECKPOINT_COLUMNS,
    AlignmentRow,
    alignment_url,
    difference_row,
    digest_of,
    record_alignments,
)
from catalog.rows.embeddings import EmbeddingRecord
from indexing.align.score import AlignConfig, Score, Scored, Side, difference, score_sides, values_of, why_no_interval
from indexing.scores.records import columns_of, plain, shared_columns
from indexing.sets.joins import (
    JoinConfig,
    Joined,
    Keys,
    SceneVectors,
    common_rows,
    join,
    on_common_scenes,
    scene_vectors,
)
from indexing.sets.leakage import Leakage, Unknown, leakage
from infra import storage
from infra.errors import GoodviewsError, InputError
from infra.home import Home
from infra.models.checkpoints import model_name
from infra.vectors import Ids

_log = logging.getLogger(__name__)

SHOWN_ITEMS: Final = 64
"Scenes whose neighbours are kept for the report."


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """One call of `goodviews align`. left_layer, right_layer: None for the last, or for all under huh2024."""

    left: str
    right: str
    against: str | None = None
    left_layer: int | None = None
    right_layer: int | None = None
    keys: str | None = None
    "File with one scene key a line: only these are scored."
    align: AlignConfig = field(default_factory=AlignConfig)
    join: JoinConfig = field(default_factory=JoinConfig)


def score_sets(home: Home, config: ScoringConfig) -> list[dict[str, Any]]:
    """Score, record in the catalog, and return plain objects: the scores, then the differences to `against`.

    Raises InputError for sets that are not there, do not join, or hold too few common scenes.
    """
    left, right = embeddings.find(home, config.left), embeddings.find(home, config.right)
    baseline = None if config.against is None else embeddings.find(home, config.against)
    joined = _joined(home, left, right, config)
    if baseline is not None:
        joined, other = on_common_scenes(joined, _joined(home, baseline, right, config))
    sides = Side(joined.left.layers, config.align), Side(joined.right.layers, config.align)
    found = score_sides(*sides, config.align)
    leaked = leakage(home, [left, right], joined.keys_S.tolist())
    beside = {"without_leaked": _without(joined, leaked, config.align), **_earlier_values(home, joined, sides, config)}
    lost = None if config.keys is None else len(read_key_file(config.keys)) - len(joined.keys_S)
    rows = [
        _row(joined, one, config, leaked, lost, {name: values[place] for name, values in beside.items()})
        for place, one in enumerate(found)
    ]
    gaps, gap_rows = [], []
    if baseline is not None:
        # The baseline is joined with RIGHT on the same scenes, so that side stays as it is.
        scores = score_sides(Side(other.left.layers, config.align), sides[1], config.align)
        gaps = [_difference(a, b, left, baseline, config) for a, b in zip(found, scores, strict=True)]
        named = (baseline.embedding_id, baseline.name)
        gap_rows = [difference_row(row, named, gap) for row, gap in zip(rows, gaps, strict=True)]
    record_alignments(home, rows + gap_rows)
    _keep_neighbours(home, joined, sides, rows)
    return [*(plain(row) for row in rows), *gaps]


def read_key_file(path: str) -> Keys:
    """Scene keys, sorted and unique, from lines that may hold spaces. Raises InputError for an empty or binary file."""
    try:
        lines = storage.read_bytes(storage.absolute(path)).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}). Give a file with one scene key a line.") from error
    keys = {line.strip() for line in lines} - {""}
    if not keys:
        raise InputError(f"{path} names no scene. Give a file with one scene key a line.")
    return np.array(sorted(keys), object)


def _joined(home: Home, left: EmbeddingRecord, right: EmbeddingRecord, config: ScoringConfig) -> Joined:
    searching = config.align.protocol.name == "huh2024"

    def vectors(record: EmbeddingRecord, layer: int | None) -> SceneVectors:
        every = record.layers if searching else None
        return scene_vectors(home, record, every if layer is None else [layer], config.join)

    least = config.align.k + 2
    joined = join(vectors(left, config.left_layer), vectors(right, config.right_layer), least=least)
    if config.keys is None:
        return joined
    wanted = read_key_file(config.keys)
    rows, _ = common_rows(joined.keys_S, wanted)
    if len(rows) < least:
        raise InputError(
            f"{len(rows):,} of the {len(wanted):,} scenes of {config.keys} are in both sets; "
            f"a score needs {least} or more."
        )
    return joined.take(rows)


def _without(joined: Joined, leaked: Leakage | Unknown, config: AlignConfig) -> list[float | None]:
    """The scores of the scenes that did not leak, each None when too few are left for it or nothing is known."""
    kept = np.flatnonzero(leaked.kept(joined.keys_S)) if isinstance(leaked, Leakage) else np.empty(0, np.int64)
    if not len(kept):
        return [None] * len(config.metrics)
    rest = joined.take(kept)
    return values_of(Side(rest.left.layers, config), Side(rest.right.layers, config), config)


def _earlier_values(
    home: Home, joined: Joined, sides: tuple[Side, Side], config: ScoringConfig
) -> dict[str, list[float | None]]:
    """The same scores, scenes and layers for earlier checkpoints of the run behind the left set, else the right one."""
    found: dict[str, list[float | None]] = {}
    both = (joined.left, joined.right)
    place = next((i for i, side in enumerate(both) if side.record.run_id is not None), None)
    if place is None:
        return found
    layers = list(both[place].layers)
    for column, checkpoint in CHECKPOINT_COLUMNS.items():
        earlier = earlier_set(home, both[place].record, checkpoint, layers)
        if earlier is None:
            continue
        try:
            vectors = scene_vectors(home, earlier, layers, config.join)
            rows, _ = common_rows(vectors.keys_S, joined.keys_S)
            if len(rows) < len(joined.keys_S):
                continue
            side = Side(vectors.take(rows).layers, config.align)
            ordered = (side, sides[1]) if place == 0 else (sides[0], side)
            found[column] = values_of(*ordered, config.align)
        except GoodviewsError as error:
            # The score is complete without the earlier ones.
            _log.warning("Checkpoint %r of run %s is left out: %s", checkpoint, both[place].record.run_id, error)
    return found


def earlier_set(
    home: Home, record: EmbeddingRecord, checkpoint: str, layers: Collection[int] = ()
) -> EmbeddingRecord | None:
    """The newest set of that checkpoint that was made like this one and holds these layers; None without any."""
    facts = ("dataset", "version", "split", "observation", "roles", "pooling", "averaging", "max_length")
    alike = [
        other
        for other in embeddings.list_sets(home)
        if other.model == model_name(str(record.run_id), checkpoint)
        and set(layers) <= set(other.layers)
        and all(getattr(other, name) == getattr(record, name) for name in facts)
    ]
    return alike[-1] if alike else None


def _row(
    joined: Joined,
    scored: Scored,
    config: ScoringConfig,
    leaked: Leakage | Unknown,
    keys_not_found: int | None,
    extra: Mapping[str, float | None],
) -> AlignmentRow:
    found = scored.score
    details: dict[str, Any] = {
        "undefined": found.undefined,
        "threshold": found.threshold,
        "draws": found.draws,
        "left_only": joined.left_only,
        "right_only": joined.right_only,
        "without_leaked": extra["without_leaked"],
        "leaked": leaked.reason if isinstance(leaked, Unknown) else leaked.counts,
        "keys_not_found": keys_not_found,
        "alarms": alarms(found, config, keys_not_found),
    }
    scored_digest = digest_of(joined.keys_S)
    selection = [found.selection, joined.rule]
    if config.keys is not None:
        selection.append(f"scenes of a key file ({scored_digest})")
    columns = shared_columns(found) | columns_of(joined.left.record, joined.right.record, leaked)
    columns |= {column: extra.get(column) for column in CHECKPOINT_COLUMNS}
    columns["selection"] = "; ".join(selection)
    seed = config.align.bootstrap.seed
    return AlignmentRow(map="none", seed=seed, scored=scored_digest, details=details, **columns)


def alarms(found: Score, config: ScoringConfig, keys_not_found: int | None = None) -> list[str]:
    """Reasons to doubt a score, a sentence each."""
    reasons = []
    if found.ties is not None and found.ties > 0.5:
        reasons.append(
            f"{found.ties:.0%} of the items have ties where their list ends: "
            "a side has collapsed or repeats its vectors"
        )
    if found.undefined:
        reasons.append(f"{found.undefined:,} items have a zero vector: they have no neighbours and score 0")
    if keys_not_found:
        reasons.append(f"{keys_not_found:,} of the scenes of {config.keys} are not in all sets and were not scored")
    missing = why_no_interval(found.metric, found.n)
    return reasons + ([missing] if missing and config.align.bootstrap.draws else [])


def _difference(
    a: Scored, b: Scored, left: EmbeddingRecord, baseline: EmbeddingRecord, config: ScoringConfig
) -> dict[str, Any]:
    found = difference(a, b, config.align)
    return {
        "metric": a.score.metric,
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "chance": 0.0,
        "k": a.score.k,
        "n": a.score.n,
        "ties": a.score.ties,
        "difference": [left.name, baseline.name],
        "values": [a.score.value, b.score.value],
        "layers": [[s.score.left_layer, s.score.right_layer] for s in (a, b)],
        "protocol": a.score.protocol,
    }


def _keep_neighbours(home: Home, joined: Joined, sides: tuple[Side, Side], rows: Sequence[AlignmentRow]) -> None:
    """Publish neighbours.parquet of the mutual k-NN score (scene_key, left, right), for scenes spread over the keys."""
    for row in rows:
        if row.metric != "mutual_knn" or row.k is None:
            continue
        chosen = np.unique(np.linspace(0, len(joined.keys_S) - 1, SHOWN_ITEMS).astype(np.int64))
        layers = (row.left_layer or 0, row.right_layer or 0)
        lists = [
            _named(joined.keys_S, side.lists(layer).ids_NK[chosen]) for side, layer in zip(sides, layers, strict=True)
        ]
        names = pa.array(joined.keys_S[chosen], pa.large_string())
        table = pa.table({"scene_key": names, "left": lists[0], "right": lists[1]})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        storage.publish(alignment_url(home, row.alignment_id, "neighbours.parquet"), [sink.getvalue()])


def _named(keys_S: Keys, ids_NK: Ids) -> pa.Array:
    named = [[str(keys_S[j]) for j in row if j >= 0] for row in ids_NK]
    return pa.array(named, pa.large_list(pa.large_string()))
