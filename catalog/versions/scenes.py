"""Read the scenes of a published version, one record batch of Arrow at a time.

Invariant: batches come in the order of shards and rows, and only one is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from catalog.versions.published import read_records
from infra import storage
from infra.errors import InputError
from infra.home import Home


def scene_batches(home: Home, dataset: str, version: str, split: str) -> Iterator[pa.RecordBatch]:
    """Record batches of `catalog.schema.SCENES`. Raises InputError for a version or split that is not there."""
    found = read_records(home, dataset, version)
    manifests = sorted((m for m in found.manifests if m.split == split), key=lambda m: m.shard)
    if not manifests:
        splits = ", ".join(sorted({m.split for m in found.manifests}))
        raise InputError(f"{found.name} has no split {split!r}. Its splits are {splits}.")
    return _batches([storage.join(found.folder, f.path) for m in manifests for f in m.files if f.kind == "scenes"])


def _batches(urls: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for url in urls:
        with storage.open_read(url) as file:
            yield from pq.ParquetFile(file).iter_batches()
