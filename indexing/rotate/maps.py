"""Maps on disk: HOME/maps/<map_id>/, written file by file and published by its record.

Invariants: record.json is written last and is the publication; it holds the digest of every other file, and a file with
another digest is refused.

    map.safetensors     means and weights; the control fitted on shuffled pairs under `shuffled.`
    fit_keys.parquet    scene_key of every fit pair, which may never be scored with this map
    picks.parquet       what each scored query picked, for the report; see PICKS. Other scored sets give another id
    record.json         a MapRecord
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors
import safetensors.numpy

from indexing.rotate.rotation import FittedMap, MapConfig
from indexing.sets.joins import Keys
from infra import storage
from infra.errors import InputError, IntegrityError
from infra.home import Home

FORMAT: Final = "goodviews-map-1"
RECORD: Final = "record.json"
WEIGHTS, FIT_KEYS, PICKS_FILE = "map.safetensors", "fit_keys.parquet", "picks.parquet"

PICKS: Final = pa.schema(
    [
        pa.field("protocol", pa.large_string(), nullable=False),
        pa.field("direction", pa.large_string(), nullable=False),
        pa.field("scene_key", pa.large_string(), nullable=False),
        pa.field("item", pa.int64()),
        pa.field("picked_scene_key", pa.large_string(), nullable=False),
        pa.field("picked_item", pa.int64()),
        pa.field("rank", pa.int64(), nullable=False),
        pa.field("score", pa.float32(), nullable=False),
        pa.field("ties", pa.int64(), nullable=False),
    ]
)
"""One row a query. item: caption or frame, null where several were averaged. rank: of the right row, 1 is first, ties
against it. score: cosine of the pick. ties: number of wrong rows with the score of the right one."""


@dataclass(frozen=True, kw_only=True)
class MapRecord:
    """Record of a map: between which models it was fitted, on which pairs, and how."""

    map_id: str
    kind: str
    config: Mapping[str, Any]
    left: Mapping[str, Any]
    "Name, embedding_id, model, observation, layer, pooling, dims and space (digests) of the fit set that is mapped."
    right: Mapping[str, Any]
    "The same of the space it is mapped into."
    dataset: str | None
    version: str | None
    split: str | None
    pairs: int
    rule: str
    facts: Mapping[str, float]
    code_version: str
    created_at: float
    files: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StoredMap:
    """A map read back. shuffled: the control of the same kind that was fitted on shuffled pairs."""

    record: MapRecord
    fitted: FittedMap
    shuffled: FittedMap
    fit_keys: frozenset[str]


def map_url(home: Home, map_id: str, *names: str) -> str:
    """URL below HOME/maps/<map_id>."""
    return storage.join(home.url, "maps", map_id, *names)


def map_id_of(
    left: Mapping[str, Any], right: Mapping[str, Any], config: MapConfig, fit_keys: Keys, rule: str, scored: str
) -> str:
    """16 hex digits of the sha256 of all that decides a map. rule: of the fit sets. scored: digest of the scored."""
    content = {
        "left": dict(left),
        "right": dict(right),
        "config": dataclasses.asdict(config),
        "fit_keys": hashlib.sha256("\n".join(sorted(fit_keys)).encode()).hexdigest(),
        "rule": rule,
        "scored": scored,
    }
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def save_map(
    home: Home, record: MapRecord, fitted: FittedMap, shuffled: FittedMap, fit_keys: Keys, picks: pa.Table
) -> MapRecord:
    """Publish a map, and return its record with the files."""
    tensors = {**_tensors(fitted, ""), **_tensors(shuffled, "shuffled.")}
    keys = pa.table({"scene_key": pa.array(sorted(fit_keys), pa.large_string())})
    contents = {
        WEIGHTS: safetensors.numpy.save(tensors),
        FIT_KEYS: _parquet(keys),
        PICKS_FILE: _parquet(picks.cast(PICKS)),
    }
    files = {
        name: dataclasses.asdict(storage.publish(map_url(home, record.map_id, name), data))
        for name, data in contents.items()
    }
    record = dataclasses.replace(record, files=files)
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    whole = {"format": FORMAT, **dataclasses.asdict(record)}
    storage.publish(map_url(home, record.map_id, RECORD), orjson.dumps(whole, option=options))
    return record


def read_map_record(home: Home, map_id: str) -> MapRecord:
    """Raises InputError when there is no such map, IntegrityError when this release cannot read its record."""
    url = map_url(home, map_id, RECORD)
    # An id of letters and digits cannot lead out of the folder.
    if not map_id.isalnum() or not storage.exists(url):
        names = storage.list_names(storage.join(home.url, "maps"))
        known = [name for name in names if name.isalnum() and storage.exists(map_url(home, name, RECORD))]
        hint = f"There are {', '.join(known[-10:])}." if known else "There is none yet; `goodviews rotate` saves one."
        raise InputError(f"There is no map {map_id!r} below {storage.join(home.url, 'maps')}. {hint}")
    try:
        values = orjson.loads(storage.read_bytes(url))
        if values.pop("format") != FORMAT:
            raise ValueError("another format")
        return MapRecord(**values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{url} is not the record of a map that this release reads ({error}). "
            "Remove the folder and rerun `goodviews rotate`."
        ) from error


def load_map(home: Home, map_id: str) -> StoredMap:
    """A map with its control. Raises InputError when there is none, IntegrityError when a file was changed."""
    record = read_map_record(home, map_id)
    data = {name: _verified(home, record, name) for name in (WEIGHTS, FIT_KEYS)}
    try:
        tensors = safetensors.numpy.load(data[WEIGHTS])
        keys = pq.read_table(pa.BufferReader(data[FIT_KEYS]))["scene_key"].to_pylist()
        config = MapConfig(**record.config)
        fitted = _fitted(config, tensors, "", record.facts)
        shuffled = _fitted(config, tensors, "shuffled.", {})
    except (safetensors.SafetensorError, pa.ArrowInvalid, KeyError, TypeError) as error:
        raise IntegrityError(
            f"Map {map_id} cannot be read ({error}). Remove {map_url(home, map_id)} and rerun `goodviews rotate`."
        ) from error
    return StoredMap(record=record, fitted=fitted, shuffled=shuffled, fit_keys=frozenset(keys))


def _verified(home: Home, record: MapRecord, name: str) -> bytes:
    data = storage.read_bytes(map_url(home, record.map_id, name))
    if hashlib.sha256(data).hexdigest() != record.files[name]["sha256"]:
        raise IntegrityError(
            f"File {name} of map {record.map_id} has another sha256 than its record says, so it would map wrongly. "
            f"Remove {map_url(home, record.map_id)} and rerun `goodviews rotate`."
        )
    return data


def _tensors(fitted: FittedMap, prefix: str) -> dict[str, np.ndarray[Any, Any]]:
    named = {"x_mean": fitted.x_mean_D, "y_mean": fitted.y_mean_E, **fitted.weights}
    return {prefix + name: np.ascontiguousarray(values) for name, values in named.items()}


def _fitted(
    config: MapConfig, tensors: Mapping[str, np.ndarray[Any, Any]], prefix: str, facts: Mapping[str, float]
) -> FittedMap:
    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    # Without a prefix `own` holds the shuffled control too, whose names have a dot.
    weights = {name: t for name, t in own.items() if name not in ("x_mean", "y_mean") and "." not in name}
    return FittedMap(config=config, x_mean_D=own["x_mean"], y_mean_E=own["y_mean"], weights=weights, facts=facts)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue().to_pybytes())
