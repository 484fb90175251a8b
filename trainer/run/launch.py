"""Ray Train around the loop: where the ranks run, what happens when one dies, how their errors come back.

Owns: the only use of `ray.train`. Does not own: what a rank does (`trainer.run.loop`), starting or joining Ray (`infra.session`).
Invariants: a rank that died (or its node) restarts all ranks from the newest checkpoint of our own, at most
`run.max_failures` times; an error with a sentence of ours ends the run at the next restart, because it would come again.

Ray Train 2.60: an exception of a rank counts like its death, and the same `name` in the same storage folder resumes what
lay there. So names are drawn anew at each launch, nothing is ever reported to Ray, and errors travel by file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow.fs
import torch

from infra import errors, storage
from infra.errors import GoodviewsError, UsageError
from infra.session import open_workers
from trainer.run.loop import Job, Place, train_rank

POLL_S: Final = "0.5"
"Of Ray Train's controller, which notices a dead rank at its polls (its default is 2 s)."

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where ranks run. num_workers: ranks; 0 is one rank in this process, without Ray."""

    num_workers: int = 0
    use_gpu: bool = False
    cpus_per_worker: float = 0.9
    "Not 1: Ray Train needs a little of a CPU itself, and waits for ever where its ranks hold all of them."
    address: str | None = None
    num_cpus: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise UsageError(f"--num-workers is {self.num_workers}; use 0 (in this process, without Ray) or more.")
        if self.num_workers == 0 and self.address is not None:
            raise UsageError(
                f"--num-workers 0 trains in this process, but --address {self.address} names a Ray cluster. Give the number of ranks there."
            )

    @property
    def ranks(self) -> int:
        """Processes of the training."""
        return max(self.num_workers, 1)


def launch(job: Job, cluster: Cluster) -> None:
    """Train until the run is finished. Raises what ended it early, with the same type as in the rank that raised it."""
    if cluster.num_workers == 0:
        _check_gpu(cluster)
        _clear_failures(job.url)
        _fit(job, cluster)
        _raise_failure(job.url)
        return
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", POLL_S)
    with open_workers(address=cluster.address, num_cpus=cluster.num_cpus):
        _clear_failures(job.url)
        _check_room(cluster)
        _fit(job, cluster)
    _raise_failure(job.url)


def _fit(job: Job, cluster: Cluster) -> None:
    # In a notebook the import recommends widgets.
    logging.getLogger("ray.widgets").setLevel(logging.WARNING)
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    # It tells that local mode is local, which was asked for; what it warns of still shows.
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
                f"Run {job.run_id} lost its ranks more than {job.max_failures} times ({reason}). Its checkpoints are kept: "
                f"mend the cause and go on with `goodviews train --resume {job.run_id}`."
            )
            raise GoodviewsError(message) from error


@contextlib.contextmanager
def _ray_folder(job: Job) -> Iterator[tuple[Any, str]]:
    """Where Ray Train keeps its own state for the time of one launch: below the run, so that every node sees it."""
    url = storage.join(job.url, "ray")
    if storage.is_remote(url):
        fs, path = storage.filesystem(url)
        yield pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs)), path
    else:
        yield None, storage.absolute(url)
    storage.remove_folder(url)


def _train_loop(config: dict[str, Any]) -> None:
    """What every rank runs. Importable by name, because Ray pickles it."""
    import ray.train
    import ray.train.torch

    job: Job = config["job"]
    context = ray.train.get_context()
    world, rank = context.get_world_size(), context.get_world_rank()
    if _read_failures(job.url):
        # A rank raised a sentence of ours before this restart; the command reads it when all ranks have returned.
        return
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

    if not config["use_gpu"]:
        return torch.device("cpu")
    return torch.device("cuda", 0) if config["in_process"] else ray.train.torch.get_device()


def _check_gpu(cluster: Cluster) -> None:
    if cluster.use_gpu and not torch.cuda.is_available():
        raise UsageError(
            "--use-gpu was given, but torch sees no GPU here. Leave it out, or name the ranks of a cluster that has some: --num-workers N --address ADDRESS."
        )


def _check_room(cluster: Cluster) -> None:
    """Refuse what would wait for ever: more CPUs or GPUs than the cluster has now, unless it can grow."""
    import ray

    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    wanted = {
        "CPU": cluster.cpus_per_worker * cluster.num_workers,
        "GPU": float(cluster.num_workers if cluster.use_gpu else 0),
    }
    for kind, count in wanted.items():
        if count > there.get(kind, 0.0):
            message = f"{cluster.num_workers} ranks need {count:g} {kind}s, Ray has {there.get(kind, 0.0):g}. Use fewer with --num-workers, or a larger cluster with --address."
            raise UsageError(message)


# --- failures that travel by file ---------------------------------------------------------------------------------


def _write_failure(url: str, rank: int, error: GoodviewsError) -> None:
    _log.error("rank %d: %s", rank, error)
    record = {"kind": type(error).__name__, "message": str(error)}
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
    kind = getattr(errors, found[0]["kind"], GoodviewsError)
    _clear_failures(url)
    raise (kind if isinstance(kind, type) and issubclass(kind, GoodviewsError) else GoodviewsError)(found[0]["message"])
