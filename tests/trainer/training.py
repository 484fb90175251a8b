"""A toy world on disk, tiny recipes, and ranks as forked processes: what the tests of the loop share."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import distributed

from infra.home import Home, resolve
from infra.session import open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import ingest
from trainer.run import checkpoint, recipe, records
from trainer.run.assembly import assemble
from trainer.run.loop import Place, train_rank
from trainer.run.recipe import Recipe
from trainer.run.records import Job

SMALL = (
    "data.dataset=toyworld",
    "plan.batch_global=16",
    "plan.lanes=4",
    "plan.window=8",
    "plan.epochs=2",
    "tokenizer.vocab_size=600",
    "encoder.width=32",
    "encoder.heads=2",
    "encoder.ffn=64",
    "encoder.projector.entry=16",
    "encoder.projector.hidden=24",
    "encoder.projector.output=8",
    "lejepa.n_directions=16",
    "run.log_every_steps=4",
    "run.health_every_steps=4",
    "run.loader_workers=0",
    'run.exclude_trackers=["tensorboard", "wandb", "mlflow"]',
)


def make_home(folder: Path, *, scenes: int = 120, scenes_per_shard: int = 32) -> Home:
    """A HOME with the toy world: about 98 training scenes in 4 shards, and a validation split."""
    home = resolve(str(folder))
    fill(home, scenes=scenes, scenes_per_shard=scenes_per_shard)
    return home


def fill(home: Home, *, scenes: int = 120, scenes_per_shard: int = 32) -> None:
    """Ingest the toy world into `home`, in this process."""
    sets = [f"source.scenes={scenes}", f"scenes_per_shard={scenes_per_shard}", "images=false"]
    request = build_request("toyworld", [], None, None, sets, 0.5)
    with open_workers(address=None, num_cpus=0) as workers:
        ingest(request, home, workers)


def small_recipe(*sets: str, arm: str | None = None) -> Recipe:
    """`tiny-cpu`, smaller still."""
    return recipe.load("tiny-cpu", arm=arm, sets=[*SMALL, *sets])


def make_job(home: Home, chosen: Recipe, run_id: str) -> Job:
    """A run that is ready for its ranks, without a catalog."""
    materials = assemble(chosen, home)
    record = records.RunRecord(
        run_id=run_id,
        recipe=chosen.name,
        arm=chosen.arm,
        objective=chosen.objective,
        config=recipe.to_config(materials.recipe),
        dataset=materials.shards.dataset,
        version=materials.shards.version,
        split=materials.shards.split,
        plan_digest=materials.plan.digest,
        tokenizer_digest=materials.tokenizer.digest,
        code_version="test",
        seed=chosen.seed,
        steps=materials.plan.total_steps,
        snapshot_id=None,
        started_at=time.time(),
    )
    url = records.runs_url(home, run_id)
    records.write_record(url, record)
    return Job(home=home, run_id=run_id, url=url, record=record, max_failures=0)


def train(job: Job) -> None:
    """One rank, in this process."""
    torch.set_num_threads(1)
    train_rank(job, Place(rank=0, world=1, device=torch.device("cpu")))


def start_ranks(job: Job, world: int, folder: Path) -> list[BaseProcess]:
    """`world` ranks as forked processes (a spawned one would import torch for 5 s), joined by gloo."""
    store = folder / f"store-{job.run_id}-{world}-{time.time_ns()}"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(job, rank, world, str(store))) for rank in range(world)]
    for process in processes:
        process.start()
    return list(processes)


def train_ranks(job: Job, world: int, folder: Path) -> None:
    """`world` ranks to their end; fails when one of them does."""
    processes = start_ranks(job, world, folder)
    for process in processes:
        process.join(timeout=120)
    codes = [process.exitcode for process in processes]
    kill(processes)
    assert codes == [0] * world


def kill(processes: Sequence[BaseProcess]) -> None:
    """SIGKILL, as the system does for want of memory."""
    for process in processes:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def wait_for_step(job: Job, step: int, processes: Sequence[BaseProcess]) -> None:
    """Until the checkpoint of `step` is published."""
    deadline = time.monotonic() + 120
    while step not in checkpoint.published_steps(records.checkpoints_url(job.url, job.record)):
        assert time.monotonic() < deadline and any(p.is_alive() for p in processes), "the ranks ended early"
        time.sleep(0.002)


def ledger_of(job: Job) -> dict[str, list[object]]:
    """The ledger by column."""
    columns: dict[str, list[object]] = records.read_ledger(job.url).to_pydict()
    return columns


def renamed(job: Job, home: Home, run_id: str) -> Job:
    """The same training under another id."""
    record = dataclasses.replace(job.record, run_id=run_id)
    url = records.runs_url(home, run_id)
    records.write_record(url, record)
    return dataclasses.replace(job, run_id=run_id, url=url, record=record)


def _rank(job: Job, rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train_rank(job, Place(rank=rank, world=world, device=torch.device("cpu")))
    if world > 1:
        distributed.destroy_process_group()


def with_failures(job: Job, count: int) -> Job:
    """The job with so many restarts allowed."""
    return dataclasses.replace(job, max_failures=count)
