"""From a plan and a token cache to the batches of one rank, step by step.

Invariant: the batch of a step is a pure function of (plan, step, rank, world), so the sequence is the same with any
number of workers, and starting at step s gives what the uninterrupted stream gives from s on.

Workers are threads, not processes: tokenising, JSON and NumPy's loops release the interpreter lock, and a core makes
some hundred thousand views/s where a GPU eats ten thousand. So there is no shared memory, no socket and no child that a
SIGKILL could leave behind (mosaicml/streaming#717, #767). Legend: b samples of this rank at one step, B of all ranks.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from infra.errors import ConfigError, IntegrityError
from trainer.data.cache import TokenCache
from trainer.data.captions import I64, U64, Captions
from trainer.data.plan import EpochOrder, Plan
from trainer.data.ragged import Ragged
from trainer.data.shardset import role_mask
from trainer.data.views import Draws, ViewsConfig, good_samples, make_views

STEPS_AHEAD: Final = 2
"Batches that each worker may have made before they are asked for."


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """What one rank is given at one step."""

    step: int
    "Global, 0-based."
    epoch: int
    scene_hashes: U64
    "(b,) hashes of the scene keys, lane after lane"
    places: I64
    "(b,) places in the global batch, so that a ledger can be added up over ranks"
    is_good: NDArray[np.bool_]
    "(b,) whether the views draw from the whole scene"
    views: Ragged
    "V * b sequences, view-major: row v * b + i is view v of sample i; the global views first"
    tokens_read: int
    "Caption tokens of the groups that were drawn from."


class Stream:
    """The batches of one rank. `workers`: threads that work ahead; 0 makes each batch when it is asked for."""

    def __init__(
        self, plan: Plan, cache: TokenCache, views: ViewsConfig, *, rank: int = 0, world: int = 1, workers: int = 0
    ) -> None:
        if workers < 0:
            raise ConfigError(f"stream.workers is {workers}; use 0 (no thread) or more.")
        if cache.shards.facts() != plan.shards.facts():
            raise ConfigError(
                f"The token cache is of {cache.shards.name} {cache.shards.split}, the plan of {plan.shards.name}"
                f" {plan.shards.split}. Make both from the same shards."
            )
        self.plan = plan
        self._cache = cache
        self._views = views
        self._lanes = plan.stripe(rank, world)
        self._workers = workers
        self._roles = role_mask(plan.config.roles)
        self._selects = bool(len(plan.excluded)) or not self._roles.all()
        self._lock = threading.Lock()
        scenes_per_shard = max(1, plan.scenes_per_epoch // len(plan.scenes))
        per_lane = plan.steps_per_window * plan.per_lane // scenes_per_shard + 2
        cache.reserve(2 * per_lane * (self._lanes[1] - self._lanes[0]))
        # Two neighbouring windows (or epochs) are in use at once when workers are ahead.
        self._order = functools.lru_cache(maxsize=2)(plan.order)
        self._window = functools.lru_cache(maxsize=4)(self._window_of)
        self._rows = functools.lru_cache(maxsize=1_024)(self._rows_of)

    def __len__(self) -> int:
        """Steps of the whole run, the same on every rank."""
        return self.plan.total_steps

    def batches(self, start: int = 0, stop: int | None = None) -> Generator[StepBatch]:
        """Batches of the steps [start, stop), by default to the end of the run; may begin at any step, in any epoch.

        Close it (`contextlib.closing`) to end the workers before the last batch.

        Raises ConfigError for steps that the run does not have.
        """
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise ConfigError(
                f"Steps {start:,} to {stop:,} are asked of a run of {len(self):,} steps. Raise plan.epochs or"
                " plan.samples to go on."
            )
        return self._ahead(start, stop) if self._workers else (self.batch(step) for step in range(start, stop))

    def batch(self, step: int) -> StepBatch:
        """The batch of one step."""
        epoch, _ = self.plan.locate(step)
        captions = self._captions(step, self._lanes)
        draws = self.draws(epoch)
        views, tokens_read = make_views(captions, draws, self._views, self._cache.tokenizer.special)
        first = self._lanes[0] * self.plan.per_lane
        return StepBatch(
            step=step,
            epoch=epoch,
            scene_hashes=captions.scene_hashes,
            places=np.arange(first, first + len(captions), dtype=np.int64),
            is_good=good_samples(captions.scene_hashes, draws),
            views=views,
            tokens_read=tokens_read,
        )

    def draws(self, epoch: int) -> Draws:
        """What the views of an epoch are drawn with."""
        return Draws(
            seed=self.plan.config.seed,
            epoch=epoch,
            good_fraction=self.plan.config.good_fraction,
            caption_seed=self.plan.shards.caption_seed,
            bad_passes=self.plan.shards.bad_passes,
        )

    def global_scene_hashes(self, step: int) -> U64:
        """(B,) hashes of the scene keys of all ranks, in order: what the ledger of this step must add up to."""
        return self._captions(step, (0, self.plan.config.lane_count)).scene_hashes

    # --- one step ---

    def _captions(self, step: int, lanes: tuple[int, int]) -> Captions:
        """The scenes of a step, in the order of the plan, with the captions they may draw from."""
        epoch, at = self.plan.locate(step)
        with self._lock:  # lru_cache would let two threads compute the same window
            window, row = divmod(at, self.plan.steps_per_window)
            ordinals, rows = self._window(epoch, window, lanes)
        captions = self._gather(self._pass(epoch), ordinals[row], rows[row])
        return captions if self._roles.all() else captions.where(self._roles[captions.roles])

    def _gather(self, bad_pass: int | None, ordinals: I64, rows: I64) -> Captions:
        order = np.argsort(ordinals, kind="stable")
        ordinals, rows = ordinals[order], rows[order]
        cuts = np.flatnonzero(np.diff(ordinals)) + 1
        parts = [
            self._shard(bad_pass, int(ordinals[a])).take(self._selected(bad_pass, int(ordinals[a]), rows[a:b]))
            for a, b in zip([0, *cuts.tolist()], [*cuts.tolist(), len(ordinals)], strict=True)
        ]
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return Captions.concatenate(parts).take(back)

    def _shard(self, bad_pass: int | None, ordinal: int) -> Captions:
        return self._cache.open(ordinal, bad_pass).captions

    def _selected(self, bad_pass: int | None, ordinal: int, rows: I64) -> I64:
        """Rows of the shard for rows among those that the selection keeps."""
        return self._rows(bad_pass, ordinal)[rows] if self._selects else rows

    def _rows_of(self, bad_pass: int | None, ordinal: int) -> I64:
        captions = self._shard(bad_pass, ordinal)
        has_role = np.add.reduceat(self._roles[captions.roles].astype(np.int64), captions.scene_offsets[:-1]) > 0
        rows = np.flatnonzero(has_role & ~np.isin(captions.scene_hashes, self.plan.excluded))
        if len(rows) != self.plan.scenes[ordinal]:
            raise IntegrityError(
                f"Shard {self.plan.shards.numbers[ordinal]} of {self.plan.shards.name} has {len(rows):,} selected"
                f" scenes, the plan counted {self.plan.scenes[ordinal]:,} in its parquet. Tar and parquet disagree;"
                " delete the shard's manifest and rerun `goodviews ingest`."
            )
        return rows

    def _window_of(self, epoch: int, window: int, lanes: tuple[int, int]) -> tuple[I64, I64]:
        order: EpochOrder = self._order(epoch)
        return order.window(window, lanes)

    def _pass(self, epoch: int) -> int | None:
        shards = self.plan.shards
        return None if shards.kind == "good" else epoch % shards.bad_passes

    # --- working ahead ---

    def _ahead(self, start: int, stop: int) -> Generator[StepBatch]:
        """The same batches in the same order, made by threads before they are asked for."""
        steps = iter(range(start, stop))
        filler = _Filler(self._cache, self.needed(start, stop), limit=self._lanes[1] - self._lanes[0] + self._workers)
        batches = ThreadPoolExecutor(self._workers, thread_name_prefix="batch")
        shards = ThreadPoolExecutor(self._workers, thread_name_prefix="fill")
        try:
            for _ in range(self._workers):
                shards.submit(filler.run)
            pending = deque(batches.submit(self.batch, step) for step in islice(steps, self._workers * STEPS_AHEAD))
            while pending:
                batch = pending.popleft().result()
                pending.extend(batches.submit(self.batch, step) for step in islice(steps, 1))
                filler.pass_step(batch.step)
                yield batch
        finally:
            filler.end()
            for pool in (batches, shards):
                pool.shutdown(wait=True, cancel_futures=True)

    def needed(self, start: int, stop: int) -> Iterator[tuple[int, int, int | None]]:
        """(step, ordinal, bad pass) of the shards that the steps [start, stop) read, in the order of need."""
        if start == stop:
            return
        for epoch in range(self.plan.locate(start)[0], self.plan.locate(stop - 1)[0] + 1):
            with self._lock:
                order: EpochOrder = self._order(epoch)
            base = epoch * self.plan.steps_per_epoch
            for first, last, ordinal in order.shards_ahead(self._lanes):
                if base + first < stop and base + last >= start:
                    yield base + first, ordinal, self._pass(epoch)


class _Filler:
    """Opens shards before the first batch that needs them, which fills the cache in the first epoch.

    At most `limit` shards are open that no batch has asked for yet, so memory and disk are bounded however slow the
    training is.
    """

    def __init__(self, cache: TokenCache, needed: Iterator[tuple[int, int, int | None]], *, limit: int) -> None:
        self._cache = cache
        self._needed = needed
        self._limit = limit
        self._early: list[int] = []
        self._passed = -1
        self._is_over = False
        self._turn = threading.Condition()

    def pass_step(self, step: int) -> None:
        """The batch of `step` is made."""
        with self._turn:
            self._passed = step
            self._early = [first for first in self._early if first > step]
            self._turn.notify_all()

    def end(self) -> None:
        """No more shards are opened."""
        with self._turn:
            self._is_over = True
            self._turn.notify_all()

    def run(self) -> None:
        """Open shards until all are, or `end`. One of several threads."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._is_over or len(self._early) < self._limit)
                entry = None if self._is_over else next(self._needed, None)
                if entry is None:
                    return
                step, ordinal, bad_pass = entry
                if step > self._passed:
                    self._early.append(step)
            try:
                self._cache.open(ordinal, bad_pass)
            # The batch that needs this shard opens it again and raises in the caller's thread.
            except Exception:  # noqa: BLE001
                return
