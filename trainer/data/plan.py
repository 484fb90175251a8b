"""Which scene is in which global batch: arithmetic on the counts of the manifests, before any process group exists.

Invariants: the order depends on (dataset version, seed, epoch, global batch, lanes, window) and nothing else, so any
number of ranks and workers sees the same global batches; every rank takes the same number of steps; each scene is drawn
once an epoch but for the remainder `drops_per_epoch`. Nothing is kept while training: a step number and the digest are
the cursor.

One epoch: the shards, permuted, are written one after another around a circle, which is cut at a drawn place and laid
out into L equal lanes (so the remainder, at the end, differs from epoch to epoch even with one shard). Each lane is cut
into windows, shuffled within themselves. Step s takes the next batch/L scenes of each lane, lane after lane. A rank
owns a stripe of neighbouring lanes: its batch is one piece of the global batch, and it reads each shard of its lanes in
sequence. Legend: S shards, N scenes of an epoch, L lanes, K steps of a window, B scenes of one lane at one step.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import orjson
from numpy.typing import NDArray

from infra import config as configuration
from infra import seeds
from infra.errors import ConfigError, ConflictError
from infra.home import Home
from trainer.data.shardset import ShardSet, count_selected, read_excluded, role_mask

FORMAT: Final = "goodviews-plan-1"
MAX_LANES: Final = 64
"Of the default: 64 places of the data in one batch, and 64 ranks, at the price of 64 open shards on one rank."

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What decides the sequence of samples besides the dataset; exactly one of `epochs` and `samples` is set."""

    seed: int = 0
    batch_global: int = 256
    "Scenes of one step, over all ranks."
    lanes: int | None = None
    "Places of the data that are read side by side; ranks must divide it. None: the largest power of 2 <= 64 that fits."
    window: int = 4_096
    "Scenes of one lane that are shuffled together; rounded up to whole steps."
    epochs: int | None = None
    samples: int | None = None
    "Scenes to see in all, rounded down to whole steps, instead of epochs."
    good_fraction: float = 1.0
    "Share of samples whose views draw from the whole scene: 1 good views, 0 bad views."
    roles: tuple[str, ...] = ()
    "Captions of these roles only; scenes without one are left out. Empty: all roles."
    exclude: str | None = None
    "File with one scene key a line that is never trained on."

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ConfigError(f"plan.seed is {self.seed}; use 0 or more.")
        if self.batch_global < 1 or self.window < 1:
            raise ConfigError(
                f"plan.batch_global is {self.batch_global} and plan.window {self.window}; both are numbers of scenes, 1"
                " or more."
            )
        if self.lanes is not None and (self.lanes < 1 or self.batch_global % self.lanes):
            raise ConfigError(
                f"plan.lanes is {self.lanes}, which does not divide plan.batch_global = {self.batch_global}: each lane"
                " gives the same number of scenes to a step. Change one of them."
            )
        if (self.epochs is None) == (self.samples is None):
            raise ConfigError(
                f"plan.epochs is {self.epochs} and plan.samples {self.samples}; set exactly one of them, it is the"
                " length of the run."
            )
        if (self.epochs is not None and self.epochs < 1) or (self.samples is not None and self.samples < 1):
            raise ConfigError("plan.epochs and plan.samples are counts of 1 or more.")
        if not 0.0 <= self.good_fraction <= 1.0:
            raise ConfigError(
                f"plan.good_fraction is {self.good_fraction}; it is a share from 0 (bad views) to 1 (good views)."
            )
        role_mask(self.roles)

    @property
    def lane_count(self) -> int:
        """`lanes`, or its default."""
        return self.lanes if self.lanes is not None else math.gcd(self.batch_global, MAX_LANES)


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where a run stands: `step` steps are done. Valid for every number of ranks under the plan of that digest."""

    step: int
    plan_digest: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The whole sequence of global batches. Made by `make_plan`; picklable, a few bytes a shard."""

    config: PlanConfig
    shards: ShardSet
    scenes: I64
    "(S,) scenes of each shard that the selection keeps"
    excluded: U64
    "Sorted hashes of scene keys that are left out."

    @property
    def scenes_per_epoch(self) -> int:
        """N, the remainder included."""
        return int(self.scenes.sum())

    @property
    def steps_per_epoch(self) -> int:
        """Of every rank."""
        return self.scenes_per_epoch // self.config.batch_global

    @property
    def drops_per_epoch(self) -> int:
        """Scenes of an epoch that no step takes, because they do not fill a batch; others in each epoch."""
        return self.scenes_per_epoch - self.steps_per_epoch * self.config.batch_global

    @property
    def total_steps(self) -> int:
        """Length of the run: exact, for every rank and any number of workers."""
        if self.config.samples is not None:
            return self.config.samples // self.config.batch_global
        return self.steps_per_epoch * (self.config.epochs or 0)

    @property
    def per_lane(self) -> int:
        """B, scenes of one lane at one step."""
        return self.config.batch_global // self.config.lane_count

    @property
    def steps_per_window(self) -> int:
        """K."""
        return -(-self.config.window // self.per_lane)

    @functools.cached_property
    def digest(self) -> str:
        """16 hex digits that name the sequence of samples and the captions that each may draw from, not its length."""
        config = configuration.to_dict(self.config)
        for name in ("epochs", "samples", "exclude", "lanes", "window"):
            del config[name]
        record = {
            "format": FORMAT,
            "shards": self.shards.facts(),
            "config": {**config, "roles": sorted(set(config["roles"]))},
            "lanes": self.config.lane_count,
            "steps_per_window": self.steps_per_window,
            "scenes": hashlib.sha256(self.scenes.astype("<i8").tobytes()).hexdigest(),
            "excluded": hashlib.sha256(self.excluded.astype("<u8").tobytes()).hexdigest(),
        }
        return hashlib.sha256(orjson.dumps(record, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within it) of a global step."""
        return divmod(step, self.steps_per_epoch)

    def cursor(self, step: int) -> Cursor:
        """The cursor after `step` steps."""
        return Cursor(step=step, plan_digest=self.digest)

    def resume(self, cursor: Cursor) -> int:
        """The step to go on with. Raises ConflictError for the cursor of another plan: its steps mean other scenes."""
        if cursor.plan_digest != self.digest:
            raise ConflictError(
                f"The checkpoint was written under plan {cursor.plan_digest}, this run has plan {self.digest}: dataset"
                " version, split, seed, batch, lanes, window, roles, exclusions or good fraction differ, so step"
                f" {cursor.step:,} means other samples. Resume with the config of that run, or start a new one."
                " (Another number of ranks or workers is fine.)"
            )
        if cursor.step < 0:
            raise ConflictError(
                f"The checkpoint stands at step {cursor.step}, which no run reaches. It was changed by hand."
            )
        return cursor.step

    def stripe(self, rank: int, world: int) -> tuple[int, int]:
        """Lanes [first, last) of a rank. Raises ConfigError when `world` ranks cannot share the lanes evenly."""
        lanes = self.config.lane_count
        if world < 1 or lanes % world:
            fitting = [w for w in range(1, lanes + 1) if lanes % w == 0]
            raise ConfigError(
                f"{world} ranks do not divide the {lanes} lanes of the plan, so their batches would differ in size. Use"
                f" {', '.join(map(str, fitting))} ranks, or set plan.lanes to a multiple of {world} that divides"
                " plan.batch_global."
            )
        if not 0 <= rank < world:
            raise ConfigError(f"There is no rank {rank} among {world}.")
        share = lanes // world
        return rank * share, (rank + 1) * share

    def order(self, epoch: int) -> EpochOrder:
        """The order of one epoch."""
        return EpochOrder(self, epoch)


def make_plan(config: PlanConfig, shards: ShardSet, home: Home) -> Plan:
    """Compute the plan. Raises ConfigError when an epoch is shorter than one batch."""
    if shards.kind == "bad" and (config.good_fraction > 0 or config.roles):
        raise ConfigError(
            f"plan.good_fraction is {config.good_fraction} and plan.roles {list(config.roles)}, but bad tars show one"
            " caption of a scene, of any role. Read the good tars: they give bad views too."
        )
    excluded = read_excluded(config.exclude)
    scenes = count_selected(shards, home, roles=config.roles, excluded=excluded)
    plan = Plan(config=config, shards=shards, scenes=scenes, excluded=excluded)
    if plan.steps_per_epoch == 0:
        raise ConfigError(
            f"plan.batch_global is {config.batch_global:,}, but split {shards.split!r} of {shards.name} has"
            f" {plan.scenes_per_epoch:,} scenes to train on, so an epoch has no step. Lower the batch, or add data."
        )
    if plan.total_steps == 0:
        raise ConfigError(
            f"plan.samples is {config.samples:,}, less than one batch of {config.batch_global:,}. Raise it."
        )
    return plan


class EpochOrder:
    """The order of one epoch; costs a sort of the shards to make."""

    def __init__(self, plan: Plan, epoch: int) -> None:
        self._plan = plan
        self._lane_scenes = plan.steps_per_epoch * plan.per_lane
        draws = seeds.mix(plan.shards.numbers.astype(np.uint64) ^ self._salt("shards", epoch))
        self._ordinals = np.argsort(draws, kind="stable")
        self._edges = np.concatenate([[0], np.cumsum(plan.scenes[self._ordinals])])
        self._cut = int(self._salt("cut", epoch)) % plan.scenes_per_epoch
        self._window_salt = self._salt("window", epoch)

    def _salt(self, stage: str, epoch: int) -> np.uint64:
        return np.uint64(seeds.derive(self._plan.config.seed, f"plan/{stage}", epoch))

    def window(self, window: int, lanes: tuple[int, int]) -> tuple[I64, I64]:
        """Addresses of one window for lanes [first, last).

        Returns (ordinals, rows), each (steps, scenes of the lanes at a step): the shard's place in `Plan.shards`, and
        the scene's place among those of the shard that the selection keeps.
        """
        plan = self._plan
        first, last = window * plan.steps_per_window, min((window + 1) * plan.steps_per_window, plan.steps_per_epoch)
        size = (last - first) * plan.per_lane
        # Places (lanes, size) in the concatenation of all lanes; a permutation of each row is the shuffle.
        starts = np.arange(*lanes, dtype=np.int64) * self._lane_scenes + first * plan.per_lane
        places = starts[:, None] + np.arange(size, dtype=np.int64)
        draws = seeds.mix(seeds.mix(places.astype(np.uint64)) ^ self._window_salt)
        shuffled = np.take_along_axis(places, np.argsort(draws, axis=1, kind="stable"), axis=1)
        by_step = shuffled.reshape(len(starts), last - first, plan.per_lane).transpose(1, 0, 2)
        return self._addresses(by_step.reshape(last - first, -1))

    def _addresses(self, places: I64) -> tuple[I64, I64]:
        on_circle = (places + self._cut) % self._plan.scenes_per_epoch
        at = np.searchsorted(self._edges, on_circle, side="right") - 1
        return self._ordinals[at], on_circle - self._edges[at]

    def shards_ahead(self, lanes: tuple[int, int]) -> list[tuple[int, int, int]]:
        """(first step, last step, ordinal) of each shard of lanes [first, last), by first step.

        Steps within the epoch whose window may need the shard; one that several lanes read stands once, with the range
        that covers them.
        """
        plan = self._plan
        circle = np.concatenate([self._edges[:-1], self._edges[:-1] + plan.scenes_per_epoch])
        needed: dict[int, tuple[int, int]] = {}
        for lane in range(*lanes):
            start = lane * self._lane_scenes
            # Where in the lane each of its shards begins: at its own start, then at every edge of a shard within it.
            at = (start + self._cut) % plan.scenes_per_epoch
            inside = circle[
                np.searchsorted(circle, at, "right") : np.searchsorted(circle, at + self._lane_scenes, "left")
            ]
            begins = np.unique(np.concatenate([[0], inside - at]))
            ends = np.append(begins[1:], self._lane_scenes) - 1
            ordinals, _ = self._addresses(start + begins)
            windows = np.stack([begins, ends]) // (plan.steps_per_window * plan.per_lane)
            firsts = windows[0] * plan.steps_per_window
            lasts = np.minimum((windows[1] + 1) * plan.steps_per_window, plan.steps_per_epoch) - 1
            for ordinal, first, last in zip(ordinals.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
                known = needed.get(ordinal, (first, last))
                needed[ordinal] = min(first, known[0]), max(last, known[1])
        return sorted((first, last, ordinal) for ordinal, (first, last) in needed.items())
