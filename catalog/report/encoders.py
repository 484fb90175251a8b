"""Runs and encoders as the report names them, with their arm, seed and checkpoint.

Invariant: two encoders have the same label only when their vectors come from the same run and checkpoint, or from the
same model. Runs belong to one system only when their configs differ in nothing but the seed and settings that do not
change a result (`run`, `forecast`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from catalog.lake.answers import printable
from catalog.lake.lake import Lake
from catalog.rows.runs import JSON_COLUMNS
from infra.models import checkpoints


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training. system: digest of all that decides it but the seed; arm: `good`, `bad`, ... or None."""

    run_id: str
    recipe: str
    arm: str | None
    objective: str
    seed: int | None
    system: str
    label: str
    "Of the system."
    row: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """One side of a score. system: what seeds are averaged over; checkpoint: None for the last."""

    name: str
    "Of the embedding set."
    label: str
    system: str
    arm: str | None = None
    run_id: str | None = None
    seed: int | None = None
    checkpoint: str | None = checkpoints.LAST
    observation: str | None = None
    samples: int | None = None
    dataset: str | None = None
    version: str | None = None
    split: str | None = None

    @property
    def is_trained_here(self) -> bool:
        """Whether it is the last state of a run of this catalog."""
        return self.run_id is not None and self.checkpoint is checkpoints.LAST


def read_runs(reader: Lake) -> dict[str, Run]:
    """All runs by id, oldest first."""
    rows = reader.records("SELECT * FROM main.runs ORDER BY started_at, run_id", decode=JSON_COLUMNS)
    systems = {row["run_id"]: _system(row) for row in rows}
    labels = _labels([(systems[row["run_id"]], _arm(row), str(row["run_id"])) for row in rows])
    return {
        row["run_id"]: Run(
            run_id=row["run_id"],
            recipe=row["recipe"],
            arm=_arm(row),
            objective=row["objective"],
            seed=row["seed"],
            system=systems[row["run_id"]],
            label=labels[systems[row["run_id"]]],
            row=row,
        )
        for row in rows
    }


def read_encoders(reader: Lake, runs: Mapping[str, Run]) -> dict[str, Encoder]:
    """All embedding sets by id."""
    rows = reader.records("SELECT * FROM main.embeddings ORDER BY created_at, embedding_id")
    return {row["embedding_id"]: _encoder(row, runs) for row in rows}


def unknown(name: str) -> Encoder:
    """The side of a score whose embedding set is no longer in the catalog."""
    return Encoder(name=name, label=printable(name), system=name)


def _encoder(row: Mapping[str, Any], runs: Mapping[str, Run]) -> Encoder:
    run = runs.get(row["run_id"] or "")
    model = str(row["model"])
    checkpoint = checkpoints.checkpoint_of(model)
    suffix = f", {checkpoints.label(checkpoint)}" if checkpoint else ""
    label = f"{run.label}{suffix}" if run else f"{_short(model)}{'' if row['run_id'] is None else suffix}"
    # Control characters would make an SVG that no browser reads.
    label = printable(label)
    return Encoder(
        name=row["name"],
        label=label,
        system=f"{run.system if run else model}@{checkpoints.label(checkpoint)}",
        arm=run.arm if run else None,
        run_id=row["run_id"],
        seed=run.seed if run else None,
        checkpoint=checkpoint,
        **{column: row[column] for column in ("observation", "samples", "dataset", "version", "split")},
    )


def _short(model: str) -> str:
    """A folder by its last name; anything else as it is."""
    return model.rstrip("/").rsplit("/", 1)[-1] if model.startswith(("/", "./", "~")) or "://" in model else model


def _arm(row: Mapping[str, Any]) -> str | None:
    arm = row["config"].get("arm")
    return str(arm) if arm else None


def _system(row: Mapping[str, Any]) -> str:
    config = {name: value for name, value in row["config"].items() if name not in ("run", "forecast")}
    plan = config.get("plan")
    if isinstance(plan, Mapping):
        config["plan"] = {name: value for name, value in plan.items() if name != "seed"}
    content = [row["recipe"], row["objective"], config, row["dataset_versions"]]
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _labels(found: Sequence[tuple[str, str | None, str]]) -> dict[str, str]:
    """Label of each system: its arm where one system has that arm, else with the id of its first run.

    found: (system, arm, run id), oldest first.
    """
    first: dict[str, tuple[str | None, str]] = {}
    for system, arm, run_id in found:
        first.setdefault(system, (arm, run_id))
    arms = [arm for arm, _ in first.values()]
    return {
        system: run_id if arm is None else arm if arms.count(arm) == 1 else f"{arm} ({run_id})"
        for system, (arm, run_id) in first.items()
    }
