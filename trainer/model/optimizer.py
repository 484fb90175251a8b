"""AdamW, the schedule of its learning rate, and clipping: how a gradient becomes a step.

Invariant: the learning rate is a function of (config, step, total steps) alone, so a run that goes on needs no state of
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch

from infra.errors import ConfigError

FIRST_SHARE: Final = 0.01
"Of the peak, at step 0. Source: the warm-up of the public LeJEPA recipes (algorithms.md 1)."


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float
    "Peak learning rate, for the batch of the recipe; it is not scaled by anything."
    weight_decay: float = 0.05
    "On matrices (embeddings too). Gains and biases do not decay: pulling a LayerNorm gain to 0 only fights the loss."
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup_share: float = 0.05
    "Share of all steps over which the rate rises."
    final_share: float = 0.001
    "Of the peak, at the last step."
    clip_norm: float | Literal["off"] = 1.0
    "Largest norm of the whole gradient. Of the paper's runs without clipping 3 of 36 collapsed."

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ConfigError(f"optimizer.lr is {self.lr}; nothing would be learned. Use a number above 0.")
        if self.weight_decay < 0:
            raise ConfigError(f"optimizer.weight_decay is {self.weight_decay}; use 0 or more.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optimizer.betas is {self.betas}; each must be at least 0 and below 1.")
        if not 0 <= self.warmup_share < 1 or not 0 <= self.final_share <= 1:
            raise ConfigError(
                f"optimizer.warmup_share is {self.warmup_share} and final_share {self.final_share}; both are shares,"
                " from 0 to 1."
            )
        if not self.max_norm > 0:
            raise ConfigError(f'optimizer.clip_norm is {self.clip_norm}; use a number above 0, or "off".')

    @property
    def max_norm(self) -> float:
        """`clip_norm` as a number; infinite when it is off."""
        return math.inf if self.clip_norm == "off" else float(self.clip_norm)


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Rate of step `step` (0-based) of `total`: linear from 1 % to the peak, then cosine to `final_share` of it."""
    warmup = round(config.warmup_share * total)
    if step < warmup:
        return config.lr * (FIRST_SHARE + (1 - FIRST_SHARE) * step / warmup)
    # The last step, total - 1, gets exactly the final rate.
    progress = min((step - warmup) / max(total - 1 - warmup, 1), 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_share + (1 - config.final_share) * cosine)


def build_optimizer(config: OptimizerConfig, model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW over the trained parameters, matrices with decay, vectors without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def take_step(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int, total: int) -> torch.Tensor:
    """Clip, step, and clear the gradients; returns the norm of the gradient before clipping, 0-dim.

    A gradient that is not finite is not applied: the weights stay those of the step before, for the alarm to report.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step, total)
    # On a GPU asking would wait for it at every step; there the loop asks at its log points, before any checkpoint.
    if norm.is_cuda or bool(torch.isfinite(norm)):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.detach()
