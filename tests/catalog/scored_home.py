"""A small HOME with everything that a report can show: scenes, runs, embedding sets, scores, picks, neighbours.

The numbers are made up and easy to recognise; scenes and pictures are real ones of the toy world.
"""

from __future__ import annotations

import datetime
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from catalog.lake import lake
from catalog.lake.lake import Lake
from catalog.lake.transaction import commit_rows
from catalog.rows.alignments import AlignmentRow, alignment_url, record_alignments
from catalog.rows.embeddings import EmbeddingRecord, embedding_id_of, insert
from catalog.rows.runs import METRICS, RunRow, append_metrics
from catalog.rows.theory import Check, record_check
from infra import storage
from infra.cli import run as goodviews
from infra.home import Home, resolve

ARMS = ("good", "bad", "next-token")
SEEDS = (0, 1)
VALUES = {("good", 0): 0.4375, ("good", 1): 0.4175, ("bad", 0): 0.2115, ("bad", 1): 0.2315, ("next-token", 0): 0.1925, ("next-token", 1): 0.1525}  # fmt: skip
HALF_WIDTH = 0.03125
UNTRAINED, FIRST_EPOCH, CHANCE = 0.0815, 0.0915, 0.0435
PICTURES, SPLIT = "efficientnet-lite0", "test"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A filled HOME. keys: scene keys of the scored split, sorted."""

    home: Home
    dataset: str
    version: str
    keys: Sequence[str]


def toy_home(folder: Path) -> Scored:
    """The toy world with pictures, ingested and nothing else."""
    command = ["ingest", "toyworld", "--set", "source.scenes=60", "--set", "source.test=0.4", "--num-cpus", "0"]
    return _ingested(folder, "toyworld", command)


def caption_home(folder: Path, captions: Sequence[str]) -> Scored:
    """These captions, two a scene, without pictures."""
    source = folder.parent / "captions.parquet"
    keys = [f"s{i // 2}" for i in range(len(captions))]
    pq.write_table(pa.table({"id": keys, "caption": list(captions), "split": [SPLIT] * len(keys)}), source)
    sets = ("source.id=id", "source.text=caption:human", "source.split=column:split")
    command = ["ingest", "table", "--dataset", "mine", "--input", str(source), "--num-cpus", "0"]
    return _ingested(folder, "mine", [*command, *(word for name in sets for word in ("--set", name))])


def _ingested(folder: Path, dataset: str, command: Sequence[str]) -> Scored:
    assert goodviews([*command, "--home", str(folder)]) == 0
    home = resolve(str(folder))
    with lake.reading(home) as reader:
        version = reader.rows("SELECT version FROM datasets WHERE dataset = ?", [dataset])[0][0]
        rows = reader.rows("SELECT scene_key FROM scenes WHERE split = ? ORDER BY 1", [SPLIT])
    keys = [key for (key,) in rows]
    assert len(keys) >= 2
    return Scored(home=home, dataset=dataset, version=version, keys=keys)


def run_id(arm: str, seed: int) -> str:
    """Of a run that `add_runs` makes."""
    return f"{arm}-s{seed}"


def add_runs(at: Scored) -> None:
    """Two seeds of three arms, with curves."""
    for arm in ARMS:
        for seed in SEEDS:
            objective = "ntp" if arm == "next-token" else "lejepa"
            row = RunRow(
                run_id=run_id(arm, seed),
                recipe="tiny-cpu",
                objective=objective,
                config={"arm": arm, "plan": {"seed": seed, "good_fraction": float(arm == "good")}, "run": {"seed": 1}},
                dataset_versions={at.dataset: at.version},
                plan_digest="0" * 16,
                code_version="0.1.0",
                seed=seed,
                ranks=1,
                steps=60,
                samples=15_360,
                tokens=123_456,
                status="finished",
                url=storage.join(at.home.url, "runs", run_id(arm, seed)),
                started_at=1.0e9 + seed,
                finished_at=1.0e9 + 60,
            )
            append_metrics(at.home, row, _metrics(seed))


def _metrics(seed: int) -> pa.Table:
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    rows = [
        {"step": step, "name": name, "value": value / step + seed / 50, "recorded_at": at}
        for step in range(5, 65, 5)
        for name, value in (("loss", 9.0), ("effective_rank", 70.0))
    ]
    return pa.Table.from_pylist(rows, schema=METRICS)


def embedding(
    at: Scored, model: str, observation: str, run: str | None = None, samples: int | None = None
) -> EmbeddingRecord:
    """The record of a set without vectors."""
    name = f"{model}/{at.dataset}/{SPLIT}/{observation}"
    return EmbeddingRecord(
        embedding_id=embedding_id_of({"name": name}),
        name=name,
        model=model,
        run_id=run,
        observation=observation,
        dataset=at.dataset,
        version=at.version,
        split=SPLIT,
        roles=(),
        layers=(2,),
        pooling="mean",
        averaging="none",
        max_length=48,
        rows=len(at.keys),
        dims=8,
        dtype="float16",
        samples=samples,
        tokens=None,
        config={},
        url=at.home.url,
        snapshot_id=2,
        dataset_versions={at.dataset: at.version},
        code_version="0.1.0",
        created_at=1.0e9,
    )


def register_all(home: Home, records: Sequence[EmbeddingRecord]) -> None:
    """Write the rows of sets in one commit."""

    def write(writer: Lake) -> None:
        for record in records:
            insert(writer, record)

    commit_rows(home, "embedding sets", write)


def score_row(at: Scored, left: tuple[str, str], right: tuple[str | None, str], **values: Any) -> AlignmentRow:
    """A row between sets, each (id, name)."""
    facts: dict[str, Any] = {
        "metric": "mutual_knn",
        "map": "none",
        "k": 10,
        "n": len(at.keys),
        "protocol": "plain",
        "selection": "one pair of layers, chosen beforehand",
        "chance": CHANCE,
        "ties": 0.0,
        "seed": 0,
        "split": SPLIT,
        "snapshot_id": 2,
    }
    return AlignmentRow(
        left_id=left[0],
        left_name=left[1],
        right_id=right[0],
        right_name=right[1],
        left_layer=2,
        right_layer=1 if right[0] else None,
        dataset=at.dataset,
        version=at.version,
        created_at=1.0e9,
        code_version="0.1.0",
        dataset_versions={at.dataset: at.version},
        **{**facts, **values},
    )


def around(value: float) -> dict[str, float]:
    """A value in its interval."""
    return {"value": value, "low": value - HALF_WIDTH, "high": value + HALF_WIDTH}


def add_scores(at: Scored, *, pictures: str = PICTURES) -> None:
    """Alignment, retrieval with controls and a curve, probes, picks and neighbours of every run."""
    image = embedding(at, pictures, "images")
    right, sets, rows = (image.embedding_id, image.name), [image], []
    for (arm, seed), value in VALUES.items():
        run = run_id(arm, seed)
        moments = (("@untrained", 0), ("@epoch-001", 256), ("", 15_360))
        sets += [embedding(at, f"run:{run}{moment}", "captions", run, samples) for moment, samples in moments]
        left = (sets[-1].embedding_id, sets[-1].name)
        rows += [_alignment(at, left, right, value), *_map(at, left, right, value)]
        probe = {"metric": "probe_linear", "k": None, "protocol": "5-fold", "selection": "labels", "chance": 0.25}
        rows.append(score_row(at, left, (None, "states:place"), **{**probe, **around(value + 0.3)}))
    register_all(at.home, sets)
    record_alignments(at.home, rows)


def _alignment(at: Scored, left: tuple[str, str], right: tuple[str, str], value: float) -> AlignmentRow:
    """A mutual k-NN score with its neighbours: on the left the next scenes, on the right every second one."""
    training = f"{at.dataset}@{at.version}/train"
    row = score_row(
        at,
        left,
        right,
        **around(value),
        calibrated=value - 0.05,
        p_value=0.005,
        samples=15_360,
        untrained_value=UNTRAINED,
        first_epoch_value=FIRST_EPOCH,
        leakage=0.125,
        details={
            "without_leaked": value - 0.0025,
            "leaked": {training: {"exact": 3, "normalised": 4, "scene": 0, "source_id": 0, "any": 4}},
            "alarms": [],
        },
    )
    n = len(at.keys)
    lists = [[[at.keys[(i + step * j) % n] for j in range(1, 11)] for i in range(n)] for step in (1, 2)]
    kind = pa.large_list(pa.large_string())
    table = pa.table(
        {
            "scene_key": pa.array(at.keys, pa.large_string()),
            "left": pa.array(lists[0], kind),
            "right": pa.array(lists[1], kind),
        }
    )
    storage.publish(alignment_url(at.home, row.alignment_id, "neighbours.parquet"), parquet(table))
    return row


def _map(at: Scored, left: tuple[str, str], right: tuple[str, str], value: float) -> list[AlignmentRow]:
    """R@1, 5, 10 in both directions, controls, a curve, and picks: each third picture finds its own caption."""
    map_id = hashlib.sha256(left[0].encode()).hexdigest()[:16]
    common: dict[str, Any] = {"protocol": "multi", "selection": "fit on split val", "chance": 0.0625}
    common["details"] = {"map_id": map_id}
    rows = []
    for direction in ("left_to_right", "right_to_left"):
        asked = {**common, "direction": direction, "pairs": 20}
        for k, gain in ((1, 0.0), (5, 0.2), (10, 0.3)):
            found = {**asked, **around(value + gain), "k": k, "metric": f"recall@{k}", "map": "rotation"}
            rows.append(score_row(at, left, right, **found))
        for control in ("random", "shuffled"):
            rows.append(
                score_row(at, left, right, **{**asked, **around(0.0625), "k": 1, "metric": "recall@1", "map": control})
            )
        for pairs in (5, 10):
            fewer = {**asked, **around(value * pairs / 20), "pairs": pairs}
            rows.append(score_row(at, left, right, **{**fewer, "k": 1, "metric": "recall@1", "map": "rotation"}))
    publish_map(at.home, map_id, picks(at.keys))
    return rows


def picks(keys: Sequence[str]) -> pa.Table:
    """What the pictures picked: their own first caption, or that of the next scene."""
    rows = [
        {
            "protocol": "multi",
            "direction": "right_to_left",
            "scene_key": key,
            "item": 0,
            "picked_scene_key": key if i % 3 == 0 else keys[(i + 1) % len(keys)],
            "picked_item": 0,
            "rank": 1 if i % 3 == 0 else 7,
            "score": 0.5,
            "ties": 0,
        }
        for i, key in enumerate(keys)
    ]
    return pa.Table.from_pylist(rows)


def publish_map(home: Home, map_id: str, table: pa.Table) -> None:
    """Picks and the record that names them."""
    folder = storage.join(home.url, "maps", map_id)
    record = storage.publish(storage.join(folder, "picks.parquet"), parquet(table))
    about: Mapping[str, Any] = {"map_id": map_id, "files": {"picks.parquet": {"sha256": record.sha256}}}
    storage.publish(storage.join(folder, "record.json"), orjson.dumps(about))


def parquet(table: pa.Table) -> bytes:
    """The table as the bytes of a file."""
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def grid_check() -> Check:
    """A check of the theorems of nine cases."""

    def case(ratio: float, lost: int, off: float) -> dict[str, float]:
        error = 2 * lost + off
        return {"beta": ratio / 2, "alpha": 0.5, "good_error": 2e-15, "error": error, "predicted_lost": float(lost)}

    result = {
        "max_good_error": 2e-15,
        "rows_below": 4,
        "max_below_error": 3e-15,
        "rows_above": 3,
        "max_above_deviation": 5e-14,
        "above_r": {1: 2, 2: 1},
        "special_error": 4.0,
        "special_r": 2,
        "special_naive_r": 1,
        "mismatch_checks": 7,
        "mismatch_checks_one": 8,
        "mismatch_violations": 0,
        "mismatch_tightness_median": 0.013,
        "mismatch_tightness_max": 0.25,
        "mismatch_tightness_one_median": 0.002,
        "mismatch_tightness_one_max": 0.0175,
    }
    points = {
        "below": [case(r, 0, 3e-15) for r in (0.0, 0.3, 0.6, 0.9)],
        "above": [case(1.1, 1, 5e-14), case(1.3, 1, 0.0), case(1.6, 2, -2e-15)],
        "special": [case(2.0, 2, 0.0)] * 2,
    }
    config = {"states": 12, "dims": 2, "worlds": 2, "steps": 4}
    return Check(kind="grid", seed=5, config=config, result=result, points=points)


def bridge_check() -> Check:
    """Trained encoders of two seeds, one kind an arm beside the control."""
    names = {
        "excess": 0.5,
        "lost": 0.25,
        "error": 1.5,
        "exact_error": 0.0,
        "least_variance": 0.75,
        "most_variance": 1.0,
    }
    kinds = []
    points = {}
    for arm in ("good", "bad"):
        for name, weight, angle in (("whitening", None, 2.0), ("SIGReg, w 4", 4.0, 30.0)):
            kinds.append({"name": f"{arm}: {name}", "arm": arm, "weight": weight})
            angles = {"angle_1": angle / 2, "angle_2": angle, "share_1": 0.9, "share_2": 0.8, "share_3": 0.3}
            points[f"{arm}: {name}"] = [{**names, **angles, "seed": float(s), "angle_2": angle + s} for s in (0, 1)]
    result = {"beta": 0.625, "kinds": kinds}
    return Check(kind="bridge", seed=5, config={"dims": 2, "seeds": 2}, result=result, points=points)


def full_home(folder: Path) -> Scored:
    """The toy world with all of it."""
    at = toy_home(folder)
    add_runs(at)
    add_scores(at)
    record_check(at.home, grid_check())
    record_check(at.home, bridge_check())
    return at
