"""Arrow tables of a shard (scenes, rejects, true states) and their canonical digest.

Invariant: every text and every picture is in exactly one of the two tables scenes (kept) and rejects. The schemas are
in `catalog.schema`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from catalog import schema
from pipelines.arrays import Ints, column, is_none, offsets_of, run_starts
from pipelines.ingest.group import Scenes


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The columns that are equal in all rows of a shard."""

    dataset: str
    version: str
    split: str
    shard: int


@dataclass(frozen=True)
class Kept:
    """The scenes that keep a caption. rows (S',): their places in `Scenes.keys`.

    texts (T',): rows of the kept texts; offsets (S'+1,): scene i owns kept texts offsets[i] to offsets[i + 1].
    first_record (S',): the first record of each scene.
    """

    keys: pa.LargeStringArray
    rows: Ints
    texts: Ints
    offsets: Ints
    first_record: Ints

    def places(self, scenes: Scenes) -> Ints:
        """Place in `rows` of the scene of each record (R,), -1 if the scene is not kept or the record has no id."""
        place = np.full(len(scenes.keys) + 1, -1, np.int64)  # the last entry is that of scene -1
        place[self.rows] = np.arange(len(self.rows))
        return place[scenes.record_scene]


def keep(scenes: Scenes) -> Kept:
    """Scenes with at least one caption that was not rejected."""
    texts = np.flatnonzero(is_none(scenes.reason))
    scene = scenes.text_scene[texts]
    starts = run_starts(scene)
    rows = scene[starts]
    record_starts = run_starts(scenes.record_scene)
    record_scene = scenes.record_scene[record_starts]
    first = record_starts[np.searchsorted(record_scene[record_scene >= 0], rows)]
    return Kept(scenes.keys.take(pa.array(rows)), rows, texts, np.append(starts, len(texts)), first)


def scenes_table(scenes: Scenes, kept: Kept, origin: Origin) -> pa.Table:
    """Rows of `schema.SCENES`, sorted by scene_key."""
    columns = {
        "scene_key": kept.keys,
        "captions": _captions(scenes, kept),
        "images": _images(scenes, kept),
        **_addresses(scenes, kept.first_record),
    }
    return _table(schema.SCENES, origin, columns)


def _captions(scenes: Scenes, kept: Kept) -> pa.Array:
    rows = pa.array(kept.texts)
    children = [
        pa.array(scenes.text_index[kept.texts]),
        _plain(column(scenes.texts, "role").take(rows)),
        scenes.cleaned.take(rows),
        pa.array(scenes.repaired[kept.texts]),
    ]
    return _lists(kept.offsets, children, "captions")


def _images(scenes: Scenes, kept: Kept) -> pa.Array:
    """One entry for each distinct (uri, sha256, frame) of a scene, in the order of its records."""
    records = scenes.records
    uri, sha, frame = (column(records, name) for name in ("image_uri", "image_sha256", "frame"))
    present = np.asarray(pc.or_(pc.or_(uri.is_valid(), sha.is_valid()), frame.is_valid()))
    scene = kept.places(scenes)
    rows = np.flatnonzero(present & (scene >= 0))
    counts = np.bincount(scene[rows], minlength=len(kept.rows))
    if len(rows) and counts.max() > 1:
        # Only scenes with several entries can hold repeats, and they are few.
        several = counts[scene[rows]] > 1
        repeated = rows[several]
        first = repeated[_first_of_each(records, repeated, scene[repeated])]
        rows = np.sort(np.concatenate([rows[~several], first]))
        counts = np.bincount(scene[rows], minlength=len(kept.rows))
    taken = pa.array(rows)
    children = [column(records, name).take(taken) for name in ("image_uri", "image_sha256", "width", "height", "frame")]
    offsets = np.zeros(len(kept.rows) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return _lists(offsets, children, "images")


def _first_of_each(records: pa.Table, rows: Ints, scene: Ints) -> Ints:
    """Places in `rows` of the first record of each distinct (scene, uri, sha256, frame), ascending."""
    taken = pa.array(rows)
    identity = scene.astype(np.int64)
    for name in ("image_uri", "image_sha256", "frame"):
        codes = column(records, name).take(taken).dictionary_encode(null_encoding="encode").indices
        # One column after another: (identity so far, code) becomes the next identity, a dense integer.
        pairs = np.stack([identity, np.asarray(codes, np.int64)])
        _, identity = np.unique(pairs, axis=1, return_inverse=True)
        identity = identity.reshape(-1).astype(np.int64)
    _, first = np.unique(identity, return_index=True)
    return np.sort(first)


def image_rows(scenes: Scenes, kept: Kept) -> tuple[Ints, pa.LargeStringArray, pa.LargeBinaryArray]:
    """Images that the source carries, one for each scene and frame: place in `kept`, suffix (`.f003.jpg`), bytes."""
    image, frame = column(scenes.records, "image"), column(scenes.records, "frame")
    owner = kept.places(scenes)
    rows = np.flatnonzero(np.asarray(image.is_valid()) & (owner >= 0))
    frames = np.asarray(frame.fill_null(-1), np.int64)
    rows = rows[np.lexsort((rows, frames[rows], owner[rows]))]
    number = frames[rows]
    # Owner and frame as one number, so that runs of equal pairs are runs of equal numbers.
    pairs = owner[rows] * (int(number.max(initial=0)) + 2) + number
    rows, number = rows[run_starts(pairs)], number[run_starts(pairs)]
    suffixes = [".jpg" if n < 0 else f".f{n:03d}.jpg" for n in number.tolist()]
    return owner[rows], pa.array(suffixes, pa.large_string()), image.take(pa.array(rows))


def rejects_table(scenes: Scenes, origin: Origin) -> pa.Table:
    """Rows of `schema.REJECTS`, in canonical order of their texts."""
    rows = np.flatnonzero(~is_none(scenes.reason))
    taken, scene = pa.array(rows), scenes.text_scene[rows]
    raw = column(scenes.texts, "text").take(taken).to_pylist()
    texts, bad_bytes = zip(*map(_readable, raw), strict=True) if raw else ((), ())
    columns = {
        "reason": pa.array(scenes.reason[rows].tolist(), pa.large_string()),
        "detail": pa.array([scenes.detail.get(row) for row in rows.tolist()], pa.large_string()),
        "scene_key": scenes.keys.take(pa.array(np.where(scene < 0, 0, scene), mask=scene < 0)),
        "field": _plain(column(scenes.texts, "field").take(taken)),
        "text": pa.array(texts, pa.large_string()),
        "raw": pa.array(bad_bytes, pa.large_binary()),
        **_addresses(scenes, scenes.text_record[rows]),
    }
    return _table(schema.REJECTS, origin, columns)


@dataclass(frozen=True)
class Pictures:
    """The fate of the pictures. read, kept: counts. rows (P,): records whose picture is rejected, each with its reason.

    read is None when no record says where its picture was: the source carries none, or draws its own.
    """

    read: int | None
    kept: int
    rows: Ints
    reasons: list[str]
    details: list[str | None]


def pictures_of(scenes: Scenes, kept: Kept) -> Pictures:
    """A picture is kept when it is whole and its scene is kept; else it is a reject."""
    read = np.flatnonzero(np.asarray(column(scenes.records, "image_field").is_valid()))
    if not read.size:
        return Pictures(None, 0, read, [], [])
    fault, place = column(scenes.records, "image_fault"), kept.places(scenes)
    is_whole = ~np.asarray(fault.is_valid())[read]
    is_kept = is_whole & (place[read] >= 0)
    rows = read[~is_kept]
    reasons: list[str] = []
    details: list[str | None] = []
    for row, found in zip(rows.tolist(), fault.take(pa.array(rows)).to_pylist(), strict=True):
        lacking = "missing_id" if scenes.record_scene[row] < 0 else "image_without_caption"
        reason, _, detail = (found or lacking).partition(": ")
        reasons.append(reason)
        details.append(detail or None)
    return Pictures(len(read), int(np.count_nonzero(is_kept)), rows, reasons, details)


def rejected_pictures(scenes: Scenes, pictures: Pictures, origin: Origin) -> pa.Table:
    """Rows of `schema.REJECTS` of the pictures, in canonical order of their records, without the bytes."""
    taken, scene = pa.array(pictures.rows), scenes.record_scene[pictures.rows]
    columns = {
        "reason": pa.array(pictures.reasons, pa.large_string()),
        "detail": pa.array(pictures.details, pa.large_string()),
        "scene_key": scenes.keys.take(pa.array(np.where(scene < 0, 0, scene), mask=scene < 0)),
        "field": _plain(column(scenes.records, "image_field").take(taken)),
        "text": pa.nulls(len(taken), pa.large_string()),
        "raw": pa.nulls(len(taken), pa.large_binary()),
        **_addresses(scenes, pictures.rows),
    }
    return _table(schema.REJECTS, origin, columns)


def _readable(value: bytes | None) -> tuple[str | None, bytes | None]:
    """The text, and its bytes where they are not UTF-8 and the text shows them as escapes."""
    if value is None:
        return None, None
    try:
        return value.decode(), None
    except UnicodeDecodeError:
        return value.decode("utf-8", "backslashreplace"), value


def states_table(scenes: Scenes, kept: Kept, origin: Origin) -> pa.Table:
    """Rows of `schema.STATES` for the kept scenes whose source knows their state."""
    state = column(scenes.records, "state").take(pa.array(kept.first_record))
    known = state.is_valid()
    columns = {"scene_key": kept.keys.filter(known), "state": state.filter(known)}
    return _table(schema.STATES, origin, columns)


# --- canonical digest ---------------------------------------------------------------------------------------------


def rows_digest(table: pa.Table, *, without: tuple[str, ...] = ("version",)) -> str:
    """sha256 (hex) of the rows: equal tables give equal digests under any release of pyarrow.

    Each leaf column adds its path, its validity (one byte for each row), and its lengths (lists and texts) and values
    as little-endian 64-bit integers or bytes. Without `version`, two versions with the same rows have one digest.
    """
    sha = hashlib.sha256()
    for field in table.schema:
        if field.name not in without:
            _digest(sha, field.name, column(table, field.name))
    return sha.hexdigest()


def _digest(sha: hashlib._Hash, path: str, array: pa.Array) -> None:
    sha.update(f"\0{path}:{len(array)}\0".encode())
    valid = np.asarray(array.is_valid()).astype(np.uint8)
    sha.update(valid.tobytes())
    kind = array.type
    if pa.types.is_large_list(kind):
        offsets = np.asarray(array.offsets, np.int64)
        sha.update(np.diff(offsets).astype("<i8").tobytes())
        _digest(sha, path + "[]", array.values[int(offsets[0]) : int(offsets[-1])])
    elif pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            _digest(sha, f"{path}.{kind.field(i).name}", array.field(i))
    elif pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        filled = array.fill_null("") if array.null_count else array
        offsets = offsets_of(filled)
        sha.update(np.diff(offsets).astype("<i8").tobytes())
        if len(filled) and offsets[-1] > offsets[0]:
            sha.update(filled.buffers()[2].slice(int(offsets[0]), int(offsets[-1] - offsets[0])))
    else:
        filled = array.fill_null(False if pa.types.is_boolean(kind) else 0) if array.null_count else array
        sha.update(np.asarray(filled).astype("<i8").tobytes())


# --- columns ------------------------------------------------------------------------------------------------------


def _table(kind: pa.Schema, origin: Origin, columns: Mapping[str, pa.Array]) -> pa.Table:
    """Columns in the order of the schema; those that are not given are equal in all rows and come from the origin."""
    n = len(columns["scene_key"])
    constant = {f.name: pa.scalar(getattr(origin, f.name), f.type) for f in kind if f.name not in columns}
    arrays = [columns[name] if name in columns else pa.repeat(constant[name], n) for name in kind.names]
    return pa.Table.from_arrays(arrays, schema=kind)


def _addresses(scenes: Scenes, rows: Ints) -> dict[str, pa.Array]:
    """Id and place in the input of these records."""
    taken = pa.array(rows)
    columns = {name: column(scenes.records, name).take(taken) for name in ("source_id", "source_uri", "source_row")}
    return {**columns, "source_uri": _plain(columns["source_uri"])}


def _plain(array: pa.Array) -> pa.LargeStringArray:
    """A dictionary array as large_string."""
    return array.dictionary.cast(pa.large_string()).take(array.indices)


def _lists(offsets: Ints, children: list[pa.Array], field: str) -> pa.Array:
    """large_list<struct> of exactly the declared type, nested nullability included."""
    kind = schema.SCENES.field(field).type
    values = pa.StructArray.from_arrays(children, fields=list(kind.value_type))
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=kind)
