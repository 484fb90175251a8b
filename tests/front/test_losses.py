"""The losses are those of our own trainer, in anyone's loop: plain, autocast, compiled, on one process or two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import goodviews as gv
from tests.trainer.sigreg import sigreg_statistics
from trainer.model.objectives import LejepaConfig, LejepaTerms, lejepa

SETTINGS: dict[str, Any] = {"n_directions": 48, "n_knots": 9, "t_max": 2.5}
OURS = LejepaConfig(weight=3.0, direction_seed=5, **SETTINGS)


def projections(dtype: torch.dtype = torch.float64) -> Tensor:
    """(V, B, D), far from Gaussian, to be differentiated."""
    drawn = torch.randn(4, 10, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (1.5 * drawn + 0.3).to(dtype).requires_grad_()


def test_the_loss_and_its_gradient_are_those_of_the_trainer() -> None:
    own, theirs = projections(), projections()
    wanted = lejepa(own, 2, 7, OURS)
    wanted.loss.backward()  # type: ignore[no-untyped-call]
    terms = gv.LejepaLoss(weight=3.0, n_global=2, seed=5, **SETTINGS)(theirs, step=7)
    terms.loss.backward()
    assert [float(a.detach()) for a in terms[:4]] == [float(a.detach()) for a in wanted[:4]]
    assert own.grad is not None and theirs.grad is not None
    assert torch.equal(own.grad, theirs.grad)


def test_sigreg_is_the_part_of_the_loss() -> None:
    z = projections()
    rows = z.flatten(0, 1)
    wanted = lejepa(z, 2, 7, OURS).sigreg
    found = gv.sigreg(rows, step=7, seed=5, **SETTINGS)
    assert torch.allclose(found, wanted, rtol=1e-12)
    assert torch.allclose(found, sigreg_statistics(rows, 7, OURS).mean() / len(rows), rtol=1e-12)
    assert torch.equal(gv.SigReg(seed=5, **SETTINGS)(rows, step=7), found)
    (own,) = torch.autograd.grad(found, z)
    (theirs,) = torch.autograd.grad(wanted, z)
    assert torch.allclose(own, theirs, rtol=1e-10)


def test_the_module_counts_training_steps_and_remembers_them(tmp_path: Path) -> None:
    rows = projections().detach().flatten(0, 1)
    module = gv.SigReg(**SETTINGS)
    first, second = module(rows), module(rows)
    assert first == gv.sigreg(rows, step=0, **SETTINGS) != second == gv.sigreg(rows, step=1, **SETTINGS)
    assert module.eval()(rows) == module(rows) == gv.sigreg(rows, step=2, **SETTINGS)
    save_file(module.state_dict(), tmp_path / "state.safetensors")
    resumed = gv.SigReg(**SETTINGS)
    resumed.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert resumed(rows) == gv.sigreg(rows, step=2, **SETTINGS)
    assert "n_directions=48" in repr(module)


def test_autocast_keeps_the_statistic_in_float32() -> None:
    z = projections(torch.float32)
    loss = gv.LejepaLoss(weight=3.0, seed=5, **SETTINGS)
    plain = loss(z, step=7)
    layer = nn.Linear(6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = loss(z, step=7)
        projected = layer(z)
        rounded = loss(projected, step=7)
    assert projected.dtype == torch.bfloat16
    assert {term.dtype for term in (*mixed[:4], *rounded[:4])} == {torch.float32}
    assert torch.equal(mixed.loss, plain.loss)
    assert torch.equal(rounded.loss, loss(projected.float(), step=7).loss)
    rounded.loss.backward()
    assert layer.weight.grad is not None and bool(layer.weight.grad.isfinite().all())


class Model(nn.Module):
    """Anyone's model: a projector and our loss in one module, to be wrapped as a whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.projector = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
        self.objective = gv.LejepaLoss(weight=3.0, seed=5, **SETTINGS)

    def forward(self, x: Tensor) -> Tensor:
        """The loss of one batch of views (V, B, D)."""
        terms: LejepaTerms = self.objective(self.projector(x))
        return terms.loss


def train(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Losses of some steps of plain gradient descent, then the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach() for p in model.parameters())]


# torch looks at `grad` of what the loss returns, and hides its warning only after Python has raised it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_trains_as_it_does_uncompiled() -> None:
    batches = [projections().detach() + i for i in range(12)]
    plain = train(Model(), batches)
    torch._dynamo.reset()
    compiled = train(torch.compile(Model(), backend="aot_eager"), batches)  # type: ignore[arg-type]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    for a, b in zip(plain, compiled, strict=True):
        assert torch.allclose(a, b, rtol=1e-10)


PROGRAM = """
import sys, torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
import test_losses as own

rank, world, folder = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = own.Model()
if world > 1:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    model = DistributedDataParallel(model)
# Unequal shares: 4 samples and 6.
cut = {(0, 1): slice(0, 10), (0, 2): slice(0, 4), (1, 2): slice(4, 10)}[rank, world]
batches = [(own.projections().detach() + i)[:, cut] for i in range(3)]
torch.save(own.train(model, batches), f"{folder}/{world}-{rank}.pt")
if world > 1:
    distributed.destroy_process_group()
"""


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    batches = [projections().detach() + i for i in range(3)]
    one = train(Model(), batches)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"2-{rank}.pt", weights_only=True)  # noqa: TID251 - tensors only
        for a, b in zip(one, found, strict=True):
            assert torch.allclose(a, b, rtol=1e-10)


def test_wrong_shapes_and_settings_are_refused() -> None:
    with pytest.raises(gv.InputError, match="needs rows"):
        gv.sigreg(projections(), step=0)
    with pytest.raises(gv.InputError, match="views"):
        gv.LejepaLoss(weight=1.0)(projections()[0])
    with pytest.raises(gv.ConfigError, match="n_knots is 4"):
        gv.LejepaLoss(weight=1.0, n_knots=4)
