"""What a run leaves behind below HOME/runs/<run id>, and the proof that two runs read the same.

Owns: the record of a run, its ledger and metrics as immutable parts, the rolling hashes, `verify`. Does not own: training,
checkpoints, the catalog (whose rows of a run can be written again from here: see `catalog_row`, `read_metrics`).
Invariants: a part is published whole under the number of its first step; a run that goes on after a kill first drops the
parts at or after its checkpoint, so each step has one row. Every count and hash is over all ranks.

    run.json                 what was asked: config, dataset version, plan digest, code version (written once)
    status.json              how far it is: running, finished or failed
    ledger/000000000.parquet one row a step      metrics/000000000.parquet one row a number
    checkpoints/  encoder/ encoder-best/ encoder-untrained/ encoder-epoch-001/  tensorboard/  tokenizer/

Legend: b samples of one rank at one step, T steps of a part.
"""

from __future__ import annotations

import io
import math
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
"""One row a step, 0-based. Hashes roll over all steps so far; samples and tokens are totals after the step; loss is the
mean over ranks as computed, so that equal bits mean equal training."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What decided a run; never changed after its start."""

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
    "Planned in all."
    snapshot_id: int | None
    started_at: float


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
    """Whether two runs read the same. `differs_at` is the first step at which they do not, None when all steps agree."""

    left: str
    right: str
    left_steps: int
    right_steps: int
    differs_at: int | None
    epoch: int | None
    same_views: bool
    "Over the steps that agree: the same tokens were shown, not only the same scenes."
    same_losses: bool
    "Over the steps that agree: bit for bit."
    sentence: str


def runs_url(home: Home, *names: str) -> str:
    """URL below HOME/runs."""
    return storage.join(home.url, "runs", *names)


def check_run_id(run_id: str) -> str:
    """The id itself. Raises UsageError when it could leave the folder of runs or be read in two ways."""
    if not RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"The run id {run_id!r} does not match {RUN_ID.pattern}. Use lower-case letters, digits, `.`, `_` and `-`."
        )
    return run_id


# --- record and status --------------------------------------------------------------------------------------------


def write_record(url: str, record: RunRecord) -> None:
    """Publish `run.json` below the folder of the run."""
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    storage.publish(storage.join(url, "run.json"), orjson.dumps(record, option=options))


def read_record(home: Home, run_id: str) -> RunRecord:
    """Raises InputError when there is no such run, IntegrityError when its record is not one this release reads."""
    url = runs_url(home, check_run_id(run_id), "run.json")
    if not storage.exists(url):
        known = list_run_ids(home)
        hint = f"Known are {', '.join(known[-5:])}." if known else "There are none yet; `goodviews train` makes one."
        raise InputError(f"There is no run {run_id!r} below {runs_url(home)}. {hint}")
    try:
        values = orjson.loads(storage.read_bytes(url))
        if values["format"] != FORMAT:
            raise IntegrityError(
                f"{url} has format {values['format']!r}, this release reads {FORMAT!r}. Use the release that wrote it."
            )
        return RunRecord(**values)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{url} is not the record of a run ({error}). It was changed after the run had started."
        ) from error


def write_status(url: str, status: RunStatus) -> None:
    """Publish `status.json` below the folder of the run, in the place of the one before."""
    storage.publish(storage.join(url, "status.json"), orjson.dumps(status, option=orjson.OPT_APPEND_NEWLINE))


def read_status(url: str) -> RunStatus | None:
    """None for a run that was ended before its first status."""
    path = storage.join(url, "status.json")
    return RunStatus(**orjson.loads(storage.read_bytes(path))) if storage.exists(path) else None


def list_run_ids(home: Home) -> list[str]:
    """Ids of all runs on disk, sorted by the time of their start."""
    folder = runs_url(home)
    names = [name for name in storage.list_names(folder) if storage.exists(storage.join(folder, name, "run.json"))]
    return sorted(names, key=lambda name: read_record(home, name).started_at)


def catalog_row(url: str, record: RunRecord, status: RunStatus) -> RunRow:
    """The row of this run in the table `runs`."""
    return RunRow(
        run_id=record.run_id,
        recipe=record.recipe,
        objective=record.objective,
        config=record.config,
        dataset_versions={record.dataset: record.version},
        plan_digest=record.plan_digest,
        code_version=record.code_version,
        seed=record.seed,
        ranks=status.ranks,
        steps=status.steps,
        samples=status.samples,
        tokens=status.tokens,
        status=status.status,
        url=url,
        started_at=record.started_at,
        snapshot_id=record.snapshot_id,
        finished_at=status.finished_at,
    )


def no_status() -> RunStatus:
    """Of a run that was ended before its first one."""
    return RunStatus(status="running", ranks=0, steps=0, samples=0, tokens=0, updated_at=0.0)


def checkpoints_url(url: str, record: RunRecord) -> str:
    """Folder of the checkpoints of a run: below it, or below `run.checkpoints` by its id."""
    elsewhere = record.config["run"].get("checkpoints")
    return storage.join(elsewhere, record.run_id) if elsewhere else storage.join(url, "checkpoints")


def encoder_names(url: str) -> list[str]:
    """Names of the exported encoders below the folder of a run."""
    return [
        n
        for n in storage.list_names(url)
        if n.startswith(FOLDER) and storage.exists(storage.join(url, n, "config.json"))
    ]


def latest_metrics(url: str) -> dict[str, float]:
    """The last value of each metric, by name."""
    rows = read_metrics(url).sort_by("step")
    return dict(zip(rows.column("name").to_pylist(), rows.column("value").to_pylist(), strict=True))


# --- hashes -------------------------------------------------------------------------------------------------------


def batch_digest(hashes: NDArray[np.uint64], places: NDArray[np.int64]) -> int:
    """Digest of a part of a global batch; the digests of all parts add up (mod 2^64) to that of the whole.

    hashes (b,): one number a sample. places (b,): the sample's place in the global batch, so that order counts.
    """
    with np.errstate(over="ignore"):
        return int(seeds.mix(hashes ^ seeds.mix(places.astype(np.uint64))).sum(dtype=np.uint64))


def row_hashes(tokens: NDArray[np.int32], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One number a sequence, from its tokens in their order. offsets (N + 1,); no sequence is empty."""
    lengths = np.diff(offsets)
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
    """Publish rows of `kind` (ledger, metrics) whose first step is `first_step`."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    storage.publish(_part_url(url, kind, first_step), sink.getvalue())


def drop_parts(url: str, kind: str, *, from_step: int) -> None:
    """Remove the parts that begin at or after `from_step`; called before a run goes on from that step."""
    for first in _parts(url, kind):
        if first >= from_step:
            storage.remove(_part_url(url, kind, first))


def read_ledger(url: str) -> pa.Table:
    """All steps of the run in order. Raises IntegrityError when one is missing or there twice."""
    table = _read(url, "ledger", LEDGER)
    steps = table.column("step").to_numpy()
    wrong = np.flatnonzero(steps != np.arange(len(steps)))
    if len(wrong):
        message = f"The ledger of {url} has step {steps[wrong[0]]} in the place of step {wrong[0]}: a part was removed or changed. Nothing can be said of the steps after it."
        raise IntegrityError(message)
    return table


def read_metrics(url: str) -> pa.Table:
    """All metrics of the run, with the columns of `catalog.rows.runs.METRICS`."""
    return _read(url, "metrics", METRICS)


def _part_url(url: str, kind: str, first_step: int) -> str:
    return storage.join(url, kind, f"{first_step:09d}.parquet")


def _parts(url: str, kind: str) -> list[int]:
    names = storage.list_names(storage.join(url, kind))
    return sorted(int(name.removesuffix(".parquet")) for name in names if re.fullmatch(r"\d{9}\.parquet", name))


def _read(url: str, kind: str, schema: pa.Schema) -> pa.Table:
    tables = [
        pq.read_table(io.BytesIO(storage.read_bytes(_part_url(url, kind, s))), schema=schema) for s in _parts(url, kind)
    ]
    return pa.concat_tables([schema.empty_table(), *tables])


# --- verify -------------------------------------------------------------------------------------------------------


def verify(home: Home, left: str, right: str) -> Comparison:
    """Compare the ledgers of two runs step by step.

    Raises InputError for an unknown run, IntegrityError for a ledger with holes, UsageError when one has no steps.
    """
    tables = []
    for run_id in (left, right):
        read_record(home, run_id)
        table = read_ledger(runs_url(home, run_id))
        if table.num_rows == 0:
            raise UsageError(
                f"Run {run_id} has no step in its ledger yet, so there is nothing to compare. Let it reach a checkpoint."
            )
        tables.append(table)
    return compare(left, right, tables[0], tables[1])


def compare(left: str, right: str, left_ledger: pa.Table, right_ledger: pa.Table) -> Comparison:
    """The comparison of two ledgers, each with all steps from 0 on."""
    n = min(left_ledger.num_rows, right_ledger.num_rows)
    differs = _first_difference(left_ledger, right_ledger, ("scenes_hash", "samples", "epoch"), n)
    agreed = n if differs is None else differs
    same_views = _first_difference(left_ledger, right_ledger, ("views_hash", "tokens"), agreed) is None
    same_losses = _first_difference(left_ledger, right_ledger, ("loss",), agreed) is None
    if differs is None and left_ledger.num_rows != right_ledger.num_rows:
        differs = n
    epoch = None
    if differs is not None:
        longer = left_ledger if left_ledger.num_rows >= right_ledger.num_rows else right_ledger
        epoch = int(longer.column("epoch")[differs].as_py())
    sizes = (left_ledger.num_rows, right_ledger.num_rows)
    return Comparison(
        left=left,
        right=right,
        left_steps=sizes[0],
        right_steps=sizes[1],
        differs_at=differs,
        epoch=epoch,
        same_views=same_views,
        same_losses=same_losses,
        sentence=_sentence((left, right), sizes, (differs, epoch), (same_views, same_losses)),
    )


def _first_difference(left: pa.Table, right: pa.Table, names: Sequence[str], n: int) -> int | None:
    firsts = []
    for name in names:
        a, b = left.column(name).to_numpy()[:n], right.column(name).to_numpy()[:n]
        if a.dtype.kind == "f":
            # Bits, because a NaN is not equal to itself.
            a, b = a.view(np.uint64), b.view(np.uint64)
        wrong = np.flatnonzero(a != b)
        firsts.append(int(wrong[0]) if len(wrong) else math.inf)
    first = min(firsts)
    return None if first == math.inf else int(first)


def _sentence(
    names: tuple[str, str], steps: tuple[int, int], where: tuple[int | None, int | None], same: tuple[bool, bool]
) -> str:
    (left, right), (differs, epoch), (same_views, same_losses) = names, where, same
    agreed = steps[0] if differs is None else differs
    if agreed == 0:
        return f"{left} and {right} differ from step 0 on: they did not read the same scenes."
    views = "the same views" if same_views else "other views of them"
    losses = "bit-identical losses" if same_losses else "other losses"
    if differs is None:
        return f"{left} and {right} read the same scenes in the same order at all {agreed:,} steps, with {views} and {losses}."
    before = f"before it they read the same scenes with {views} and {losses}"
    if steps[0] != steps[1] and differs == min(steps):
        short = left if steps[0] < steps[1] else right
        return f"{short} ends before step {differs:,} (epoch {epoch}), the other goes on to {max(steps):,} steps; {before}."
    return f"{left} and {right} differ first at step {differs:,} (epoch {epoch}); {before}."
