"""Someone's encoder and training loop, which know nothing of ours but `Views` and `LejepaLoss`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import goodviews as gv
from trainer.run.dataset import Batch, Views

BATCH, STEPS, EPOCHS = 8, 4, 3
SETTINGS: dict[str, Any] = {"tokenizer.vocab_size": 512, "plan.window": 8}
RATE = 0.05


def views(home: str, **options: Any) -> Views:
    """Views of the toy world under settings that make four steps an epoch."""
    settings = {**SETTINGS, **options.pop("settings", {})}
    return gv.Views(home, "toyworld", recipe="tiny-cpu", batch_global=BATCH, seed=3, settings=settings, **options)


class Encoder(nn.Module):
    """Means of token embeddings, then a layer, and the LeJEPA loss of the views of a batch."""

    def __init__(self, n_views: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.n_views = n_views
        self.embedding = nn.Embedding(512, 16)
        self.layer = nn.Linear(16, 8)
        self.double()
        self.objective = gv.LejepaLoss(weight=2.0, n_global=2, n_directions=32)
        self.steps: list[int] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, step: int, **rest: Any) -> dict[str, Tensor]:
        """The loss of one batch, under the name that Hugging Face's Trainer looks for."""
        self.steps.append(int(step))
        mask = attention_mask[..., None].to(torch.float64)
        pooled = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        projected = self.layer(pooled)
        return {"loss": self.objective(projected.view(self.n_views, -1, projected.shape[-1]), step=int(step)).loss}


def train(model: nn.Module, loader: Iterable[Batch], epochs: int = EPOCHS) -> list[float]:
    """Plain gradient descent; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def weights(model: nn.Module) -> Tensor:
    """All parameters in one row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rank_main(home: str, folder: str, rank: int, world: int, workers: int) -> None:
    """One rank of a plain loop under DistributedDataParallel; keeps what it learned."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    made = views(home)
    model = Encoder(made.n_views)
    losses = train(DistributedDataParallel(model), DataLoader(made, batch_size=None, num_workers=workers))
    torch.save({"weights": weights(model), "losses": losses, "steps": model.steps}, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    rank_main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
