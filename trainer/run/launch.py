"""Ray Train around the loop: where the ranks run, restarts of lost ranks, and how errors of ranks come back.

Invariants: when a rank or its node dies, all ranks restart from the newest checkpoint of `trainer.run.checkpoint`, at
most `run.max_failures` times. A GoodviewsError of a rank ends the run at the next restart: it would happen again.

Ray Train 2.60 counts an exception of a rank as its death, and resumes whatever has the same `name` in its storage
folder. So each launch draws a new name, nothing is reported to Ray, and errors go through files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson
import pyarrow.fs

from infra import errors, storage
from infra.errors import GoodviewsError, UsageError
from infra.session import open_workers
from trainer.run.records import Job

if TYPE_CHECKING:
    import torch

POLL_S: Final = "0.5"
"How often Ray Train's controller looks for dead ranks (its default is 2 s)."

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where the ranks run. num_workers: ranks on Ray; 0: one rank in this process, without Ray."""

    num_workers: int = 0
    use_gpu: bool = False
    cpus_per_worker: float = 0.9
    "Below 1, because Ray Train needs part of a CPU itself: if the ranks hold all CPUs, it waits for ever."
    address: str | None = None
    num_cpus: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise UsageError(f"--num-workers is {self.num_workers}; use 0 (in this process, without Ray) or more.")
        if self.num_workers == 0 and self.address is not None:
            message = (
                f"--num-workers 0 trains in this process, but --address {self.address} names a Ray cluster. Give the "
                "number of ranks on it."
            )
            raise UsageError(message)

    @property
    def ranks(self) -> int:
        """Number of processes that train."""
        return max(self.num_workers, 1)


def launch(job: Job, cluster: Cluster) -> None:
    """Train to the end of the run. Raises what ended it early, with the type that the rank raised."""
    _clear_failures(job.url)
    if cluster.num_workers == 0:
        _check_gpu(cluster)
        _fit(job, cluster)
    else:
        os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", POLL_S)
        with open_workers(address=cluster.address, num_cpus=cluster.num_cpus):
            _check_resources(cluster)
            _fit(job, cluster)
    _raise_failure(job.url)


def _fit(job: Job, cluster: Cluster) -> None:
    # In a notebook the import warns that widgets are missing.
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    # Its info lines say that local mode is local. Warnings still show.
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    resources: dict[str, float] = {"CPU": cluster.cpus_per_worker, **({"GPU": 1.0} if cluster.use_gpu else {})}
    scaling = ScalingConfig(
        num_workers=cluster.num_workers,
        use_gpu=cluster.use_gpu,
        resources_per_worker=resources if cluster.num_workers else None,
        placement_strategy="PACK" if cluster.use_gpu else "SPREAD",
    )
    with _ray_folder(job) as (filesystem, path):
        trainer: Any = TorchTrainer(
            _train_loop,
            train_loop_config={"job": job, "use_gpu": cluster.use_gpu, "in_process": cluster.num_workers == 0},
            torch_config=TorchConfig(backend="nccl" if cluster.use_gpu else "gloo"),
            scaling_config=scaling,
            run_config=RunConfig(
                # New each time: under a known name Ray Train would resume its own state.
                name=f"{job.run_id}-{secrets.token_hex(4)}",
                storage_path=path,
                storage_filesystem=filesystem,
                failure_config=FailureConfig(max_failures=job.max_failures),
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            _raise_failure(job.url)
            reason = " ".join(str(error).split())[:600]
            message = (
                f"Run {job.run_id} lost its ranks more than {job.max_failures} times ({reason}). Its checkpoints are "
                f"kept: remove the cause and go on with `goodviews train --resume {job.run_id}`."
            )
            raise GoodviewsError(message) from error


@contextlib.contextmanager
def _ray_folder(job: Job) -> Iterator[tuple[Any, str]]:
    """Folder for Ray Train's own state during one launch: in the run, where every node sees it."""
    # Ray would open URLs with filesystems of pyarrow; this one opens every URL that HOME can be.
    url = storage.join(job.url, "ray")
    if storage.is_remote(url):
        fs, path = storage.filesystem(url)
        yield pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs)), path
    else:
        yield None, storage.absolute(url)
    storage.remove_folder(url)


def _train_loop(config: dict[str, Any]) -> None:
    """Run one rank. At module level, because Ray pickles it by name."""
    import ray.train
    import ray.train.torch

    job: Job = config["job"]
    context = ray.train.get_context()
    world, rank = context.get_world_size(), context.get_world_rank()
    if _read_failures(job.url):
        # A rank raised a GoodviewsError before this restart. The command reads it when all ranks have returned.
        return
    # Only now: Ray Train's controller imports this module too, and so does a rank that returns at once. With torch and
    # transformers that costs each of them seconds.
    from trainer.run.loop import Place, train_rank

    try:
        device = _device(config)
        train_rank(job, Place(rank=rank, world=world, device=device))
    except GoodviewsError as error:
        if config["in_process"]:
            raise
        _write_failure(job.url, rank, error)
        raise


def _device(config: dict[str, Any]) -> torch.device:
    import ray.train.torch
    import torch

    if not config["use_gpu"]:
        return torch.device("cpu")
    return torch.device("cuda", 0) if config["in_process"] else ray.train.torch.get_device()


def _check_gpu(cluster: Cluster) -> None:
    import torch

    if cluster.use_gpu and not torch.cuda.is_available():
        message = (
            "--use-gpu was given, but torch sees no GPU here. Leave it out, or use a cluster that has GPUs: "
            "--num-workers N --address ADDRESS."
        )
        raise UsageError(message)


def _check_resources(cluster: Cluster) -> None:
    """Refuse more CPUs or GPUs than the cluster has now: Ray Train would wait for ever."""
    import ray

    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    wanted = {
        "CPU": cluster.cpus_per_worker * cluster.num_workers,
        "GPU": float(cluster.num_workers if cluster.use_gpu else 0),
    }
    for kind, count in wanted.items():
        if count > there.get(kind, 0.0):
            message = (
                f"{cluster.num_workers} ranks need {count:g} {kind}s, Ray has {there.get(kind, 0.0):g}. Use fewer "
                "ranks with --num-workers, or a larger cluster with --address."
            )
            raise UsageError(message)


# --- errors of ranks, through files -------------------------------------------------------------------------------


def _write_failure(url: str, rank: int, error: GoodviewsError) -> None:
    _log.error("rank %d: %s", rank, error)
    kind, message = errors.encode(error)
    record = {"kind": kind, "message": message}
    with contextlib.suppress(GoodviewsError, OSError):
        storage.publish(storage.join(url, "failures", f"{rank:05d}.json"), orjson.dumps(record))


def _read_failures(url: str) -> list[dict[str, str]]:
    folder = storage.join(url, "failures")
    return [orjson.loads(storage.read_bytes(storage.join(folder, name))) for name in storage.list_files(folder)]


def _clear_failures(url: str) -> None:
    storage.remove_folder(storage.join(url, "failures"))


def _raise_failure(url: str) -> None:
    found = _read_failures(url)
    if not found:
        return
    _clear_failures(url)
    raise errors.decode(found[0]["kind"], found[0]["message"])
