"""Build and publish one shard: parquet, good and bad tars, rejects, and its manifest.

Invariant: the manifest is renamed last, after every file it names was flushed; the bytes depend on the records and the
version alone. After a kill at any point, a rerun writes the same bytes under the same names.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from catalog import schema
from catalog.manifest import PICTURE_COUNTS, Manifest, ShardFile
from infra import seeds, storage
from infra.errors import AccountingError, InputError, IntegrityError
from infra.storage.publisher import Publisher
from pipelines.arrays import Ints, column, is_none
from pipelines.ingest import caption_cap, exclusion, tables, tars
from pipelines.ingest.caption_cap import Cap
from pipelines.ingest.clean import CleanConfig
from pipelines.ingest.exchange import Exchange, fetch
from pipelines.ingest.exclusion import Exclusion
from pipelines.ingest.group import Scenes, group, merge
from pipelines.ingest.stamps import Stamps, read_pieces
from pipelines.ingest.tables import Kept, Origin, Pictures
from pipelines.records import Batch, Piece, Source

ROW_GROUP_TEXT_BYTES = 64 << 20
"""Other readers fail on a row group whose nested strings pass 2 GB (apache/arrow#32723); this stays far below."""


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """Which tars are written, and from which seed the bad passes draw."""

    good: bool
    bad: bool
    images: bool
    bad_passes: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """Everything that one task needs; picklable. Records come from `pieces`, or from the files of `exchanged`."""

    origin: Origin
    version_url: str
    source: Source
    clean: CleanConfig
    views: ViewConfig
    is_recorded: bool = False
    "The job record exists, so every file was hashed when it was complete; else published files are hashed again."
    pieces: tuple[Piece, ...] = ()
    stamps: Stamps = field(default_factory=dict)
    exchanged: Exchange | None = None
    exclusion: Exclusion | None = None
    cap: Cap | None = None

    @property
    def title(self) -> str:
        """`Shard train-00000 of NAME`, for messages."""
        return f"Shard {schema.shard_name(self.origin.split, self.origin.shard)} of {self.origin.dataset}"


@dataclass(frozen=True, kw_only=True)
class PublishedShard:
    """Totals of a published shard."""

    name: str
    scenes: int
    captions: int
    texts_read: int
    texts_kept: int
    rejects: dict[str, int]
    pictures_read: int | None
    pictures_kept: int | None
    pictures_rejected: dict[str, int] | None
    was_there: bool


def publish_shard(task: ShardTask) -> PublishedShard:
    """Build and publish the shard, unless its manifest and files are there already.

    Raises AccountingError when a text or a row was lost; then no manifest is published.
    """
    published = published_shard(task)
    if published is not None:
        return published
    try:
        scenes = _scenes(task)
    except InputError:
        # Another job of the same version may have finished and removed the exchanged files.
        published = published_shard(task)
        if published is None:
            raise
        return published
    manifest = _publish_files(task, scenes)
    rejected = sum(manifest.rejects.values())
    if manifest.texts_read != manifest.texts_kept + rejected:
        raise AccountingError(
            f"{task.title} read {manifest.texts_read} texts, kept {manifest.texts_kept} and rejected {rejected}. Texts "
            "were lost or doubled; it was not published. This is a bug."
        )
    accounted = sum((manifest.pictures_rejected or {}).values()) + (manifest.pictures_kept or 0)
    if manifest.pictures_read not in (None, accounted):
        raise AccountingError(
            f"{task.title} read {manifest.pictures_read} pictures, but kept and rejected {accounted}. It was not "
            "published. This is a bug."
        )
    storage.publish(_manifest_url(task), manifest.to_json())
    return _done(manifest, was_there=False)


def _manifest_url(task: ShardTask) -> str:
    return storage.join(task.version_url, schema.manifest_path(task.origin.split, task.origin.shard))


def published_shard(task: ShardTask) -> PublishedShard | None:
    """Totals of the shard if its manifest is there and its files agree with it; else None."""
    url = _manifest_url(task)
    if not storage.exists(url):
        return None
    manifest = Manifest.from_json(storage.read_bytes(url), url=url)
    for file in manifest.files:
        path = storage.join(task.version_url, file.path)
        if not storage.exists(path) or storage.size(path) != file.bytes:
            return None
        if not task.is_recorded and storage.digest(path).sha256 != file.sha256:
            return None
    return _done(manifest, was_there=True)


def _scenes(task: ShardTask) -> Scenes:
    """The scenes of the shard, with a reason for each text that is left out."""
    batch = merge(_batches(task))
    rows = sum(piece.stop - piece.start for piece in task.pieces)
    if task.exchanged is None and batch.records.num_rows != rows:
        raise AccountingError(
            f"{task.title} is cut to {rows:,} rows but {batch.records.num_rows:,} were read. The input changed since "
            "it was surveyed, or its reader lost rows; rerun."
        )
    others = set(column(batch.records, "split").unique().to_pylist()) - {task.origin.split}
    if others:
        raise IntegrityError(
            f"{task.title} got records of split {min(others)!r}. The input changed since it was surveyed; rerun."
        )
    if not task.source.grouped:
        # Each row is a scene of its own, so two rows of one id would become a false pair of views. Rows that are read
        # directly may repeat an id in another shard, too: the job looks for those when all shards are written.
        _refuse_repeated_ids(batch, task.origin)
    scenes = group(batch, config=task.clean, repair=task.clean.repairs(task.source))
    if task.exclusion is not None:
        scenes = exclusion.leave_out(scenes, task.exclusion)
    return scenes if task.cap is None else caption_cap.apply(scenes, task.cap)


def count_captions(task: ShardTask) -> int:
    """First pass of the cap: write the normal forms of a shard unless they are there; returns their number."""
    cap, shard = task.cap, task.origin.shard
    if cap is None:
        raise IntegrityError("This job caps no captions, so there is nothing to count. This is a bug.")
    counted = caption_cap.counted_rows(cap, shard)
    if counted is None:
        counted = caption_cap.write_counts(_scenes(dataclasses.replace(task, cap=None)), cap, shard)
    return counted


def _refuse_repeated_ids(batch: Batch, origin: Origin) -> None:
    """Raises IntegrityError when two rows have one id, though the source says that a row is a scene."""
    counts = pc.value_counts(column(batch.records, "source_id").drop_null())
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(repeated):
        name = repeated[0]["values"].as_py()
        raise IntegrityError(
            f"The id {name!r} of {origin.dataset} stands in several rows, though each row is a scene of its own. "
            "Rename one; in a table leave `source.unique` out, so that rows of one id become one scene."
        )


def _batches(task: ShardTask) -> Iterator[Batch]:
    if task.exchanged is not None:
        yield from fetch(task.exchanged, task.origin.shard)
    yield from read_pieces(task.source, task.pieces, task.stamps)


def _done(manifest: Manifest, *, was_there: bool) -> PublishedShard:
    names = ("scenes", "captions", "texts_read", "texts_kept", "rejects", *PICTURE_COUNTS)
    totals = {name: getattr(manifest, name) for name in names}
    return PublishedShard(name=schema.shard_name(manifest.split, manifest.shard), was_there=was_there, **totals)


# --- files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A file of the shard, before it is published. blocks: length of each sample of a tar, in blocks of 512 bytes."""

    path: str
    kind: str
    rows: int
    parts: list[pa.Buffer | bytes]
    blocks: list[int] | None = None
    bad_pass: int | None = None


def _publish_files(task: ShardTask, scenes: Scenes) -> Manifest:
    origin, views = task.origin, task.views
    kept = tables.keep(scenes)
    table = tables.scenes_table(scenes, kept, origin)
    pictures = tables.pictures_of(scenes, kept)
    publisher = Publisher()
    files: list[_File] = []
    try:
        for file in _plan_files(task, scenes, kept, pictures, table):
            publisher.submit(file.path, storage.join(task.version_url, file.path), file.parts)
            files.append(
                dataclasses.replace(file, parts=[])
            )  # the publisher alone holds the bytes, until they are written
    finally:
        records = publisher.finish()
    counts = np.diff(kept.offsets)
    reasons: Counter[str] = Counter(scenes.reason[~is_none(scenes.reason)].tolist())
    passes = views.bad_passes if views.bad else 0
    return Manifest(
        dataset=origin.dataset,
        version=origin.version,
        split=origin.split,
        shard=origin.shard,
        seed=views.seed,
        scenes=len(kept.rows),
        captions=len(kept.texts),
        texts_read=scenes.texts.num_rows,
        texts_kept=len(kept.texts),
        rejects=dict(sorted(reasons.items())),
        repaired=int(np.count_nonzero(scenes.repaired[kept.texts])),
        captions_per_scene={str(k): int(v) for k, v in enumerate(np.bincount(counts)) if v},
        bad_passes=passes,
        bad_repeats=int(np.maximum(0, passes - counts).sum()),
        rows_digest=tables.rows_digest(table),
        scenes_without_caption=len(scenes.keys) - len(kept.rows),
        pictures_read=pictures.read,
        pictures_kept=None if pictures.read is None else pictures.kept,
        pictures_rejected=None if pictures.read is None else dict(sorted(Counter(pictures.reasons).items())),
        files=[
            ShardFile(
                path=file.path,
                kind=file.kind,
                bytes=records[file.path].bytes,
                sha256=records[file.path].sha256,
                rows=file.rows,
                blocks=file.blocks,
                bad_pass=file.bad_pass,
            )
            for file in files
        ],
    )


def _plan_files(task: ShardTask, scenes: Scenes, kept: Kept, pictures: Pictures, table: pa.Table) -> Iterator[_File]:
    """Files that hold at least one row: other readers refuse a parquet file without rows (pg_lake PR#425)."""
    origin, views = task.origin, task.views
    if table.num_rows:
        yield _parquet(schema.scenes_path(origin.split, origin.shard), "scenes", table)
        captions = tars.caption_json(
            scenes.text_index[kept.texts],
            table["captions"].chunk(0).values.field("role"),
            table["captions"].chunk(0).values.field("text"),
        )
        if views.good:
            yield _good(task, scenes, kept, captions)
        if views.bad:
            yield from _bad(task, scenes, kept, captions)
    rejects = tables.rejects_table(scenes, origin)
    if pictures.rows.size:
        rejects = pa.concat_tables([rejects, tables.rejected_pictures(scenes, pictures, origin)]).combine_chunks()
    if rejects.num_rows:
        yield _parquet(schema.rejects_path(origin.shard), "rejects", rejects)
    states = tables.states_table(scenes, kept, origin)
    if states.num_rows:
        yield _parquet(schema.states_path(origin.split, origin.shard), "states", states)


def _parquet(path: str, kind: str, table: pa.Table) -> _File:
    return _File(path, kind, table.num_rows, [parquet_bytes(table)])


ROLE_LEAF = "captions.list.element.role"
DICTIONARY_COLUMNS = ("dataset", "version", "split", "source_uri", ROLE_LEAF, "reason", "field")
"""Columns of few distinct values."""
STATISTICS_COLUMNS = ("dataset", "version", "split", "scene_key", "source_row", "reason")


def parquet_bytes(table: pa.Table) -> pa.Buffer:
    """The table as parquet with fixed settings: zstd, page index, row groups of at most about 64 MB of text."""
    groups = max(1, -(-table.nbytes // ROW_GROUP_TEXT_BYTES))
    sink = pa.BufferOutputStream()
    leaves = {*table.column_names, ROLE_LEAF}
    pq.write_table(
        table,
        sink,
        row_group_size=max(1, -(-table.num_rows // groups)),
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in DICTIONARY_COLUMNS if name in leaves],
        write_page_index=True,
        write_statistics=[name for name in STATISTICS_COLUMNS if name in leaves],
    )
    return sink.getvalue()


def _good(task: ShardTask, scenes: Scenes, kept: Kept, captions: pa.LargeStringArray) -> _File:
    payload = tars.sample_json(task.origin.dataset, kept.keys, tars.joined_by_scene(captions, kept.offsets))
    names = tars.joined(kept.keys, ".json")
    samples: Ints | None = None
    if task.views.images:
        names, payload, samples = tars.with_images(names, payload, kept.keys, *tables.image_rows(scenes, kept))
    tar = tars.tar(names, payload, samples)
    path = schema.good_path(task.origin.split, task.origin.shard)
    return _File(path, "good", len(kept.rows), tar.parts, blocks=tar.blocks.tolist())


def _bad(task: ShardTask, scenes: Scenes, kept: Kept, captions: pa.LargeStringArray) -> Iterator[_File]:
    """Pass p shows the caption at place p mod n of each scene's seeded permutation of its n captions."""
    counts = np.diff(kept.offsets)
    index = scenes.text_index[kept.texts]
    hashes = np.repeat(seeds.hash_keys(kept.keys.to_pylist()), counts)
    places = seeds.permutation_places(hashes, index, task.views.seed)
    # The inverse of the permutations of all scenes: entry offsets[i] + p is the caption of scene i at place p.
    by_place = np.empty(len(places), np.int64)
    by_place[np.repeat(kept.offsets[:-1], counts) + places] = np.arange(len(places))
    for bad_pass in range(task.views.bad_passes):
        rows = by_place[kept.offsets[:-1] + bad_pass % counts]
        number = pc.utf8_lpad(pa.array(index[rows]).cast(pa.large_string()), 3, padding="0")
        names = tars.joined(kept.keys, "-c", number, ".json")
        payload = tars.sample_json(task.origin.dataset, kept.keys, captions.take(pa.array(rows)))
        tar = tars.tar(names, payload)
        path = schema.bad_path(task.origin.split, task.origin.shard, bad_pass)
        yield _File(path, "bad", len(rows), tar.parts, tar.blocks.tolist(), bad_pass)
