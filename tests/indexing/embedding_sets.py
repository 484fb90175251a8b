"""Embedding sets made by hand, so that a test knows every vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from infra import storage
from infra.home import Home


def put_set(
    home: Home,
    name: str,
    keys: Sequence[tuple[str, int]],
    layers: Mapping[int, npt.NDArray[Any]],
    **facts: Any,
) -> EmbeddingRecord:
    """Publish a set; keys: (scene_key, item) of each row. facts: fields of the record that are not the default."""
    first = np.asarray(next(iter(layers.values())))
    embedding_id = embeddings.embedding_id_of({"name": name, "facts": {k: str(v) for k, v in facts.items()}})
    table = pa.table({"scene_key": [k for k, _ in keys], "item": [i for _, i in keys]}, schema=embeddings.KEYS)
    vectors = {n: np.ascontiguousarray(x, np.float32) for n, x in layers.items()}
    file = embeddings.publish_vectors(home, embedding_id, 0, table, vectors)
    values: dict[str, Any] = {
        "model": name,
        "run_id": None,
        "observation": "scenes",
        "dataset": None,
        "version": None,
        "split": None,
        "roles": (),
        "pooling": "mean",
        "averaging": "none",
        "max_length": None,
        "samples": None,
        "tokens": None,
        "config": {},
        "snapshot_id": None,
        "dataset_versions": {},
    }
    record = EmbeddingRecord(
        embedding_id=embedding_id,
        name=name,
        layers=tuple(sorted(layers)),
        rows=len(keys),
        dims=first.shape[1],
        dtype="float32",
        url=embeddings.set_url(home, embedding_id),
        code_version="0",
        created_at=1.0,
        files=(file,),
        **{**values, **facts},
    )
    # Published and not registered: scoring finds sets by their files, and a commit each takes most of a test's time.
    storage.publish(embeddings.set_url(home, embedding_id, embeddings.MANIFEST), record.to_json())
    return record


def scene_keys(n: int, first: int = 0) -> list[tuple[str, int]]:
    """Keys of n scenes with one row each, in sorted order."""
    return [(f"s{i:05d}", 0) for i in range(first, first + n)]


def related(seed: int, n: int, d: int, e: int, noise: float = 0.5) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Two noisy views of one latent table of 8 dims."""
    g = np.random.default_rng(seed)
    z = g.normal(size=(n, 8))
    x, y = (z @ g.normal(size=(8, dims)) + noise * g.normal(size=(n, dims)) for dims in (d, e))
    return x.astype(np.float32), y.astype(np.float32)
