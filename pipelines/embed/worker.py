"""What one worker does with one shard: read, embed, publish the vectors, record the result.

Invariant: the vectors depend on the shard and the plan alone. The result is recorded after the vectors, so a recorded
shard is a whole one. N rows of a shard, D dims, S scenes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingFile
from infra import storage
from infra.errors import InputError, StorageError
from infra.vectors import mean_of_sums, unit_rows
from pipelines.embed.images import Missing, Picture, PictureIndex, pictures_of
from pipelines.embed.plan import EmbedPlan, Shard

Layers: TypeAlias = dict[int, NDArray[Any]]
"Vectors (N, D) by layer."
Batches: TypeAlias = Iterable[tuple[NDArray[np.int64], Mapping[int, NDArray[Any]]]]
"Row numbers of a batch, and the vectors of these rows by layer; batches come in order of length, not of rows."


@dataclass(frozen=True, kw_only=True)
class EmbeddedShard:
    """One finished shard. texts: captions or images read; tokens: of captions, special ones included."""

    file: EmbeddingFile
    scenes: int
    texts: int
    tokens: int = 0
    truncated: int = 0
    unknown: int = 0
    missing: list[Missing] = field(default_factory=list)

    def to_json(self) -> bytes:
        """The record that is kept until the set is published."""
        return orjson.dumps(self, option=orjson.OPT_SORT_KEYS)

    @staticmethod
    def from_json(data: bytes) -> EmbeddedShard:
        """Raises ValueError, KeyError or TypeError for what is no such record."""
        values = orjson.loads(data)
        values["file"] = EmbeddingFile(**values["file"])
        values["missing"] = [Missing(**one) for one in values["missing"]]
        return EmbeddedShard(**values)


def finished_shard(plan: EmbedPlan, shard: Shard) -> EmbeddedShard | None:
    """The result that an earlier run recorded, if its file of vectors is unchanged; else None."""
    url = _record_url(plan, shard)
    if not storage.exists(url):
        return None
    try:
        done = EmbeddedShard.from_json(storage.read_bytes(url))
    except (ValueError, KeyError, TypeError):
        return None  # written by another release: the shard is embedded again
    return done if embeddings.is_whole(plan.home, plan.record, done.file) else None


def _record_url(plan: EmbedPlan, shard: Shard) -> str:
    return storage.join(plan.work_url, f"{shard.name}.json")


class ShardEmbedder:
    """A worker with its model, which is loaded once. device: None for the best that is there."""

    def __init__(self, plan: EmbedPlan, *, device: str | None = None) -> None:
        from infra.models import encoders

        kind = encoders.FrozenImageEncoder if plan.config.observation == "images" else encoders.FrozenTextEncoder
        self._plan = plan
        self._dtype = np.dtype(plan.config.dtype)
        self._encoder: Any = kind(plan.model, plan.facts, device=device or encoders.default_device())
        self._index = PictureIndex(plan.config.images) if plan.config.images else None

    def embed(self, shard: Shard) -> EmbeddedShard:
        """Compute and publish the vectors of one shard, then record the result.

        Raises InputError for what has no vector, StorageError for a read or write that fails.
        """
        try:
            return self._embed(shard)
        except OSError as error:
            raise StorageError(
                f"Shard {shard.name} of {self._plan.config.dataset} could not be embedded: {error}. "
                "Rerun; finished shards are kept."
            ) from error

    def _embed(self, shard: Shard) -> EmbeddedShard:
        plan, of_images = self._plan, self._plan.config.observation == "images"
        with storage.open_read(shard.scenes_url) as file:
            scenes = pq.ParquetFile(file).read(columns=["scene_key", "images" if of_images else "captions"])
        counted: dict[str, int] = {}
        missing: list[Missing] = []
        if of_images:
            keys, layers = self._of_images(pictures_of(scenes, shard.tar_url, self._index, missing), missing)
            texts = keys.num_rows
        else:
            captions = self._captions(scenes)
            texts = captions.num_rows
            keys, layers, counted = self._of_captions(captions)
        written = embeddings.publish_vectors(plan.home, plan.record.embedding_id, shard.number, keys, layers)
        done = EmbeddedShard(file=written, scenes=scenes.num_rows, texts=texts, missing=missing, **counted)
        storage.publish(_record_url(plan, shard), done.to_json())
        return done

    def _captions(self, scenes: pa.Table) -> pa.Table:
        """One row (scene_key, item, text) for each caption of the wanted roles."""
        lists = scenes["captions"].combine_chunks()
        structs = lists.flatten()
        keys = scenes["scene_key"].combine_chunks().take(pc.list_parent_indices(lists))
        table = pa.table({"scene_key": keys, "item": structs.field("index"), "text": structs.field("text")})
        roles = pa.array(list(self._plan.config.roles), pa.large_string())
        return table.filter(pc.is_in(structs.field("role"), roles)) if len(roles) else table

    def _of_captions(self, captions: pa.Table) -> tuple[pa.Table, Layers, dict[str, int]]:
        """Keys, vectors and token counts of the captions, or of their scenes."""
        from infra.models.encoders import Counted

        facts = self._plan.facts
        self._encoder.counted = Counted()  # the encoder counts tokens over all of its batches; this shard starts at 0
        batches = self._encoder.batches(captions["text"].to_pylist(), batch_tokens=self._plan.config.batch_tokens)
        if self._plan.config.observation == "captions":
            keys = captions.select(["scene_key", "item"])
            layers = {layer: np.empty((len(captions), facts.dims), self._dtype) for layer in facts.layers}
            for places, vectors in batches:
                for layer, rows in vectors.items():
                    layers[layer][places] = self._narrowed(rows)
        else:
            scene = captions["scene_key"].combine_chunks().dictionary_encode()
            items = pa.array(np.zeros(len(scene.dictionary), np.int64))
            keys = pa.table({"scene_key": scene.dictionary, "item": items})
            means = scene_means(batches, scene.indices.to_numpy(), shape=(len(items), facts.dims))
            # A shard without captions has no batches, and yet every layer.
            empty = np.empty((0, facts.dims))
            layers = {layer: self._narrowed(means.get(layer, empty)) for layer in facts.layers}
        return keys, layers, dataclasses.asdict(self._encoder.counted)

    def _of_images(self, pictures: Iterator[Picture], missing: list[Missing]) -> tuple[pa.Table, Layers]:
        """Keys and vectors of the images; one that cannot be decoded is added to `missing`."""
        from infra.models.encoders import BATCH_IMAGES
        from infra.models.pictures import decode

        facts = self._plan.facts
        names: list[str] = []
        items: list[int] = []
        parts: dict[int, list[NDArray[Any]]] = {n: [np.empty((0, facts.dims), self._dtype)] for n in facts.layers}
        waiting: list[Any] = []

        def flush() -> None:
            for layer, rows in self._encoder.embed(waiting).items() if waiting else ():
                parts[layer].append(self._narrowed(rows))
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

    def _narrowed(self, rows: NDArray[Any]) -> NDArray[Any]:
        # A value that does not fit becomes infinite, and the publication refuses it by the name of its scene.
        with np.errstate(over="ignore"):
            return rows.astype(self._dtype)


def scene_means(batches: Batches, scene_N: NDArray[np.integer[Any]], *, shape: tuple[int, int]) -> Layers:
    """Mean of the unit captions of each scene, at length 1 again, by layer (S, D) float64 (arXiv 2610.09411).

    scene_N: the scene of each caption. shape: (S, D). Only sums are held, never the vectors of all captions.
    """
    sums: dict[int, NDArray[np.float64]] = {}
    for places, vectors in batches:
        for layer, rows in vectors.items():
            # A batch may hold several captions of one scene; `sums[scenes] += rows` would add only one of them.
            np.add.at(sums.setdefault(layer, np.zeros(shape)), scene_N[places], unit_rows(rows))
    counts_S = np.bincount(scene_N, minlength=shape[0])
    return {layer: mean_of_sums(total, counts_S) for layer, total in sums.items()}
