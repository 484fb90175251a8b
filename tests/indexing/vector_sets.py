"""Embedding sets made by hand, published below a HOME, for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from infra.home import Home


def publish(
    home: Home, x_ND: np.ndarray, *, keys: Sequence[str] | None = None, items: Sequence[int] | None = None, **facts: Any
) -> EmbeddingRecord:
    """A set of one layer (1) in float32: row i belongs to scene keys[i] (default s00000, ...) and items[i] (default 0)."""
    n, dims = x_ND.shape
    names = list(keys) if keys is not None else [f"s{i:05d}" for i in range(n)]
    table = pa.table({"scene_key": names, "item": list(items) if items is not None else [0] * n})
    content = {"name": facts.get("name", "tiny"), "seed": facts.pop("seed", 0)}
    embedding_id = embeddings.embedding_id_of(content)
    file = embeddings.publish_vectors(home, embedding_id, 0, table, {1: x_ND.astype(np.float32)})
    values: dict[str, Any] = {
        "embedding_id": embedding_id,
        "name": "tiny",
        "model": "tiny",
        "run_id": None,
        "observation": "captions",
        "dataset": None,
        "version": None,
        "split": None,
        "roles": (),
        "layers": (1,),
        "pooling": "mean",
        "averaging": "none",
        "max_length": None,
        "rows": n,
        "dims": dims,
        "dtype": "float32",
        "samples": None,
        "tokens": None,
        "config": {},
        "url": embeddings.set_url(home, embedding_id),
        "snapshot_id": None,
        "dataset_versions": {},
        "code_version": "0.1.0",
        "created_at": 1_700_000_000.0,
        "files": (file,),
    }
    return embeddings.publish_set(home, EmbeddingRecord(**{**values, **facts}))
