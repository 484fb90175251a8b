"""Results of maps: rows of the catalog with their alarms, differences of two systems, and the picks of single queries.

Invariant: a row says on which pairs its map was fitted and on which scenes it was scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from catalog.rows.alignments import AlignmentRow
from indexing.rotate import maps
from indexing.rotate.recall import Captions, Key, Measure, Queries, Tally, retrieve
from indexing.rotate.rotation import FittedMap
from indexing.scores.records import columns_of, shared_columns
from indexing.sets.joins import Joined, Keys
from indexing.sets.leakage import Leakage, Unknown
from indexing.uncertainty.bootstrap import BootstrapConfig, ratio_interval
from infra.vectors import Ids


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One map on all divisions. map: its kind, or shuffled. first, picks: of the first division, which are saved.

    brief: a point of the curve or a control, of which only the first recall is recorded.
    """

    map: str
    pairs: int
    measures: Sequence[Measure]
    first: FittedMap
    picks: dict[Key, Queries]
    brief: bool = False


def trial_of(
    name: str,
    pairs: int,
    maps_of: Iterable[tuple[FittedMap, Ids]],
    joined: Joined,
    captions: Captions | None,
    config: BootstrapConfig,
) -> Trial:
    """Score one map a division on its rows of the joined table. name: kind of the maps, or shuffled."""
    tally = Tally(len(joined.keys_S))
    first: tuple[FittedMap, dict[Key, Queries]] | None = None
    for fitted, rows in maps_of:
        outcome = retrieve(joined, captions, fitted, rows)
        tally.add(outcome, rows)
        first = first or (fitted, outcome)
    assert first is not None  # there is at least one division
    return Trial(map=name, pairs=pairs, measures=tally.measures(config), first=first[0], picks=first[1])


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all rows of one call have in common.

    selection: how the map came about and what it was scored on. scored: digest of these scenes and of the fit pairs.
    """

    joined: Joined
    selection: str
    scored: str
    seed: int
    divisions: int
    map_id: str
    leaked: Leakage | Unknown
    is_applied: bool = False
    "Whether the map was fitted for another call: the picks beside it are then not of these rows."


def rows_of(setting: Setting, trial: Trial) -> Iterator[AlignmentRow]:
    """A row for each measure of a trial; of a brief one, for the first recall alone."""
    left, right = setting.joined.left, setting.joined.right
    leaked = setting.leaked
    for one in trial.measures:
        if trial.brief and one.metric != "recall@1":
            continue
        details: dict[str, Any] = {
            "applied_map_id" if setting.is_applied else "map_id": setting.map_id,
            "divisions": setting.divisions,
            "spread_over_divisions": one.spread,
            "ties_at_random": one.expected,
            "scenes_scored": int((one.counts_S > 0).sum()),
            "without_leaked": _without(setting.joined.keys_S, one, leaked),
            "leaked": leaked.reason if isinstance(leaked, Unknown) else leaked.counts,
            "facts": dict(trial.first.facts),
            "alarms": alarms(one, trial),
        }
        yield AlignmentRow(
            left_layer=max(left.layers),
            right_layer=max(right.layers),
            map=trial.map,
            n=one.gallery,
            selection=setting.selection,
            seed=setting.seed,
            pairs=trial.pairs,
            scored=setting.scored,
            details=details,
            **shared_columns(one),
            **columns_of(left.record, right.record, leaked),
        )


def alarms(one: Measure, trial: Trial) -> list[str]:
    """Reasons to doubt a result, a sentence each."""
    reasons = []
    if one.ties > 0.5:
        reasons.append(
            f"{one.ties:.0%} of the queries tie with a wrong one: a side has collapsed, and ties count as misses"
        )
    rank = trial.first.facts.get("rank")
    full = min(len(trial.first.x_mean_D), len(trial.first.y_mean_E))
    if trial.map == "rotation" and not trial.brief and rank is not None and rank < 0.95 * full:
        reasons.append(
            f"{trial.pairs:,} pairs fix {rank:.0f} of {full} directions of the rotation; the rest is arbitrary"
        )
    return reasons


def _without(keys_S: Keys, one: Measure, leaked: Leakage | Unknown) -> float | None:
    """Mean over the queries whose scene did not leak, with the gallery as it is; None where nothing is known."""
    if isinstance(leaked, Unknown) or one.hits_S is None:
        return None
    kept = leaked.kept(keys_S)
    counted = float(one.counts_S[kept].sum())
    return float(one.hits_S[kept].sum()) / counted if counted else None


def differences(
    main: Trial, baseline: Trial, names: tuple[str, str], config: BootstrapConfig
) -> Iterator[dict[str, Any]]:
    """Recalls of one system minus those of another, fitted and scored on the same scenes, with paired intervals."""
    for a, b in zip(main.measures, baseline.measures, strict=False):
        if a.hits_S is None or b.hits_S is None or a.key != b.key:
            continue
        found = ratio_interval(a.hits_S - b.hits_S, a.counts_S, config)
        yield {
            "metric": a.metric,
            "value": found.value,
            "low": found.low,
            "high": found.high,
            "chance": 0.0,
            "k": a.k,
            "n": a.gallery,
            "ties": a.ties,
            "difference": list(names),
            "values": [a.value, b.value],
            "map": main.map,
            "pairs": main.pairs,
            "protocol": a.protocol,
            "direction": a.direction,
        }


def picks_table(joined: Joined, rows: Ids, picks: dict[Key, Queries]) -> pa.Table:
    """Rows of `maps.PICKS` for one division, whose scored scenes are these rows of the joined table."""
    keys_R = joined.keys_S[rows]
    parts = [pa.Table.from_pylist([], schema=maps.PICKS)]
    for (protocol, direction), queries in picks.items():
        ranks, m = queries.ranks, len(queries.scenes_M)
        items = [pa.array(i, mask=i < 0) for i in (queries.items_M, queries.items_G[ranks.picked_M])]
        columns = {
            "protocol": [protocol] * m,
            "direction": [direction] * m,
            "scene_key": keys_R[queries.scenes_M].tolist(),
            "item": items[0],
            "picked_scene_key": keys_R[queries.found_G[ranks.picked_M]].tolist(),
            "picked_item": items[1],
            "rank": ranks.ranks_M + 1,
            "score": ranks.best_M,
            "ties": ranks.tied_M,
        }
        parts.append(pa.table(columns, schema=maps.PICKS))
    return pa.concat_tables(parts)
