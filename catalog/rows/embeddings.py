"""Embedding sets: vectors of one model for one split, as files and as a row of the catalog.

Invariants: the manifest is published last, and publishes the set; the rows of a set have one canonical order, sorted by
(scene_key, item) over all files; a key occurs once.

    HOME/embeddings/<embedding_id>/vectors/00000.parquet ...   scene_key, item, layer_<n> ...; sorted within the file
    HOME/embeddings/<embedding_id>/manifest.json               the EmbeddingRecord

Legend: N rows of the set, D dims.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from catalog.lake.lake import Lake
from catalog.lake.transaction import commit_rows
from infra import storage
from infra.errors import InputError, IntegrityError
from infra.home import Home

_log = logging.getLogger(__name__)

FORMAT: Final = "goodviews-embedding-1"
OBSERVATIONS: Final = ("captions", "images", "scenes")
DTYPES: Final = {"float16": pa.float16(), "float32": pa.float32()}
MANIFEST: Final = "manifest.json"
ID_PATTERN: Final = re.compile(r"[0-9a-f]{16}")
PREFIX_DIGITS: Final = 4
"Shortest beginning of an id that is taken for one."
GROUP_BYTES: Final = 128 << 20
KEYS: Final = pa.schema(
    [pa.field("scene_key", pa.large_string(), nullable=False), pa.field("item", pa.int64(), nullable=False)]
)
"""What names a row. item: caption index of captions, frame of images (0 when there is none), 0 of scenes."""

Vectors = NDArray[np.float16] | NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class EmbeddingFile:
    """One parquet file; `path` is relative to the folder of the set."""

    path: str
    bytes: int
    sha256: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class EmbeddingRecord:
    """What a set is. `embedding_id` is a digest of what decides the vectors; `name` is what people call it.

    observation: captions, images or scenes. averaging: how the vectors of a scene's captions became one, else `none`.
    samples, tokens: what the model was trained on, where that is known. created_at: seconds since the epoch.
    """

    embedding_id: str
    name: str
    model: str
    run_id: str | None
    observation: str
    dataset: str | None
    version: str | None
    split: str | None
    roles: tuple[str, ...]
    "Roles of the captions that were embedded; empty for all, and for images."
    layers: tuple[int, ...]
    "Ascending; 0 is what the first block reads, and the last one is the default of `read_layer`."
    pooling: str
    averaging: str
    max_length: int | None
    rows: int
    dims: int
    dtype: str
    samples: int | None
    tokens: int | None
    config: Mapping[str, Any]
    url: str
    snapshot_id: int | None
    dataset_versions: Mapping[str, str]
    code_version: str
    created_at: float
    files: tuple[EmbeddingFile, ...] = ()

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, indented for people."""
        options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        return orjson.dumps({"format": FORMAT, **dataclasses.asdict(self)}, option=options)


def set_url(home: Home, embedding_id: str, *names: str) -> str:
    """URL below HOME/embeddings/<embedding_id>."""
    return storage.join(home.url, "embeddings", embedding_id, *names)


def embedding_id_of(content: Mapping[str, Any]) -> str:
    """16 hex digits of the sha256 of `content` as canonical JSON."""
    return hashlib.sha256(orjson.dumps(dict(content), option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def layer_column(layer: int) -> str:
    """Name of the column of a layer."""
    return f"layer_{layer}"


# --- writing ------------------------------------------------------------------------------------------------------


def publish_vectors(
    home: Home, embedding_id: str, number: int, keys: pa.Table, layers: Mapping[int, Vectors]
) -> EmbeddingFile:
    """Publish file `number` of a set, sorted by (scene_key, item); the same rows give the same bytes.

    keys: columns of `KEYS`, N rows in any order. layers: number of the layer -> vectors (N, D) in the same order, of
    one dtype. Raises InputError for a repeated key, and for vectors that are not finite, whose distances mean nothing.
    """
    keys = keys.select(KEYS.names).cast(KEYS)
    order = pc.sort_indices(keys, sort_keys=[("scene_key", "ascending"), ("item", "ascending")])
    keys = keys.take(order).combine_chunks()
    _refuse_repeats(keys)
    table, places = keys, order.to_numpy()
    for layer in sorted(layers):
        vectors = layers[layer]
        _refuse_not_finite(vectors, layer, keys, places)
        flat = pa.array(np.ascontiguousarray(vectors[places]).reshape(-1))
        column = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        field = pa.field(layer_column(layer), pa.list_(flat.type, vectors.shape[1]), nullable=False)
        table = table.append_column(field, column)
    sink = pa.BufferOutputStream()
    group_rows = max(1, GROUP_BYTES * keys.num_rows // max(1, table.nbytes))
    # Vectors do not compress (zstd takes 8 % off float16 for ten times the time) and have no useful dictionary.
    pq.write_table(
        table, sink, row_group_size=group_rows, compression="none", use_dictionary=False, write_statistics=KEYS.names
    )
    path = f"vectors/{number:05d}.parquet"
    record = storage.publish(set_url(home, embedding_id, path), [sink.getvalue()])
    return EmbeddingFile(path=path, bytes=record.bytes, sha256=record.sha256, rows=keys.num_rows)


def publish_set(home: Home, record: EmbeddingRecord) -> EmbeddingRecord:
    """Check the files that `record` names, publish its manifest, write its row; returns the record.

    A set of the same id is replaced; its vectors are the same. Raises InputError when a key stands in two files,
    IntegrityError when a file is not what the record says.
    """
    _refuse_repeats(read_keys(home, record))
    for file in record.files:
        _check_columns(home, record, file)
    storage.publish(set_url(home, record.embedding_id, MANIFEST), record.to_json())
    register(home, record)
    return record


def register(home: Home, record: EmbeddingRecord) -> None:
    """Write the row of a published set into the table `embeddings`, in the place of an earlier one."""

    def write(writer: Lake) -> None:
        insert(writer, record)

    commit_rows(home, f"embedding set {record.embedding_id} {record.name}", write)


def insert(writer: Lake, record: EmbeddingRecord) -> None:
    """Write the row in the open transaction."""
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "files"}
    writer.connection.execute("DELETE FROM main.embeddings WHERE embedding_id = ?", [record.embedding_id])
    writer.insert("main.embeddings", values)


def _refuse_repeats(keys: pa.Table) -> None:
    """keys: sorted."""
    if keys.num_rows < 2:
        return
    name, item = keys["scene_key"].combine_chunks(), keys["item"].combine_chunks()
    same = pc.and_(pc.equal(name[1:], name[:-1]), pc.equal(item[1:], item[:-1]))
    if pc.any(same).as_py():
        place = pc.index(same, True).as_py()
        message = (
            f"Scene {name[place].as_py()!r}, item {item[place].as_py()}, stands twice among the vectors. A key names "
            "one row; leave one of the two out."
        )
        raise InputError(message)


def _refuse_not_finite(vectors: Vectors, layer: int, keys: pa.Table, places: NDArray[np.int64]) -> None:
    """vectors (N, D) in the given order; keys sorted, row i of which is vectors[places[i]]."""
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(broken):
        row = int(np.flatnonzero(places == broken[0])[0])
        key, item = keys["scene_key"][row].as_py(), keys["item"][row].as_py()
        message = (
            f"{len(broken):,} of {len(vectors):,} vectors of layer {layer} are not finite, among them that of scene "
            f"{key!r}, item {item}. The model overflowed, or the file is broken; a wider --dtype may help."
        )
        raise InputError(message)


# --- finding ------------------------------------------------------------------------------------------------------


def set_ids(home: Home, *, published: bool = True) -> list[str]:
    """Ids of the sets that have a manifest, or of all whose folder is there, sorted."""
    names = storage.list_names(storage.join(home.url, "embeddings"))
    ids = [name for name in names if ID_PATTERN.fullmatch(name)]
    return [name for name in ids if not published or storage.exists(set_url(home, name, MANIFEST))]


def list_sets(home: Home) -> list[EmbeddingRecord]:
    """All published sets, oldest first. Raises IntegrityError when a manifest is not one this release reads."""
    found = [read_record(home, name) for name in set_ids(home)]
    return sorted(found, key=lambda record: (record.created_at, record.embedding_id))


def find(home: Home, name_or_id: str) -> EmbeddingRecord:
    """The newest set of that name, else the one whose id begins so (at least four digits).

    Logs a warning when several have the name (for example of several dataset versions). Raises InputError, which names
    similar sets, when there is none or the beginning fits several.
    """
    known = list_sets(home)
    named = [record for record in known if record.name == name_or_id]
    if named:
        if len(named) > 1:
            ids = ", ".join(record.embedding_id for record in reversed(named))
            _log.warning(
                "%d embedding sets are called %r; taken is the newest of %s. An id names one.",
                len(named),
                name_or_id,
                ids,
            )
        return named[-1]
    if len(name_or_id) >= PREFIX_DIGITS:
        begun = [record for record in known if record.embedding_id.startswith(name_or_id)]
        if len(begun) == 1:
            return begun[0]
        if begun:
            ids = ", ".join(f"{record.embedding_id} ({record.name})" for record in begun)
            raise InputError(f"{name_or_id!r} begins the ids of several embedding sets: {ids}. Give more digits.")
    names = sorted({record.name for record in known})
    near = difflib.get_close_matches(name_or_id, names, n=3, cutoff=0.5)
    # Names are long (`model/dataset/split/observation`), so a part of one is a good guess too.
    near += [name for name in names if name_or_id in name and name not in near][:3]
    if not names:
        hint = "There are none yet; `goodviews embed` makes one."
    elif near:
        hint = f"Did you mean {' or '.join(repr(name) for name in near)}?"
    else:
        hint = f"Known are {', '.join(repr(name) for name in names[-10:])}."
    raise InputError(f"There is no embedding set {name_or_id!r} below {storage.join(home.url, 'embeddings')}. {hint}")


def read_record(home: Home, embedding_id: str) -> EmbeddingRecord:
    """Raises InputError for a set that is not published, IntegrityError for a manifest this release cannot read."""
    url = set_url(home, embedding_id, MANIFEST)
    try:
        values = orjson.loads(storage.read_bytes(url))
        if values.pop("format") != FORMAT or values["embedding_id"] != embedding_id:
            raise ValueError("another format, or the manifest of another set")
        for name in ("roles", "layers"):
            values[name] = tuple(values[name])
        values["files"] = tuple(EmbeddingFile(**file) for file in values["files"])
        record = EmbeddingRecord(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = (
            f"{url} is not the manifest of an embedding set that this release reads ({error}). Remove the folder and "
            "rerun `goodviews embed`."
        )
        raise IntegrityError(message) from error
    for file in record.files:
        if not re.fullmatch(r"vectors/[0-9]{5,}\.parquet", file.path):
            raise IntegrityError(f"{url} names the file {file.path!r}, which lies outside its set. Remove the folder.")
    return record


# --- reading ------------------------------------------------------------------------------------------------------


def read_keys(home: Home, record: EmbeddingRecord) -> pa.Table:
    """scene_key, item of all N rows in canonical order. Raises IntegrityError for a changed file."""
    keys = _stored_keys(home, record)
    return keys.take(_canonical_order(keys)).combine_chunks()


def read_layer(home: Home, record: EmbeddingRecord, layer: int | None = None, *, verify: bool = False) -> Vectors:
    """Vectors (N, D) of one layer (None: the last) in canonical order, in the dtype they are stored in.

    verify: compare the sha256 of each file too, not only its size. Raises InputError when the set has no such layer,
    IntegrityError when a file is not what the record says.
    """
    layer = record.layers[-1] if layer is None else layer
    if layer not in record.layers:
        known = ", ".join(str(number) for number in record.layers)
        message = (
            f"Embedding set {record.name!r} holds no layer {layer}; it holds {known}. Embed again with --layers all."
        )
        raise InputError(message)
    vectors_ND: Vectors = np.empty((record.rows, record.dims), np.dtype(record.dtype))
    order = _canonical_order(_stored_keys(home, record)).to_numpy()
    places = np.empty(record.rows, np.int64)
    places[order] = np.arange(record.rows)
    start = 0
    for file in record.files:
        if verify and storage.digest(set_url(home, record.embedding_id, file.path)).sha256 != file.sha256:
            raise _changed(home, record, file, "has another sha256 than its manifest says")
        _check_columns(home, record, file)
        column = _read(home, record, file, [layer_column(layer)]).column(0)
        for chunk in column.chunks:
            values = chunk.flatten().to_numpy(zero_copy_only=False).reshape(-1, record.dims)
            vectors_ND[places[start : start + len(values)]] = values
            start += len(values)
    return vectors_ND


def _stored_keys(home: Home, record: EmbeddingRecord) -> pa.Table:
    """The keys in the order of the files."""
    if record.rows != sum(file.rows for file in record.files):
        rows = sum(file.rows for file in record.files)
        message = (
            f"The manifest of embedding set {record.name!r} counts {record.rows:,} rows, its files {rows:,}. Remove "
            f"{set_url(home, record.embedding_id)} and rerun `goodviews embed`."
        )
        raise IntegrityError(message)
    tables = [_read(home, record, file, KEYS.names).cast(KEYS) for file in record.files]
    return pa.concat_tables([KEYS.empty_table(), *tables])


def is_whole(home: Home, record: EmbeddingRecord, file: EmbeddingFile) -> bool:
    """Whether the file is there and has the sha256 that its manifest says."""
    url = set_url(home, record.embedding_id, file.path)
    return storage.exists(url) and storage.digest(url).sha256 == file.sha256


def _canonical_order(keys: pa.Table) -> pa.UInt64Array:
    return pc.sort_indices(keys, sort_keys=[("scene_key", "ascending"), ("item", "ascending")])


def _read(home: Home, record: EmbeddingRecord, file: EmbeddingFile, columns: Sequence[str]) -> pa.Table:
    url = set_url(home, record.embedding_id, file.path)
    if not storage.exists(url):
        raise _changed(home, record, file, "is missing")
    if (size := storage.size(url)) != file.bytes:
        raise _changed(home, record, file, f"has {size:,} bytes, its manifest says {file.bytes:,}")
    try:
        with storage.open_read(url) as opened:
            table = pq.ParquetFile(opened).read(columns=list(columns))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _changed(home, record, file, f"is no parquet file ({error})") from error
    if table.num_rows != file.rows or table.column_names != list(columns):
        found = f"{table.num_rows:,} rows of {', '.join(table.column_names)}"
        raise _changed(home, record, file, f"holds {found}, its manifest says {file.rows:,} of {', '.join(columns)}")
    return table


def _check_columns(home: Home, record: EmbeddingRecord, file: EmbeddingFile) -> None:
    with storage.open_read(set_url(home, record.embedding_id, file.path)) as opened:
        found = pq.read_schema(opened)
    wanted = pa.list_(DTYPES[record.dtype], record.dims)
    for layer in record.layers:
        place = found.get_field_index(layer_column(layer))
        kind = found.field(place).type if place >= 0 else None
        if kind is None or (kind.value_type, kind.list_size) != (wanted.value_type, wanted.list_size):
            raise _changed(
                home,
                record,
                file,
                f"has {kind} in {layer_column(layer)}, its manifest says {record.dims} x {record.dtype}",
            )


def _changed(home: Home, record: EmbeddingRecord, file: EmbeddingFile, what: str) -> IntegrityError:
    folder = set_url(home, record.embedding_id)
    message = (
        f"File {file.path} of embedding set {record.name!r} ({record.embedding_id}) {what}. Scores of it would be "
        f"wrong; remove {folder} and rerun `goodviews embed`."
    )
    return IntegrityError(message)
