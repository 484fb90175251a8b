"""The runs behind the law tests: the same global batches on 1, 2 and 4 processes, results in one file a world and rank.

Usage: law_worker.py FOLDER. Four processes are forked from this one, so that torch and transformers are imported
once. Ranks below the size of a world take part in it; a world of 1 has no process group at all.
Every model is built before its process group exists (failures.md E23), so the laws hold for early objects too.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.data.ragged import Ragged
from trainer.model.distributed import SyncedBatchNorm1d, all_reduce_sum
from trainer.model.encoder import SIZES, ProjectorConfig, TextEncoder
from trainer.model.objectives import LejepaConfig, LejepaModel, NextTokenModel, lejepa, next_token

WORLDS = (4, 2, 1)
SAMPLES, VIEWS, GLOBAL_VIEWS, DIMENSIONS = 20, 4, 2, 6
CUTS = {1: (0, 20), 2: (0, 12, 20), 4: (0, 2, 9, 15, 20)}
"First sample of each rank: shares are unequal."
EVEN_CUTS = {world: tuple(range(0, SAMPLES + 1, SAMPLES // world)) for world in WORLDS}
STEP = 7
LOSS = LejepaConfig(weight=3.0, n_directions=32)
PAPER = replace(LOSS, sync="paper")
ENCODER = replace(
    SIZES["tiny"],
    width=16,
    heads=2,
    ffn=32,
    vocab_size=40,
    max_tokens=16,
    dropout=0.0,
    length_groups=3,
    projector=ProjectorConfig(entry=8, hidden=12, output=6),
)


@dataclass(frozen=True)
class Share:
    """The samples of this rank."""

    world: int
    rank: int
    cuts: tuple[int, ...]

    @property
    def samples(self) -> slice:
        return slice(self.cuts[self.rank], self.cuts[self.rank + 1])

    def take(self, ragged: Ragged, views: int) -> Ragged:
        """The rank's part of view-major sequences."""
        per_view = np.arange(len(ragged)).reshape(views, -1)[:, self.samples]
        return ragged.take(per_view.ravel())


def projections() -> Tensor:
    """Random, far from N(0, I), (V, samples, D)."""
    generator = torch.Generator().manual_seed(1)
    return 1.5 * torch.randn(VIEWS, SAMPLES, DIMENSIONS, generator=generator, dtype=torch.float64) + 0.3


def sequences(views: int) -> Ragged:
    """Captions of 3 to 12 tokens, view-major."""
    draws = np.random.default_rng(2)
    return Ragged.from_rows([list(draws.integers(5, 40, n)) for n in draws.integers(3, 13, views * SAMPLES)])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_alone(share: Share, config: LejepaConfig) -> dict[str, Tensor]:
    """Loss and the gradient of the local projections."""
    z = projections()[:, share.samples].clone().requires_grad_()
    terms = lejepa(z, GLOBAL_VIEWS, STEP, config)
    torch.autograd.backward(terms.loss)
    assert z.grad is not None
    return {"grad": z.grad, **{name: value for name, value in terms._asdict().items() if isinstance(value, Tensor)}}


def broken_loss(share: Share) -> dict[str, Tensor]:
    """E22: a loss of a global sum whose backward is missing, as the peers had it, beside the right one."""

    def gradient(reduce: Callable[[Tensor], Tensor]) -> Tensor:
        z = projections()[:, share.samples].clone().requires_grad_()
        torch.autograd.backward((reduce(z.square().sum()) / SAMPLES - 1.0) ** 2)
        assert z.grad is not None
        return z.grad

    def without_backward(x: Tensor) -> Tensor:
        return x + (all_reduce_sum(x.detach()) - x.detach())

    return {"dropped": gradient(without_backward), "kept": gradient(all_reduce_sum)}


def batch_norm(share: Share, norm: SyncedBatchNorm1d) -> dict[str, Tensor]:
    """Two train steps and an eval pass on rows far from zero."""
    rows = projections().flatten(0, 1)[share.samples] * 2 + 5
    x = rows.clone().requires_grad_()
    norm.train()
    out = norm(norm(x))
    # Not invariant to the normalisation: a plain sum of squares would have no gradient.
    torch.autograd.backward(all_reduce_sum((out**3).sum()))
    assert x.grad is not None
    with torch.no_grad():
        evaluated = norm.eval()(rows)
    state = {f"state.{name}": value.clone() for name, value in norm.state_dict().items()}
    local = {"out": out.detach(), "grad": x.grad, "eval": evaluated}
    return {**local, **state, **{f"parameter.{n}": g for n, g in gradients(norm).items()}}


def trained(share: Share, model: LejepaModel | NextTokenModel, views: int) -> dict[str, Tensor]:
    """Loss and gradients of a whole model, through DistributedDataParallel when there are ranks."""
    wrapped = DistributedDataParallel(model) if share.world > 1 else model
    batch = model.encoder.batch(share.take(sequences(views), views))
    result = wrapped(batch, STEP) if isinstance(model, LejepaModel) else wrapped(batch)
    loss = result.loss if isinstance(model, LejepaModel) else result
    torch.autograd.backward(loss)
    buffers = {f"buffer.{name}": b.clone() for name, b in model.named_buffers() if "running" in name}
    return {"loss": loss.detach(), **buffers, **gradients(model)}


def token_loss(share: Share) -> dict[str, Tensor]:
    """The normalisation alone: local sums of unequal numbers of tokens."""
    x = projections()[0, share.samples].clone().requires_grad_()
    loss = next_token(x.square().sum(), 3 * len(x))
    torch.autograd.backward(loss)
    assert x.grad is not None
    return {"loss": loss.detach(), "grad": x.grad}


def prepared() -> Callable[[Share], dict[str, dict[str, Tensor]]]:
    """All cases, with every module built now."""
    torch.manual_seed(3)
    lejepa_model = LejepaModel(TextEncoder(ENCODER), LOSS, n_views=VIEWS, n_global=GLOBAL_VIEWS).double()
    causal = TextEncoder(replace(ENCODER, causal=True, projector=None))
    next_token_model = NextTokenModel(causal).double()
    norm = SyncedBatchNorm1d(DIMENSIONS).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)

    def run(share: Share) -> dict[str, dict[str, Tensor]]:
        return {
            "inputs": {"z": projections(), "weight": torch.tensor(LOSS.weight)},
            "lejepa": loss_alone(share, LOSS),
            "paper": loss_alone(replace(share, cuts=EVEN_CUTS[share.world]), PAPER),
            "dropped": broken_loss(share),
            "batch_norm": batch_norm(share, norm),
            "token_loss": token_loss(share),
            "lejepa_model": trained(share, lejepa_model, VIEWS),
            "next_token_model": trained(share, next_token_model, 1),
        }

    return run


def run_rank(rank: int, folder: Path) -> None:
    """Every world in turn."""
    for world in WORLDS:
        if rank >= world:
            continue
        run = prepared()
        if world > 1:
            init = f"file://{folder / f'init-{world}'}"
            distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
        found = run(Share(world, rank, CUTS[world]))
        flat = {f"{case}/{name}": x.detach().clone() for case, values in found.items() for name, x in values.items()}
        save_file(flat, folder / f"{world}-{rank}.safetensors")
        if world > 1:
            distributed.barrier()
            distributed.destroy_process_group()


def main(folder: Path) -> int:
    """Exit code 1 when any rank failed."""
    torch.set_num_threads(1)
    processes = [
        multiprocessing.get_context("fork").Process(target=run_rank, args=(r, folder)) for r in range(max(WORLDS))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
