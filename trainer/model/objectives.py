"""The two losses and their settings (the weight of SIGReg): LeJEPA and next-token prediction, over all ranks.

Invariant: loss and averaged gradients do not depend on how the global batch is cut over ranks (`sync = "global"`);
statistics are float32 (float64 when the input is) with autocast off. Leave `torch.set_float32_matmul_precision` at
"highest": TF32 projections would move the statistic by 1e-3.

SIGReg (Balestriero and LeCun, LeJEPA; algorithms.md 1). Rows x of N views in D dimensions, S unit directions a_s:
T_s = N sum_j w_j phi_j [(mean_n cos(t_j x_n.a_s) - phi_j)^2 + (mean_n sin(t_j x_n.a_s))^2], t_j = j dt on [0, t_max],
phi_j = exp(-t_j^2 / 2) both target and window, w the trapezoid weights doubled for the other half of the line.
The loss is inv + weight x mean_s(T_s / N): `weight` is the one number between the two terms, whatever the batch is.

Shapes: V views, B samples, N rows (V B), D dimensions, S directions, K knots without t = 0 (its term is always 0);
lower case for a part of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from infra import seeds
from infra.errors import ConfigError, InputError
from trainer.model import distributed
from trainer.model.encoder import TextEncoder
from trainer.model.packing import TokenBatch, moved

ROWS, CPU_BLOCK, GPU_BLOCK = 2048, 1 << 21, 1 << 22
"""Rows (on a CPU) and projections of one matrix product and its sines; 8 and 16 MB in float32."""
TILE = 15 * ROWS
"""Projections of one step of a recurrence on a CPU: in the cache of a core, and just below the 32,768 elements
from which torch calls its threads. Sines are taken by the block because MKL calls threads at any size. Thousands of
such calls cost 7 s instead of .6 where two threads shared two busy cores."""


@dataclass(frozen=True, kw_only=True)
class LejepaConfig:
    """Settings of the LeJEPA loss. Raises ConfigError for values outside their range."""

    weight: float
    "Factor of mean_s(T_s / N), the whole weight: lambda x views x batch per GPU of the paper (.02 x 8 x 256 = 40.96)."
    n_directions: int = 1024
    "Random directions a step."
    n_knots: int = 17
    "Points on [0, t_max], both ends included; odd."
    t_max: float = 3.0
    "Largest frequency."
    sync: Literal["global", "paper"] = "global"
    "`global`: statistics over all ranks. `paper`: each rank over its own rows, as the public code really computes."
    direction_seed: int = 0
    "Root of the seeds of the directions; step and this number decide them, the rank does not."

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(
                f"weight is {self.weight}, but must be a finite number of at least 0. Set it in the recipe."
            )
        if self.n_directions < 1 or not (math.isfinite(self.t_max) and self.t_max > 0):
            raise ConfigError(
                f"n_directions is {self.n_directions} and t_max {self.t_max}, but both must be positive. Change them."
            )
        if self.n_knots < 3 or self.n_knots % 2 == 0:
            raise ConfigError(f"n_knots is {self.n_knots}, but must be odd and at least 3. The paper has 17.")


class LejepaTerms(NamedTuple):
    """Scalars of one step: loss = inv + weight * sigreg, statistic = mean T; `loss` and its parts carry gradients."""

    loss: Tensor
    inv: Tensor
    sigreg: Tensor
    statistic: Tensor
    weight: float

    def to_floats(self) -> dict[str, float]:
        """The terms by name, with one wait for the device."""
        loss, inv, sigreg, statistic = torch.stack([t.detach() for t in self[:4]]).tolist()
        return {"loss": loss, "inv": inv, "sigreg": sigreg, "statistic": statistic, "weight": self.weight}


def lejepa(z_VBD: Tensor, n_global: int, step: int, config: LejepaConfig) -> LejepaTerms:
    """LeJEPA loss of the projections of this rank's views, the first `n_global` of them global.

    z_VBD: V views of B samples in D dimensions; B may differ by rank. step: the global step, which seeds the
    directions. inv: mean over views, samples, dimensions of the squared distance to the mean of the global views (not
    detached). `global`: every term is of the global batch and equal on all ranks. `paper`: every term is of this rank's
    rows, and `statistic` carries the public code's factor (rows here x processes), so it grows with their number
    (algorithms.md). Raises InputError for a wrong shape.
    """
    if z_VBD.ndim != 3 or not 1 <= n_global <= len(z_VBD):
        raise InputError(
            f"LeJEPA got projections of shape {tuple(z_VBD.shape)} and {n_global} global views, but needs (views, "
            "samples, dimensions) with 1 to `views` global ones. Check the order of the views."
        )
    with torch.autocast(z_VBD.device.type, enabled=False):
        z_VBD = z_VBD.to(torch.promote_types(z_VBD.dtype, torch.float32))
        distances = (z_VBD - z_VBD[:n_global].mean(0)).square().sum()
        z_ND = z_VBD.flatten(0, 1)
        a_DS = directions(step, z_ND.shape[1], config, like=z_ND)
        sums = characteristic_sums(z_ND, a_DS, config)
        # One collective for everything: the sums, the distances, the rows.
        packed = torch.cat([sums.flatten(), distances[None], distances.new_full((1,), len(z_ND))])
        if config.sync == "global":
            packed = distributed.all_reduce_sum(packed)
        n = packed[-1].detach()
        inv = packed[-2] / (n * z_ND.shape[1])
        sigreg = epps_pulley(packed[:-2].view_as(sums) / n, config).mean()
        processes = distributed.world_size() if config.sync == "paper" else 1
        return LejepaTerms(inv + config.weight * sigreg, inv, sigreg, sigreg.detach() * n * processes, config.weight)


def directions(step: int, dimensions: int, config: LejepaConfig, *, like: Tensor) -> Tensor:
    """The S unit directions of a step, (D, S), of the dtype and on the device of `like`.

    Drawn on the CPU in float32 whatever the device, because generators of different devices give different numbers.
    """
    generator = torch.Generator("cpu").manual_seed(seeds.derive(config.direction_seed, "sigreg", step))
    drawn = torch.randn(dimensions, config.n_directions, generator=generator, dtype=torch.float32)
    a_DS = moved(drawn, like.device).to(like.dtype)
    return functional.normalize(a_DS, dim=0)


def epps_pulley(means_2KS: Tensor, config: LejepaConfig) -> Tensor:
    """T_s / N, (S,), from the mean cosines and sines over the rows at the knots t_1 .. t_K."""
    t_K = _knots(config, means_2KS)
    phi_K = torch.exp(-0.5 * t_K.square())
    trapezoid_K = torch.full_like(t_K, 2 * config.t_max / len(t_K))
    trapezoid_K[-1] /= 2
    apart_KS = (means_2KS[0] - phi_K[:, None]).square() + means_2KS[1].square()
    # No product of matrices, which a backward pass under autocast would round to bfloat16.
    return ((trapezoid_K * phi_K)[:, None] * apart_KS).sum(0)


def characteristic_sums(x_ND: Tensor, a_DS: Tensor, config: LejepaConfig) -> Tensor:
    """Sums over rows of cos and sin of t_k x.a_s, (2, K, S), at the knots t_1 .. t_K; differentiable once, in x only.

    Nothing of size N S is kept: tiles of rows and directions are projected anew in the backward pass.
    """
    sums: Tensor = _CharacteristicSums.apply(x_ND, a_DS, _knots(config, a_DS))  # type: ignore[no-untyped-call]
    return sums


def _knots(config: LejepaConfig, like: Tensor) -> Tensor:
    # Made on the device: copying from the host would wait for all work queued there.
    k = torch.arange(1, config.n_knots, dtype=like.dtype, device=like.device)
    return k * (config.t_max / (config.n_knots - 1))


class _CharacteristicSums(torch.autograd.Function):
    """sum_n e^{i t_k y_n} for y = x.a and t_k = k dt, from one sine and cosine an element.

    Forward: e^{i k dt y} = e^{i (k-1) dt y} e^{i dt y}, a rotation a knot. Backward, for gradients C_k, S_k of the
    sums: dL/dy_n = sum_k t_k (S_k cos(t_k y_n) - C_k sin(t_k y_n)) = Re sum_k t_k (S_k + i C_k) e^{i t_k y_n}, by
    Horner's rule in e^{i dt y}. Both are products of numbers of modulus 1, so errors grow like k rounding errors, not
    k^2 as in the three-term recurrence near y = 0.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, a_DS: Tensor, t_K: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, a_DS, t_K)
        sums_2KS = a_DS.new_zeros(2, len(t_K), a_DS.shape[1])
        with torch.autocast(x_ND.device.type, enabled=False):
            for rows, columns in _blocks(x_ND, a_DS):
                cosine_sn, sine_sn = _first_harmonic(x_ND[rows], a_DS[:, columns], t_K)
                sums_2Ks = sums_2KS[:, :, columns]
                for tile in _tiles(cosine_sn):
                    _add_harmonics(sums_2Ks[:, :, tile], cosine_sn[tile], sine_sn[tile])
        return sums_2KS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x_ND, a_DS, t_K = ctx.saved_tensors
        dx_ND = torch.zeros_like(x_ND)
        real_KS1, imaginary_KS1 = ((grad_KS * t_K[:, None])[..., None] for grad_KS in (grads[0][1], grads[0][0]))
        with torch.autocast(x_ND.device.type, enabled=False):
            for rows, columns in _blocks(x_ND, a_DS):
                a_Ds, real_Ks1, imaginary_Ks1 = a_DS[:, columns], real_KS1[:, columns], imaginary_KS1[:, columns]
                cosine_sn, sine_sn = _first_harmonic(x_ND[rows], a_Ds, t_K)
                for tile in _tiles(cosine_sn):
                    _horner_(cosine_sn[tile], sine_sn[tile], real_Ks1[:, tile], imaginary_Ks1[:, tile])
                dx_ND[rows].addmm_(cosine_sn.T, a_Ds.T)
        return dx_ND, None, None


def _blocks(x_ND: Tensor, a_DS: Tensor) -> Iterator[tuple[slice, slice]]:
    n_rows, n_columns = len(x_ND), a_DS.shape[1]
    on_cpu = x_ND.device.type == "cpu"
    rows = max(1, min(n_rows, ROWS if on_cpu else GPU_BLOCK))
    columns = (CPU_BLOCK if on_cpu else GPU_BLOCK) // rows
    for row in range(0, n_rows, rows):
        for column in range(0, n_columns, columns):
            yield slice(row, row + rows), slice(column, column + columns)


def _tiles(block_sn: Tensor) -> Iterator[slice]:
    size = max(1, TILE // block_sn.shape[1]) if block_sn.device.type == "cpu" else len(block_sn)
    for first in range(0, len(block_sn), size):
        yield slice(first, first + size)


def _first_harmonic(x_nD: Tensor, a_Ds: Tensor, t_K: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of dt y, (s, n): directions first, so that sums over rows run along memory."""
    angle_sn = (a_Ds.T * t_K[0]) @ x_nD.T
    return angle_sn.cos(), angle_sn.sin_()


def _add_harmonics(sums_2Ks: Tensor, cosine_sn: Tensor, sine_sn: Tensor) -> None:
    real, imaginary = cosine_sn, sine_sn
    # Two pairs of buffers in turn; nothing else is allocated.
    spare = [(torch.empty_like(real), torch.empty_like(real)) for _ in range(2)]
    for k in range(sums_2Ks.shape[1]):
        if k:
            next_real, next_imaginary = spare[k % 2]
            torch.mul(real, cosine_sn, out=next_real).addcmul_(imaginary, sine_sn, value=-1)
            torch.mul(imaginary, cosine_sn, out=next_imaginary).addcmul_(real, sine_sn)
            real, imaginary = next_real, next_imaginary
        sums_2Ks[0, k] += real.sum(1)
        sums_2Ks[1, k] += imaginary.sum(1)


def _horner_(cosine_sn: Tensor, sine_sn: Tensor, real_Ks1: Tensor, imaginary_Ks1: Tensor) -> None:
    """Replace the cosines by Re sum_k (real_k + i imaginary_k) z^(k+1), where z = cosine + i sine."""
    real, imaginary = real_Ks1[-1].expand_as(cosine_sn), imaginary_Ks1[-1].expand_as(cosine_sn)
    spare = [(torch.empty_like(cosine_sn), torch.empty_like(cosine_sn)) for _ in range(2)]
    for k in range(len(real_Ks1) - 2, -1, -1):
        next_real, next_imaginary = spare[k % 2]
        torch.addcmul(real_Ks1[k], real, cosine_sn, out=next_real).addcmul_(imaginary, sine_sn, value=-1)
        torch.addcmul(imaginary_Ks1[k], real, sine_sn, out=next_imaginary).addcmul_(imaginary, cosine_sn)
        real, imaginary = next_real, next_imaginary
    cosine_sn.mul_(real).addcmul_(imaginary, sine_sn, value=-1)


def next_token(sum_loss: Tensor, n_tokens: int) -> Tensor:
    """Mean next-token loss over the tokens of all ranks, equal on each.

    sum_loss: this rank's summed cross-entropy; n_tokens: its predicted tokens, which may differ by rank. The gradient
    is that of (local sum x ranks / global tokens), so that the average of DistributedDataParallel is the gradient of
    the mean.
    """
    both = distributed.all_reduce_sum(torch.stack([sum_loss, sum_loss.new_full((), n_tokens)]))
    return both[0] / both[1].detach()


class LejepaModel(nn.Module):
    """Encoder and LeJEPA loss in one module for DistributedDataParallel: batch and step in, terms out."""

    def __init__(self, encoder: TextEncoder, config: LejepaConfig, *, n_views: int, n_global: int) -> None:
        super().__init__()
        if not 1 <= n_global <= n_views:
            raise ConfigError(f"{n_global} of {n_views} views are to be global, but it must be 1 to {n_views} of them.")
        self.encoder = encoder
        self.config = config
        self.n_views = n_views
        self.n_global = n_global

    def forward(self, batch: TokenBatch, step: int) -> LejepaTerms:
        """Terms of a batch of n_views x B sequences, view-major. Raises InputError when they do not divide."""
        if len(batch) % self.n_views:
            message = f"A batch of {len(batch)} sequences does not divide into {self.n_views} views. Check the stream."
            raise InputError(message)
        z_NP = self.encoder.project(self.encoder.pooled(batch))
        return lejepa(z_NP.view(self.n_views, -1, z_NP.shape[1]), self.n_global, step, self.config)


class NextTokenModel(nn.Module):
    """Causal encoder and next-token loss in one module for DistributedDataParallel: batch in, mean loss out."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, batch: TokenBatch) -> Tensor:
        """Mean next-token loss over the global batch."""
        return next_token(*self.encoder.next_token_loss(batch))
