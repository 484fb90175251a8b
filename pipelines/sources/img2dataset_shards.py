"""Shards of img2dataset's output and their metadata.

Owns: names, which files belong together, rows that were tried and what became of them, counts that must agree.
Does not own: what is in a tar. Source of the layout: img2dataset 1.47.0 (`writer.py`, `downloader.py`, `logger.py`).
Invariant: rows of a tar are in the order of their keys, whatever the order in which the pictures came; rows of parquet that carries the
pictures are in the order of the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa

from infra.errors import InputError
from pipelines.sources import Input
from pipelines.sources import columns as cols
from pipelines.sources import footers as feet
from pipelines.sources import tar_samples as tars
from pipelines.sources.documents import load
from pipelines.sources.names import listed
from pipelines.sources.tar_members import open_tar
from pipelines.sources.tar_records import PICTURE_ENDS
from pipelines.sources.tar_texts import ID_FIELDS, STATE_FIELDS, Reading, row_texts

NAME: Final = re.compile(r"(\d+)(?:\.(tar|parquet)|(_stats)\.json)")
SUCCESS: Final = "success"
KEY_DIGITS_MAX: Final = 18
"""So that the number in a key fits 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Shard(Input):
    """A tar, or a parquet that carries the pictures; sidecar: the metadata of a tar. stats decide no row, so they are no input file."""

    sidecar: Input | None = None
    stats: Input | None = None

    @property
    def is_parquet(self) -> bool:
        """Whether the pictures are in a column."""
        return self.uri.endswith(".parquet")

    @property
    def files(self) -> tuple[Input, ...]:
        """The shard and its metadata."""
        return (self,) if self.sidecar is None else (self, self.sidecar)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What the metadata of a shard says. failed: of each row in canonical order. statuses: counts of those that failed."""

    failed: Sequence[bool]
    statuses: Counter[str]
    columns: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row that was tried. number: of the record. failed: None, or the status and its error. picture: of a parquet row."""

    key: str
    number: int
    failed: str | None = None
    columns: Mapping[str, Any]
    picture: bytes | None = None


def shards_of(inputs: Sequence[Input]) -> list[Shard]:
    """The shards by uri. Raises InputError for a parquet whose tar is not there and that carries no pictures."""
    parts: dict[str, dict[str, Input]] = {}
    for source in sorted(inputs, key=lambda i: i.uri):
        folder, slash, base = source.uri.rpartition("/")
        match = NAME.fullmatch(base)
        if match is not None:
            parts.setdefault(folder + slash + match[1], {})[match[2] or "stats"] = source
    found = []
    for part in parts.values():
        tar, parquet = part.get("tar"), part.get("parquet")
        if tar is not None:
            found.append(Shard(uri=tar.uri, url=tar.url, sidecar=parquet, stats=part.get("stats")))
        elif parquet is not None:
            found.append(Shard(uri=parquet.uri, url=parquet.url, stats=part.get("stats")))
        else:
            raise InputError(
                f"{part['stats'].uri} is there, but neither the tar nor the parquet of its shard. Name the folder that holds them."
            )
    return found


def outline(shard: Shard) -> Outline:
    """What became of each row. Raises InputError for files that are not img2dataset's, or whose counts do not agree."""
    tried = keys(shard)
    statuses = Counter(status for _, status in tried if status is not None)
    metadata = shard if shard.is_parquet else shard.sidecar
    names = feet.footers([metadata])[0].schema.names if metadata is not None else []
    _check_stats(shard, len(tried), statuses)
    return Outline(failed=[status is not None for _, status in tried], statuses=statuses, columns=names)


def keys(shard: Shard) -> list[tuple[str, str | None]]:
    """(key, None or the status of a failure) of each row in canonical order."""
    metadata = shard if shard.is_parquet else shard.sidecar
    if metadata is None:
        with open_tar(shard) as file:
            found: list[tuple[str, str | None]] = [
                (sample.key, None) for sample in tars.samples(file, shard, wants=tars.nothing)
            ]
    else:
        found = []
        for row in _table(metadata, STATE_FIELDS[:2]):
            status = row["status"] if isinstance(row["status"], str) else "no status"
            found.append((_key(row["key"], metadata), None if status == SUCCESS else status))
    return found if shard.is_parquet else _by_number(found, shard)


def _by_number(found: list[tuple[str, str | None]], shard: Shard) -> list[tuple[str, str | None]]:
    numbers = [number_of(key, shard) for key, _ in found]
    order = sorted(range(len(found)), key=numbers.__getitem__)
    for one, two in pairwise(order):
        if numbers[one] == numbers[two]:
            raise InputError(
                f"The key {found[two][0]} comes twice in {(shard.sidecar or shard).uri}. Two downloads were mixed; name the files of one."
            )
    return [found[place] for place in order]


def number_of(key: str, shard: Input) -> int:
    """The number in a key. Raises InputError for a key that is none of img2dataset's."""
    name = key.rsplit("/", 1)[-1]
    if not name.isascii() or not name.isdigit() or len(name) > KEY_DIGITS_MAX:
        message = f"{shard.uri} holds a sample {key!r}, but img2dataset's keys are numbers. Read it with the source webdataset."
        raise InputError(message)
    return int(name)


def rows(shard: Shard, reading: Reading, start: int, stop: int) -> Iterator[Row]:
    """Rows [start, stop) in canonical order. Those of a tar that were fetched have no columns: their json has them."""
    if shard.is_parquet:
        yield from _parquet_rows(shard, reading, start, stop)
        return
    tried = keys(shard)[start:stop]
    wanted = {key for key, status in tried if status is not None}
    failures: dict[str, Row] = {}
    if shard.sidecar is not None and wanted:
        for row in _table(shard.sidecar, _told_columns(shard.sidecar, reading), id_=reading.id):
            if (key := _key(row["key"], shard.sidecar)) in wanted:
                failures[key] = Row(key=key, number=number_of(key, shard), failed=_why(row), columns=row)
    for key, status in tried:
        yield failures[key] if status is not None else Row(key=key, number=number_of(key, shard), columns={})


def _parquet_rows(shard: Shard, reading: Reading, start: int, stop: int) -> Iterator[Row]:
    picture = _picture_column(shard)
    columns = [picture, *_told_columns(shard, reading)]
    for number, row in enumerate(_table(shard, columns, start, stop, id_=reading.id), start):
        key, data = _key(row["key"], shard), row.pop(picture)
        is_success = row["status"] == SUCCESS
        failed = None if is_success else _why(row)
        yield Row(key=key, number=number, failed=failed, columns=row, picture=data if is_success else None)


def _why(row: Mapping[str, Any]) -> str:
    error = row.get("error_message")
    return f"{row['status']}: {error}" if error else str(row["status"])


def _told_columns(metadata: Input, reading: Reading) -> list[str]:
    names = feet.footers([metadata])[0].schema.names
    ids = [reading.id] if reading.id else []
    wanted = dict.fromkeys([*STATE_FIELDS, *ids, *ID_FIELDS, *row_texts(names, reading)])
    return [name for name in wanted if name in names]


def _picture_column(shard: Input) -> str:
    """Raises InputError when the parquet carries no pictures, so that it is the metadata of a tar."""
    names = feet.footers([shard])[0].schema.names
    for name in PICTURE_ENDS:
        if name in names:
            return name
    raise InputError(
        f"{shard.uri} carries no pictures, and the tar beside it is not there. Name the folder that holds both; output of the formats `files` and `tfrecord` is not read, and captions alone are read by the source table."
    )


def _table(
    metadata: Input, columns: Sequence[str], start: int = 0, stop: int | None = None, *, id_: str = ""
) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries: ids as text, other texts as bytes. Raises InputError for parquet that img2dataset did not write."""
    footer = feet.footers([metadata])[0]
    for name in ("key", "status"):
        if name not in footer.schema.names or not cols.is_text(footer.schema.field(name).type):
            message = f"{metadata.uri} is no metadata of img2dataset: it has no text column {name!r}. Its columns: {listed(footer.schema.names)}. Is it a list of URLs that was to be fetched? Leave it out."
            raise InputError(message)
    names = {*STATE_FIELDS, *ID_FIELDS, id_}
    for _, batch in feet.read_rows(metadata, start, footer.rows if stop is None else stop, columns):
        values = {name: _values(batch.column(name), is_name=name in names) for name in batch.schema.names}
        for place in range(batch.num_rows):
            yield {name: column[place] for name, column in values.items()}


def _values(column: pa.Array, *, is_name: bool) -> list[Any]:
    kind = column.type
    if cols.is_text_list(kind):
        return list(column.cast(pa.large_list(pa.large_binary())).to_pylist())
    if not cols.is_text(kind):
        return list(column.to_pylist())
    return list((cols.as_text(column)[0] if is_name else cols.as_bytes(column)).to_pylist())


def _key(value: Any, metadata: Input) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"A row of {metadata.uri} has no key. Is it metadata of img2dataset?")
    return value


def _check_stats(shard: Shard, tried: int, statuses: Counter[str]) -> None:
    if shard.stats is None:
        return
    stats = load(shard.stats)
    if not isinstance(stats, dict):
        raise InputError(f"{shard.stats.uri} is no statistics of img2dataset. Leave it out, or fetch it again.")
    counted = {"successes": tried - statuses.total()}
    if shard.is_parquet or shard.sidecar is not None:
        counted["count"] = tried
    for name, count in counted.items():
        if stats.get(name) != count:
            message = f"{shard.stats.uri} says {name} = {stats.get(name)!r}, but {(shard.sidecar or shard).uri} holds {count:,}. They are of different runs, or one was cut short; fetch both again, or leave the stats out."
            raise InputError(message)


def notes(found: Sequence[Shard], outlines: Sequence[Outline]) -> Iterator[str]:
    """What is missing but does no harm."""
    alone = [shard.uri for shard in found if not shard.is_parquet and shard.sidecar is None]
    if alone:
        yield f"{len(alone)} of {len(found)} tars come without their parquet (absent, or not named), so rows that were not fetched are unknown: {listed(alone)}"
    unfinished = [shard.uri for shard in found if shard.stats is None]
    if unfinished:
        yield f"{len(unfinished)} of {len(found)} shards have no stats, which img2dataset writes last; was it interrupted? {listed(unfinished)}"
    if empty := [s.uri for s, o in zip(found, outlines, strict=True) if o.statuses.total() == len(o.failed)]:
        yield f"{len(empty)} of {len(found)} shards hold no picture: {listed(empty)}"
