"""Output of img2dataset: `NNNNN.tar` with `NNNNN.parquet` and `NNNNN_stats.json`, or parquet with the pictures inside.

A tar holds the fetched pictures in order of completion; the parquet has a row for every attempt. So rows are joined by
key: the number in a key is the row number of a record, and a caption without picture is a reject with the error of its
download (img2dataset#452).
Invariant: tar, parquet and stats agree, or InputError names the two that do not. A scene is named by sha256, else by
url, never by key (A3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from infra.errors import InputError
from pipelines.arrays import Ints
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats import tar_samples
from pipelines.sources.formats.embedded_images import WRITERS, embedded_image
from pipelines.sources.formats.footers import FOOTER_THREADS
from pipelines.sources.formats.names import listed, nearest
from pipelines.sources.formats.rows import Record, Text, batches
from pipelines.sources.formats.tar_members import open_headers
from pipelines.sources.options import check_choice, check_split, parse_texts
from pipelines.sources.tars import img2dataset_shards, tar_records
from pipelines.sources.tars.img2dataset_shards import NAME, Row, Shard
from pipelines.sources.tars.tar_places import placed, split_notes
from pipelines.sources.tars.tar_texts import ID_FIELDS, KEY, Reading, describe, describe_row
from pipelines.sources.tars.webdataset_tars import check_id, peek_at

FAILED: Final = ("reject", "keep", "skip")


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPiece(Piece):
    """A piece of a shard.

    offsets (stop - start,): where the sample of each row begins, -1 where there is none; None: one pass finds them.
    """

    offsets: Ints | None


@dataclass(frozen=True, kw_only=True)
class Img2dataset(Source):
    """Pictures and alt texts that img2dataset fetched."""

    text: str = ""
    "Json fields or columns, commas between, each `name` or `name:role`. Empty: the caption, as alt text."
    id: str = ""
    "Json field or column that names the scene. Empty: sha256, else url, else DataComp's uid."
    split: str = ""
    "Split of all rows. Empty: by the name of the folder (`val/00000.tar`), else train."
    failed: str = "reject"
    "Captions of pictures that were not fetched: `reject`, `keep` them as scenes without picture, or `skip` unread."

    name = "img2dataset"
    # One alt text, and up to two recaptions as in Recap-DataComp.
    bad_passes = 3
    writers = WRITERS

    def __post_init__(self) -> None:
        parse_texts(self.text)
        check_split(self.split)
        check_id("key" if self.id == KEY else self.id)
        check_choice("failed", self.failed, FAILED)

    def reads(self, name: str) -> bool:
        """Files that are named as img2dataset names its output; a list of URLs beside them is left out."""
        return bool(NAME.fullmatch(name))

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Reads metadata until `limit` is reached, and headers of tars that have none or that many tasks read.

        Raises InputError when files of a shard do not agree, or hold no column that was named.
        """
        named = [i for i in inputs if self.reads(i.uri.rsplit("/", 1)[-1])]
        found = img2dataset_shards.shards_of(placed(named, self.split))
        if not found:
            raise InputError(
                "None of the inputs is named as img2dataset names its output (`00000.tar`, `00000.parquet`, "
                f"`00000_stats.json`): {listed([i.uri for i in inputs])}. Other tars are read by the source webdataset."
            )
        pieces: list[Piece] = []
        seen: list[Shard] = []
        empty: list[Shard] = []
        columns: dict[str, None] = {}
        statuses: Counter[str] = Counter()
        every = rows = 0
        for shard, outline in _outlines(found, limit):
            taken = len(outline.failed) if limit is None else min(limit - rows, len(outline.failed))
            pieces += self._pieces(shard, outline, taken)
            rows, every = rows + taken, every + len(outline.failed)
            statuses += outline.statuses
            columns |= dict.fromkeys(outline.columns)
            seen.append(shard)
            if outline.statuses.total() == len(outline.failed):
                empty.append(shard)
            if rows == limit:
                break
        texts = {f: f"text:{role}" for f, role in self._reading().texts} or {"txt": "text:alt"}
        return Survey(
            format=f"img2dataset, {len(found)} shards, {every:,} rows tried, {every - statuses.total():,} pictures",
            pieces=pieces,
            columns=texts | {n: "scene id" for n in ([self.id] if self.id else ID_FIELDS) if n in columns},
            notes=[
                *img2dataset_shards.notes(seen, empty),
                *self._failed_note(statuses, every),
                *self._unknown(seen, list(columns), limit),
                *split_notes(seen, self.split),
            ],
        )

    def _pieces(self, shard: Shard, outline: img2dataset_shards.Outline, rows: int) -> Iterator[ShardPiece]:
        for start in range(0, rows, outline.step):
            stop = min(start + outline.step, rows)
            scenes = stop - start - (int(outline.failed[start:stop].sum()) if self.failed == "skip" else 0)
            if scenes:
                yield ShardPiece(
                    input=shard,
                    start=start,
                    stop=stop,
                    scenes_by_split={shard.split: scenes},
                    offsets=None if outline.offsets is None else outline.offsets[start:stop],
                )

    def _unknown(self, found: Sequence[Shard], columns: Sequence[str], limit: int | None) -> Iterator[str]:
        """A note for each name of an option that was not found; where all columns are known, InputError."""
        reading = self._reading()
        asked = [*([self.id] if self.id else []), *(name for name, _ in reading.texts)]
        missing = [name for name in asked if name not in columns]
        if not missing:
            return
        tar = next((shard for shard in found if not shard.is_parquet), None)
        if tar is None:
            raise InputError(
                f"No parquet of {listed([shard.uri for shard in found])} has a column "
                f"{missing[0]!r}.{nearest(missing[0], columns)} Their columns: {listed(columns)}."
            )
        peek = peek_at(tar, reading, limit)
        for name in missing:
            if name not in peek.fields and not any(s in peek.suffixes for s in (name, f"{name}.gz")):
                known = sorted({*columns, *peek.fields, *peek.suffixes})
                yield (
                    f"no parquet, and none of the first {peek.samples} samples of {tar.uri}, has "
                    f"`{name}`.{nearest(name, known)} There are: {listed(known)}"
                )

    def _failed_note(self, statuses: Counter[str], every: int) -> Iterator[str]:
        if failed := statuses.total():
            words = {
                "reject": "their captions are rejects and count towards --max-reject-rate; "
                "`--set source.failed=skip` leaves them out",
                "keep": "their captions are kept as scenes without picture",
                "skip": "their captions are not read",
            }
            kinds = listed([f"{status} {count:,}" for status, count in statuses.most_common()])
            yield f"{failed:,} of {every:,} rows have no picture ({kinds}): {words[self.failed]}"

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Rows [start, stop) of one shard: of a tar in the order of keys, of parquet in its own."""
        shard = piece.input_as(Shard)
        if not isinstance(piece, ShardPiece):
            raise InputError(f"A piece of {shard.uri} has no offsets. Pieces come from `survey`.")
        yield from batches(shard.uri, self._records(shard, piece))

    def _records(self, shard: Shard, piece: ShardPiece) -> Iterator[Record]:
        reading = self._reading()
        picture = img2dataset_shards.picture_column(shard) if shard.is_parquet else ""
        for row, sample in _rows(shard, piece, reading):
            if sample is not None:
                described = describe(sample, reading, shard.fallback, row=row.columns)
                yield from tar_records.records(sample, row.number, described, shard)
            elif row.failed is None or self.failed != "skip":
                yield self._record(row, reading, shard, picture)

    def _reading(self) -> Reading:
        return Reading(texts=parse_texts(self.text), id=self.id, role="alt")

    def _record(self, row: Row, reading: Reading, shard: Shard, field: str) -> Record:
        """The record of a row without a sample in a tar. field: the column of pictures of a parquet shard."""
        described = describe_row(row.columns or {}, reading, shard.fallback, key=row.key)
        picture = {} if row.picture is None else embedded_image(row.picture).columns(field)
        texts: list[Text] = described.texts
        if row.failed is not None and self.failed == "reject":
            texts = [(name, role, text, f"missing_image: {row.failed}") for name, role, text, _ in texts]
        columns = {"image_uri": described.url, **picture}
        if described.sha256:
            columns["image_sha256"] = described.sha256
        return Record(source_id=described.id, split=shard.split, row=row.number, texts=texts, columns=columns)


def _outlines(found: Sequence[Shard], limit: int | None) -> Iterator[tuple[Shard, img2dataset_shards.Outline]]:
    """The shards in order with their outlines; with a limit at most one for each thread is read ahead."""
    has_metadata = all(shard.metadata is not None for shard in found)
    count = FOOTER_THREADS if has_metadata else tar_samples.HEADER_THREADS
    # Outlines have a value for each row. They are dropped after each window, as a billion of them need too much memory.
    window = count if limit is not None else 16 * count
    with ThreadPoolExecutor(count) as threads:
        for first in range(0, len(found), window):
            some = found[first : first + window]
            yield from zip(some, threads.map(img2dataset_shards.outline, some), strict=True)


def _rows(shard: Shard, piece: ShardPiece, reading: Reading) -> Iterator[tuple[Row, tar_samples.Sample | None]]:
    """The rows of a piece, each with its sample in the tar, if it has one."""
    if shard.metadata is None:
        for sample in _samples_at(shard, piece.offsets, reading):
            yield Row(key=sample.key, number=img2dataset_shards.number_of(sample.key), columns=None), sample
        return
    known = img2dataset_shards.attempts(shard)
    fetched: dict[str, tar_samples.Sample] = {}
    if piece.offsets is not None:
        fetched = {sample.key: sample for sample in _samples_at(shard, piece.offsets, reading)}
    elif not shard.is_parquet:
        fetched = _samples(shard, known, piece, reading)
    for row in img2dataset_shards.rows(shard, known, reading, piece.start, piece.stop):
        yield row, fetched.pop(row.key) if row.failed is None and not shard.is_parquet else None


def _samples_at(shard: Shard, offsets: Ints | None, reading: Reading) -> list[tar_samples.Sample]:
    """The samples that begin at these offsets, in their order; read in the order of the tar, as seeks back are slow."""
    if offsets is None:
        raise InputError(f"A piece of {shard.uri} does not say where its samples are.")
    places = offsets[offsets >= 0]
    found: dict[int, tar_samples.Sample] = {}
    with open_headers(shard) as file:
        for offset in np.sort(places).tolist():
            samples = tar_samples.samples(
                file, shard, wants=lambda _, suffix, size: tar_records.wants(reading, suffix, size), offset=offset
            )
            found[offset] = next(samples)
    return [found[offset] for offset in places.tolist()]


def _samples(
    shard: Shard, known: img2dataset_shards.Attempts, piece: Piece, reading: Reading
) -> dict[str, tar_samples.Sample]:
    """Samples of the piece by key; one pass over the tar, whose order is that of the downloads."""
    failed = known.failed
    wanted = set(known.keys[piece.start : piece.stop].filter(pa.array(~failed[piece.start : piece.stop])).to_pylist())
    found: dict[str, tar_samples.Sample] = {}
    seen: list[str] = []

    def wants(key: str, suffix: str, size: int) -> bool:
        return key in wanted and tar_records.wants(reading, suffix, size)

    with open_headers(shard) as file:
        for sample in tar_samples.samples(file, shard, wants=wants):
            seen.append(sample.key)
            if sample.key in wanted:
                found[sample.key] = sample
    img2dataset_shards.check_same(
        shard, fetched=known.keys.filter(pa.array(~failed)), seen=pa.array(seen, pa.large_string())
    )
    return found
