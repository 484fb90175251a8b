"""What a run leaves below HOME/runs/RUN, and the comparison of two runs step by step.

The catalog's rows of a run can be written again from these files (`catalog_row`, `read_metrics`).
Invariants: a part of the ledger or of the metrics is published whole, under the number of its first step. A run that
goes on after a kill first drops the parts at or after its checkpoint, so each step has one row. Counts and hashes are
over all ranks.

    run.json                  config, dataset version, plan digest, code version; written once, before the first step
    status.json               how far the run is: running, finished or failed
    ledger/000000000.parquet  one row a step      metrics/000000000.parquet  one row a number
    checkpoints/  encoder/ encoder-best/ encoder-untrained/ encoder-epoch-001/  tensorboard/  tokenizer/

Legend: b samples of one rank at one step, N sequences.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from catalog.rows.runs import METRICS, RunRow
from infra import seeds, storage
from infra.errors import InputError, IntegrityError, UsageError
from infra.home import Home
from infra.models.checkpoints import FOLDER, RUN_ID

FORMAT: Final = "goodviews-run-1"
MASK: Final = (1 << 64) - 1

LEDGER: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("scenes_hash", pa.uint64(), nullable=False),
        pa.field("views_hash", pa.uint64(), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("loss", pa.float64(), nullable=False),
    ]
)
"""One row a step, from 0. Each hash covers all steps so far; samples and tokens are totals after the step; loss is the
mean over ranks, unrounded, so that equal bits mean equal training."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What decides a run; never changed after its start."""

    format: str = FORMAT
    run_id: str
    recipe: str
    arm: str
    objective: str
    config: Mapping[str, Any]
    dataset: str
    version: str
    split: str
    plan_digest: str
    tokenizer_digest: str
    code_version: str
    seed: int
    steps: int
    "Of the whole plan."
    snapshot_id: int | None
    started_at: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is sent to each rank; the record decides the rest.

    It is not beside the loop, so that a process that only hands it on needs no torch.
    """

    home: Home
    run_id: str
    url: str
    record: RunRecord
    max_failures: int


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How far a run is. status: running, finished or failed."""

    status: str
    ranks: int
    steps: int
    samples: int
    tokens: int
    updated_at: float
    finished_at: float | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Whether two runs read the same data. differs_at: first step at which they do not; None when all steps agree."""

    left: str
    right: str
    left_steps: int
    right_steps: int
    differs_at: int | None
    epoch: int | None
    same_views: bool
    "At all steps before: the same tokens, not only the same scenes."
    same_losses: bool
    "At all steps before, bit for bit."
    sentence: str = ""


def runs_url(home: Home, *names: str) -> str:
    """URL below HOME/runs."""
    return storage.join(home.url, "runs", *names)


def check_run_id(run_id: str) -> str:
    """The id. Raises UsageError when it is unsafe as a folder name."""
    if not RUN_ID.fullmatch(run_id):
        raise UsageError(f"The run id {run_id!r} may hold only a-z, 0-9, `.`, `_` and `-`, and begins with a-z or 0-9.")
    return run_id


# --- record and status --------------------------------------------------------------------------------------------


def write_record(url: str, record: RunRecord) -> None:
    """Publish `run.json` in the folder of the run."""
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    storage.publish(storage.join(url, "run.json"), orjson.dumps(record, option=options))


def read_record(home: Home, run_id: str) -> RunRecord:
    """Raises InputError when there is no such run, IntegrityError when this release cannot read its record."""
    url = runs_url(home, check_run_id(run_id), "run.json")
    if not storage.exists(url):
        known = list_run_ids(home)
        hint = f"Known are {', '.join(known[-5:])}." if known else "There are none yet; `goodviews train` makes one."
        raise InputError(f"There is no run {run_id!r} below {runs_url(home)}. {hint}")
    try:
        values = orjson.loads(storage.read_bytes(url))
        if values["format"] != FORMAT:
            message = (
                f"{url} has format {values['format']!r}, this release reads {FORMAT!r}. Use the release that wrote it."
            )
            raise IntegrityError(message)
        return RunRecord(**values)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{url} is not the record of a run ({error}): the file was changed.") from error


def write_status(url: str, status: RunStatus) -> None:
    """Publish `status.json` in the folder of the run, replacing the last one."""
    storage.publish(storage.join(url, "status.json"), orjson.dumps(status, option=orjson.OPT_APPEND_NEWLINE))


def read_status(url: str) -> RunStatus | None:
    """None for a run that ended before it wrote a status."""
    path = storage.join(url, "status.json")
    return RunStatus(**orjson.loads(storage.read_bytes(path))) if storage.exists(path) else None


def list_run_ids(home: Home) -> list[str]:
    """Ids of all runs in HOME, by start time."""
    folder = runs_url(home)
    names = [name for name in storage.list_names(folder) if storage.exists(storage.join(folder, name, "run.json"))]
    return sorted(names, key=lambda name: read_record(home, name).started_at)


def catalog_row(url: str, record: RunRecord, status: RunStatus) -> RunRow:
    """The row of this run in the table `runs`."""
    decided = ("run_id", "recipe", "objective", "config", "plan_digest", "code_version", "seed")
    reached = ("ranks", "steps", "samples", "tokens", "status", "finished_at")
    return RunRow(
        **{name: getattr(record, name) for name in (*decided, "started_at", "snapshot_id")},
        **{name: getattr(status, name) for name in reached},
        dataset_versions={record.dataset: record.version},
        url=url,
    )


def no_status() -> RunStatus:
    """Stands for the status of a run that has not written one."""
    return RunStatus(status="running", ranks=0, steps=0, samples=0, tokens=0, updated_at=0.0)


def checkpoints_url(url: str, record: RunRecord) -> str:
    """Folder of the run's checkpoints: in its own folder, or in `run.checkpoints` of its config."""
    elsewhere = record.config["run"].get("checkpoints")
    return storage.join(elsewhere, record.run_id) if elsewhere else storage.join(url, "checkpoints")


def encoder_names(url: str) -> list[str]:
    """Folders of the run's exported encoders."""
    names = (name for name in storage.list_names(url) if name.startswith(FOLDER))
    return [name for name in names if storage.exists(storage.join(url, name, "config.json"))]


def latest_metrics(url: str) -> dict[str, float]:
    """The last value of each metric, by name."""
    rows = read_metrics(url).sort_by("step")
    return dict(zip(rows.column("name").to_pylist(), rows.column("value").to_pylist(), strict=True))


# --- hashes -------------------------------------------------------------------------------------------------------


def batch_digest(hashes: NDArray[np.uint64], places: NDArray[np.int64]) -> int:
    """Digest of a part of a global batch; the digests of all parts sum (mod 2^64) to that of the whole.

    hashes (b,): one number a sample. places (b,): position of the sample in the global batch, so that order counts.
    """
    # A sum of mixed 64-bit hashes does not depend on how the ranks split the batch. Overflow is the modulus.
    with np.errstate(over="ignore"):
        return int(seeds.mix(hashes ^ seeds.mix(places.astype(np.uint64))).sum(dtype=np.uint64))


def row_hashes(tokens: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One number a sequence, from its tokens in order. offsets (N + 1,); no sequence is empty."""
    lengths = np.diff(offsets)
    # A token shares a 64-bit word with its position: equal tokens at other positions hash differently.
    places = (np.arange(len(tokens)) - np.repeat(offsets[:-1], lengths)).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = seeds.mix(tokens.astype(np.uint64) + (places << np.uint64(32)))
        return seeds.mix(np.add.reduceat(mixed, offsets[:-1]) + lengths.astype(np.uint64))


def roll(rolling: int, digest: int) -> int:
    """The rolling hash after one more step."""
    value = np.array([(rolling ^ digest) & MASK], np.uint64)
    with np.errstate(over="ignore"):
        return int(seeds.mix(seeds.mix(value) + np.uint64(rolling))[0])


# --- parts --------------------------------------------------------------------------------------------------------


def write_part(url: str, kind: str, table: pa.Table, *, first_step: int) -> None:
    """Publish rows of `kind` (`ledger` or `metrics`) that begin at `first_step`."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    storage.publish(_part_url(url, kind, first_step), sink.getvalue())


def drop_parts(url: str, kind: str, *, from_step: int) -> None:
    """Remove the parts that begin at or after `from_step`, before a run goes on from that step."""
    for first in _parts(url, kind):
        if first >= from_step:
            storage.remove(_part_url(url, kind, first))


def read_ledger(url: str) -> pa.Table:
    """All steps of the run in order. Raises IntegrityError when a step is missing or repeated."""
    table = _read(url, "ledger", LEDGER)
    steps = table.column("step").to_numpy()
    wrong = np.flatnonzero(steps != np.arange(len(steps)))
    if len(wrong):
        message = (
            f"The ledger of {url} has step {steps[wrong[0]]} in the place of step {wrong[0]}, because a part was "
            "removed or changed. The run cannot be compared from there on."
        )
        raise IntegrityError(message)
    return table


def read_metrics(url: str) -> pa.Table:
    """All metrics of the run, as `catalog.rows.runs.METRICS`."""
    return _read(url, "metrics", METRICS)


def _part_url(url: str, kind: str, first_step: int) -> str:
    return storage.join(url, kind, f"{first_step:09d}.parquet")


def _parts(url: str, kind: str) -> list[int]:
    names = storage.list_names(storage.join(url, kind))
    return sorted(int(name.removesuffix(".parquet")) for name in names if re.fullmatch(r"\d{9}\.parquet", name))


def _read(url: str, kind: str, schema: pa.Schema) -> pa.Table:
    contents = [storage.read_bytes(_part_url(url, kind, first)) for first in _parts(url, kind)]
    return pa.concat_tables([schema.empty_table(), *(pq.read_table(io.BytesIO(c), schema=schema) for c in contents)])


# --- verify -------------------------------------------------------------------------------------------------------


def verify(home: Home, left: str, right: str) -> Comparison:
    """Compare the ledgers of two runs step by step.

    Raises InputError for an unknown run, IntegrityError for a ledger with gaps, UsageError for one without steps.
    """
    tables = []
    for run_id in (left, right):
        read_record(home, run_id)
        table = read_ledger(runs_url(home, run_id))
        if table.num_rows == 0:
            raise UsageError(f"Run {run_id} has no step in its ledger to compare. Let it reach a checkpoint.")
        tables.append(table)
    return compare(left, right, tables[0], tables[1])


def compare(left: str, right: str, left_ledger: pa.Table, right_ledger: pa.Table) -> Comparison:
    """The comparison of two ledgers, each complete from step 0."""
    n = min(left_ledger.num_rows, right_ledger.num_rows)
    differs = _first_difference(left_ledger, right_ledger, ("scenes_hash", "samples", "epoch"), n)
    agreed = n if differs is None else differs
    same_views = _first_difference(left_ledger, right_ledger, ("views_hash", "tokens"), agreed) is None
    same_losses = _first_difference(left_ledger, right_ledger, ("loss",), agreed) is None
    longer = max(left_ledger, right_ledger, key=lambda ledger: int(ledger.num_rows))
    if differs is None and longer.num_rows > n:
        differs = n
    found = Comparison(
        left=left,
        right=right,
        left_steps=left_ledger.num_rows,
        right_steps=right_ledger.num_rows,
        differs_at=differs,
        epoch=None if differs is None else int(longer.column("epoch")[differs].as_py()),
        same_views=same_views,
        same_losses=same_losses,
    )
    return dataclasses.replace(found, sentence=_sentence(found))


def _first_difference(left: pa.Table, right: pa.Table, names: Sequence[str], n: int) -> int | None:
    differs = np.zeros(n, bool)
    for name in names:
        a, b = (ledger.column(name).to_numpy()[:n] for ledger in (left, right))
        # Bits of 64-bit columns, because a NaN does not equal itself.
        differs |= a.view(np.uint64) != b.view(np.uint64)
    return int(differs.argmax()) if differs.any() else None


def _sentence(found: Comparison) -> str:
    agreed = found.left_steps if found.differs_at is None else found.differs_at
    if agreed == 0:
        return f"{found.left} and {found.right} differ from step 0 on: they did not read the same scenes."
    views = "the same views" if found.same_views else "other views of them"
    losses = "bit-identical losses" if found.same_losses else "other losses"
    both = f"{found.left} and {found.right}"
    if found.differs_at is None:
        return f"{both} read the same scenes in the same order at all {agreed:,} steps, with {views} and {losses}."
    before = f"before it they read the same scenes with {views} and {losses}"
    where = f"step {agreed:,} (epoch {found.epoch})"
    fewest, most = sorted((found.left_steps, found.right_steps))
    if fewest < most and agreed == fewest:
        short = found.left if found.left_steps == fewest else found.right
        return f"{short} ends before {where}, the other goes on to {most:,} steps; {before}."
    return f"{both} differ first at {where}; {before}."
