"""The embedding job: scenes in, one published embedding set out.

Owns: the order of the steps, the work on one shard, where shards run, what is remembered of finished ones. Does not own: the
identity of a set (`embed_plan`), models (`infra.models.encoders`), files of a set (`catalog.rows.embeddings`).
Invariants: the vectors of a shard depend on the shard and the plan alone, so any number of workers writes the same bytes; a
shard that was finished before a kill is not computed again; every caption or picture is a row or counted as missing.

Legend: N rows of a shard, D dims.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingFile, EmbeddingRecord
from infra import errors, storage
from infra.errors import ConflictError, GoodviewsError, InputError, StorageError
from infra.progress import Progress
from infra.session import Workers
from infra.vectors import mean_of_sums, unit_rows
from pipelines.embed.images import Missing, Picture, PictureIndex, pictures_of
from pipelines.embed.plan import EmbedPlan, Shard

_log = logging.getLogger(__name__)

SHOWN_MISSING: Final = 3


@dataclass(frozen=True, kw_only=True)
class ShardDone:
    """One finished shard. texts: captions or pictures read; tokens: of captions, special ones included."""

    file: EmbeddingFile
    scenes: int
    texts: int
    tokens: int = 0
    truncated: int = 0
    unknown: int = 0
    missing: list[Missing] = field(default_factory=list)

    def to_json(self) -> bytes:
        """What is remembered until the set is published."""
        return orjson.dumps(self, option=orjson.OPT_SORT_KEYS)

    @staticmethod
    def from_json(data: bytes) -> ShardDone:
        """Raises ValueError, KeyError or TypeError for what is no such record."""
        values = orjson.loads(data)
        values["file"] = EmbeddingFile(**values["file"])
        values["missing"] = [Missing(**one) for one in values["missing"]]
        return ShardDone(**values)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an embedding ended with. seconds: without the start of Ray; texts_per_s: over what this call computed."""

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


def embed(plan: EmbedPlan, workers: Workers | None) -> Outcome:
    """Run the job and publish its set. workers: an open Ray; None computes in this process.

    Raises InputError over the budget of missing pictures and for what cannot be embedded, ConflictError when the set is
    there under another name; then nothing is published.
    """
    started = time.time()
    if (there := _published(plan)) is not None:
        embeddings.register(plan.home, there)
        return _outcome(there, there.config["counts"], started, was_there=True)
    done = {shard.name: found for shard in plan.shards if (found := _finished(plan, shard)) is not None}
    reused, computed, loaded = len(done), 0, set[str]()
    missing = [shard for shard in plan.shards if shard.name not in done]
    with Progress(len(missing), label=f"{plan.record.name}: embedding") as progress:
        for name, result, worker in _run(plan, missing, workers):
            done[name] = result
            loaded.add(worker)
            computed += result.texts
            progress.advance(shards=1, texts=result.texts, scenes=result.scenes)
    seconds = time.time() - started
    counts = {**_counts([done[shard.name] for shard in plan.shards]), "loads": len(loaded)}
    counts |= {"shards": len(plan.shards), "shards_reused": reused, "texts_per_s": computed / max(seconds, 1e-9)}
    record = _publish(plan, [done[shard.name] for shard in plan.shards], counts)
    return _outcome(record, counts, started, was_there=False)


def _publish(plan: EmbedPlan, done: Sequence[ShardDone], counts: Mapping[str, Any]) -> EmbeddingRecord:
    lost = [one for shard in done for one in shard.missing]
    _check_missing(plan, lost, counts["texts"])
    files = tuple(shard.file for shard in done)
    if not counts["rows"]:
        message = f"No {plan.config.observation} of {plan.config.dataset}, split {plan.config.split}, was found to embed (roles: {', '.join(plan.config.roles) or 'all'})."
        raise InputError(message)
    if lost:
        storage.publish(
            embeddings.set_url(plan.home, plan.record.embedding_id, "missing.json"),
            orjson.dumps(lost, option=orjson.OPT_INDENT_2),
        )
    config = {**plan.record.config, "counts": dict(counts), "batch_tokens": plan.config.batch_tokens}
    record = dataclasses.replace(plan.record, rows=counts["rows"], files=files, config=config, created_at=time.time())
    embeddings.publish_set(plan.home, record)
    storage.remove_folder(plan.work_url)
    storage.remove_empty_parents(plan.work_url)
    return record


def _check_missing(plan: EmbedPlan, lost: Sequence[Missing], found: int) -> None:
    if not lost:
        return
    shown = "; ".join(f"{one.scene_key} ({one.uri or 'no address'}: {one.why})" for one in lost[:SHOWN_MISSING])
    rate = len(lost) / (len(lost) + found)
    said = f"{len(lost):,} of {len(lost) + found:,} pictures of {plan.config.dataset}, split {plan.config.split}, cannot be embedded, for example {shown}"
    if rate > plan.config.max_missing_rate:
        message = f"{said}. Scores would be of another set of scenes; find the pictures, or allow {rate:.4f} with --max-missing-rate."
        raise InputError(message)
    _log.warning("%s. All are listed in missing.json beside the vectors.", said)


def _counts(done: Sequence[ShardDone]) -> dict[str, Any]:
    totals = {
        name: sum(getattr(d, name) for d in done) for name in ("scenes", "texts", "tokens", "truncated", "unknown")
    }
    return {**totals, "rows": sum(d.file.rows for d in done), "missing": sum(len(d.missing) for d in done)}


def _outcome(record: EmbeddingRecord, counts: Mapping[str, Any], started: float, *, was_there: bool) -> Outcome:
    names = ("shards", "shards_reused", "scenes", "texts", "tokens", "truncated", "missing", "loads", "texts_per_s")
    values = {name: counts[name] for name in names}
    if was_there:
        values |= {"shards_reused": counts["shards"], "loads": 0, "texts_per_s": 0.0}
    return Outcome(
        name=record.name,
        embedding_id=record.embedding_id,
        observation=record.observation,
        was_there=was_there,
        rows=record.rows,
        dims=record.dims,
        layers=record.layers,
        pooling=record.pooling,
        seconds=time.time() - started,
        url=record.url,
        **values,
    )


# --- what is there already ----------------------------------------------------------------------------------------


def _published(plan: EmbedPlan) -> EmbeddingRecord | None:
    """The set when it is published and its files are whole. Raises ConflictError when it bears another name."""
    if not storage.exists(embeddings.set_url(plan.home, plan.record.embedding_id, embeddings.MANIFEST)):
        return None
    record = embeddings.read_record(plan.home, plan.record.embedding_id)
    if plan.config.name is not None and plan.config.name != record.name:
        message = f"These vectors are there already, as {record.name!r} ({record.embedding_id}). Use that name, or remove {record.url} first."
        raise ConflictError(message)
    whole = all(embeddings.is_whole(plan.home, record, file) for file in record.files)
    return record if whole else None


def _finished(plan: EmbedPlan, shard: Shard) -> ShardDone | None:
    """What an earlier run finished of this shard, when its file is still what it wrote."""
    url = storage.join(plan.work_url, f"{shard.name}.json")
    if not storage.exists(url):
        return None
    try:
        done = ShardDone.from_json(storage.read_bytes(url))
    except (ValueError, KeyError, TypeError):
        return None  # of another release; the shard is made again
    return done if embeddings.is_whole(plan.home, plan.record, done.file) else None


# --- where shards run ---------------------------------------------------------------------------------------------


def _run(plan: EmbedPlan, shards: Sequence[Shard], workers: Workers | None) -> Iterator[tuple[str, ShardDone, str]]:
    """(shard, what it became, which worker loaded the model) as shards finish."""
    if not shards:
        return
    if workers is None:
        worker = ShardEmbedder(plan)
        for shard in shards:
            yield shard.name, worker.embed(shard), "here"
        return
    from pipelines.embed.pool import run_on_ray

    for row in run_on_ray(plan, shards, workers.slots):
        if row["error"]:
            kind = getattr(errors, row["error"], GoodviewsError)
            raise kind(row["message"])
        yield row["shard"], ShardDone.from_json(row["done"]), row["worker"]


class ShardEmbedder:
    """A worker: the model, loaded once, and what it does with a shard."""

    def __init__(self, plan: EmbedPlan, *, device: str | None = None) -> None:
        from infra.models import encoders

        chosen = device or encoders.default_device()
        kind = encoders.ImageEncoder if plan.config.observation == "images" else encoders.TextEncoder
        self._plan = plan
        self._encoder: Any = kind(plan.model, plan.facts, device=chosen)
        self._index = PictureIndex(plan.config.images) if plan.config.images else None

    def embed(self, shard: Shard) -> ShardDone:
        """Compute and publish the file of one shard, then remember it. Raises InputError for what has no vector."""
        try:
            return self._embed(shard)
        except OSError as error:
            message = f"Shard {shard.name} of {self._plan.config.dataset} could not be embedded: {error}. Rerun; finished shards are kept."
            raise StorageError(message) from error

    def _embed(self, shard: Shard) -> ShardDone:
        plan, config = self._plan, self._plan.config
        columns = ["scene_key", "images" if config.observation == "images" else "captions"]
        with storage.open_read(shard.scenes_url) as file:
            scenes = pq.ParquetFile(file).read(columns=columns)
        counted: dict[str, int] = {}
        missing: list[Missing] = []
        if config.observation == "images":
            keys, layers = self._pictures(pictures_of(scenes, shard.tar_url, self._index, missing), missing)
            texts = keys.num_rows
        else:
            captions = _captions(scenes, config.roles)
            texts = captions.num_rows
            keys, layers, counted = self._captions(captions)
        written = embeddings.publish_vectors(plan.home, plan.record.embedding_id, shard.number, keys, layers)
        done = ShardDone(file=written, scenes=scenes.num_rows, texts=texts, missing=missing, **counted)
        storage.publish(storage.join(plan.work_url, f"{shard.name}.json"), done.to_json())
        return done

    def _captions(self, captions: pa.Table) -> tuple[pa.Table, dict[int, NDArray[Any]], dict[str, int]]:
        """Keys, vectors by layer, and what was counted, of the captions or of their scenes."""
        from infra.models.encoders import Counted

        self._encoder.counted = Counted()
        batches = self._encoder.batches(captions["text"].to_pylist(), batch_tokens=self._plan.config.batch_tokens)
        keys = captions.select(["scene_key", "item"])
        if self._plan.config.observation == "captions":
            layers = self._collect(batches, captions.num_rows)
        else:
            keys, layers = self._averaged(batches, captions)
        return keys, layers, dataclasses.asdict(self._encoder.counted)

    def _collect(
        self, batches: Iterable[tuple[NDArray[np.int64], Mapping[int, Any]]], n: int
    ) -> dict[int, NDArray[Any]]:
        facts, dtype = self._plan.facts, np.dtype(self._plan.config.dtype)
        layers: dict[int, NDArray[Any]] = {layer: np.empty((n, facts.dims), dtype) for layer in facts.layers}
        for places, vectors in batches:
            for layer, rows in vectors.items():
                layers[layer][places] = _narrowed(rows, dtype)
        return layers

    def _averaged(
        self, batches: Iterable[tuple[NDArray[np.int64], Mapping[int, Any]]], captions: pa.Table
    ) -> tuple[pa.Table, dict[int, NDArray[Any]]]:
        """One vector a scene: each caption's to unit length, their mean, that to unit length (arXiv 2610.09411)."""
        facts, dtype = self._plan.facts, np.dtype(self._plan.config.dtype)
        coded = captions["scene_key"].combine_chunks().dictionary_encode()
        owner, names = coded.indices.to_numpy(), coded.dictionary
        counts = np.bincount(owner, minlength=len(names))
        sums = {layer: np.zeros((len(names), facts.dims)) for layer in facts.layers}
        for places, vectors in batches:
            for layer, rows in vectors.items():
                np.add.at(sums[layer], owner[places], unit_rows(rows))
        keys = pa.table({"scene_key": names, "item": pa.array(np.zeros(len(names), np.int64))})
        return keys, {layer: _narrowed(mean_of_sums(total, counts), dtype) for layer, total in sums.items()}

    def _pictures(
        self, pictures: Iterator[Picture], missing: list[Missing]
    ) -> tuple[pa.Table, dict[int, NDArray[Any]]]:
        from infra.models.encoders import BATCH_IMAGES
        from infra.models.pictures import decode

        facts, dtype = self._plan.facts, np.dtype(self._plan.config.dtype)
        names: list[str] = []
        items: list[int] = []
        parts: dict[int, list[NDArray[Any]]] = {layer: [np.empty((0, facts.dims), dtype)] for layer in facts.layers}
        waiting: list[Any] = []

        def flush() -> None:
            for layer, rows in self._encoder.embed(waiting).items() if waiting else ():
                parts[layer].append(_narrowed(rows, dtype))
            waiting.clear()

        for picture in pictures:
            try:
                waiting.append(decode(picture.data))
            except InputError as error:
                missing.append(Missing(scene_key=picture.scene_key, item=picture.item, uri=None, why=str(error)))
                continue
            names.append(picture.scene_key)
            items.append(picture.item)
            if len(waiting) == BATCH_IMAGES:
                flush()
        flush()
        keys = pa.table({"scene_key": pa.array(names, pa.large_string()), "item": pa.array(items, pa.int64())})
        return keys, {layer: np.concatenate(rows) for layer, rows in parts.items()}


def _captions(scenes: pa.Table, roles: Sequence[str]) -> pa.Table:
    """One row a caption of the roles (none: all): scene_key, item, text."""
    lists = scenes["captions"].combine_chunks()
    structs = lists.flatten()
    table = pa.table(
        {
            "scene_key": scenes["scene_key"].combine_chunks().take(pc.list_parent_indices(lists)),
            "item": structs.field("index"),
            "text": structs.field("text"),
        }
    )
    return table.filter(pc.is_in(structs.field("role"), pa.array(list(roles), pa.large_string()))) if roles else table


def _narrowed(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    # What does not fit becomes infinite, which the publication refuses with the name of the scene.
    with np.errstate(over="ignore"):
        return rows.astype(dtype)
