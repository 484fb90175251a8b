"""Alarms of a training: collapse, numbers that are not finite, a fall in speed.

A number that is not finite always ends the run, because every later step would be lost. For the other alarms the loop
decides what happens.
Legend: N pooled vectors, D their width.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

import torch

from infra.errors import ConfigError, GoodviewsError


@dataclass(frozen=True, kw_only=True)
class AlarmConfig:
    """Limits below which a representation counts as collapsed, or a run as slow."""

    min_rank_share: float = 0.05
    "Effective rank, as a share of the highest that N vectors of D dimensions can have."
    min_spread: float = 0.02
    "Distance from the mean over size of the vectors (both root mean square); near 0 all texts have one vector."
    speed_share: float = 0.5
    "Samples/s, as a share of the median of the last windows."
    windows: int = 20
    stop_on_collapse: bool = False
    "End the run at a collapse alarm. Off by default: an alarm early in warm-up may pass."

    def __post_init__(self) -> None:
        for name in ("min_rank_share", "min_spread", "speed_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"alarms.{name} is {getattr(self, name)}; it is a share, from 0 to below 1.")
        if self.windows < 1:
            raise ConfigError(f"alarms.windows is {self.windows}; use 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Health:
    """State of a representation. effective_rank in [1, D]; rank_share and spread in [0, 1]."""

    effective_rank: float
    rank_share: float
    spread: float


def measure(x_ND: torch.Tensor) -> Health:
    """Effective rank and spread of pooled vectors.

    Effective rank: exponential of the entropy of the eigenvalues of the covariance, normalised to sum 1
    (Roy and Vetterli 2007, on eigenvalues instead of singular values). All vectors equal: rank 1, spread 0.
    """
    x_ND = x_ND.detach().float()
    centred_ND = x_ND - x_ND.mean(0)
    limit = max(min(x_ND.shape[0] - 1, x_ND.shape[1]), 1)
    size = float(x_ND.square().mean().sqrt())
    if not math.isfinite(size):
        return Health(effective_rank=math.nan, rank_share=math.nan, spread=math.nan)
    spread = float(centred_ND.square().mean().sqrt()) / size if size > 0 else 0.0
    values = torch.linalg.eigvalsh((centred_ND.T @ centred_ND).double().cpu()).clamp(min=0)
    # In float32, equal vectors differ from their mean by about 1e-7 of their size. That is rounding, not spread.
    if spread < 1e-6:
        return Health(effective_rank=1.0, rank_share=1.0 / limit, spread=spread)
    shares = values / values.sum()
    rank = float(torch.exp(-torch.special.xlogy(shares, shares).sum()))
    return Health(effective_rank=rank, rank_share=rank / limit, spread=spread)


def collapse(health: Health, config: AlarmConfig) -> str | None:
    """The message of a collapse alarm, or None."""
    if health.rank_share >= config.min_rank_share and health.spread >= config.min_spread:
        return None
    return (
        f"The encoder has collapsed: effective rank {health.effective_rank:.1f} ({health.rank_share:.1%} of the "
        f"highest, alarm below {config.min_rank_share:.0%}), spread {health.spread:.3f} (alarm below "
        f"{config.min_spread}). Try a lower learning rate, clipping, or another weight of SIGReg."
    )


def refuse_not_finite(loss: float, norm: float, step: int) -> None:
    """Raises GoodviewsError when loss or gradient of a step is not a finite number."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    message = (
        f"Step {step:,} gave loss {loss} and gradient norm {norm}. No checkpoint holds them. Start a new run with a "
        "smaller optimizer.lr or optimizer.clip_norm, or with precision fp32."
    )
    raise GoodviewsError(message)


class SpeedAlarm:
    """Compares the samples/s of each window with the median of the windows before it."""

    def __init__(self, config: AlarmConfig) -> None:
        self._config = config
        self._speeds: deque[float] = deque(maxlen=config.windows)

    def check(self, samples_per_s: float) -> str | None:
        """The message of an alarm, or None. A slow window does not enter the median."""
        enough = len(self._speeds) >= min(5, self._config.windows)
        usual = statistics.median(self._speeds) if enough else 0.0
        if enough and samples_per_s < self._config.speed_share * usual:
            return (
                f"Speed fell to {samples_per_s:,.0f} samples/s from usually {usual:,.0f}. Look for other load on the "
                "machine, a slow disk or store, or heat."
            )
        self._speeds.append(samples_per_s)
        return None
