"""The embedding job: the scenes of a split in, one published embedding set out.

Invariants: any number of workers writes the same bytes; a shard that was finished before a kill is not computed again;
every caption or image is a row or is counted as missing. The digest that names a set is made in `plan`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from infra import errors, storage
from infra.errors import InputError
from infra.progress import Progress
from infra.session import Workers
from pipelines.embed.images import Missing
from pipelines.embed.plan import EmbedPlan, Shard, published_set
from pipelines.embed.pool import run_on_ray
from pipelines.embed.worker import EmbeddedShard, ShardEmbedder, finished_shard

_log = logging.getLogger(__name__)

SHOWN_MISSING: Final = 3


@dataclass(frozen=True, kw_only=True)
class EmbedOutcome:
    """Result of an embedding. seconds: without the start of Ray; texts_per_s: of what this call computed."""

    name: str
    embedding_id: str
    observation: str
    was_there: bool
    rows: int
    dims: int
    layers: Sequence[int]
    pooling: str
    shards: int
    shards_reused: int
    scenes: int
    texts: int
    tokens: int
    truncated: int
    missing: int
    loads: int
    "How often the model was loaded: once a worker."
    seconds: float
    texts_per_s: float
    url: str


def embed(plan: EmbedPlan, workers: Workers | None) -> EmbedOutcome:
    """Run the job and publish its set. workers: an open Ray; None computes in this process.

    Raises InputError over the budget of missing images and for what cannot be embedded, ConflictError when the set is
    there under another name; then nothing is published.
    """
    started = time.time()
    there = published_set(plan.home, plan.record.embedding_id, name=plan.config.name, subject="These vectors are")
    if there is not None:
        counts = there.config["counts"]
        return _outcome(there, {**counts, "shards_reused": counts["shards"], "loads": 0, "texts_per_s": 0.0}, started)
    found = {shard.name: finished_shard(plan, shard) for shard in plan.shards}
    done = {name: shard for name, shard in found.items() if shard is not None}
    reused, computed, loaded = len(done), 0, set[str]()
    missing = [shard for shard in plan.shards if shard.name not in done]
    with Progress(len(missing), label=f"{plan.record.name}: embedding") as progress:
        for name, result, worker in _run(plan, missing, workers):
            done[name] = result
            loaded.add(worker)
            computed += result.texts
            progress.advance(shards=1, texts=result.texts, scenes=result.scenes)
    in_order = [done[shard.name] for shard in plan.shards]
    counts = _counts(in_order) | {
        "loads": len(loaded),
        "shards": len(plan.shards),
        "shards_reused": reused,
        "texts_per_s": computed / max(time.time() - started, 1e-9),
    }
    return _outcome(_publish(plan, in_order, counts), counts, started, was_there=False)


def _run(plan: EmbedPlan, shards: Sequence[Shard], workers: Workers | None) -> Iterator[tuple[str, EmbeddedShard, str]]:
    """(shard, result, name of the worker) as shards finish."""
    if not shards:
        return
    if workers is None:
        worker = ShardEmbedder(plan)
        for shard in shards:
            yield shard.name, worker.embed(shard), "here"
        return
    for row in run_on_ray(plan, shards, workers.slots):
        if row["error"]:
            raise errors.decode(row["error"], row["message"])
        yield row["shard"], EmbeddedShard.from_json(row["done"]), row["worker"]


def _publish(plan: EmbedPlan, done: Sequence[EmbeddedShard], counts: Mapping[str, Any]) -> EmbeddingRecord:
    config, lost = plan.config, [one for shard in done for one in shard.missing]
    _check_missing(plan, lost, counts["texts"])
    if not counts["rows"]:
        raise InputError(
            f"No {config.observation} of {config.dataset}, split {config.split}, was found to embed "
            f"(roles: {', '.join(config.roles) or 'all'})."
        )
    if lost:
        listed = orjson.dumps(lost, option=orjson.OPT_INDENT_2)
        storage.publish(embeddings.set_url(plan.home, plan.record.embedding_id, "missing.json"), listed)
    record = dataclasses.replace(
        plan.record,
        rows=counts["rows"],
        files=tuple(shard.file for shard in done),
        config={**plan.record.config, "counts": dict(counts), "batch_tokens": config.batch_tokens},
        created_at=time.time(),
    )
    embeddings.publish_set(plan.home, record)
    storage.remove_folder(plan.work_url)
    storage.remove_empty_parents(plan.work_url)
    return record


def _check_missing(plan: EmbedPlan, lost: Sequence[Missing], found: int) -> None:
    if not lost:
        return
    shown = "; ".join(f"{one.scene_key} ({one.uri or 'no address'}: {one.why})" for one in lost[:SHOWN_MISSING])
    total = len(lost) + found
    summary = (
        f"{len(lost):,} of {total:,} pictures of {plan.config.dataset}, split {plan.config.split}, cannot be embedded, "
        f"for example {shown}"
    )
    rate = len(lost) / total
    if rate > plan.config.max_missing_rate:
        raise InputError(
            f"{summary}. Scores would be of another set of scenes; find the pictures, or allow {rate:.4f} with "
            "--max-missing-rate."
        )
    _log.warning("%s. All are listed in missing.json beside the vectors.", summary)


def _counts(done: Sequence[EmbeddedShard]) -> dict[str, Any]:
    names = ("scenes", "texts", "tokens", "truncated", "unknown")
    totals = {name: sum(getattr(shard, name) for shard in done) for name in names}
    return {**totals, "rows": sum(d.file.rows for d in done), "missing": sum(len(d.missing) for d in done)}


def _outcome(
    record: EmbeddingRecord, counts: Mapping[str, Any], started: float, *, was_there: bool = True
) -> EmbedOutcome:
    of_record = ("name", "embedding_id", "observation", "rows", "dims", "layers", "pooling", "url")
    # `tokens` is a count of this set; the record's own `tokens` are those that the model was trained on.
    of_counts = ("shards", "shards_reused", "scenes", "texts", "tokens", "truncated", "missing", "loads", "texts_per_s")
    values: dict[str, Any] = {name: getattr(record, name) for name in of_record}
    values |= {name: counts[name] for name in of_counts}
    return EmbedOutcome(**values, was_there=was_there, seconds=time.time() - started)
