"""Example pictures with the caption each encoder picks, and neighbours side by side.

Invariant: scenes are chosen by the hash of their key, never by the result of an encoder, so right and wrong answers
appear in their true proportion; all encoders of a gallery were given the same queries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from catalog.lake.lake import Lake
from catalog.report.encoders import Encoder
from catalog.report.scene_images import Scene, read_scenes
from catalog.report.scores import CONTROLS, Score
from catalog.rows.alignments import alignment_url
from infra import storage
from infra.errors import IntegrityError
from infra.home import Home

SHOWN_QUERIES: Final = 12
SHOWN_NEIGHBOURHOODS: Final = 5
SHOWN_NEIGHBOURS: Final = 5
MOST_ENCODERS: Final = 5
PICTURE, CAPTION = "pictures find captions", "captions find pictures"


@dataclass(frozen=True, kw_only=True)
class Pick:
    """What one encoder found for one query. rank: of the right one, 1 is first."""

    encoder: str
    text: str
    is_right: bool
    rank: int


@dataclass(frozen=True, kw_only=True)
class Query:
    """A picture that was to find its caption, and what was found for it."""

    scene: Scene
    picks: Sequence[Pick]


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Queries of one scored set; hits: of all of its queries, how many each encoder got right."""

    queries: Sequence[Query]
    hits: Mapping[str, tuple[int, int]]
    map: str
    place: str


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """A scene in a list of neighbours. is_shared: the list of the anchor holds it too, at any place."""

    scene: Scene
    is_shared: bool


@dataclass(frozen=True, kw_only=True)
class Neighbourhood:
    """One scene, its neighbours by the anchor and by each encoder: name -> (shared of k, the first few)."""

    scene: Scene
    k: int
    lists: Mapping[str, tuple[int | None, Sequence[Neighbour]]]


# --- picks --------------------------------------------------------------------------------------------------------


def read_gallery(home: Home, reader: Lake, scores: Iterable[Score]) -> Gallery | None:
    """Of the newest scored set whose pictures look for captions; None where no map keeps such picks.

    Raises IntegrityError for picks that are not those of their map's record.
    """
    found = [(score, table) for score in encoders_of(_mapped(scores)) if (table := _picks(home, score)) is not None]
    if not found:
        return None
    place = _place(found[-1][0])
    tables: dict[str, dict[str, Mapping[str, Any]]] = {}
    for score, table in found:
        if _place(score) == place and len(tables) < MOST_ENCODERS:
            tables[_name(score, tables)] = {row["scene_key"]: row for row in table.to_pylist()}
    common = set.intersection(*(set(rows) for rows in tables.values()))
    shown = drawn(common, SHOWN_QUERIES)
    dataset, version, _, _, kind = place
    keys = {row["picked_scene_key"] for rows in tables.values() for key in shown for row in [rows[key]]}
    scenes = read_scenes(home, reader, dataset, version, {*shown, *keys})
    queries = [
        Query(scene=scenes[key], picks=[_pick(name, rows[key], scenes) for name, rows in tables.items()])
        for key in shown
        if key in scenes
    ]
    hits = {name: (sum(row["rank"] == 1 for row in rows.values()), len(rows)) for name, rows in tables.items()}
    return Gallery(queries=queries, hits=hits, map=kind, place=f"{dataset}@{version}/{place[2]}") if queries else None


def drawn(keys: Iterable[str], count: int) -> list[str]:
    """`count` of the keys, those with the lowest hash."""
    return sorted(keys, key=lambda key: hashlib.sha256(key.encode()).digest())[:count]


def _mapped(scores: Iterable[Score]) -> list[Score]:
    """Scores of maps in which pictures look for captions, one a map, those of trained encoders only."""
    found = {}
    for score in scores:
        row = score.row
        is_one = row["metric"] == "recall@1" and score.direction == PICTURE and row["map"] not in CONTROLS
        is_kept = row["details"].get("map_id") and row["dataset"] and row["version"]
        # Earlier checkpoints of a run are left out; frozen models are shown.
        if is_one and is_kept and (score.subject.run_id is None or score.subject.is_trained_here):
            found[row["details"]["map_id"]] = score
    return list(found.values())


def _place(score: Score) -> tuple[str, str, str, str, str]:
    row = score.row
    anchor = score.anchor.name if score.anchor is not None else ""
    return (row["dataset"], row["version"], row["split"] or "", anchor, row["map"])


def _picks(home: Home, score: Score) -> pa.Table | None:
    """Rows of the picture queries: against single captions (`multi`) if the map has them, else against scenes."""
    folder = storage.join(home.url, "maps", score.row["details"]["map_id"])
    record_url, url = storage.join(folder, "record.json"), storage.join(folder, "picks.parquet")
    if not storage.exists(record_url) or not storage.exists(url):
        return None
    data = storage.read_bytes(url)
    said = orjson.loads(storage.read_bytes(record_url)).get("files", {}).get("picks.parquet", {}).get("sha256")
    if said != hashlib.sha256(data).hexdigest():
        raise IntegrityError(
            f"{url} has another sha256 than the record of its map says, so the page would show other picks than "
            "were scored. Rerun `goodviews rotate`."
        )
    table = pq.read_table(pa.BufferReader(data))
    table = table.filter(pa.compute.equal(table["direction"], score.row["direction"]))
    for protocol in ("multi", "single"):
        part = table.filter(pa.compute.equal(table["protocol"], protocol))
        if part.num_rows:
            return part
    return None


def _name(score: Score, taken: Iterable[str]) -> str:
    """Label of the encoder, with seed or run where two bear one label."""
    subject = score.subject
    label = subject.label if subject.seed is None else f"{subject.label}, seed {subject.seed}"
    return label if label not in taken else f"{label} ({subject.run_id or subject.name})"


def _pick(name: str, row: Mapping[str, Any], scenes: Mapping[str, Scene]) -> Pick:
    scene = scenes.get(row["picked_scene_key"])
    captions = {} if scene is None else scene.captions
    item = row["picked_item"]
    text = captions.get(item) if item is not None else next(iter(captions.values()), None)
    return Pick(encoder=name, text=text or row["picked_scene_key"], is_right=row["rank"] == 1, rank=row["rank"])


# --- neighbours ---------------------------------------------------------------------------------------------------


def read_neighbourhoods(home: Home, reader: Lake, scores: Sequence[Score]) -> list[Neighbourhood]:
    """Of scores of one group: a few scenes with the neighbours that the anchor and each encoder give them."""
    tables: dict[str, tuple[Score, Mapping[str, Mapping[str, Any]]]] = {}
    for score in scores:
        if len(tables) < MOST_ENCODERS and (rows := _neighbours(home, score)):
            tables[_name(score, tables)] = (score, rows)
    if not tables:
        return []
    first = next(iter(tables.values()))[0]
    if not (first.row["dataset"] and first.row["version"]):
        return []
    common = set.intersection(*(set(rows) for _, rows in tables.values()))
    shown = drawn(common, SHOWN_NEIGHBOURHOODS)
    keys = {
        k for _, rows in tables.values() for key in shown for side in ("subject", "anchor") for k in rows[key][side]
    }
    scenes = read_scenes(home, reader, first.row["dataset"], first.row["version"], {*shown, *keys})
    return [_neighbourhood(scenes, key, tables) for key in shown if key in scenes]


def _neighbours(home: Home, score: Score) -> dict[str, Mapping[str, Any]]:
    """scene_key -> subject, anchor: keys, nearest first. Empty where the score keeps none."""
    url = alignment_url(home, str(score.row["alignment_id"]), "neighbours.parquet")
    if score.anchor is None or not storage.exists(url):
        return {}
    names = ("left", "right") if score.side == "left" else ("right", "left")
    return {
        row["scene_key"]: {"subject": row[names[0]], "anchor": row[names[1]]}
        for row in pq.read_table(pa.BufferReader(storage.read_bytes(url))).to_pylist()
    }


def _neighbourhood(
    scenes: Mapping[str, Scene], key: str, tables: Mapping[str, tuple[Score, Mapping[str, Mapping[str, Any]]]]
) -> Neighbourhood:
    score, rows = next(iter(tables.values()))
    anchor_keys = rows[key]["anchor"]
    lists: dict[str, tuple[int | None, Sequence[Neighbour]]] = {
        score.against: (None, _listed(scenes, anchor_keys, anchor_keys))
    }
    for name, (_, found) in tables.items():
        own = found[key]["subject"]
        lists[name] = (len({*own} & {*found[key]["anchor"]}), _listed(scenes, own, anchor_keys))
    return Neighbourhood(scene=scenes[key], k=len(anchor_keys), lists=lists)


def _listed(scenes: Mapping[str, Scene], keys: Sequence[str], shared: Sequence[str]) -> list[Neighbour]:
    known = [key for key in keys if key in scenes][:SHOWN_NEIGHBOURS]
    return [Neighbour(scene=scenes[key], is_shared=key in shared) for key in known]


def encoders_of(scores: Sequence[Score]) -> list[Score]:
    """Of one group, the trained ones: the lowest seed of each system, and every frozen model."""
    best: dict[str, Score] = {}
    for score in scores:
        subject: Encoder = score.subject
        if subject.run_id is not None and not subject.is_trained_here:
            continue
        known = best.get(subject.system)
        if known is None or (subject.seed or 0) < (known.subject.seed or 0):
            best[subject.system] = score
    return list(best.values())
