"""The stream of a training as a torch dataset, for other training loops.

Invariant: the batches are those of `trainer.data.stream` under the same recipe, step by step and byte by byte, for any
number of ranks and of worker processes of a DataLoader, and from whichever step a state was loaded.

How worker processes share the work: worker w of W makes the steps start + w, start + w + W, ... of a pass. A DataLoader
asks its workers in turn, so the steps arrive in order and once. One pass is one epoch. Shared memory keeps where the
next pass begins, one number a worker, because a DataLoader starts new workers for each pass from the dataset of the
main process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from infra import config as configuration
from infra.errors import ConfigError, ConflictError, UsageError
from infra.home import Home, resolve
from trainer.data.cache import TokenCache
from trainer.data.plan import MAX_LANES, Cursor, Plan
from trainer.data.stream import StepBatch, Stream
from trainer.data.tokenizer import TextTokenizer
from trainer.model import distributed
from trainer.run import recipe as recipes
from trainer.run.assembly import Materials, assemble

MOST_WORKERS: Final = 256
ENDLESS: Final = 1 << 30
"Epochs of the plan: how long a training is, the loop around this dataset decides."


class Batch(TypedDict):
    """What one rank is given at one step: V views of b samples, view-major: row v * b + i is view v of sample i."""

    input_ids: Tensor
    "(V b, length of the longest) int64, padded with the tokenizer's pad"
    attention_mask: Tensor
    "(V b, length) int64, 1 for a token and 0 for padding"
    is_good: Tensor
    "(b,) whether the views of a sample draw from all captions of its scene"
    places: Tensor
    "(b,) places of the samples in the global batch"
    step: int
    "Global, from 0, over all passes."
    epoch: int


class Views(IterableDataset[Batch]):
    """Good and bad views of the captions of a dataset, batch by batch, as a torch `IterableDataset`.

    Give it to a DataLoader with `batch_size=None`: it yields whole batches (`input_ids` and `attention_mask` of V b
    rows, view-major, `is_good`, `places`, `step`, `epoch`). One pass is one epoch; the next pass is the next epoch.
    Threads of this process prepare batches ahead, so worker processes are seldom worth their copies: 1.3 million
    views/s without, half a million with two (20,000 toy scenes, 2 cores).

    home: folder or URL. dataset: `name` for the current version, or `name@version`. recipe: gives views, batch and plan
    (flickr-33m: 2 global and 6 local views, batches of 256). arm: good, bad, next-token, caption-pair. good_fraction:
    share of good samples. tokenizer: `corpus`, a folder, or a Hugging Face name. batch_global: samples of a step over
    all ranks. settings: any other key of the recipe, such as {"views.max_tokens": 32, "plan.roles": ["human"]}.
    rank, world: None asks torch.distributed when a pass begins. Each rank gets its own batches, so on several ranks
    override `get_train_dataloader` of Hugging Face's Trainer: accelerate would divide them once more.

    `state_dict` and `load_state_dict` follow torchdata's StatefulDataLoader, which may be stopped and resumed anywhere.
    Under a plain DataLoader with worker processes, save `views.state_dict(batch["step"] + 1)`.
    Raises InputError for data that is not there, ConfigError for settings, ConflictError for the state of another plan.

    >>> import goodviews as gv
    >>> from torch.utils.data import DataLoader
    >>> views = gv.Views(home, "toyworld", arm="good", batch_global=8, settings={"tokenizer.vocab_size": 512})
    >>> batches = list(DataLoader(views, batch_size=None))
    >>> len(views), [batch["step"] for batch in batches], batches[0]["input_ids"].shape[0]
    (4, [0, 1, 2, 3], 64)
    """

    def __init__(
        self,
        home: str | Home | None,
        dataset: str,
        split: str = "train",
        *,
        recipe: str = "flickr-33m",
        arm: str = "good",
        good_fraction: float | None = None,
        tokenizer: str = "corpus",
        batch_global: int | None = None,
        seed: int = 0,
        settings: configuration.Settings | None = None,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        super().__init__()
        if (rank is None) != (world is None):
            raise UsageError(f"rank is {rank} and world {world}. Give both, or neither to ask torch.distributed.")
        title, _, version = dataset.partition("@")
        lanes = None if batch_global is None else math.gcd(batch_global, MAX_LANES)
        own: configuration.Settings = {
            "data.dataset": title,
            "data.version": version or None,
            "data.split": split,
            "plan.good_fraction": good_fraction,
            "plan.batch_global": batch_global,
            "plan.lanes": lanes,
            "plan.seed": seed,
            "tokenizer.source": tokenizer,
        }
        chosen = recipes.load(recipe, arm=arm, sets=[*configuration.to_sets(own), *configuration.to_sets(settings)])
        endless = dataclasses.replace(chosen.plan, epochs=ENDLESS, samples=None)
        self._home = home if isinstance(home, Home) else resolve(home)
        self._materials: Materials = assemble(dataclasses.replace(chosen, plan=endless), self._home)
        self._place = None if rank is None or world is None else (rank, world)
        # Step at which the next pass of each worker begins; the last number is set when workers were used.
        self._shared = torch.zeros(MOST_WORKERS + 1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._made = 0
        self._workers = 1
        self._position: tuple[int, int] | None = None

    @property
    def plan(self) -> Plan:
        """The order of samples: `steps_per_epoch`, `scenes_per_epoch`, `digest`."""
        return self._materials.plan

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer: `vocab_size`, `special` with the ids of its special tokens, `save` for its folder."""
        return self._materials.tokenizer

    @property
    def n_views(self) -> int:
        """Views of a sample, V; the global ones come first."""
        return self._materials.recipe.views.n_views

    def __len__(self) -> int:
        """Batches of one pass, the same on every rank."""
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        # Nothing moves before the first batch: a StatefulDataLoader makes iterators that it never asks.
        self._position = None
        return self._one_pass()

    def _one_pass(self) -> Iterator[Batch]:
        worker, workers = _worker()
        if self._made and self._workers != workers:
            raise ConflictError(
                f"This state is of one of {self._workers} worker processes, and there are {workers} now. Use as "
                "many, or save `state_dict(step)`, which any number of workers can resume from."
            )
        start, made, self._made, self._workers = int(self._shared[worker]), self._made, 0, workers
        stop = (start // len(self) + 1) * len(self)
        self._shared[worker] = stop
        self._shared[-1] = workers if get_worker_info() is not None else 0
        for batch in self._steps(start + worker + made * workers, stop, workers):
            made += 1
            self._position = (start, made)
            yield self._tensors(batch)
        self._position = None

    def _steps(self, first: int, stop: int, stride: int) -> Iterator[StepBatch]:
        rank, world = self._ranks()
        # Made anew in each process: a lock that was held when a process forked would never be free.
        materials = self._materials
        cache = TokenCache(materials.shards, materials.tokenizer, self._home)
        threads = 0 if get_worker_info() is not None else materials.recipe.run.loader_workers
        stream = Stream(self.plan, cache, materials.recipe.views, rank=rank, world=world, workers=threads)
        if get_worker_info() is not None:
            yield from map(stream.batch, range(first, stop, stride))
            return
        with contextlib.closing(stream.batches(min(first, stop), stop)) as batches:
            yield from batches

    def _ranks(self) -> tuple[int, int]:
        return self._place or (distributed.rank(), distributed.world_size())

    def _tensors(self, batch: StepBatch) -> Batch:
        lengths_N = batch.views.lengths
        is_token_NL = np.arange(int(lengths_N.max()))[None, :] < lengths_N[:, None]
        ids_NL = np.full(is_token_NL.shape, self.tokenizer.special.pad, np.int64)
        ids_NL[is_token_NL] = batch.views.tokens
        return {
            "input_ids": torch.from_numpy(ids_NL),
            "attention_mask": torch.from_numpy(is_token_NL.astype(np.int64)),
            "is_good": torch.from_numpy(batch.is_good),
            "places": torch.from_numpy(batch.places),
            "step": batch.step,
            "epoch": batch.epoch,
        }

    # --- stopping and going on ---

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """State of the stream. step: steps that were done; None: as counted in this process.

        Raises UsageError in the main process when worker processes make the batches: it cannot know how far they are.
        """
        state = {"plan": self.plan.digest, "step": step, "made": 0, "workers": 1}
        if step is not None:
            return state
        worker, workers = _worker()
        if get_worker_info() is None and int(self._shared[-1]):
            raise UsageError(
                "Worker processes of a DataLoader make the batches, so this process cannot tell how far they are. Save"
                ' `views.state_dict(batch["step"] + 1)`, or use torchdata.stateful_dataloader.StatefulDataLoader.'
            )
        start, made = self._position or (int(self._shared[worker]), self._made)
        if workers == 1:
            return {**state, "step": start + made}
        return {**state, "step": start, "made": made, "workers": workers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state at the next pass. Raises ConflictError for the state of another plan."""
        step = self.plan.resume(Cursor(step=int(state_dict["step"]), plan_digest=str(state_dict["plan"])))
        worker, _ = _worker()
        slots = slice(0, MOST_WORKERS) if get_worker_info() is None else slice(worker, worker + 1)
        self._shared[slots] = step
        self._made, self._workers = int(state_dict["made"]), int(state_dict["workers"])
        if get_worker_info() is None:
            self._shared[-1] = 0
        self._position = None

    def __getstate__(self) -> dict[str, Any]:
        # For workers that are spawned: they read the files themselves, and belong to no process group.
        state = {name: value for name, value in self.__dict__.items() if name != "_materials"}
        return {**state, "_place": self._ranks(), "_recipe": self._materials.recipe}

    def __setstate__(self, state: dict[str, Any]) -> None:
        chosen = state.pop("_recipe")
        self.__dict__.update(state)
        self._materials = assemble(chosen, self._home)


def _worker() -> tuple[int, int]:
    """Number of this worker process of a DataLoader, and how many there are; (0, 1) in the main process."""
    info = get_worker_info()
    if info is None:
        return 0, 1
    if info.num_workers > MOST_WORKERS:
        raise ConfigError(f"The DataLoader has {info.num_workers} workers; Views shares out to {MOST_WORKERS} at most.")
    return info.id, info.num_workers
