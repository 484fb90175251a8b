"""Shards of img2dataset's output: which files belong together, their metadata, and counts that must agree.

Source of the layout: img2dataset 1.47.0 (`writer.py`, `downloader.py`, `logger.py`).
Invariant: rows of a tar are in the order of their keys, whatever the order of the downloads; rows of parquet with the
pictures inside are in the order of the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from infra import storage
from infra.errors import InputError
from pipelines.arrays import Ints
from pipelines.records import Input
from pipelines.sources.formats import arrow_columns, footers, tar_samples
from pipelines.sources.formats.documents import load
from pipelines.sources.formats.names import listed
from pipelines.sources.formats.tar_members import open_headers
from pipelines.sources.tars.tar_places import Tar
from pipelines.sources.tars.tar_records import PICTURE_ENDS
from pipelines.sources.tars.tar_texts import ID_FIELDS, STATE_FIELDS, Reading, row_texts

NAME: Final = re.compile(r"(\d+)(?:\.(tar|parquet)|(_stats)\.json)")
SUCCESS: Final = "success"
KEY_DIGITS_MAX: Final = 18
"""The number in a key fits 64 bits."""

TAKEN_ROWS: Final = 4_096
"""Rows that are held as Python values at once."""


@dataclass(frozen=True, kw_only=True)
class Shard(Tar):
    """A tar, or a parquet with the pictures inside. sidecar: metadata of a tar. stats: decide no row, so no input."""

    sidecar: Input | None = None
    stats: Input | None = None

    @property
    def is_parquet(self) -> bool:
        """Whether the pictures are in a column."""
        return self.uri.endswith(".parquet")

    @property
    def metadata(self) -> Input | None:
        """The parquet that has a row for every attempt; None for a tar alone."""
        return self if self.is_parquet else self.sidecar

    @property
    def known_metadata(self) -> Input:
        """`metadata`. Raises InputError for a tar alone."""
        if self.metadata is None:
            raise InputError(f"{self.uri} has no metadata, so its attempts are unknown.")
        return self.metadata

    @property
    def files(self) -> tuple[Input, ...]:
        """The shard and its metadata."""
        return (self,) if self.sidecar is None else (self, self.sidecar)


@dataclass(frozen=True, kw_only=True, eq=False)
class Attempts:
    """The rows of a shard, one for each picture that was to be fetched, in canonical order.

    keys (R,). status (R,): `success`, or why there is no picture. numbers (R,): of the records. places (R,): rows in
    the metadata.
    """

    keys: pa.LargeStringArray
    status: pa.LargeStringArray
    numbers: Ints
    places: Ints

    @property
    def failed(self) -> NDArray[np.bool_]:
        """Which rows (R,) have no picture."""
        return np.asarray(pc.not_equal(self.status, SUCCESS))


@dataclass(frozen=True, kw_only=True, eq=False)
class Outline:
    """What a shard holds. failed (R,): rows without picture, in canonical order. statuses: their counts.

    columns: of its metadata. step: rows of one piece. offsets (R,): where the sample of a row begins in the tar, -1
    where there is none; None where one pass over the tar serves its only piece.
    """

    failed: NDArray[np.bool_]
    statuses: Counter[str]
    columns: Sequence[str]
    step: int
    offsets: Ints | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attempt. number: of the record. failed: None, or the status and its error. picture: of a parquet row.

    columns: None for a tar without metadata.
    """

    key: str
    number: int
    failed: str | None = None
    columns: Mapping[str, Any] | None
    picture: bytes | None = None


def shards_of(inputs: Sequence[Tar]) -> list[Shard]:
    """The shards by uri. Raises InputError for stats without their shard."""
    parts: dict[str, dict[str, Tar]] = {}
    for source in sorted(inputs, key=lambda i: i.uri):
        folder, slash, base = source.uri.rpartition("/")
        match = NAME.fullmatch(base)
        if match is not None:
            parts.setdefault(folder + slash + match[1], {})[match[2] or "stats"] = source
    found = []
    for part in parts.values():
        tar, parquet = part.get("tar"), part.get("parquet")
        main = tar or parquet
        if main is None:
            raise InputError(
                f"{part['stats'].uri} is there, but neither the tar nor the parquet of its shard. "
                "Name the folder that holds them."
            )
        found.append(
            Shard(
                uri=main.uri,
                url=main.url,
                split=main.split,
                label=main.label,
                sidecar=parquet if tar else None,
                stats=part.get("stats"),
            )
        )
    return found


def outline(shard: Shard) -> Outline:
    """The outcome of each row. Raises InputError for files that are not img2dataset's, or that do not agree."""
    offsets: Ints | None = None
    if shard.metadata is None:
        keys, at = _keys_in_tar(shard)
        rows = _ordered(keys, pa.repeat(pa.scalar(SUCCESS, pa.large_string()), len(keys)), shard)
        offsets = at[rows.places]
    else:
        rows = attempts(shard)
    if shard.is_parquet:
        picture_column(shard)
    # As many rows as hold about PIECE_BYTES, if samples are of equal size.
    step = max(1, -(-len(rows.keys) * tar_samples.PIECE_BYTES // max(1, storage.size(shard.url))))
    if not shard.is_parquet and offsets is None and step < len(rows.keys):
        offsets = _offsets(shard, rows)
    failed = rows.failed
    counts = pc.value_counts(rows.status.filter(pa.array(failed))).to_pylist()
    statuses = Counter({count["values"]: count["counts"] for count in counts})
    _check_stats(shard, len(rows.keys), statuses)
    names = footers.footers([shard.metadata])[0].schema.names if shard.metadata is not None else []
    return Outline(failed=failed, statuses=statuses, columns=names, step=step, offsets=offsets)


def attempts(shard: Shard) -> Attempts:
    """Keys and statuses in the metadata of a shard."""
    metadata = shard.known_metadata
    footer = _checked_footer(metadata)
    keys, statuses = [], []
    for _, batch in footers.read_rows(metadata, 0, footer.rows, STATE_FIELDS[:2]):
        keys.append(arrow_columns.as_text(batch.column("key"))[0])
        statuses.append(arrow_columns.as_text(batch.column("status"))[0])
    key, status = (pa.chunked_array(chunks, pa.large_string()).combine_chunks() for chunks in (keys, statuses))
    if pc.any(pc.fill_null(pc.equal(key, ""), True)).as_py():
        raise InputError(f"A row of {metadata.uri} has no key. Is it metadata of img2dataset?")
    status = pc.fill_null(status, "no status")
    if not shard.is_parquet:
        return _ordered(key, status, shard)
    places = np.arange(len(key))
    return Attempts(keys=key, status=status, numbers=places, places=places)


def _ordered(keys: pa.LargeStringArray, status: pa.LargeStringArray, shard: Shard) -> Attempts:
    """The rows by the numbers in their keys. Raises InputError for a key that is no number, or that comes twice."""
    # Keys may have folders before the number, as `00000/000000012` in repacked tars.
    names = pc.replace_substring_regex(keys, "^.*/", "")
    legal = pc.match_substring_regex(names, rf"^[0-9]{{1,{KEY_DIGITS_MAX}}}\z")
    if pc.any(pc.invert(legal)).as_py():
        wrong = keys.filter(pc.invert(legal))[0].as_py()
        raise InputError(
            f"{shard.uri} holds a sample {wrong!r}, but img2dataset's keys are numbers. "
            "Read it with the source webdataset."
        )
    numbers = np.asarray(names.cast(pa.int64()))
    places = np.argsort(numbers, kind="stable")
    numbers = numbers[places]
    twice = np.flatnonzero(numbers[1:] == numbers[:-1])
    if len(twice):
        key = keys[int(places[twice[0] + 1])].as_py()
        raise InputError(
            f"The key {key} comes twice in {(shard.sidecar or shard).uri}. Two downloads were mixed; "
            "name the files of one."
        )
    order = pa.array(places)
    return Attempts(keys=keys.take(order), status=status.take(order), numbers=numbers, places=places)


def number_of(key: str) -> int:
    """The number in a key that `outline` found to be one."""
    return int(key.rsplit("/", 1)[-1])


def _keys_in_tar(shard: Shard) -> tuple[pa.LargeStringArray, Ints]:
    """Keys and offsets of the samples in the order of the tar."""
    with open_headers(shard) as file:
        found = [(sample.key, sample.offset) for sample in tar_samples.samples(file, shard, wants=tar_samples.nothing)]
    keys = pa.array([key for key, _ in found], pa.large_string())
    return keys, np.array([offset for _, offset in found], np.int64)


def _offsets(shard: Shard, rows: Attempts) -> Ints:
    """Where the sample of each row begins. Raises InputError when the tar holds others."""
    keys, at = _keys_in_tar(shard)
    failed = rows.failed
    check_same(shard, fetched=rows.keys.filter(pa.array(~failed)), seen=keys)
    place = np.asarray(pc.fill_null(pc.index_in(rows.keys, keys), -1), np.int64)
    return np.where(failed, -1, at[place]) if len(at) else np.full(len(failed), -1, np.int64)


def check_same(shard: Shard, *, fetched: pa.LargeStringArray, seen: pa.LargeStringArray) -> None:
    """Raises InputError when the keys of the tar are not those that its metadata calls fetched."""
    says = (shard.sidecar or shard).uri
    hint = "They are of different runs, or one was cut short; fetch both again, or name the tars alone (`*.tar`)."
    lost = fetched.filter(pc.invert(pc.is_in(fetched, seen)))
    if len(lost):
        raise InputError(
            f"{shard.uri} lacks {len(lost):,} of the {len(fetched):,} samples that {says} calls fetched, "
            f"{pc.min(lost)} first. {hint}"
        )
    extra = seen.filter(pc.invert(pc.is_in(seen, fetched)))
    if len(extra):
        message = (
            f"{shard.uri} holds {len(extra):,} samples that {says} does not call fetched, {pc.min(extra)} first. {hint}"
        )
        raise InputError(message)


def rows(shard: Shard, known: Attempts, reading: Reading, start: int, stop: int) -> Iterator[Row]:
    """Rows [start, stop) of the metadata of a shard in canonical order."""
    metadata = shard.known_metadata
    picture = picture_column(shard) if shard.is_parquet else None
    columns = [*([picture] if picture else []), *_read_columns(metadata, reading)]
    read = _InOrder(metadata=metadata, columns=columns, names=frozenset({*STATE_FIELDS, *ID_FIELDS, reading.id}))
    at = start
    places = known.places[start:stop]
    for batch in read.range(places) if shard.is_parquet else read.taken(places):
        for row in batch.to_pylist():
            data = row.pop(picture) if picture else None
            failed = None if row["status"] == SUCCESS else _why(row)
            yield Row(
                key=row["key"],
                number=int(known.numbers[at]),
                failed=failed,
                columns=row,
                picture=data if failed is None else None,
            )
            at += 1


@dataclass(frozen=True, kw_only=True)
class _InOrder:
    """Rows of metadata by their places: the columns in `names` as text, other texts as bytes."""

    metadata: Input
    columns: Sequence[str]
    names: frozenset[str]

    def range(self, places: Ints) -> Iterator[pa.RecordBatch]:
        """Rows at consecutive places, as they are read, so that only one batch of pictures is in memory."""
        for _, batch in footers.read_rows(self.metadata, int(places[0]), int(places[-1]) + 1, self.columns):
            yield self._cast(batch)

    def taken(self, places: Ints) -> Iterator[pa.RecordBatch]:
        """Rows at any places, in their order."""
        # The file is read once in its own order, and only the wanted rows are kept.
        order = np.argsort(places)
        ascending = places[order]
        taken = []
        for first, batch in footers.read_rows(self.metadata, int(ascending[0]), int(ascending[-1]) + 1, self.columns):
            inside = slice(*np.searchsorted(ascending, [first, first + batch.num_rows]).tolist())
            taken.append(self._cast(batch).take(pa.array(ascending[inside] - first)))
        # The inverse permutation: the row that was read as number i belongs at order[i].
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        whole = pa.Table.from_batches(taken).combine_chunks()
        for first in range(0, len(back), TAKEN_ROWS):
            yield from whole.take(pa.array(back[first : first + TAKEN_ROWS])).to_batches()

    def _cast(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """`take` does not support string views, and text that is not UTF-8 cannot become Python values."""
        names = batch.schema.names
        return pa.RecordBatch.from_arrays([_plain(batch.column(n), is_name=n in self.names) for n in names], names)


def _why(row: Mapping[str, Any]) -> str:
    status, error = row["status"] or "no status", row.get("error_message")
    return f"{status}: {error}" if error else status


def _read_columns(metadata: Input, reading: Reading) -> list[str]:
    names = footers.footers([metadata])[0].schema.names
    ids = [reading.id] if reading.id else []
    wanted = dict.fromkeys([*STATE_FIELDS, *ids, *ID_FIELDS, *row_texts(names, reading)])
    return [name for name in wanted if name in names]


def picture_column(shard: Input) -> str:
    """Raises InputError when the parquet carries no pictures, so that it is the metadata of a tar."""
    names = footers.footers([shard])[0].schema.names
    for name in PICTURE_ENDS:
        if name in names:
            return name
    raise InputError(
        f"{shard.uri} carries no pictures, and the tar beside it is not there. Name the folder that holds both; "
        "output of the formats `files` and `tfrecord` is not read, and captions alone are read by the source table."
    )


def _checked_footer(metadata: Input) -> footers.Footer:
    """Raises InputError for parquet that img2dataset did not write."""
    footer = footers.footers([metadata])[0]
    for name in STATE_FIELDS[:2]:
        if name not in footer.schema.names or not arrow_columns.is_text(footer.schema.field(name).type):
            raise InputError(
                f"{metadata.uri} is no metadata of img2dataset: it has no text column {name!r}. "
                f"Its columns: {listed(footer.schema.names)}. Is it a list of URLs that was to be fetched? Leave it "
                "out."
            )
    return footer


def _plain(column: pa.Array, *, is_name: bool) -> pa.Array:
    kind = column.type
    if arrow_columns.is_text_list(kind):
        return column.cast(pa.large_list(pa.large_binary()))
    if not arrow_columns.is_text(kind):
        return column
    return arrow_columns.as_text(column)[0] if is_name else arrow_columns.as_bytes(column)


def _check_stats(shard: Shard, count: int, statuses: Counter[str]) -> None:
    if shard.stats is None:
        return
    stats = load(shard.stats)
    if not isinstance(stats, dict):
        raise InputError(f"{shard.stats.uri} is no statistics of img2dataset. Leave it out, or fetch it again.")
    counted = {"successes": count - statuses.total()}
    if shard.is_parquet or shard.sidecar is not None:
        counted["count"] = count
    for name, number in counted.items():
        if stats.get(name) != number:
            raise InputError(
                f"{shard.stats.uri} says {name} = {stats.get(name)!r}, but {(shard.sidecar or shard).uri} holds "
                f"{number:,}. They are of different runs, or one was cut short; "
                "fetch both again, or leave the stats out."
            )


def notes(found: Sequence[Shard], empty: Sequence[Shard]) -> Iterator[str]:
    """Notes on missing files that are not needed. empty: shards in which no row has a picture."""
    alone = [shard.uri for shard in found if shard.metadata is None]
    if alone:
        yield (
            f"{len(alone)} of {len(found)} tars come without their parquet (absent, or not named), so rows that were "
            f"not fetched are unknown: {listed(alone)}"
        )
    unfinished = [shard.uri for shard in found if shard.stats is None]
    if unfinished:
        yield (
            f"{len(unfinished)} of {len(found)} shards have no stats, which img2dataset writes last; "
            f"was it interrupted? {listed(unfinished)}"
        )
    if empty:
        yield f"{len(empty)} of {len(found)} shards hold no picture: {listed([shard.uri for shard in empty])}"
