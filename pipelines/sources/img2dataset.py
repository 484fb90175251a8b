"""Output of img2dataset: `NNNNN.tar`, its metadata `NNNNN.parquet` and `NNNNN_stats.json`; or parquet that carries the pictures.

Owns: which files are one shard, the order of its rows, rows whose picture was not fetched. Does not own: the layout of its metadata
(`img2dataset_shards`), samples and texts (`tar_samples`, `tar_texts`).
A tar holds what was fetched, in order of completion; the parquet has every row that was tried. So rows are taken by key: the number in a
key is the row number of a record, and a caption without picture is a reject that says why (img2dataset#452).
Invariant: tar, parquet and stats agree, or InputError says which two do not. A scene is named by sha256, else by url, never by key (A3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from infra import storage
from infra.errors import ConfigError, InputError
from pipelines.sources import Batch, Input, Piece, Source, Survey
from pipelines.sources import img2dataset_shards as shards
from pipelines.sources import layout as lay
from pipelines.sources import tar_records as rec
from pipelines.sources import tar_samples as tars
from pipelines.sources.footers import FOOTER_THREADS
from pipelines.sources.img2dataset_shards import NAME, Row, Shard
from pipelines.sources.names import listed
from pipelines.sources.pictures import WRITERS, carried
from pipelines.sources.rows import Builder
from pipelines.sources.tar_members import open_tar
from pipelines.sources.tar_texts import KEY, Reading, Told, row_told
from pipelines.sources.webdataset_tars import check_id, check_split, split_of

FAILED: Final = ("reject", "keep", "skip")


@dataclass(frozen=True, kw_only=True)
class Img2dataset(Source):
    """Pictures and alt texts that img2dataset fetched."""

    text: str = ""
    "Json fields or columns, commas between, each `name` or `name:role`. Empty: the caption, as alt text."
    id: str = ""
    "Json field that names the scene. Empty: sha256, else url, else uid."
    split: str = ""
    "Split of all rows. Empty: by a word in the path (`val/00000.tar`), else train."
    failed: str = "reject"
    "Captions of pictures that were not fetched: `reject` them, `keep` them as scenes without picture, or `skip` them unread."

    name = "img2dataset"
    # One alt text, and up to two recaptions as in Recap-DataComp.
    bad_passes = 3
    grouped = True
    needs_input = True
    repairs_byte_escapes = False
    writers = WRITERS

    def __post_init__(self) -> None:
        lay.parse_texts(self.text)
        check_split(self.split)
        check_id("key" if self.id == KEY else self.id)
        if self.failed not in FAILED:
            raise ConfigError(f"The option source.failed={self.failed!r} is not one of {', '.join(FAILED)}.")

    def reads(self, name: str) -> bool:
        """Files that are named as img2dataset names its output; a list of URLs beside them is left out."""
        return bool(NAME.fullmatch(name))

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Reads metadata; of a tar that has none, every header. Raises InputError when files of a shard do not agree."""
        found = shards.shards_of([i for i in inputs if self.reads(i.uri.rsplit("/", 1)[-1])])
        if not found:
            message = f"None of the inputs is named as img2dataset names its output (`00000.tar`, `00000.parquet`, `00000_stats.json`): {listed([i.uri for i in inputs])}. Other tars are read by the source webdataset."
            raise InputError(message)
        has_metadata = all(shard.is_parquet or shard.sidecar for shard in found)
        with ThreadPoolExecutor(FOOTER_THREADS if has_metadata else tars.HEADER_THREADS) as threads:
            outlines = list(threads.map(shards.outline, found))
        pieces: list[Piece] = []
        left = limit
        for shard, outline in zip(found, outlines, strict=True):
            rows = len(outline.failed) if left is None else min(left, len(outline.failed))
            left = None if left is None else left - rows
            step = max(1, -(-len(outline.failed) * tars.PIECE_BYTES // max(1, storage.size(shard.url))))
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                scenes = stop - start - (sum(outline.failed[start:stop]) if self.failed == "skip" else 0)
                if scenes:
                    counts = {split_of(shard, self.split): scenes}
                    pieces.append(Piece(input=shard, start=start, stop=stop, scenes_by_split=counts))
        every = sum(len(o.failed) for o in outlines)
        statuses = sum((o.statuses for o in outlines), Counter[str]())
        names = outlines[0].columns
        texts = {f: f"text:{role}" for f, role in self._reading().texts} or {"txt": "text:alt"}
        return Survey(
            format=f"img2dataset, {len(found)} shards, {every:,} rows tried, {every - statuses.total():,} pictures",
            pieces=pieces,
            columns=texts | {n: "scene id" for n in ([self.id] if self.id else ["sha256", "url", "uid"]) if n in names},
            notes=[*shards.notes(found, outlines), *self._failed_note(statuses, every)],
        )

    def _failed_note(self, statuses: Counter[str], every: int) -> Iterator[str]:
        if failed := statuses.total():
            words = {
                "reject": "their captions are rejects and count towards --max-reject-rate; `--set source.failed=skip` leaves them out",
                "keep": "their captions are kept as scenes without picture",
                "skip": "their captions are not read",
            }
            kinds = listed([f"{status} {count:,}" for status, count in statuses.most_common()])
            yield f"{failed:,} of {every:,} rows have no picture ({kinds}): {words[self.failed]}"

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Rows [start, stop) of one shard: of a tar in the order of keys, of parquet in its own."""
        shard = piece.input
        if not isinstance(shard, Shard):
            raise InputError("A piece of img2dataset names no shard.")
        reading = self._reading()
        place = rec.Place(uri=shard.uri, split=split_of(shard, self.split))
        builder = Builder(shard.uri)
        rows = shards.rows(shard, reading, piece.start, piece.stop)
        fetched = {} if shard.is_parquet else self._samples(shard, piece, reading)
        for row in rows:
            if builder.is_full:
                yield builder.build()
            if row.failed is not None:
                self._add_failed(builder, row, reading, place)
            elif shard.is_parquet:
                _add_row(builder, row, reading, place)
            else:
                rec.add(builder, fetched.pop(row.key), row.number, reading, place)
        if not builder.is_empty:
            yield builder.build()

    def _reading(self) -> Reading:
        return Reading(texts=lay.parse_texts(self.text), id=self.id, role="alt")

    def _samples(self, shard: Shard, piece: Piece, reading: Reading) -> dict[str, tars.Sample]:
        """Samples of the piece by key; one pass over the tar, whose order is that in which the pictures came."""
        tried = shards.keys(shard)
        expected = {key for key, failed in tried if not failed}
        wanted = {key for key, failed in tried[piece.start : piece.stop] if not failed}
        found: dict[str, tars.Sample] = {}
        seen: set[str] = set()

        def wants(key: str, suffix: str, size: int) -> bool:
            return key in wanted and rec.wants(reading, suffix, size)

        with open_tar(shard) as file:
            for sample in tars.samples(file, shard, wants=wants):
                seen.add(sample.key)
                if sample.key in wanted:
                    found[sample.key] = sample
        _check_same(shard, fetched=expected, seen=seen)
        return found

    def _add_failed(self, builder: Builder, row: Row, reading: Reading, place: rec.Place) -> None:
        if self.failed == "skip":
            return
        said = row_told(row.columns, reading, key=row.key, fallback=f"{place.uri}#{row.key}")
        _record(builder, row, said, place, None)
        for field, role, text, broken in said.texts:
            why = f"missing_image: {row.failed}" if self.failed == "reject" else broken
            builder.text(field, role, text, why)


def _check_same(shard: Shard, *, fetched: set[str], seen: set[str]) -> None:
    """Raises InputError when the keys of the tar are not those that its metadata calls fetched."""
    says = (shard.sidecar or shard).uri
    hint = "They are of different runs, or one was cut short; fetch both again, or name the tars alone (`*.tar`)."
    if lost := fetched - seen:
        message = f"{shard.uri} lacks {len(lost):,} of the {len(fetched):,} samples that {says} calls fetched, {min(lost)} first. {hint}"
        raise InputError(message)
    if extra := seen - fetched:
        message = (
            f"{shard.uri} holds {len(extra):,} samples that {says} does not call fetched, {min(extra)} first. {hint}"
        )
        raise InputError(message)


def _add_row(builder: Builder, row: Row, reading: Reading, place: rec.Place) -> None:
    said = row_told(row.columns, reading, key=row.key, fallback=f"{place.uri}#{row.key}")
    _record(builder, row, said, place, row.picture)
    rec.add_texts(builder, said.texts)


def _record(builder: Builder, row: Row, said: Told, place: rec.Place, picture: bytes | None) -> None:
    shown = None if picture is None else carried(picture)
    builder.record(
        said.id,
        place.split,
        row.number,
        image_uri=said.url,
        image_sha256=said.sha256 or (shown and shown.sha256),
        width=shown and shown.width,
        height=shown and shown.height,
        image=shown and shown.data,
    )
