"""The training loop of one rank: batch, loss, step; then logs, checkpoints, validation and exports at their steps.

Invariants: a step depends on its number and the record of the run alone, so a run that resumes from a checkpoint equals
the uninterrupted one, bit for bit on the same number of ranks and threads of a CPU. All ranks reach every collective at
the same step; rank 0 alone writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from infra import seeds, storage
from infra.errors import ConflictError, GoodviewsError
from infra.models.checkpoints import BEST, FIRST_EPOCH, LAST, UNTRAINED, folder_name
from trainer.data.plan import Cursor
from trainer.data.stream import StepBatch
from trainer.model import distributed
from trainer.model.encoder import TextEncoder, TokenBatch
from trainer.model.objectives import LejepaModel
from trainer.model.optimizer import build_optimizer, learning_rate, take_step
from trainer.run import checkpoint, evaluation, recipe, records
from trainer.run.alarms import SpeedAlarm, collapse, measure, refuse_not_finite
from trainer.run.assembly import Materials, assemble, build_model, check_record
from trainer.run.checkpoint import State
from trainer.run.export import export_encoder
from trainer.run.forecast import precision_of, train_flops
from trainer.run.heartbeat import Heartbeat
from trainer.run.recorder import Recorder, Totals, digests_of
from trainer.run.records import Job
from trainer.run.reporter import Reporter

PEAK_TFLOPS: Final = {
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10": 125.0,
    "V100": 125.0,
    "T4": 65.0,
}
"For MFU: dense bf16 (V100, T4: fp16) on tensor cores, from the data sheets."


@dataclass(frozen=True, kw_only=True)
class Place:
    """The rank of this process, the number of ranks and the device."""

    rank: int
    world: int
    device: torch.device


@dataclass
class Window:
    """Sums since the last log point."""

    terms: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    tokens: int = 0
    squares: float = 0.0
    padding: float = 0.0
    waited_s: float = 0.0
    aside_s: float = 0.0
    "Spent on validation, checkpoints and exports."
    began_s: float = field(default_factory=time.perf_counter)


def train_rank(job: Job, place: Place) -> None:
    """Train from the newest checkpoint (or the start) to the end, as one rank of `place.world`.

    Raises ConflictError when data or code no longer match the record, GoodviewsError for a loss that is not finite.
    """
    _Training(job, place).run()


class _Training:
    def __init__(self, job: Job, place: Place) -> None:
        self.job, self.place = job, place
        _check_world(place)
        recipe_ = recipe.from_config(job.record.config)
        if recipe_.run.threads is not None:
            torch.set_num_threads(recipe_.run.threads)
        self.materials: Materials = assemble(recipe_, job.home)
        self.recipe = self.materials.recipe
        check_record(self.materials, job.record)
        self.plan = self.materials.plan
        self.total = self.plan.total_steps
        # The model without DDP, so that names in checkpoints do not depend on the number of ranks.
        self.bare = build_model(self.recipe).to(place.device)
        self.optimizer = build_optimizer(self.recipe.optimizer, self.bare)
        self.checkpoints_url = records.checkpoints_url(job.url, job.record)
        self.config_digest = recipe.digest(self.recipe)
        state = checkpoint.newest(self.checkpoints_url)
        self.start = self._restore(state)
        self.best_loss = None if state is None else state.best_loss
        self.model = self._wrapped()
        self.recorder = Recorder(Totals.of(state), place.device)
        self.reporter = None
        if place.rank == 0:
            self.reporter = Reporter(job.home, job.url, job.record, ranks=place.world, step=self.start)
        self.speed = SpeedAlarm(self.recipe.alarms)
        self.window = Window()
        self.is_bf16 = precision_of(self.recipe, on_gpu=place.device.type == "cuda") == "bf16"

    # --- setting up ---

    def _restore(self, state: State | None) -> int:
        if state is None:
            return 0
        if state.config_digest != self.config_digest:
            message = (
                f"The newest checkpoint of run {self.job.run_id} was written under config {state.config_digest}, the "
                f"run now has {self.config_digest}: its record was changed. Start a new run."
            )
            raise ConflictError(message)
        step = self.plan.resume(Cursor(step=state.step, plan_digest=state.plan_digest))
        checkpoint.load(self.checkpoints_url, state, self.bare, self.optimizer)
        return step

    def _wrapped(self) -> Any:
        if self.recipe.compile:
            # In place, which keeps the names in checkpoints. The losses hash step numbers, which cannot be traced.
            self.encoder.bert.compile(dynamic=True)
        if self.place.world == 1:
            return self.bare
        # DDP rebuilds its gradient buckets after the first step, so a resumed run would add gradients in another order
        # than an uninterrupted one. With find_unused_parameters it keeps its first buckets, which a CPU can afford.
        return DistributedDataParallel(self.bare, find_unused_parameters=self.place.device.type == "cpu")

    @property
    def encoder(self) -> TextEncoder:
        """The encoder without its wrappers."""
        return self.bare.encoder

    # --- the loop ---

    def run(self) -> None:
        """The remaining steps, then the last export."""
        if self.start == 0:
            self._export(UNTRAINED)
        stream = self.materials.stream(rank=self.place.rank, world=self.place.world)
        batches = stream.batches(self.start, self.total)
        for batch in self._waited(batches):
            self._step(batch)
            self._after(batch)
        self._export(LAST)
        if self.reporter is not None:
            self.reporter.close()

    def _waited(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        while True:
            began_s = time.perf_counter()
            batch = next(batches, None)
            self.window.waited_s += time.perf_counter() - began_s
            if batch is None:
                return
            yield batch

    def _step(self, batch: StepBatch) -> None:
        tokens = self.encoder.batch(batch.views)
        # Dropout from step and rank, not from what was drawn before: a resumed run draws the same.
        torch.manual_seed(seeds.derive(self.recipe.seed, "dropout", batch.step, self.place.rank))
        with torch.autocast(self.place.device.type, dtype=torch.bfloat16, enabled=self.is_bf16):
            terms = self._terms(tokens, batch.step)
        torch.autograd.backward(terms[0])
        norm = take_step(self.optimizer, self.recipe.optimizer, batch.step, self.total)
        self._count(batch, tokens, terms.detach(), norm)

    def _terms(self, tokens: TokenBatch, step: int) -> torch.Tensor:
        """Loss first, then its parts; (4,) for LeJEPA, (1,) for next tokens."""
        if isinstance(self.bare, LejepaModel):
            terms = self.model(tokens, step)
            return torch.stack([terms.loss, *(part.detach() for part in terms[1:4])])
        return torch.stack([self.model(tokens)])

    def _count(self, batch: StepBatch, tokens: TokenBatch, terms: torch.Tensor, norm: torch.Tensor) -> None:
        window, lengths = self.window, batch.views.lengths
        window.terms.append(terms)
        window.norms.append(norm)
        window.tokens += int(lengths.sum())
        window.squares += float((lengths.astype(float) ** 2).sum())
        window.padding += tokens.padding_share
        rows = records.row_hashes(batch.views.tokens, batch.views.offsets)
        first = int(batch.places[0]) if len(batch.places) else 0
        digests = digests_of(batch.scene_hashes, rows, first, self.plan.config.batch_global)
        self.recorder.add(batch.epoch, digests, batch.tokens_read, len(batch.scene_hashes), terms[0])

    def _after(self, batch: StepBatch) -> None:
        done, settings = batch.step + 1, self.recipe.run
        ends_epoch = done % self.plan.steps_per_epoch == 0
        is_last = done == self.total
        every = settings.checkpoint_every_steps
        saves = ends_epoch or is_last or (every is not None and done % every == 0)
        records_rows = saves or done % settings.record_every_steps == 0
        if done % settings.log_every_steps == 0 or saves:
            self._log(batch, done)
        # The log comes first: it refuses a loss that is not finite before a checkpoint could hold it.
        began_s = time.perf_counter()
        # Totals first: exports write how many samples the encoder has seen.
        if records_rows:
            self.recorder.gather()
        if ends_epoch or is_last:
            self._validate(batch.epoch, done)
        if ends_epoch and batch.epoch == 0:
            self._export(FIRST_EPOCH)
        if records_rows:
            self._record()
        if saves:
            self._save()
        self.window.aside_s += time.perf_counter() - began_s

    # --- log points ---

    def _log(self, batch: StepBatch, done: int) -> None:
        window = self.window
        terms = torch.stack(window.terms).double()
        norms = torch.stack(window.norms).double()
        # The only wait for the device in a window.
        losses, sizes = terms[:, 0].tolist(), norms.tolist()
        for i, (loss, norm) in enumerate(zip(losses, sizes, strict=True)):
            refuse_not_finite(loss, norm, done - len(losses) + i)
        means = distributed.all_reduce_sum(terms.mean(0).to(self.place.device)) / self.place.world
        values = dict(zip(self._term_names(), means.tolist(), strict=True))
        if self.reporter is not None:
            self._report(self.reporter, batch, done, {**values, "grad_norm": sum(sizes) / len(sizes)})
        self.window = Window()

    def _term_names(self) -> list[str]:
        return ["loss", "inv", "sigreg", "statistic"] if isinstance(self.bare, LejepaModel) else ["loss"]

    def _report(self, reporter: Reporter, batch: StepBatch, done: int, losses: Mapping[str, float]) -> None:
        window = self.window
        steps = len(window.terms)
        seconds = max(time.perf_counter() - window.began_s - window.aside_s, 1e-9)
        samples_per_s = steps * self.plan.config.batch_global / seconds
        values = {
            **losses,
            "lr": learning_rate(self.recipe.optimizer, done - 1, self.total),
            "samples_per_s": samples_per_s,
            "tokens_per_s": window.tokens * self.place.world / seconds,
            "data_stall": min(window.waited_s / seconds, 1.0),
            "padding_share": window.padding / steps,
        }
        mfu = self._mfu(seconds)
        if mfu is not None:
            values["mfu"] = mfu
        alarm = self.speed.check(samples_per_s)
        if done % self.recipe.run.health_every_steps < steps or done == self.total:
            health_values, alarm_of_health = self._health(batch)
            values.update(health_values)
            alarm = alarm_of_health or alarm
        values["alarm"] = float(alarm is not None)
        reporter.metrics(done, values)
        heartbeat = Heartbeat(
            step=done,
            steps=self.total,
            epoch=batch.epoch,
            losses={name: losses[name] for name in self._term_names()},
            samples_per_s=samples_per_s,
            tokens_per_s=values["tokens_per_s"],
            stall=values["data_stall"],
            mfu=mfu,
            eta_s=(self.total - done) * seconds / steps,
            alarm=alarm,
            written_at=time.time(),
        )
        reporter.heartbeat.write(heartbeat)

    def _mfu(self, seconds: float) -> float | None:
        """Share of the device's peak (model FLOPs utilisation), of this rank: the others have equal work."""
        name = torch.cuda.get_device_name(self.place.device) if self.place.device.type == "cuda" else ""
        peak = next((tflops for key, tflops in PEAK_TFLOPS.items() if key in name), None)
        if peak is None:
            return None
        window = self.window
        sequences = len(window.terms) * self.recipe.views.n_views * self.plan.config.batch_global / self.place.world
        return train_flops(self.recipe.encoder, window.tokens, window.squares, sequences) / seconds / (peak * 1e12)

    def _health(self, batch: StepBatch) -> tuple[dict[str, float], str | None]:
        """Health of the first views of this rank's samples, and an alarm. No collective: only rank 0 calls it."""
        # Rows are view by view, so the first b rows are the first views.
        rows = len(batch.scene_hashes)
        health = measure(evaluation.pooled(self.encoder, batch.views, rows=rows, is_bf16=self.is_bf16))
        alarm = collapse(health, self.recipe.alarms)
        if alarm is not None and self.recipe.alarms.stop_on_collapse:
            raise GoodviewsError(f"{alarm} alarms.stop_on_collapse ends the run here; its checkpoints are kept.")
        values = {"effective_rank": health.effective_rank, "rank_share": health.rank_share, "spread": health.spread}
        return {name: value for name, value in values.items() if math.isfinite(value)}, alarm

    # --- epoch ends and checkpoints ---

    def _validate(self, epoch: int, done: int) -> None:
        split = self.recipe.data.validation_split
        if self.recipe.objective != "ntp" or split is None:
            return
        loss = evaluation.validation_loss(
            self.encoder, self.materials, split, self.place.rank, self.place.world, is_bf16=self.is_bf16
        )
        if self.reporter is not None:
            self.reporter.metrics(done, {"validation_loss": loss, "epoch": float(epoch)})
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss = loss
            self._export(BEST)

    def _record(self) -> None:
        ledger = self.recorder.flush()
        if self.reporter is not None:
            self.reporter.record(ledger, self.recorder.totals)

    def _save(self) -> None:
        if self.place.rank != 0:
            return
        totals = self.recorder.totals
        state = State(
            step=totals.step,
            plan_digest=self.plan.digest,
            config_digest=self.config_digest,
            ranks=self.place.world,
            samples=totals.samples,
            tokens=totals.tokens,
            scenes_hash=f"{totals.scenes_hash:016x}",
            views_hash=f"{totals.views_hash:016x}",
            best_loss=self.best_loss,
        )
        checkpoint.save(self.checkpoints_url, state, self.bare, self.optimizer)
        checkpoint.prune(self.checkpoints_url, keep=self.recipe.run.keep_checkpoints)

    def _export(self, at: str | None) -> None:
        if self.place.rank != 0:
            return
        record, totals = self.job.record, self.recorder.totals
        about = {
            "run_id": record.run_id,
            "dataset_versions": {record.dataset: record.version},
            "plan_digest": record.plan_digest,
            "code_version": record.code_version,
            "steps": totals.step,
            "samples": totals.samples,
            "tokens": totals.tokens,
        }
        url = storage.join(self.job.url, folder_name(at))
        export_encoder(
            self.encoder, self.materials.tokenizer, url, max_tokens=self.recipe.views.max_tokens, record=about
        )


def _check_world(place: Place) -> None:
    found = (distributed.rank(), distributed.world_size())
    if found != (place.rank, place.world):
        message = (
            f"This process was started as rank {place.rank} of {place.world}, but its process group says rank "
            f"{found[0]} of {found[1]}, so losses and batches would not add up. Make the process group before the loop."
        )
        raise GoodviewsError(message)
