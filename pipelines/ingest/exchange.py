"""The shuffle: bring the records of one scene, wherever they were read, to the task that builds their shard.

Invariant: the bucket (shard) of a record depends on its source id and split alone; memory is bounded by one piece.

One round: a task reads a piece of the input and writes one file with a slot for each shard; the task of a shard fetches
its slot of every file with three range reads. Above `SLOTS_MAX` shards a slot would hold a row or two, so there are two
rounds: the first sorts into bands of about sqrt(shards) shards, the second sorts each band into its shards, in portions
of the size of a piece.

A file: the slots one after another, each the Arrow IPC streams of its records and of its texts; then int64 offsets
(2 x slots + 1); then records, texts, slots (int64) and a magic of 8 bytes. Integers are little-endian.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra import seeds, storage
from infra.errors import IntegrityError
from pipelines.arrays import Ints, column
from pipelines.ingest.group import merge
from pipelines.ingest.stamps import Stamps, read_pieces
from pipelines.records import RECORDS, TEXTS, Batch, Piece, Source

MAGIC = b"gvexch02"
TRAILER = struct.Struct("<qqq8s")
SLOTS_MAX = 1024


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """First shard number and number of shards of each split."""

    by_split: Mapping[str, tuple[int, int]]

    @property
    def total(self) -> int:
        """Number of shards over all splits."""
        return sum(count for _, count in self.by_split.values())


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The rounds of one job; small, because every shard task carries it.

    folder: named by the cut of the input (see `plan_exchange`), so files of another cut are never taken for these.
    band: number of shards in a band; None: one round, in which every piece has a slot for every shard.
    """

    folder: str
    pieces: int
    buckets: Buckets
    band: int | None

    @property
    def bands(self) -> int:
        """Number of bands of the first of two rounds."""
        return 1 if self.band is None else -(-self.buckets.total // self.band)

    @property
    def portions(self) -> int:
        """Number of second-round files of each band. Each joins as many pieces as there are bands."""
        return -(-self.pieces // self.bands)

    def piece_url(self, piece: int) -> str:
        """File of the first round."""
        return storage.join(self.folder, f"piece-{piece:06d}.exchange")

    def band_url(self, band: int, portion: int) -> str:
        """File of the second round."""
        return storage.join(self.folder, f"band-{band:05d}-{portion:05d}.exchange")


def plan_exchange(folder: str, pieces: Sequence[Piece], buckets: Buckets, *, slots_max: int = SLOTS_MAX) -> Exchange:
    """One round up to `slots_max` shards, else two; the files go into a subfolder of `folder` named by the cut.

    The cut is not part of the version: another release may cut the input elsewhere and resume the version. Files of the
    other cut hold other rows under the same numbers, so they need other names.
    """
    band = None if buckets.total <= slots_max else math.isqrt(buckets.total - 1) + 1
    cuts = [(p.input.uri if p.input else "", p.start, p.stop) for p in pieces]
    # The magic is part of the name, so that files of another format are not read either.
    identity = hashlib.sha256(repr((cuts, sorted(buckets.by_split.items()), band, MAGIC)).encode()).hexdigest()[:16]
    return Exchange(folder=storage.join(folder, identity), pieces=len(pieces), buckets=buckets, band=band)


@dataclass(frozen=True, kw_only=True)
class PartitionTask:
    """First round: read one piece and write its file."""

    source: Source
    piece: Piece
    number: int
    exchange: Exchange
    stamps: Stamps = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RegroupTask:
    """Second round: one portion of one band into the shards of the band."""

    exchange: Exchange
    band: int
    portion: int


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Number of records and texts in the file of one task."""

    records: int
    texts: int


def partition(task: PartitionTask) -> Moved:
    """Write the file of one piece, unless a killed run wrote it."""
    exchange = task.exchange
    url = exchange.piece_url(task.number)
    if storage.exists(url):
        return _counts(url)
    batch = merge(read_pieces(task.source, [task.piece], task.stamps))
    shard = bucket_of(batch.records, exchange.buckets)
    if exchange.band is None:
        return _write(url, batch, shard, exchange.buckets.total)
    return _write(url, batch, shard // exchange.band, exchange.bands)


def regroup_tasks(exchange: Exchange) -> list[RegroupTask]:
    """The tasks of the second round; none when one round is enough."""
    if exchange.band is None:
        return []
    return [
        RegroupTask(exchange=exchange, band=band, portion=portion)
        for band in range(exchange.bands)
        for portion in range(exchange.portions)
    ]


def regroup(task: RegroupTask) -> Moved:
    """Write one file of the second round, unless a killed run wrote it."""
    exchange, band = task.exchange, task.exchange.band
    if band is None:
        raise IntegrityError("This exchange has one round, so there is nothing to regroup. This is a bug.")
    url = exchange.band_url(task.band, task.portion)
    if storage.exists(url):
        return _counts(url)
    # A portion reads as many pieces as there are bands, each for one band: together about the size of one piece.
    first = task.portion * exchange.bands
    pieces = range(first, min(exchange.pieces, first + exchange.bands))
    batch = merge(_slot(exchange.piece_url(piece), task.band) for piece in pieces)
    shard = bucket_of(batch.records, exchange.buckets)
    return _write(url, batch, shard - task.band * band, band)


def fetch(exchange: Exchange, shard: int) -> Iterator[Batch]:
    """The records of one shard from every file that has a slot for it, in a fixed order."""
    if exchange.band is None:
        for piece in range(exchange.pieces):
            yield _slot(exchange.piece_url(piece), shard)
        return
    band, slot = divmod(shard, exchange.band)
    for portion in range(exchange.portions):
        yield _slot(exchange.band_url(band, portion), slot)


def bucket_of(records: pa.Table, buckets: Buckets) -> Ints:
    """Shard (R,) of each record: its split's first shard plus hash(source id) modulo the split's shards.

    A record without an id goes by its address. Raises IntegrityError for a split that the survey did not announce.
    """
    split = column(records, "split")
    names = split.dictionary.to_pylist()
    used = set(np.unique(np.asarray(split.indices)).tolist())
    unknown = sorted(names[i] for i in used if names[i] not in buckets.by_split)
    if unknown:
        known = ", ".join(buckets.by_split)
        raise IntegrityError(
            f"The input gave split {unknown[0]!r}, which its survey did not announce ({known}). The input changed "
            "while it was read; rerun."
        )
    # A dictionary may hold names of no record; (0, 1) stands in for these, and keeps the arrays from being empty.
    ranges = [buckets.by_split.get(name, (0, 1)) for name in names] or [(0, 1)]
    first, count = (np.array(values, np.int64) for values in zip(*ranges, strict=True))
    code = np.asarray(split.indices, np.int64)
    ids = column(records, "source_id")
    if ids.null_count:
        uris = column(records, "source_uri").cast(pa.large_string())
        rows = column(records, "source_row").cast(pa.large_string())
        ids = pc.coalesce(ids, pc.binary_join_element_wise(uris, rows, pa.scalar("#", pa.large_string())))
    hashes = seeds.hash_keys(ids.cast(pa.large_binary()).to_pylist())
    return first[code] + (hashes % count[code].astype(np.uint64)).astype(np.int64)


# --- files --------------------------------------------------------------------------------------------------------


def _write(url: str, batch: Batch, slot: Ints, slots: int) -> Moved:
    storage.publish(url, list(_parts(batch, slot, slots)))
    return Moved(records=batch.records.num_rows, texts=batch.texts.num_rows)


def _parts(batch: Batch, slot: Ints, slots: int) -> Iterator[pa.Buffer | bytes]:
    # Records sorted by slot; texts follow their records, whose numbers then count from the start of the slot.
    order = np.argsort(slot, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    text_place = place[np.asarray(column(batch.texts, "record"), np.int64)]
    text_order = np.argsort(text_place, kind="stable")
    records = batch.records.take(pa.array(order)).combine_chunks()
    texts = batch.texts.take(pa.array(text_order)).combine_chunks()
    record_cuts = np.searchsorted(slot[order], np.arange(slots + 1))
    text_cuts = np.searchsorted(text_place[text_order], record_cuts)
    local = text_place[text_order] - np.repeat(record_cuts[:-1], np.diff(text_cuts))
    texts = texts.set_column(0, TEXTS.field("record"), pa.array(local))
    offsets = np.zeros(2 * slots + 1, np.int64)
    for s in range(slots):
        slices = (
            records.slice(record_cuts[s], record_cuts[s + 1] - record_cuts[s]),
            texts.slice(text_cuts[s], text_cuts[s + 1] - text_cuts[s]),
        )
        for i, table in enumerate(slices):
            stream = _stream(table)
            offsets[2 * s + i + 1] = offsets[2 * s + i] + len(stream)
            yield stream
    yield offsets.astype("<i8").tobytes()
    yield TRAILER.pack(batch.records.num_rows, batch.texts.num_rows, slots, MAGIC)


def _stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _counts(url: str) -> Moved:
    records, texts, _ = _trailer(url, storage.size(url))
    return Moved(records=records, texts=texts)


def _trailer(url: str, size: int) -> tuple[int, int, int]:
    data = storage.read_range(url, max(0, size - TRAILER.size), size)
    if len(data) < TRAILER.size or data[-8:] != MAGIC:
        raise IntegrityError(
            f"{url} is not an exchange file of this release. Delete the work folder it is in and rerun."
        )
    records, texts, slots, _ = TRAILER.unpack(data)
    return records, texts, slots


def _slot(url: str, slot: int) -> Batch:
    size = storage.size(url)
    _, _, slots = _trailer(url, size)
    index = size - TRAILER.size - 8 * (2 * slots + 1)
    # Three offsets: start of the records, start of the texts, end of both.
    cuts = storage.read_range(url, index + 16 * slot, index + 16 * slot + 24)
    start, middle, stop = np.frombuffer(cuts, "<i8").tolist()
    data = pa.py_buffer(storage.read_range(url, start, stop))
    records = pa.ipc.open_stream(data.slice(0, middle - start)).read_all()
    texts = pa.ipc.open_stream(data.slice(middle - start)).read_all()
    return Batch(records.cast(RECORDS), texts.cast(TEXTS))
