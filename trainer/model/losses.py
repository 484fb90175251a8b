"""LeJEPA and SIGReg as modules for any training loop: autocast, DistributedDataParallel, torch.compile.

Invariant: values and gradients are those of `trainer.model.objectives`, for one process and, averaged by
DistributedDataParallel, for many. torch.compile runs them uncompiled, between compiled graphs: they hash the step into
the seed of the directions, and their own backward pass keeps no intermediate values of size N S.

Shapes: V views, B samples of this rank, N rows, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from infra.errors import InputError
from trainer.model import distributed
from trainer.model.objectives import LejepaConfig, LejepaTerms, characteristic_sums, directions, epps_pulley, lejepa

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def _uncompiled(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """`torch.compiler.disable`, which has no types. The compiler does not look inside, so a count is no new graph."""
    return cast("Callable[Arguments, Returned]", torch.compiler.disable(function))  # type: ignore[no-untyped-call]


@_uncompiled
def sigreg(
    x: Tensor, *, step: int, n_directions: int = 1024, n_knots: int = 17, t_max: float = 3.0, seed: int = 0
) -> Tensor:
    """Distance of the rows x (N, D) from an isotropic Gaussian: mean over directions of the Epps-Pulley T / N.

    The rows of all ranks count, with gradients for those of this one. step: draws the directions (with `seed`); the
    same on every rank, another one at each step of a training. Computed in float32, or float64 for float64 rows, with
    autocast off. Raises InputError for another shape, ConfigError for settings out of range. Source: Balestriero and
    LeCun 2025, arXiv 2511.08544.

    >>> import goodviews as gv, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> bool(gv.sigreg(x, step=0) < gv.sigreg(x + 1, step=0) / 10)
    True
    """
    return _sigreg(x, step, _config(1.0, n_directions, n_knots, t_max, seed))


def _sigreg(x_ND: Tensor, step: int, config: LejepaConfig) -> Tensor:
    if x_ND.ndim != 2 or not len(x_ND):
        raise InputError(f"SIGReg got a tensor of shape {tuple(x_ND.shape)}, but needs rows (N, D). Flatten the views.")
    with torch.autocast(x_ND.device.type, enabled=False):
        x_ND = x_ND.to(torch.promote_types(x_ND.dtype, torch.float32))
        sums_2KS = characteristic_sums(x_ND, directions(step, x_ND.shape[1], config, like=x_ND), config)
        # One collective for the sums and the number of rows.
        packed = distributed.all_reduce_sum(torch.cat([sums_2KS.flatten(), x_ND.new_full((1,), len(x_ND))]))
        return epps_pulley(packed[:-1].view_as(sums_2KS) / packed[-1].detach(), config).mean()


class _Stepped(nn.Module):
    """Counts the training steps that draw the directions. The count is part of the state dict."""

    def __init__(self, config: LejepaConfig) -> None:
        super().__init__()
        self.config = config
        self.step = 0

    def _next_step(self, step: int | None) -> int:
        """The step as given, else the own count, which moves on in training only."""
        if step is not None:
            return step
        self.step += self.training
        return self.step - self.training

    def get_extra_state(self) -> Tensor:
        """The count, as a tensor: safetensors keeps nothing else."""
        return torch.tensor(self.step)

    def set_extra_state(self, state: Tensor) -> None:
        """Go on counting from a saved state."""
        self.step = int(state)

    def extra_repr(self) -> str:
        """The settings, for `print(model)`."""
        return f"n_directions={self.config.n_directions}, n_knots={self.config.n_knots}, t_max={self.config.t_max}"


class SigReg(_Stepped):
    """The regulariser `sigreg` as a module: rows (N, D) in, a scalar out.

    It counts its own calls in training mode, so that each step draws other directions; pass `step` to decide it.

    >>> import goodviews as gv, torch
    >>> regulariser = gv.SigReg(n_directions=64)
    >>> x = torch.randn(100, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    >>> regulariser(x).backward()
    >>> x.grad.shape, regulariser.step
    (torch.Size([100, 8]), 1)
    """

    def __init__(self, *, n_directions: int = 1024, n_knots: int = 17, t_max: float = 3.0, seed: int = 0) -> None:
        super().__init__(_config(1.0, n_directions, n_knots, t_max, seed))

    @_uncompiled
    def forward(self, x: Tensor, step: int | None = None) -> Tensor:
        """See `sigreg`."""
        return _sigreg(x, self._next_step(step), self.config)


class LejepaLoss(_Stepped):
    """The LeJEPA loss: projections (V, B, D) of V views in, `loss`, `inv`, `sigreg` and `statistic` out.

    loss = inv + weight * sigreg. inv: mean squared distance to the mean of the first `n_global` views. sigreg: of all V
    B rows of all ranks. weight: the whole weight; the paper's lambda x views x batch per GPU, such as .02 x 8 x 256 =
    40.96. It counts its own calls in training mode, so that each step draws other directions; pass `step` to decide it.
    Raises InputError for another shape, ConfigError for settings out of range. Source: Balestriero and LeCun 2025,
    arXiv 2511.08544.

    >>> import goodviews as gv, torch
    >>> views = torch.randn(4, 32, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    >>> terms = gv.LejepaLoss(weight=2.0, n_global=2, n_directions=64)(views)
    >>> terms.loss.backward()
    >>> bool(torch.isclose(terms.loss, terms.inv + 2 * terms.sigreg)), views.grad.shape
    (True, torch.Size([4, 32, 8]))
    """

    def __init__(
        self,
        weight: float,
        *,
        n_global: int = 2,
        n_directions: int = 1024,
        n_knots: int = 17,
        t_max: float = 3.0,
        seed: int = 0,
    ) -> None:
        super().__init__(_config(weight, n_directions, n_knots, t_max, seed))
        self.n_global = n_global

    @_uncompiled
    def forward(self, z: Tensor, step: int | None = None) -> LejepaTerms:
        """The terms of one step; only `loss`, `inv` and `sigreg` carry gradients."""
        return lejepa(z, self.n_global, self._next_step(step), self.config)


def _config(weight: float, n_directions: int, n_knots: int, t_max: float, seed: int) -> LejepaConfig:
    return LejepaConfig(weight=weight, n_directions=n_directions, n_knots=n_knots, t_max=t_max, direction_seed=seed)
