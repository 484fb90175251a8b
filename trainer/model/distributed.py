"""The one file that speaks to the other processes of a training: rank, world size, a differentiable sum, a BatchNorm.

Invariant: N processes equal one process on the union of their rows, for values and, under DistributedDataParallel,
gradients.

The rule behind the gradients: every rank computes the same global loss L from summed statistics, and the backward of
the sum is a sum. With s = sum_r x_r, rank r gets sum_r' dL/ds = W dL/ds for its own x_r. DistributedDataParallel then
averages parameter gradients over W ranks, 1/W sum_r W dL/ds dx_r/dw = dL/dw: exactly the single-process gradient, with
no factor anywhere. A sum whose backward is missing loses the other ranks' share (failures.md E22).

The world is asked at each call, never remembered, so an object built before the process group is as good as one built
after it; and a launcher's WORLD_SIZE without a process group is an error instead of a world of one (failures.md E23).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, distributed, nn

from infra.errors import UsageError


def world_size() -> int:
    """Processes in the group, 1 when there is none.

    Raises UsageError when the environment promises more processes (WORLD_SIZE) and no group has been made.
    """
    if _is_grouped():
        return distributed.get_world_size()
    promised = os.environ.get("WORLD_SIZE", "").strip()
    if promised not in ("", "1"):
        raise UsageError(
            f"The launcher set WORLD_SIZE={promised}, but this process belongs to no process group: every rank would "
            "train alone on its share and count itself as the whole. Call torch.distributed.init_process_group (Ray "
            "Train does) before the first step, or unset WORLD_SIZE."
        )
    return 1


def rank() -> int:
    """Number of this process in the group, 0 when there is none. Raises like `world_size`."""
    return distributed.get_rank() if world_size() > 1 else 0


def all_reduce_sum(x: Tensor) -> Tensor:
    """Sum of `x` over all ranks, the same on each; its gradient is summed over ranks too. `x` itself in one process.

    Every rank must call it in the same order with the same shape and dtype.
    """
    if world_size() == 1:
        return x
    summed: Tensor = _AllReduceSum.apply(x)  # type: ignore[no-untyped-call]
    return summed


def _is_grouped() -> bool:
    return distributed.is_available() and distributed.is_initialized()


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # Through apply, so that a second derivative is right as well.
        return all_reduce_sum(grads[0])


def _summed(x: Tensor) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, op=distributed.ReduceOp.SUM)
    return total


class SyncedBatchNorm1d(nn.BatchNorm1d):
    """BatchNorm1d over the rows of all ranks: input (N, C), N may differ by rank; equals one process on the union.

    Same parameters, buffers and state dict as `nn.BatchNorm1d`, and the same code in one process and in eval mode.
    Statistics are summed in two passes (mean, then squared distances to it): E[x^2] - mean^2 cancels in float32. Stock
    SyncBatchNorm refuses CPU tensors.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(features, eps=eps, momentum=momentum)

    def forward(self, input: Tensor) -> Tensor:
        """Normalised rows (N, C), of the dtype of the input; updates the running statistics in train mode."""
        self._check_input_dim(input)
        if not self.training or world_size() == 1:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            return self._normalised(input.to(torch.promote_types(input.dtype, torch.float32))).to(input.dtype)

    def _normalised(self, x_NC: Tensor) -> Tensor:
        rows = x_NC.new_full((1,), len(x_NC))
        sums = all_reduce_sum(torch.cat([x_NC.sum(0), rows]))
        n, mean_C = sums[-1], sums[:-1] / sums[-1]
        centred_NC = x_NC - mean_C
        variance_C = all_reduce_sum(centred_NC.square().sum(0)) / n
        self._track(mean_C.detach(), variance_C.detach() * (n / (n - 1)))
        return centred_NC * (torch.rsqrt(variance_C + self.eps) * self.weight) + self.bias

    @torch.no_grad()
    def _track(self, mean_C: Tensor, unbiased_variance_C: Tensor) -> None:
        # Equal on all ranks, so the broadcast of buffers in DistributedDataParallel changes nothing.
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        momentum = float(self.momentum or 0.0)
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_variance_C.to(self.running_var.dtype), momentum)
