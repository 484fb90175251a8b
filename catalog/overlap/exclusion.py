"""Keys of the scenes to leave out of a dataset because another is used for evaluation.

Invariant: the keys are a function of the parts' versions and of `by`. Values without information (an id that means
nothing outside its dataset, an empty normal form, the digest of no bytes) give no key. Image bytes that stand under
many scenes still give a key: a set with one row a caption has five scenes a picture, and excluding a placeholder is
harmless.

  id            the identity of the scene (`catalog.overlap.identity`)
  sha256        bytes of an image
  caption_set   the whole set of captions in their normal forms, of two or more distinct ones
  captions      any caption in its normal form
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from catalog.lake import database, lake
from catalog.lake.lake import Lake
from catalog.overlap.comparison import MEMORY_LIMIT
from catalog.overlap.identity import KEY_BYTES, NO_BYTES, sql_caption_set, sql_identity, sql_key
from catalog.overlap.parts import WHERE, Part, resolve, source_of
from catalog.wording import PYTHON_FUNCTION, normal_form, sql_normal_form
from infra.errors import StorageError
from infra.home import Home

BY: Final = ("id", "sha256", "caption_set", "captions")

RULES: Final = "1"
"Part of every version with exclusions: raise it when a change of identity, normal form or this module changes a key."

BATCH_KEYS: Final = 1 << 16


def resolve_parts(home: Home, texts: Sequence[str]) -> tuple[Part, ...]:
    """The parts that the names mean now, each once, by name. Raises UsageError, InputError."""
    with lake.reading(home) as reader:
        parts = {part.name: part for part in (resolve(reader, text) for text in texts)}
    return tuple(parts[name] for name in sorted(parts))


def keys_of(home: Home, parts: Sequence[Part], by: Sequence[str]) -> Iterator[NDArray[np.uint8]]:
    """Blocks (n, 16 + 2) of all keys, ascending; the last two bytes number the first part with the key, little-endian.

    Raises StorageError when the catalog cannot be read.
    """
    queries: list[str] = []
    values: list[object] = []
    with lake.reading(home) as reader, lake.bounded(reader.connection, memory_limit=MEMORY_LIMIT):
        for number, part in enumerate(parts):
            for kind in by:
                queries.append(f"SELECT key, {number} AS part FROM ({_query(reader, part, kind)})")
                values += part.values
        query = f"SELECT key, min(part) AS part FROM ({' UNION ALL '.join(queries)}) GROUP BY key ORDER BY key"
        try:
            reader.connection.create_function(PYTHON_FUNCTION, normal_form, ["VARCHAR"], "VARCHAR")
            for batch in reader.connection.execute(query, values).to_arrow_reader(BATCH_KEYS):
                yield _block(batch)
        except lake.DatabaseError as error:
            names = ", ".join(part.name for part in parts)
            raise StorageError(f"The catalog could not list {names}: {database.scrub(home, str(error))}.") from error


def mute_parts(home: Home, parts: Sequence[Part], by: Sequence[str]) -> list[str]:
    """Names of the parts without any key, so that none of their scenes can be recognised by these kinds."""
    with lake.reading(home) as reader:
        try:
            reader.connection.create_function(PYTHON_FUNCTION, normal_form, ["VARCHAR"], "VARCHAR")
            return [part.name for part in parts if not any(_has_key(reader, part, kind) for kind in by)]
        except lake.DatabaseError as error:
            raise StorageError(f"The catalog could not look for keys: {database.scrub(home, str(error))}.") from error


def _has_key(reader: Lake, part: Part, kind: str) -> bool:
    return bool(reader.rows(f"SELECT 1 FROM ({_query(reader, part, kind)}) LIMIT 1", part.values))


def _query(reader: Lake, part: Part, kind: str) -> str:
    """SELECT of the keys of one kind, some of them repeatedly, with the values of `WHERE` to be bound once."""
    if kind == "id":
        named = f"SELECT {sql_identity(source_of(reader, part), 's')} AS name FROM versions.scenes AS s WHERE {WHERE}"
        return f"SELECT {sql_key(kind, 'name')} AS key FROM ({named}) WHERE name IS NOT NULL"
    if kind == "sha256":
        return f"""SELECT {sql_key(kind, "sha")} AS key FROM (SELECT lower(i.sha256) AS sha FROM (
                SELECT unnest(s.images) AS i FROM versions.scenes AS s WHERE {WHERE}))
            WHERE sha NOT IN ('', '{NO_BYTES}')"""
    forms = f"""SELECT scene_key, {sql_normal_form('c."text"')} AS form FROM (
        SELECT s.scene_key, unnest(s.captions) AS c FROM versions.scenes AS s WHERE {WHERE})"""
    if kind == "captions":
        return f"SELECT {sql_key(kind, 'form')} AS key FROM ({forms}) WHERE form <> ''"
    distinct = f"SELECT DISTINCT scene_key, form FROM ({forms}) WHERE form <> ''"
    sets = f"SELECT {sql_caption_set('form')} AS value FROM ({distinct}) GROUP BY scene_key"
    return f"SELECT {sql_key(kind, 'value')} AS key FROM ({sets}) WHERE value IS NOT NULL"


def _block(batch: pa.RecordBatch) -> NDArray[np.uint8]:
    block = np.empty((batch.num_rows, KEY_BYTES + 2), np.uint8)
    keys = batch.column(0).cast(pa.binary(KEY_BYTES))
    block[:, :KEY_BYTES] = np.frombuffer(b"".join(keys.to_pylist()), np.uint8).reshape(-1, KEY_BYTES)
    block[:, KEY_BYTES:] = np.asarray(batch.column(1), "<u2").view(np.uint8).reshape(-1, 2)
    return block


def scenes_left_out(home: Home, dataset: str, version: str) -> dict[str, int]:
    """Number of scenes of a version that were left out, by the detail of their rejects (`multi30k@.../test by id`)."""
    with lake.reading(home) as reader:
        query = """SELECT detail, count(DISTINCT scene_key) FROM versions.rejects
            WHERE dataset = ? AND version = ? AND reason = 'excluded' GROUP BY detail ORDER BY detail"""
        return {str(detail): int(count) for detail, count in reader.rows(query, [dataset, version])}
