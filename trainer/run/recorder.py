"""Ledger rows of a training: what each step consumed on all ranks, summed in one collective for many steps.

Invariant: every rank holds the same totals and hashes after a flush, for any number of ranks. The digest of a step is
computed from the batch that a rank received, not from the plan.

A collective at each step would make a GPU wait each time, so steps are kept here and summed together.
Legend: b samples of this rank at one step, K steps since the last flush, V views of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from trainer.model import distributed
from trainer.run import records
from trainer.run.checkpoint import State


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What all ranks have consumed after `step` steps, with the hashes of the ledger."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    scenes_hash: int = 0
    views_hash: int = 0

    @classmethod
    def of(cls, state: State | None) -> Totals:
        """The totals of a checkpoint; zeros for None, a start."""
        if state is None:
            return cls()
        return cls(
            step=state.step,
            samples=state.samples,
            tokens=state.tokens,
            scenes_hash=int(state.scenes_hash, 16),
            views_hash=int(state.views_hash, 16),
        )


class Recorder:
    """Collects rows of the ledger. device: where the collectives of the process group take tensors from."""

    def __init__(self, totals: Totals, device: torch.device) -> None:
        self.totals = totals
        self._device = device
        self._ready: list[dict[str, object]] = []
        self._epochs: list[int] = []
        self._counts: list[list[int]] = []
        self._losses: list[torch.Tensor] = []

    def add(self, epoch: int, digests: tuple[int, int], tokens: int, samples: int, loss: torch.Tensor) -> None:
        """Add a step of this rank: digests of its scenes and views, caption tokens read, samples, loss (0-dim)."""
        self._epochs.append(epoch)
        # Collectives know no uint64: the digests travel as int64, whose sums wrap around to the same bits. The loss
        # stays on the device until the next gather.
        self._counts.append([_signed(digests[0]), _signed(digests[1]), samples, tokens])
        self._losses.append(loss.detach())

    def flush(self) -> pa.Table:
        """Rows of `records.LEDGER` since the last flush. A collective: every rank calls it at the same step."""
        self.gather()
        rows, self._ready = self._ready, []
        return pa.Table.from_pylist(rows, schema=records.LEDGER)

    def gather(self) -> None:
        """Bring `totals` up to date and keep the rows. A collective: every rank calls it at the same step."""
        if not self._epochs:
            return
        counts = torch.tensor(self._counts, dtype=torch.int64, device=self._device)
        counts_K4 = distributed.all_reduce_sum(counts).cpu().numpy()
        losses = torch.stack(self._losses).to(self._device, torch.float64)
        losses_K = (distributed.all_reduce_sum(losses) / distributed.world_size()).cpu().numpy()
        self._ready += [self._row(epoch, counts_K4[k], float(losses_K[k])) for k, epoch in enumerate(self._epochs)]
        self._epochs, self._counts, self._losses = [], [], []

    def _row(self, epoch: int, counts: NDArray[np.int64], loss: float) -> dict[str, object]:
        before = self.totals
        scenes, views = (int(value) & records.MASK for value in counts[:2])
        self.totals = Totals(
            step=before.step + 1,
            samples=before.samples + int(counts[2]),
            tokens=before.tokens + int(counts[3]),
            scenes_hash=records.roll(before.scenes_hash, scenes),
            views_hash=records.roll(before.views_hash, views),
        )
        return {**vars(self.totals), "step": before.step, "epoch": epoch, "loss": loss}


def digests_of(scenes: NDArray[np.uint64], rows: NDArray[np.uint64], first: int, batch_global: int) -> tuple[int, int]:
    """Digests of the scenes and of the views of one rank's part of a global batch.

    scenes (b,): hashes of the scene keys. rows (V * b,): `records.row_hashes` of the views, view by view. first:
    position of the rank's first sample in the global batch.
    """
    b = len(scenes)
    places = np.arange(first, first + b)
    views = np.arange(len(rows)) // max(b, 1)
    return (
        records.batch_digest(scenes, places),
        records.batch_digest(rows, views * batch_global + np.tile(places, len(rows) // max(b, 1))),
    )


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return value - (1 << 64) if value >= 1 << 63 else value
