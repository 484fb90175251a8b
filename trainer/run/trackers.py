"""Further places for metrics: TensorBoard always, Weights & Biases and MLflow when they are installed.

Invariant: no tracker asks, waits for or needs a network unless its user set it up. W&B is offline without WANDB_MODE or
WANDB_API_KEY; MLflow writes into the folder of the run without MLFLOW_TRACKING_URI. A tracker that does not start is
left out.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from infra import storage
from infra.errors import ConfigError

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """A place that metrics are sent to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""

    def close(self) -> None:
        """Send what is buffered."""


def open_trackers(
    url: str, run_id: str, config: Mapping[str, Any], *, step: int, exclude: Sequence[str] = ()
) -> list[Tracker]:
    """All installed trackers but the excluded ones. step: where the run goes on; TensorBoard drops later points.

    Raises ConfigError for an unknown name in `exclude`.
    """
    unknown = sorted(set(exclude) - set(_OPENERS))
    if unknown:
        raise ConfigError(f"run.exclude_trackers names {unknown[0]!r}; known are {', '.join(_OPENERS)}.")
    found: list[Tracker] = []
    for name, opener in _OPENERS.items():
        # find_spec does not import: wandb and mlflow take seconds.
        if name not in exclude and importlib.util.find_spec(name) is not None:
            try:
                found.append(opener(url, run_id, config, step))
            except Exception as error:  # noqa: BLE001  (a tracker may raise anything)
                _log.warning("%s did not start and is left out: %s", name, error)
    return found


class _TensorBoard:
    def __init__(self, url: str, run_id: str, config: Mapping[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(storage.join(url, "tensorboard"), purge_step=step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, url: str, run_id: str, config: Mapping[str, Any], step: int) -> None:
        wandb = importlib.import_module("wandb")
        chosen = "WANDB_API_KEY" in os.environ or "WANDB_MODE" in os.environ
        mode = os.environ.get("WANDB_MODE", "online" if chosen else "offline")
        folder = None if storage.is_remote(url) else url
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "goodviews"),
            id=run_id,
            name=run_id,
            config=dict(config),
            mode=mode,
            dir=folder,
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, url: str, run_id: str, config: Mapping[str, Any], step: int) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ and not storage.is_remote(url):
            self._mlflow.set_tracking_uri(f"sqlite:///{storage.join(url, 'mlflow.sqlite')}")
        self._mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "goodviews"))
        self._mlflow.start_run(run_name=run_id)
        self._mlflow.log_dict(dict(config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("/", "."): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_OPENERS: Final[Mapping[str, Callable[[str, str, Mapping[str, Any], int], Tracker]]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
}
