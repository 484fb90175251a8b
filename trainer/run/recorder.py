"""What every step consumed, gathered on each rank and made global in one collective a flush.

Owns: the rolling hashes, the totals, the rows of the ledger. Does not own: where rows are kept (`trainer.run.records`).
Invariant: every rank holds the same totals and hashes after a flush, whatever the number of ranks was; the digest of a
step is computed from what a rank was really given, not from the plan.

One collective a step would cost a GPU a synchronisation each time, so steps wait here and are summed together.
Legend: b samples of this rank at one step, K steps since the last flush.
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
    """What all ranks together have consumed after `step` steps; the hashes are those of the ledger."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    scenes_hash: int = 0
    views_hash: int = 0

    @classmethod
    def of(cls, state: State | None) -> Totals:
        """Those of a checkpoint; of a start for None."""
        if state is None:
            return cls()
        scenes_hash, views_hash = int(state.scenes_hash, 16), int(state.views_hash, 16)
        return cls(
            step=state.step, samples=state.samples, tokens=state.tokens, scenes_hash=scenes_hash, views_hash=views_hash
        )


class Recorder:
    """Rows of the ledger in the making. device: where collectives of the process group take their tensors."""

    def __init__(self, totals: Totals, device: torch.device) -> None:
        self.totals = totals
        self._device = device
        self._ready: list[dict[str, object]] = []
        self._epochs: list[int] = []
        self._counts: list[list[int]] = []
        self._losses: list[torch.Tensor] = []

    def add(self, epoch: int, digests: tuple[int, int], tokens: int, samples: int, loss: torch.Tensor) -> None:
        """One more step of this rank: digests of its scenes and views, captions' tokens read, its loss (0-dim)."""
        self._epochs.append(epoch)
        # Sums of 64-bit integers wrap around in collectives as they do here.
        self._counts.append([_signed(digests[0]), _signed(digests[1]), samples, tokens])
        self._losses.append(loss.detach())

    def flush(self) -> pa.Table:
        """Rows of `runs.LEDGER` for the steps since the last flush. Every rank must call it at the same step."""
        self.gather()
        rows, self._ready = self._ready, []
        return pa.Table.from_pylist(rows, schema=records.LEDGER)

    def gather(self) -> None:
        """Bring `totals` up to date without handing rows out. Every rank must call it at the same step."""
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
        after = self.totals
        hashes = {"scenes_hash": after.scenes_hash, "views_hash": after.views_hash}
        return {
            "step": before.step,
            "epoch": epoch,
            **hashes,
            "samples": after.samples,
            "tokens": after.tokens,
            "loss": loss,
        }


def digests_of(scenes: NDArray[np.uint64], rows: NDArray[np.uint64], first: int, batch_global: int) -> tuple[int, int]:
    """Digests of the scenes and of the views of one rank's part of a global batch.

    scenes (b,): hashes of the scene keys. rows (V * b,): `runs.row_hashes` of the views, view by view. first: place of
    the rank's first sample in the global batch.
    """
    b = len(scenes)
    places = np.arange(first, first + b)
    views = np.arange(len(rows)) // max(b, 1)
    return (
        records.batch_digest(scenes, places),
        records.batch_digest(rows, views * batch_global + np.tile(places, len(rows) // max(b, 1))),
    )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
