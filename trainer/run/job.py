"""Start or resume a run: write its record, launch the ranks, show progress, write the last status.

Invariants: `run.json` exists before the first rank starts and never changes. Whatever ends a run, its status says so as
long as this process lives; a killed run can be resumed from its files alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from catalog.rows.runs import finish_run, start_run
from infra import storage
from infra.errors import ConflictError, GoodviewsError, UsageError
from infra.home import Home
from infra.version import code_version
from trainer.run import checkpoint, recipe, records
from trainer.run.assembly import assemble
from trainer.run.heartbeat import LiveLine
from trainer.run.launch import Cluster, launch
from trainer.run.recipe import Recipe
from trainer.run.records import Job, RunRecord, RunStatus


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What `goodviews train` prints. encoders: folders below `url`; metrics: latest values by name."""

    run_id: str
    status: str
    steps: int
    samples: int
    tokens: int
    seconds: float
    encoders: list[str]
    metrics: dict[str, float]
    snapshot_id: int | None
    url: str


def start(chosen: Recipe, home: Home, cluster: Cluster, *, run_id: str | None = None) -> Finished:
    """Train a new run. Raises ConflictError when the run id is taken, and whatever ends the training early."""
    materials = assemble(chosen, home)
    materials.plan.stripe(0, cluster.ranks)  # refuses a number of ranks that cannot share the plan
    name = records.check_run_id(run_id) if run_id is not None else _new_id(materials.recipe)
    url = records.runs_url(home, name)
    if storage.exists(storage.join(url, "run.json")):
        raise ConflictError(f"Run {name!r} exists in {url}. Go on with `--resume {name}`, or choose another id.")
    record = RunRecord(
        run_id=name,
        recipe=materials.recipe.name,
        arm=materials.recipe.arm,
        objective=materials.recipe.objective,
        config=recipe.to_config(materials.recipe),
        dataset=materials.shards.dataset,
        version=materials.shards.version,
        split=materials.shards.split,
        plan_digest=materials.plan.digest,
        tokenizer_digest=materials.tokenizer.digest,
        code_version=code_version(),
        seed=materials.recipe.seed,
        steps=materials.plan.total_steps,
        snapshot_id=None,
        started_at=time.time(),
    )
    # The catalog first: its snapshot is part of the record, which is written once.
    snapshot_id = start_run(home, records.catalog_row(url, record, _status("running", cluster, None)))
    record = dataclasses.replace(record, snapshot_id=snapshot_id)
    records.write_record(url, record)
    return _train(record, home, cluster)


def resume(run_id: str, home: Home, cluster: Cluster, *, sets: Sequence[str] = ()) -> Finished:
    """Resume a run from its newest checkpoint, on any number of ranks.

    sets: keys of `run` (resources, reporting) for this launch. Raises UsageError for others, ConflictError when the run
    is finished or another process trains it.
    """
    record = records.read_record(home, run_id)
    for text in sets:
        if not text.strip().startswith("run."):
            message = (
                f"`--set {text}` would change what run {run_id} trains. Only keys of `run.` (threads, reporting) may "
                "change with --resume; start a new run for the others."
            )
            raise UsageError(message)
    record = dataclasses.replace(record, config=recipe.to_config(recipe.from_config(record.config, sets)))
    url = records.runs_url(home, run_id)
    done = checkpoint.newest(records.checkpoints_url(url, record))
    status = records.read_status(url)
    if done is not None and done.step >= record.steps and status is not None and status.status == "finished":
        raise ConflictError(f"Run {run_id} is finished after {record.steps:,} steps. Start a new run to train longer.")
    return _train(record, home, cluster)


def _train(record: RunRecord, home: Home, cluster: Cluster) -> Finished:
    url, began = records.runs_url(home, record.run_id), time.time()
    max_failures = int(record.config["run"]["max_failures"])
    job = Job(home=home, run_id=record.run_id, url=url, record=record, max_failures=max_failures)
    with _locked(url, record.run_id):
        records.write_status(url, _status("running", cluster, url))
        try:
            with LiveLine(url, label=record.run_id):
                launch(job, cluster)
        # An interrupt too: the status must not say `running` when this process has ended.
        except BaseException as error:
            _close(record, home, _status("failed", cluster, url, message=_message(error)))
            raise
        status = _status("finished", cluster, url)
        _close(record, home, status)
    return Finished(
        run_id=record.run_id,
        status=status.status,
        steps=status.steps,
        samples=status.samples,
        tokens=status.tokens,
        seconds=time.time() - began,
        encoders=records.encoder_names(url),
        metrics=records.latest_metrics(url),
        snapshot_id=record.snapshot_id,
        url=url,
    )


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, GoodviewsError) else f"{type(error).__name__}: {error}"[:500]


def _status(word: str, cluster: Cluster, url: str | None, *, message: str | None = None) -> RunStatus:
    """The last status of the run, with a new word for its state."""
    last = (records.read_status(url) if url is not None else None) or records.no_status()
    now = time.time()
    ended = None if word == "running" else now
    return dataclasses.replace(
        last, status=word, ranks=cluster.ranks, updated_at=now, finished_at=ended, message=message
    )


def _close(record: RunRecord, home: Home, status: RunStatus) -> None:
    url = records.runs_url(home, record.run_id)
    records.write_status(url, status)
    finish_run(home, records.catalog_row(url, record, status), records.read_metrics(url))


def _new_id(chosen: Recipe) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{chosen.name}-{chosen.arm}-s{chosen.seed}-{stamp}-{secrets.token_hex(2)}".lower()


@contextlib.contextmanager
def _locked(url: str, run_id: str) -> Iterator[None]:
    """Lock a run of a local HOME while the block runs; the system frees the lock of a killed process."""
    if storage.is_remote(url):
        yield
        return
    path = Path(storage.absolute(url)) / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            message = f"Run {run_id} is being trained by another process, which holds {path}. Wait for it or end it."
            raise ConflictError(message) from error
        yield
