"""The statistic of SIGReg by itself, and the weight that a lambda of the public code amounts to."""

from __future__ import annotations

from torch import Tensor

from trainer.model.objectives import LejepaConfig, characteristic_sums, directions, epps_pulley


def sigreg_statistics(x_ND: Tensor, step: int, config: LejepaConfig) -> Tensor:
    """Epps-Pulley statistic T_s of the rows of this process along each direction, (S,)."""
    sums = characteristic_sums(x_ND, directions(step, x_ND.shape[1], config, like=x_ND), config)
    return epps_pulley(sums / len(x_ND), config) * len(x_ND)


def weight_of_lambda(value: float, *, views: int, batch_per_gpu: int, processes: int = 1) -> float:
    """The weight that a lambda of the public code amounts to: it multiplies T_s / N by its rows per GPU and processes.

    design.md 4.5 takes `processes` as 1 for the paper's runs (unconfirmed): .02 x 8 x 256 = 40.96, .02 x 8 x 128 =
    20.48.
    """
    return value * views * batch_per_gpu * processes
