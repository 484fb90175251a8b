"""Parquet inputs: their footers, how they are cut along row groups, and the rows of one cut.

Invariant: reading rows [start, stop) decodes only the row groups that hold them, and only the columns asked for; a
batch is bounded in rows and, by the sizes in the footer, in bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from infra import storage
from infra.errors import InputError
from pipelines.records import Input, Piece
from pipelines.sources.formats.arrow_columns import BATCH_RECORDS
from pipelines.sources.formats.lines import kind_of
from pipelines.sources.formats.names import listed, nearest, none_read

PIECE_ROWS: Final = 131_072
BATCH_BYTES: Final = 128 << 20
FOOTER_THREADS: Final = 16


@dataclass(frozen=True, kw_only=True)
class Footer:
    """What the footer of one input says."""

    input: Input
    schema: pa.Schema
    row_groups: Sequence[int]
    "Rows of each row group."

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return sum(self.row_groups)


def parquet_inputs(inputs: Sequence[Input], source: str, hint: str) -> list[Input]:
    """The parquet files among the inputs of a source, by uri. Raises InputError when there is none."""
    files = sorted((file for file in inputs if file.uri.endswith(".parquet")), key=lambda file: file.uri)
    if not files:
        raise none_read(inputs, f"parquet of {source}", hint)
    return files


def open_parquet(source: Input) -> pq.ParquetFile:
    """The open file. Raises InputError that says what the file is instead of parquet."""
    remote = storage.is_remote(source.url)
    try:
        # Arrow reads a local path itself: a memory map would count every page it touches as memory of this process.
        file: Any = storage.open_read(source.url) if remote else pa.OSFile(storage.absolute(source.url))
    except FileNotFoundError as error:
        raise InputError(f"Cannot read {source.url}: there is no such file. Check the path.") from error
    except OSError as error:
        raise InputError(f"Cannot read {source.url}: {os.strerror(error.errno) if error.errno else error}.") from error
    try:
        return pq.ParquetFile(file, pre_buffer=remote)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        file.close()
        raise InputError(f"{source.uri} is not a whole parquet file: {_what_it_is(source, error)}.") from error


def _what_it_is(source: Input, error: Exception) -> str:
    size = storage.size(source.url)
    if size == 0:
        return "it is empty (0 bytes), as a full disk leaves it; fetch the file again"
    head = storage.read_range(source.url, 0, min(size, 64))
    kind = kind_of(head)
    if kind == "parquet":
        return "it is parquet without its end: the download or the copy was cut short; fetch the file again"
    return (
        f"it is {kind}"
        if kind
        else f"it begins with {head[:8]!r} ({str(error).splitlines()[0]}); name parquet files only"
    )


def footers(inputs: Sequence[Input]) -> list[Footer]:
    """The footers of all inputs, in their order; read by several threads, since a remote one costs a round trip."""
    with ThreadPoolExecutor(FOOTER_THREADS) as threads:
        return list(threads.map(_footer, inputs))


def _footer(source: Input) -> Footer:
    with open_parquet(source) as file:
        metadata = file.metadata
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        return Footer(input=source, schema=file.schema_arrow, row_groups=sizes)


def column_type(footer: Footer, name: str) -> pa.DataType:
    """Type of the column. Raises InputError with the columns and the nearest name when it is absent or there twice."""
    places = footer.schema.get_all_field_indices(name)
    if not places:
        known = footer.schema.names
        message = f"{footer.input.uri} has no column {name!r}.{nearest(name, known)} Its columns: {listed(known)}."
        raise InputError(message)
    if len(places) > 1:
        raise InputError(
            f"{footer.input.uri} has {len(places)} columns named {name!r}, which is ambiguous. Rename one."
        )
    return footer.schema.field(places[0]).type


def check_type(footer: Footer, name: str, fits: Callable[[pa.DataType], bool], wanted: str, hint: str) -> None:
    """Raises InputError when the column is absent, there twice, or of a type that does not fit."""
    kind = column_type(footer, name)
    if not fits(kind):
        raise InputError(f"Column {name!r} of {footer.input.uri} is {kind}, not {wanted}. {hint}")


def limited(found: Sequence[Footer], limit: int | None) -> Iterator[tuple[Footer, int]]:
    """Each footer with the number of its rows that are read; `limit`: of all files together."""
    for footer in found:
        rows = footer.rows if limit is None else min(limit, footer.rows)
        limit = None if limit is None else limit - rows
        yield footer, rows


def pieces(found: Sequence[Footer], limit: int | None, split_of: Callable[[Input], str]) -> list[Piece]:
    """Pieces along row groups, where every row is a scene and every file has one split."""
    return [
        Piece(input=footer.input, start=start, stop=stop, scenes_by_split={split_of(footer.input): stop - start})
        for footer, rows in limited(found, limit)
        for start, stop in cuts(footer.row_groups, rows)
    ]


def cuts(row_groups: Sequence[int], rows: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) over the first `rows` rows, each of about PIECE_ROWS at most.

    A cut is along row groups. Only a row group larger than 1.5 pieces is cut inside, in equal parts. Their readers
    decode and skip the rows before: about a second for a million rows, against ten seconds to process a piece.
    """
    for start, stop in _whole_cuts(row_groups):
        if start < rows:
            yield start, min(stop, rows)


def _whole_cuts(row_groups: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = stop = 0
    for size in row_groups:
        if stop > start and stop + size - start > PIECE_ROWS:
            yield start, stop
            start = stop
        stop += size
        if size > PIECE_ROWS * 3 // 2:
            parts = -(-size // PIECE_ROWS)  # rounded up
            bounds = [start + size * i // parts for i in range(parts + 1)]
            yield from pairwise(bounds)
            start = stop
    if stop > start:
        yield start, stop


def read_rows(
    source: Input, start: int, stop: int, columns: Sequence[str], *, batch_bytes: int = BATCH_BYTES
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows [start, stop) as (number of the first row, batch), with those of `columns` that the file has.

    Raises InputError when a page is damaged.
    """
    with open_parquet(source) as file:
        metadata = file.metadata
        groups: list[int] = []
        first = seen = 0
        for place in range(metadata.num_row_groups):
            size = metadata.row_group(place).num_rows
            if seen < stop and seen + size > start:
                first = first if groups else seen
                groups.append(place)
            seen += size
        present = [name for name in columns if name in file.schema_arrow.names]
        # Many tasks read at once, so Arrow's threads would only compete with them.
        batches = file.iter_batches(
            batch_size=_batch_rows(metadata, groups, batch_bytes), row_groups=groups, columns=present, use_threads=False
        )
        at = first
        try:
            for batch in batches if groups else ():
                low, high = max(start - at, 0), min(stop - at, batch.num_rows)
                if low < high:
                    yield at + low, batch.slice(low, high - low)
                at += batch.num_rows
                if at >= stop:
                    return
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"Cannot read rows from {at:,} of {source.uri}: {str(error).splitlines()[0]}. The file is damaged; "
                "fetch it again or leave it out."
            ) from error


def _batch_rows(metadata: pq.FileMetaData, groups: Sequence[int], batch_bytes: int) -> int:
    # One caption list of megabytes a row must not make a batch of gigabytes (Arrow cannot nest over 2 GiB).
    rows: int = sum(metadata.row_group(g).num_rows for g in groups)
    total: int = sum(metadata.row_group(g).total_byte_size for g in groups)
    return max(1, min(BATCH_RECORDS, batch_bytes * max(rows, 1) // max(total, 1)))
