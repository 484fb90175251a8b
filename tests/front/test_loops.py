"""Loops that are not ours train on good and bad views as one plain loop does: DDP, Lightning, Hugging Face's Trainer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

_spec = importlib.util.spec_from_file_location("front_loops", Path(__file__).with_name("loops.py"))
assert _spec is not None and _spec.loader is not None
loops: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(loops)

ALL_STEPS = list(range(loops.EPOCHS * loops.STEPS))


@pytest.fixture(scope="module")
def plain(home: str) -> tuple[Tensor, list[float]]:
    """Weights and losses of a plain loop on one process, after every step of every epoch."""
    made = loops.views(home)
    model = loops.Encoder(made.n_views)
    losses = loops.train(model, DataLoader(made, batch_size=None))
    assert model.steps == ALL_STEPS
    assert losses[-1] < losses[0]
    return loops.weights(model), losses


def test_a_plain_ddp_loop_of_two_ranks_trains_as_one_process(
    home: str, plain: tuple[Tensor, list[float]], tmp_path: Path
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("loops.py")), home, str(tmp_path)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    # One rank with worker processes and one without: they must agree all the same.
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(rank)], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in (0, 1)
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)  # noqa: TID251 - tensors and numbers only
        assert found["steps"] == ALL_STEPS
        assert found["losses"] == pytest.approx(plain[1], rel=1e-9)
        assert torch.allclose(found["weights"], plain[0], rtol=1e-9)


# Lightning and torchdata call what torch 2.13 has deprecated. Lightning warns of lengths (ours hold for any number of workers), of
# few workers, and of callbacks that the second trainer does not need.
@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec",
    "ignore:'set_vital' is deprecated:UserWarning",
    "ignore:Your .IterableDataset. has .__len__. defined:UserWarning",
    "ignore:Be aware that when using .ckpt_path.:UserWarning",
)
def test_lightning_trains_on_views_and_resumes_within_an_epoch(
    home: str, plain: tuple[Tensor, list[float]], tmp_path: Path
) -> None:
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Module(lightning.LightningModule):  # type: ignore[misc,unused-ignore]  # untyped where it is not installed
        def __init__(self, n_views: int) -> None:
            super().__init__()
            self.encoder = loops.Encoder(n_views)

        def training_step(self, batch: Any) -> Tensor:
            loss: Tensor = self.encoder(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.encoder.parameters(), lr=loops.RATE)

    def trainer(**options: Any) -> Any:
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        return lightning.Trainer(accelerator="cpu", **quiet, **options)

    made = loops.views(home)
    module = Module(made.n_views)
    trainer(max_epochs=loops.EPOCHS, enable_checkpointing=False).fit(module, DataLoader(made, batch_size=None))
    assert module.encoder.steps == ALL_STEPS
    assert torch.allclose(loops.weights(module), plain[0], rtol=1e-9)

    saves = ModelCheckpoint(tmp_path, filename="after-6", every_n_train_steps=6, save_top_k=-1)
    first = Module(made.n_views)
    trainer(max_steps=6, callbacks=[saves]).fit(first, StatefulDataLoader(loops.views(home), batch_size=None))
    second, rest = Module(made.n_views), StatefulDataLoader(loops.views(home), batch_size=None)
    goes_on = trainer(max_epochs=loops.EPOCHS, enable_checkpointing=False)
    goes_on.fit(second, rest, ckpt_path=tmp_path / "after-6.ckpt")
    assert first.encoder.steps + second.encoder.steps == ALL_STEPS
    assert torch.allclose(loops.weights(second), plain[0], rtol=1e-9)


@pytest.mark.parametrize("with_own_loader", [True, False], ids=["own loader", "data collator"])
def test_the_trainer_of_hugging_face_trains_on_views(
    home: str, plain: tuple[Tensor, list[float]], tmp_path: Path, with_own_loader: bool
) -> None:
    from transformers import Trainer, TrainingArguments

    made = loops.views(home)

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(made, batch_size=None)

    model = loops.Encoder(made.n_views)
    arguments = TrainingArguments(
        str(tmp_path),
        num_train_epochs=loops.EPOCHS,
        per_device_train_batch_size=1,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=loops.RATE)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    options: dict[str, Any]
    kind, options = (Own, {}) if with_own_loader else (Trainer, {"data_collator": lambda batches: batches[0]})
    trainer = kind(model, arguments, train_dataset=made, optimizers=(optimizer, constant), **options)
    trainer.train()
    assert model.steps == ALL_STEPS
    assert torch.allclose(loops.weights(model), plain[0], rtol=1e-9)
