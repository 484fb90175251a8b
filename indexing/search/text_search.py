"""The job behind `goodviews search`: embed a text like the set, find the nearest rows, and name their scenes.

A set of pictures is searched through a map that was fitted between it and a set of texts.
Invariant: a text is compared only with vectors of its own space (the same weights, tokenizer, layer and pooling, by
their digests), or through a map between exactly the two spaces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow as pa

from catalog.lake import lake
from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from indexing.rotate import maps
from indexing.search import ann, indexes
from indexing.search.indexes import IndexRecord
from indexing.search.knn import exact_knn
from indexing.search.rows import Rows
from indexing.sets.spaces import space_of
from infra.errors import InputError, UsageError
from infra.home import Home
from infra.vectors import Ids, Singles, Table

TEXT_OBSERVATIONS: Final = ("captions", "scenes")

Ranked = tuple[Ids, Singles]
"""Places (-1: none) and scores of k rows, nearest first."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One scene with its best row (`item`: which caption; 0 for scenes), its cosine, captions and images."""

    place: int
    scene_key: str
    item: int
    score: float
    captions: tuple[str, ...]
    images: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Scenes for a text. exact: by exact cosines over the whole set; else choice and scores come from the index."""

    text: str
    embedding_id: str
    set_name: str
    layer: int
    index_id: str | None
    map_id: str | None
    exact: bool
    scenes: tuple[Found, ...]


def find_target(home: Home, name_or_id: str) -> tuple[EmbeddingRecord, IndexRecord | None]:
    """The embedding set to search in, and the index when one is named. Raises InputError for an unknown name."""
    try:
        return embeddings.find(home, name_or_id), None
    except InputError as no_set:
        try:
            index = indexes.find_index(home, name_or_id)
        except InputError as no_index:
            raise InputError(f"{no_set} Nor is it an index: {no_index}") from None
    indexes.check_binding(home, index)
    return embeddings.read_record(home, index.embedding_id), index


def search_scenes(
    home: Home,
    text: str,
    target: tuple[EmbeddingRecord, IndexRecord | None],
    *,
    k: int,
    layer: int | None = None,
    map_id: str | None = None,
) -> Answer:
    """The k scenes nearest to a text, each once, by its best row.

    layer: None takes that of the index, else the last of the set. map_id: of a map between the set and a set of texts,
    in either direction. Raises UsageError for k < 1, another layer than that of the index, and an index with a map;
    InputError for a set that is not in the space of the text and for a model whose files are not those of the set.
    """
    record, index = target
    if k < 1:
        raise UsageError(f"k is {k}, but must be 1 or more.")
    if index is not None and layer not in (None, index.layer):
        raise UsageError(f"Index {index.name!r} is of layer {index.layer}, not {layer}. Build one of that layer.")
    if index is not None and map_id is not None:
        raise UsageError(
            f"Index {index.name!r} holds rows as they are, not mapped ones. Search in the set {record.name!r}."
        )
    chosen = index.layer if index is not None else record.layers[-1] if layer is None else layer
    if index is not None:
        opened = indexes.open_index(home, index, vectors=record)
        keys, query = opened.keys, Rows(embed_text(home, record, chosen, text), name="query")
        nearest = functools.partial(_by_index, opened.index, query)
    else:
        keys = embeddings.read_keys(home, record)
        nearest = functools.partial(_by_cosines, *_vectors(home, text, record, chosen, map_id))
    rows, scores = best_rows(keys["scene_key"].to_pylist(), nearest, k)
    return Answer(
        text=text,
        embedding_id=record.embedding_id,
        set_name=record.name,
        layer=chosen,
        index_id=index.index_id if index is not None else None,
        map_id=map_id,
        exact=index is None,
        scenes=_scenes(home, record, keys, rows, scores),
    )


def _by_index(index: Any, query: Rows, count: int) -> Ranked:
    places_MK, scores_MK = ann.search(index, query, count)
    return places_MK[0], scores_MK[0]


def _by_cosines(query_1D: Table, base_ND: Table, count: int) -> Ranked:
    found = exact_knn(base_ND, k=count, queries_MD=query_1D)
    return found.ids_MK[0], found.scores_MK[0]


def _vectors(home: Home, text: str, record: EmbeddingRecord, layer: int, map_id: str | None) -> tuple[Table, Table]:
    """The text (1, D) and the set's rows (N, D) in one space."""
    if map_id is None:
        return embed_text(home, record, layer, text), embeddings.read_layer(home, record, layer)
    stored = maps.load_map(home, map_id)
    left, right = (
        embeddings.read_record(home, side["embedding_id"]) for side in (stored.record.left, stored.record.right)
    )
    base_ND = embeddings.read_layer(home, record, layer)
    if _is_side(record, layer, right, stored.record.right):
        query_1D = embed_text(home, left, stored.record.left["layer"], text)
        return stored.fitted.map_rows(query_1D), stored.fitted.target_rows(base_ND)
    if _is_side(record, layer, left, stored.record.left):
        query_1D = embed_text(home, right, stored.record.right["layer"], text)
        return stored.fitted.target_rows(query_1D), stored.fitted.map_rows(base_ND)
    raise InputError(
        f"Map {map_id} is between {left.name!r} and {right.name!r}, and {record.name!r}, layer {layer}, is of the "
        "space of neither. Fit one with `goodviews rotate`."
    )


def _is_side(record: EmbeddingRecord, layer: int, fitted_on: EmbeddingRecord, side: Mapping[str, Any]) -> bool:
    space = space_of(record)
    is_same = record.embedding_id == fitted_on.embedding_id or (space is not None and space == space_of(fitted_on))
    return is_same and bool(side["layer"] == layer)


def embed_text(home: Home, record: EmbeddingRecord, layer: int, text: str) -> Singles:
    """The vector of the text (1, D), embedded like those of the set."""
    facts = text_facts(record)
    if not text.strip():
        raise UsageError("The text is empty, so it is near to nothing. Give some words.")
    if layer not in record.layers:
        known = ", ".join(map(str, record.layers))
        raise InputError(f"Embedding set {record.name!r} holds no layer {layer}; it holds {known}.")
    # Imported here: torch and transformers take seconds, and a refusal above needs neither.
    from infra.models.encoders import FrozenTextEncoder
    from infra.models.facts import Facts
    from infra.models.registry import find_model

    model = find_model(record.model, home)
    content = record.config["content"]
    if (model.weights, model.tokenizer) != (content["weights"], content["tokenizer"]):
        raise InputError(
            f"The files of model {record.model} are not those that embedded {record.name!r}: their sha256 differs, so "
            "the text would be compared with another space. Embed the set again."
        )
    return FrozenTextEncoder(model, Facts(**{**facts, "layers": (layer,)})).embed([text])[layer]


def text_facts(record: EmbeddingRecord) -> Mapping[str, Any]:
    """How the model of the set was run. Raises InputError unless a model here embedded the set from texts."""
    content = dict(record.config.get("content", {}))
    facts = content.get("facts")
    if facts is None or "imported" in content:
        raise InputError(
            f"Embedding set {record.name!r} was imported ({record.model}), so there is no model here to embed a text "
            "with. Search in a set made by `goodviews embed`."
        )
    if record.observation not in TEXT_OBSERVATIONS or facts["modality"] != "text":
        raise InputError(
            f"Embedding set {record.name!r} holds {record.observation} of {record.model}, and a text has no place in "
            "that space. Search in a set of captions or scenes, or through a map (`--map`) that was fitted between "
            "texts and it."
        )
    return dict(facts)


def best_rows(names: Sequence[str], nearest: Callable[[int], Ranked], k: int) -> tuple[list[int], list[float]]:
    """The best rows of the k nearest scenes, with their scores; fewer when there are no more.

    names: scene of each row. nearest: number of rows -> the nearest of them.
    """
    count = min(k, len(names))
    while True:
        best: dict[str, tuple[int, float]] = {}
        places, scores = nearest(count)
        for place, score in zip(places.tolist(), scores.tolist(), strict=True):
            if place >= 0:
                best.setdefault(names[place], (place, score))
        if len(best) >= k or count == len(names):
            chosen = list(best.values())[:k]
            return [place for place, _ in chosen], [score for _, score in chosen]
        # Several captions of one scene took the places of other scenes, so ask for more rows.
        count = min(len(names), 4 * count)


def _scenes(
    home: Home, record: EmbeddingRecord, keys: pa.Table, rows: Sequence[int], scores: Sequence[float]
) -> tuple[Found, ...]:
    names = [keys["scene_key"][row].as_py() for row in rows]
    known = scene_texts(home, record, names)
    found = []
    for place, (name, row, score) in enumerate(zip(names, rows, scores, strict=True), start=1):
        captions, images = known.get(name, ((), ()))
        item = keys["item"][row].as_py()
        found.append(Found(place=place, scene_key=name, item=item, score=score, captions=captions, images=images))
    return tuple(found)


def scene_texts(
    home: Home, record: EmbeddingRecord, names: Sequence[str]
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """scene_key -> (captions in their order, addresses of images) of the set's version; empty without a dataset."""
    if record.dataset is None or record.version is None or not names:
        return {}
    query = """SELECT scene_key, to_json([c."text" FOR c IN captions]), to_json([i.uri FOR i IN images])
        FROM versions.scenes WHERE dataset = ? AND version = ? AND list_contains(?, scene_key)"""
    with lake.reading(home) as reader:
        rows = reader.rows(query, [record.dataset, record.version, list(names)])
    return {str(name): (_texts(captions), _texts(images)) for name, captions, images in rows}


def _texts(found: str | None) -> tuple[str, ...]:
    return tuple(text for text in orjson.loads(found or "[]") or [] if text is not None)
