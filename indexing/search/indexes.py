"""Indexes as files: built from one layer of an embedding set, bound to it by digests, and verified when opened.

Invariants: `record.json` is written last and is the publication; an index that opens answers with the keys of exactly
the rows that it was built from.

    HOME/indexes/<index_id>/index.faiss     over the unit rows, cosine as inner product
    HOME/indexes/<index_id>/keys.parquet    scene_key, item of place 0, 1, ... of the index
    HOME/indexes/<index_id>/audit.json      the wish, and the audits of all factories that were tried
    HOME/indexes/<index_id>/record.json     the IndexRecord
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingRecord
from indexing.search import ann
from indexing.search.ann import Wish
from indexing.search.rows import Rows
from infra import storage
from infra.errors import ConflictError, InputError, IntegrityError
from infra.home import Home
from infra.version import code_version

FORMAT: Final = "goodviews-index-1"
RECORD: Final = "record.json"
ID_PATTERN: Final = re.compile(r"[0-9a-f]{16}")
PREFIX_DIGITS: Final = 4


@dataclass(frozen=True, kw_only=True)
class IndexRecord:
    """Record of an index and of the files that it is bound to. created_at: seconds since the epoch.

    rows: places in the index; zero rows of the set (`undefined`) have none. set_files: path -> sha256 of the set's
    files. files: name -> size and sha256 of the index's own. flags: limits of the wish that the index misses.
    """

    index_id: str
    name: str
    embedding_id: str
    set_name: str
    layer: int
    rows: int
    undefined: int
    dims: int
    factory: str
    parameters: str
    recall: float
    flags: tuple[str, ...]
    set_files: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]]
    faiss_version: str
    code_version: str
    created_at: float


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A loaded index: place i of `index` is row i of `keys` (scene_key, item)."""

    record: IndexRecord
    index: Any
    keys: pa.Table


def index_url(home: Home, index_id: str, *names: str) -> str:
    """URL below HOME/indexes/<index_id>."""
    return storage.join(home.url, "indexes", index_id, *names)


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """One call of `goodviews index build`. factory, parameters: see `indexing.search.ann.build`."""

    wish: Wish = field(default_factory=Wish)
    factory: str | None = None
    parameters: str | None = None
    layer: int | None = None
    "None: the last."
    name: str | None = None
    "None: the name of the set with the factory."


def build_index(home: Home, vectors: EmbeddingRecord, config: IndexConfig) -> IndexRecord:
    """Build, audit and publish an index over one layer of an embedding set.

    Raises the errors of `indexing.search.ann.build`, ConflictError for the name of an embedding set, and IntegrityError
    for a changed file of the set.
    """
    import faiss

    name, layer = config.name, vectors.layers[-1] if config.layer is None else config.layer
    if name is not None and any(record.name == name for record in embeddings.list_sets(home)):
        raise ConflictError(
            f"{name!r} is the name of an embedding set; `search --in` could not tell the two apart. "
            "Choose another --name."
        )
    rows = Rows(embeddings.read_layer(home, vectors, layer, verify=True), name=f"set {vectors.name}")
    built = ann.build(rows, config.wish, factory=config.factory, parameters=config.parameters)
    audit, sink = built.audit, pa.BufferOutputStream()
    keys = embeddings.read_keys(home, vectors).take(pa.array(np.flatnonzero(rows.norms_N)))
    pq.write_table(keys, sink, compression="zstd")
    serialized: Any = faiss.serialize_index(built.index)
    parts: dict[str, storage.Buffer] = {"index.faiss": memoryview(serialized), "keys.parquet": sink.getvalue()}
    # The id is a digest of the bytes, so two builders never write into one another's files.
    sha = hashlib.sha256(f"{vectors.embedding_id}\0{layer}\0{audit.factory}\0{audit.parameters}\0".encode())
    for part in parts.values():
        sha.update(part)
    index_id = sha.hexdigest()[:16]
    tried = [dataclasses.asdict(trial) for trial in built.trials]
    parts["audit.json"] = _json({"wish": dataclasses.asdict(config.wish), "tried": tried})
    files = {n: dataclasses.asdict(storage.publish(index_url(home, index_id, n), [p])) for n, p in parts.items()}
    record = IndexRecord(
        index_id=index_id,
        name=name or f"{vectors.name}/{audit.factory}",
        embedding_id=vectors.embedding_id,
        set_name=vectors.name,
        layer=layer,
        rows=keys.num_rows,
        undefined=rows.n_undefined,
        dims=rows.dims,
        factory=audit.factory,
        parameters=audit.parameters,
        recall=audit.recall,
        flags=built.flags,
        set_files={file.path: file.sha256 for file in vectors.files},
        files=files,
        faiss_version=str(faiss.__version__),
        code_version=code_version(),
        created_at=time.time(),
    )
    storage.publish(index_url(home, index_id, RECORD), _json({"format": FORMAT, **dataclasses.asdict(record)}))
    return record


def list_indexes(home: Home) -> list[IndexRecord]:
    """All published indexes, oldest first. Raises IntegrityError for a record that this release cannot read."""
    ids = [name for name in storage.list_names(storage.join(home.url, "indexes")) if ID_PATTERN.fullmatch(name)]
    found = [read_record(home, name) for name in ids if storage.exists(index_url(home, name, RECORD))]
    return sorted(found, key=lambda record: (record.created_at, record.index_id))


def find_index(home: Home, name_or_id: str) -> IndexRecord:
    """The newest index of that name, else the one whose id begins so. Raises InputError for none or several."""
    known = list_indexes(home)
    named = [record for record in known if record.name == name_or_id]
    if named:
        return named[-1]
    begun = [r for r in known if len(name_or_id) >= PREFIX_DIGITS and r.index_id.startswith(name_or_id)]
    if len(begun) == 1:
        return begun[0]
    if begun:
        ids = ", ".join(f"{record.index_id} ({record.name})" for record in begun)
        raise InputError(f"{name_or_id!r} begins the ids of several indexes: {ids}. Give more digits.")
    names = sorted({record.name for record in known})
    near = difflib.get_close_matches(name_or_id, names, n=3, cutoff=0.5)
    known_names = f"Known are {', '.join(map(repr, names)) or 'none'}."
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else known_names
    raise InputError(f"There is no index {name_or_id!r} below {home.url}. {hint}")


def read_record(home: Home, index_id: str) -> IndexRecord:
    """Raises InputError for an index that is not published, IntegrityError for a record of another release."""
    url = index_url(home, index_id, RECORD)
    try:
        values = orjson.loads(storage.read_bytes(url))
        if values.pop("format") != FORMAT or values["index_id"] != index_id:
            raise ValueError("another format, or the record of another index")
        return IndexRecord(**{**values, "flags": tuple(values["flags"])})
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{url} is not the record of an index that this release reads ({error}). Build the index again."
        ) from error


def read_audit(home: Home, record: IndexRecord) -> dict[str, Any]:
    """The wish and the audits of all that was tried."""
    url = index_url(home, record.index_id, "audit.json")
    _check_file(record, "audit.json", storage.digest(url))
    found: dict[str, Any] = orjson.loads(storage.read_bytes(url))
    return found


def open_index(home: Home, record: IndexRecord, *, vectors: EmbeddingRecord | None = None) -> Opened:
    """Load an index after comparing its digests, and those of the set that it is bound to.

    vectors: the set that the answers are about; None: the one of the record.
    Raises IntegrityError for a changed file of the index, another set, and a set with other files.
    """
    import faiss

    check_binding(home, record, vectors)
    check_files(home, record)
    keys = pq.read_table(pa.BufferReader(storage.read_bytes(index_url(home, record.index_id, "keys.parquet"))))
    url = index_url(home, record.index_id, "index.faiss")
    if storage.is_remote(url):
        index = faiss.deserialize_index(np.frombuffer(storage.read_bytes(url), np.uint8))
    else:
        index = faiss.read_index(os.fspath(storage.absolute(url)))
    if not keys.num_rows == index.ntotal == record.rows or index.d != record.dims:
        raise IntegrityError(
            f"Index {record.name!r} ({record.index_id}) holds {index.ntotal:,} rows and {keys.num_rows:,} keys, its "
            f"record says {record.rows:,}. Its answers would name wrong scenes; build it again."
        )
    return Opened(record=record, index=ann.with_parameters(index, record.parameters), keys=keys)


def check_binding(home: Home, record: IndexRecord, vectors: EmbeddingRecord | None = None) -> None:
    """Raises IntegrityError unless the index was built from this set (None: the published one) with these files."""
    built = f"Index {record.name!r} was built from embedding set {record.set_name!r} ({record.embedding_id})"
    if vectors is None:
        try:
            vectors = embeddings.read_record(home, record.embedding_id)
        except InputError as error:
            raise IntegrityError(
                f"{built}, which is no longer there. Embed it again, or remove {index_url(home, record.index_id)}."
            ) from error
    if vectors.embedding_id != record.embedding_id:
        raise IntegrityError(
            f"{built}, not from {vectors.name!r} ({vectors.embedding_id}). "
            "Its places would name wrong scenes; build one for that set."
        )
    if {file.path: file.sha256 for file in vectors.files} != dict(record.set_files):
        raise IntegrityError(
            f"The files of embedding set {vectors.name!r} ({vectors.embedding_id}) are not those that index "
            f"{record.name!r} was built from. Build the index again."
        )


def check_files(home: Home, record: IndexRecord) -> None:
    """Raises IntegrityError for the first file of the index whose size or sha256 is not that of the record."""
    for name in sorted(record.files):
        url = index_url(home, record.index_id, name)
        _check_file(record, name, storage.digest(url) if storage.exists(url) else None)


def _check_file(record: IndexRecord, name: str, found: storage.FileRecord | None) -> None:
    expected = record.files[name]
    if found is None or dataclasses.asdict(found) != dict(expected):
        what = "is missing" if found is None else f"has {found.bytes:,} bytes and sha256 {found.sha256[:12]}"
        raise IntegrityError(
            f"File {name} of index {record.name!r} ({record.index_id}) {what}; its record says "
            f"{expected['bytes']:,} and {expected['sha256'][:12]}. Its answers could name wrong scenes; "
            "build the index again."
        )


def _json(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
