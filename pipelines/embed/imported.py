"""Publish vectors from an npz, npy or parquet file as an embedding set.

Invariant: the set has the rows, the keys and the dtype (float64 becomes float32) of the file, or nothing is published:
no row is dropped, no pickle is read. N rows, D dims.

    .npz      arrays `keys` (N,), `vectors` (N, D), optional `items` (N,)
    .npy      vectors (N, D), with --keys FILE: one key a line, a tab and the item behind it where there are items
    .parquet  scene_key (or key), optional item, and `vector` or any of `layer_<n>`: lists of D floats
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from catalog.lake import lake
from catalog.rows import embeddings
from catalog.rows.embeddings import EmbeddingFile, EmbeddingRecord
from catalog.versions.current import find_version
from infra import storage
from infra.errors import InputError, UsageError
from infra.home import Home
from infra.version import code_version
from pipelines.embed.plan import published_set

ROWS_A_FILE: Final = 1 << 17


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Options of one import. keys: the key file of an npy. Without a dataset the keys are taken as they are.

    model: a label of the model that made the vectors; imports of one label share a space, others are not known to.
    """

    file: str
    name: str
    keys: str | None = None
    dataset: str | None = None
    split: str | None = None
    observation: str = "scenes"
    model: str | None = None

    def __post_init__(self) -> None:
        if self.observation not in embeddings.OBSERVATIONS:
            raise UsageError(f"--of is {self.observation!r}; it is one of {', '.join(embeddings.OBSERVATIONS)}.")
        if self.model is not None and not self.model.strip():
            raise UsageError("--model is empty, so it tells no model from another. Give a label, or leave it out.")
        if self.split is not None and self.dataset is None:
            raise UsageError(f"--split {self.split} names a split of no dataset. Name the dataset with --dataset.")
        if (self.keys is not None) != self.file.endswith(".npy"):
            raise UsageError(
                "A .npy file holds no keys: name them with --keys FILE. Other formats hold them; leave --keys out."
            )


@dataclass(frozen=True, kw_only=True)
class VectorTable:
    """The content of a file: N keys, items and, by layer, (N, D) vectors of one dtype."""

    keys: pa.LargeStringArray
    items: NDArray[np.int64]
    layers: Mapping[int, NDArray[Any]]


def import_vectors(config: ImportConfig, home: Home) -> EmbeddingRecord:
    """Read, check and publish; returns the record. The same file and options again change nothing.

    Raises InputError for a file that is not what it should be, ConflictError when it was imported under another name.
    """
    version, snapshot_id, known = _dataset(home, config)
    content = {
        "imported": storage.digest(config.file).sha256,
        "keys": storage.digest(config.keys).sha256 if config.keys else None,
        "dataset": config.dataset,
        "version": version,
        "split": config.split,
        "observation": config.observation,
        **_space(config),
    }
    embedding_id = embeddings.embedding_id_of(content)
    there = published_set(home, embedding_id, name=config.name, subject=f"{config.file} is")
    if there is not None:
        return there
    table = _with_scene_keys(_checked(_read(config), config), known, config)
    some = next(iter(table.layers.values()))
    files = _published(home, embedding_id, table)
    record = EmbeddingRecord(
        embedding_id=embedding_id,
        name=config.name,
        model=f"import:{config.model or config.name}",
        run_id=None,
        observation=config.observation,
        dataset=config.dataset,
        version=version,
        split=config.split,
        roles=(),
        layers=tuple(sorted(table.layers)),
        pooling="as imported",
        averaging="as imported",
        max_length=None,
        rows=len(table.keys),
        dims=some.shape[1],
        dtype=str(some.dtype),
        samples=None,
        tokens=None,
        config={"content": content, "training": None, "file": storage.absolute(config.file)},
        url=embeddings.set_url(home, embedding_id),
        snapshot_id=snapshot_id,
        dataset_versions={config.dataset: version} if config.dataset and version else {},
        code_version=code_version(),
        created_at=time.time(),
        files=tuple(files),
    )
    return embeddings.publish_set(home, record)


def _published(home: Home, embedding_id: str, table: VectorTable) -> list[EmbeddingFile]:
    """The vectors in canonical order, ROWS_A_FILE to a file."""
    keys = pa.table({"scene_key": table.keys, "item": table.items})
    order = pc.sort_indices(keys, sort_keys=[("scene_key", "ascending"), ("item", "ascending")]).to_numpy()
    files = []
    for number, start in enumerate(range(0, len(order), ROWS_A_FILE)):
        rows = order[start : start + ROWS_A_FILE]
        part = {layer: vectors[rows] for layer, vectors in table.layers.items()}
        files.append(embeddings.publish_vectors(home, embedding_id, number, keys.take(pa.array(rows)), part))
    return files


def _space(config: ImportConfig) -> dict[str, Any]:
    """The facts by which two sets of one label are found to share a space; `embed` records digests instead."""
    if config.model is None:
        return {}
    return {"weights": f"import:{config.model}", "tokenizer": "", "facts": {"modality": "as imported"}}


# --- formats ------------------------------------------------------------------------------------------------------


def _read(config: ImportConfig) -> VectorTable:
    ending = config.file.rsplit(".", 1)[-1].lower()
    readers = {"npz": _read_npz, "npy": _read_npy, "parquet": _read_parquet}
    if ending not in readers:
        raise UsageError(f"{config.file} ends with none of .npz, .npy, .parquet, the formats that can be imported.")
    try:
        return readers[ending](config)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, pa.ArrowInvalid) as error:
        raise InputError(
            f"{config.file} cannot be read as {ending} ({' '.join(str(error).split())}). Nothing was imported."
        ) from error


def _read_npz(config: ImportConfig) -> VectorTable:
    with storage.open_read(config.file) as file, zipfile.ZipFile(file) as archive:
        names = {name.removesuffix(".npy"): name for name in archive.namelist()}
        if missing := {"keys", "vectors"} - set(names):
            raise InputError(
                f"{config.file} holds the arrays {', '.join(sorted(names))}, but no "
                f"{' and no '.join(sorted(missing))}. Save it with np.savez(file, keys=..., vectors=...)."
            )
        arrays = {}
        for name in ("keys", "vectors", "items"):
            if name in names:
                with archive.open(names[name]) as member:
                    arrays[name] = _array(member)
    keys = _strings(arrays["keys"], config.file)
    return VectorTable(
        keys=keys, items=arrays.get("items", np.zeros(len(keys), np.int64)), layers={0: arrays["vectors"]}
    )


def _read_npy(config: ImportConfig) -> VectorTable:
    with storage.open_read(config.file) as file:
        vectors = _array(file)
    lines = storage.read_bytes(str(config.keys)).decode("utf-8").splitlines()
    pairs = [line.split("\t") for line in lines]
    if wrong := [place for place, pair in enumerate(pairs, 1) if len(pair) > 2 or len(pair) != len(pairs[0])]:
        raise InputError(
            f"Line {wrong[0]} of {config.keys} is {lines[wrong[0] - 1]!r}; each line holds one key, or each line holds "
            "one key, a tab and an item."
        )
    items = [int(pair[1]) if len(pair) == 2 else 0 for pair in pairs]
    return VectorTable(
        keys=pa.array([pair[0] for pair in pairs], pa.large_string()),
        items=np.array(items, np.int64),
        layers={0: vectors},
    )


def _array(file: IO[bytes]) -> NDArray[Any]:
    array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def _strings(keys: NDArray[Any], name: str) -> pa.LargeStringArray:
    if keys.ndim != 1 or keys.dtype.kind not in "US":
        raise InputError(
            f"`keys` of {name} has shape {keys.shape} and dtype {keys.dtype}; keys are a one-dimensional array of "
            "strings. Save them as np.array(list_of_keys)."
        )
    return pa.array([key.decode() if isinstance(key, bytes) else key for key in keys.tolist()], pa.large_string())


def _read_parquet(config: ImportConfig) -> VectorTable:
    with storage.open_read(config.file) as file:
        table = pq.ParquetFile(file).read()
    key = next((name for name in ("scene_key", "key") if name in table.column_names), None)
    numbers = {name: int(name[6:]) for name in table.column_names if name.startswith("layer_") and name[6:].isdigit()}
    columns = numbers or ({"vector": 0} if "vector" in table.column_names else {})
    if key is None or not columns:
        raise InputError(
            f"{config.file} has the columns {', '.join(table.column_names)}; one must be scene_key, and one vector or "
            "layer_0."
        )
    n = table.num_rows
    items = table["item"].to_numpy() if "item" in table.column_names else np.zeros(n, np.int64)
    layers = {number: _lists(table[name], name, config.file) for name, number in columns.items()}
    return VectorTable(keys=table[key].cast(pa.large_string()).combine_chunks(), items=items, layers=layers)


def _lists(column: pa.ChunkedArray, name: str, file: str) -> NDArray[Any]:
    if not hasattr(column.type, "value_type"):
        raise InputError(f"Column {name} of {file} is {column.type}; vectors are lists of floats.")
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(column) and (len(lengths) != 1 or not lengths[0] or column.null_count):
        found = ", ".join(sorted(str(length) for length in lengths)[:5])
        raise InputError(
            f"Column {name} of {file} holds lists of the lengths {found}; all vectors have one length, and none is "
            "null."
        )
    flat = pc.list_flatten(column).combine_chunks()
    if flat.null_count:
        raise InputError(
            f"Column {name} of {file} holds {flat.null_count:,} nulls within its vectors. A vector has no gaps."
        )
    values: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(len(column), -1)


# --- checks -------------------------------------------------------------------------------------------------------


def _checked(table: VectorTable, config: ImportConfig) -> VectorTable:
    n = len(table.keys)
    layers = {}
    for layer, vectors in table.layers.items():
        if vectors.ndim != 2 or len(vectors) != n or 0 in vectors.shape:
            raise InputError(
                f"{config.file} holds {n:,} keys and vectors of shape {vectors.shape}; the shape must be ({n:,}, D), a "
                "row for each key."
            )
        if vectors.dtype.kind != "f":
            raise InputError(
                f"The vectors of {config.file} are {vectors.dtype}; cosines need floating point. Convert them to "
                "float32."
            )
        native = "float16" if vectors.dtype.itemsize == 2 else "float32"
        with np.errstate(over="ignore"):
            layers[layer] = vectors.astype(native, copy=False)
    if len({(v.shape, str(v.dtype)) for v in layers.values()}) > 1:
        raise InputError(f"The layers of {config.file} differ in shape or dtype. Import them one by one.")
    items = table.items
    if items.shape != (n,) or items.dtype.kind not in "iu" or (n and items.min() < 0):
        raise InputError(
            f"The items of {config.file} have shape {items.shape} and dtype {items.dtype}; they must be {n:,} "
            "integers, 0 or more."
        )
    if table.keys.null_count or pc.any(pc.equal(table.keys, "")).as_py():
        raise InputError(f"{config.file} has a row without a key, which could never be joined. Name every row.")
    if config.observation == "scenes" and items.any():
        raise InputError(
            f"{config.file} has items other than 0, but a scene has one vector. Use --of captions or --of images, or "
            "leave items out."
        )
    return VectorTable(keys=table.keys, items=items.astype(np.int64), layers=layers)


def _dataset(home: Home, config: ImportConfig) -> tuple[str | None, int | None, pa.Table | None]:
    """Current version of the dataset, snapshot, and (scene_key, source_id) of its scenes or those of the split."""
    if config.dataset is None:
        return None, None, None
    query = "SELECT scene_key, source_id FROM versions.scenes WHERE dataset = ? AND version = ?"
    query += " AND split = ?" if config.split else ""
    with lake.reading(home) as reader:
        source = find_version(reader, config.dataset)
        values = [config.dataset, source.version, *([config.split] if config.split else [])]
        known = reader.connection.execute(query, values).to_arrow_table()
    if known.num_rows == 0:
        raise InputError(f"{config.dataset} has no scene in the split {config.split!r}.")
    return source.version, source.snapshot_id, known


def _with_scene_keys(table: VectorTable, known: pa.Table | None, config: ImportConfig) -> VectorTable:
    """Each key, or the scene key of which it is the source id. Raises InputError for a key that is neither."""
    if known is None:
        return table
    scene_keys = known["scene_key"].cast(pa.large_string()).combine_chunks()
    source_ids = known["source_id"].cast(pa.large_string()).combine_chunks()
    direct = pc.is_in(table.keys, scene_keys)
    by_source = scene_keys.take(pc.index_in(table.keys, source_ids))
    keys = pc.if_else(direct, table.keys, by_source)
    if keys.null_count:
        lost = table.keys.filter(pc.is_null(keys))
        at = config.dataset if config.split is None else f"the split {config.split} of {config.dataset}"
        raise InputError(
            f"{len(lost):,} of {len(table.keys):,} keys of {config.file} are neither scene keys nor source ids of "
            f"{at}, for example {lost[0].as_py()!r}. Rows that name no scene could never be joined."
        )
    return VectorTable(keys=keys, items=table.items, layers=table.layers)
