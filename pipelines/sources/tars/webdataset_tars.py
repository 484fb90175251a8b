"""Tars in the layout of webdataset, by any writer: members of one key are one sample, and a sample is of one scene.

Members that could run code when they are opened (`pyd`, `pkl`, `pth`) are never read.
Invariant: records are in the order of the tar; scenes are brought together by id, since one picture may be in many
samples. Every header is read before the job starts, so a broken tar fails then; with a limit, headers up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import IO, Final

from infra.errors import ConfigError, InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats import tar_samples
from pipelines.sources.formats.embedded_images import WRITERS
from pipelines.sources.formats.names import listed, nearest, none_read
from pipelines.sources.formats.rows import Record, batches
from pipelines.sources.formats.tar_members import open_headers, open_tar
from pipelines.sources.options import check_split, guess_texts, parse_texts
from pipelines.sources.tars import tar_records
from pipelines.sources.tars.tar_places import Tar, placed, split_notes
from pipelines.sources.tars.tar_texts import (
    ID_FIELDS,
    JSON_ENDS,
    KEY,
    Description,
    Reading,
    describe,
    is_fetched,
    unread_field,
)

TAR_ENDS: Final = (".tar", ".tar.gz", ".tgz")

ONE_DATASET: Final = (
    "Equal scene keys of two datasets name two scenes. Ingest each as a dataset of its own; "
    "or, if they are the same scenes, say so with `--set source.id=scene_key`."
)


@dataclass(frozen=True, kw_only=True)
class TarPiece(Piece):
    """A piece of a tar. offset: where its first sample begins, in a gzipped tar after decompression of all before it.

    dataset: the goodviews dataset that all samples of the job name; None when none does.
    """

    offset: int
    dataset: str | None


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """The headers of a tar. cuts: first sample and offset of each piece. first: its first sample with an id."""

    tar: Tar
    tally: tar_samples.Tally
    cuts: list[tuple[int, int]]
    first: Description | None


@dataclass(kw_only=True)
class Peek:
    """Counts of the first samples of a tar: by member, by json field, by what names them, by unread json field."""

    samples: int = 0
    suffixes: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)
    named: Counter[str | None] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)

    def add(self, sample: tar_samples.Sample, described: Description, reading: Reading) -> None:
        """Count a sample and its description."""
        self.samples += 1
        self.suffixes.update(sample.members.keys())
        self.fields.update(described.fields)
        if described.id is not None:
            self.named[described.named_by] += 1
        name = unread_field(sample, reading, described)
        if name is not None:
            self.unread[name] += 1


@dataclass(frozen=True, kw_only=True)
class WebdatasetTars(Source):
    """Any webdataset tars with texts."""

    text: str = ""
    "Members or json fields, commas between, each `name` or `name:role`. Empty: `txt` members, else a known json field."
    id: str = ""
    "Json field that names the scene, or `__key__`. Empty: sha256, img2dataset's url, DataComp's uid, else tar and key."
    split: str = ""
    "Split of all samples. Empty: by the name of the tar (`val-0001.tar`), else of its folder (`val`), else train."

    name = "webdataset"
    writers = WRITERS

    def __post_init__(self) -> None:
        parse_texts(self.text)
        check_split(self.split)
        check_id(self.id)

    def reads(self, name: str) -> bool:
        """Tars, plain or gzipped."""
        return name.lower().endswith(TAR_ENDS)

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Reads headers until `limit` is reached.

        Raises InputError for a broken tar, and for samples that are incomplete or of several kinds.
        """
        files = placed([i for i in inputs if self.reads(i.uri)], self.split)
        if not files:
            raise none_read(inputs, "a tar", f"Tars end in {', '.join(TAR_ENDS)}.")
        reading = self._reading()
        scans = list(_scans(files, reading, limit))
        tally = sum((scan.tally for scan in scans), tar_samples.Tally())
        held = [scan for scan in scans if scan.tally.samples]
        if not held:
            raise InputError(
                f"None of {listed([f.uri for f in files])} holds a sample "
                f"({_counts(tally.passed) if tally.passed else 'nothing at all'}). "
                "A sample is one file or more, each named `KEY.SUFFIX`. Check what was packed."
            )
        self._check_names(held)
        _check_texts(reading, tally, files)
        dataset = held[0].first.dataset if held[0].first and not self.id else None
        pieces: list[Piece] = []
        for scan in held:
            left = None if limit is None else limit - sum(piece.stop - piece.start for piece in pieces)
            pieces += _pieces(scan, dataset, left)
        first = peek_at(held[0].tar, reading, limit)
        return Survey(
            format=f"webdataset tars, {len(files)} files, {sum(p.stop - p.start for p in pieces):,} samples",
            pieces=pieces,
            columns=_meanings(tally, reading, first),
            notes=[
                *_notes(tally, reading, first),
                *split_notes([scan.tar for scan in held], self.split),
                *_skipped(inputs, files, [scan.tar for scan in scans if not scan.tally.samples]),
            ],
        )

    def _check_names(self, scans: Sequence[_Scan]) -> None:
        """Raises InputError when an id would name scenes of several downloads, goodviews datasets or tars."""
        fetched = next((scan.first for scan in scans if scan.first and is_fetched(scan.first.fields)), None)
        if self.id == KEY and fetched:
            raise InputError(
                f"The tars are img2dataset's, whose keys are the numbers of rows in one download, so source.id={KEY} "
                "would name other pictures after the next. Leave it out; the json holds "
                f"{listed(sorted({*fetched.fields} & {*ID_FIELDS}))}."
            )
        if self.id:
            return
        of_dataset = {scan.first.dataset: scan.tar.uri for scan in reversed(scans) if scan.first}
        if len(of_dataset) > 1:
            found = listed(sorted(f"{uri} holds {name or 'samples of others'}" for name, uri in of_dataset.items()))
            raise InputError(f"The tars are not of one goodviews dataset: {found}. {ONE_DATASET}")
        for scan in scans:
            if scan.first and scan.first.named_by is None and scan.first.id:
                scan.tar.fallback(scan.first.id)

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Samples [start, stop) of one tar."""
        tar = piece.input_as(Tar)
        if not isinstance(piece, TarPiece):
            raise InputError(f"A piece of {tar.uri} has no offset. Pieces come from `survey`.")
        yield from batches(tar.uri, self._records(tar, piece))

    def _records(self, tar: Tar, piece: TarPiece) -> Iterator[Record]:
        reading = self._reading()

        def wants(key: str, suffix: str, size: int) -> bool:
            return tar_records.wants(reading, suffix, size)

        with open_tar(tar) as file:
            for sample in tar_samples.samples(file, tar, wants=wants, offset=piece.offset, row=piece.start):
                if sample.row >= piece.stop:
                    break
                described = describe(sample, reading, tar.fallback)
                if described.id is not None and described.dataset != piece.dataset and not self.id:
                    raise InputError(
                        f"The sample {sample.key!r} of {tar.uri} is of {described.dataset or 'no goodviews dataset'}, "
                        f"the first one of the input of {piece.dataset or 'none'}. {ONE_DATASET}"
                    )
                yield from tar_records.records(sample, sample.row, described, tar)

    def _reading(self) -> Reading:
        return Reading(texts=parse_texts(self.text), id=self.id)


def check_id(id_: str) -> None:
    """Raises ConfigError for `key`: joining on the number of a row in one download is refused (A3)."""
    if id_ == "key":
        raise ConfigError(
            "The option source.id='key' is the number of a row in one img2dataset download; "
            f"another download of the same list has other keys. Leave it out (the id is then {', '.join(ID_FIELDS)}), "
            f"or write `{KEY}` if you chose the names in the tar yourself."
        )


def _no_fallback(key: str) -> str:
    return key


def _scans(files: Sequence[Tar], reading: Reading, limit: int | None) -> Iterator[_Scan]:
    """The scans in order, until `limit` samples were seen; the headers of later tars are not read."""
    # With a limit, tars are scanned in small groups, so that those behind the limit are never opened.
    step = len(files) if limit is None else tar_samples.HEADER_THREADS
    left = limit
    # Threads help although parsing holds the lock of Python: a scan mostly waits for seeks and for the network.
    with ThreadPoolExecutor(tar_samples.HEADER_THREADS) as threads:
        for first in range(0, len(files), step):
            for scan in threads.map(partial(_scan, reading=reading, limit=left), files[first : first + step]):
                yield scan
                left = None if left is None else left - scan.tally.samples
                if left is not None and left <= 0:
                    return


def _scan(tar: Tar, *, reading: Reading, limit: int | None) -> _Scan:
    tally = tar_samples.Tally()
    with open_headers(tar) as file:
        described = (description for _, description in _first_samples(file, tar, reading))
        first = next((description for description in described if description.id is not None), None)
        cuts = tar_samples.cuts(file, tar, tally, limit)
    return _Scan(tar=tar, tally=tally, cuts=cuts, first=first)


def _pieces(scan: _Scan, dataset: str | None, limit: int | None) -> Iterator[TarPiece]:
    rows = scan.tally.samples if limit is None else min(limit, scan.tally.samples)
    stops = [first for first, _ in scan.cuts[1:]] + [rows]
    for (start, offset), stop in zip(scan.cuts, stops, strict=True):
        if start < rows:
            count = min(stop, rows) - start
            yield TarPiece(
                input=scan.tar,
                start=start,
                stop=start + count,
                scenes_by_split={scan.tar.split: count},
                offset=offset,
                dataset=dataset,
            )


PEEKED_SAMPLES: Final = 100


def _first_samples(file: IO[bytes], tar: Tar, reading: Reading) -> Iterator[tuple[tar_samples.Sample, Description]]:
    """The first samples without the bytes of their pictures, and the description of each."""
    found = tar_samples.samples(file, tar, wants=lambda _, suffix, size: reading.wants(suffix, size))
    for sample in islice(found, PEEKED_SAMPLES):
        yield sample, describe(sample, reading, _no_fallback)


def peek_at(tar: Tar, reading: Reading, limit: int | None) -> Peek:
    """What the first samples of the tar hold, of `limit` at most."""
    peek = Peek()
    with open_headers(tar) as file:
        for sample, described in islice(_first_samples(file, tar, reading), limit):
            peek.add(sample, described, reading)
    return peek


def _check_texts(reading: Reading, tally: tar_samples.Tally, files: Sequence[Input]) -> None:
    """Raises InputError when there can be no text: neither a member that is one, nor a json."""
    if not tally.samples or "json" in tally.suffixes or "json.gz" in tally.suffixes:
        return
    present = [name for name, _ in reading.texts if name in tally.suffixes or f"{name}.gz" in tally.suffixes]
    found = f"Members by suffix: {_counts(tally.suffixes)}."
    if not any(map(reading.is_text, tally.suffixes)):
        raise InputError(
            f"None of the {tally.samples:,} samples of {listed([f.uri for f in files])} has a text or a json, so there "
            f"is no caption. {found} Name a text member with `--set source.text=<suffix>`."
        )
    if lacking := [name for name, _ in reading.texts if name not in present]:
        raise InputError(
            f"No sample of {listed([f.uri for f in files])} has a member `{lacking[0]}`, and none has a "
            f"json.{nearest(lacking[0], tally.suffixes)} {found}"
        )


def _meanings(tally: tar_samples.Tally, reading: Reading, peek: Peek) -> dict[str, str]:
    found: dict[str, str] = {}
    for suffix in sorted(tally.suffixes):
        if reading.is_text(suffix):
            named = (role for name, role in reading.texts if name in (suffix, suffix.removesuffix(".gz")))
            found[suffix] = f"text:{next(named, reading.role)}"
        elif tar_records.frame_of(suffix) is not None:
            found[f"fNNN.{suffix.partition('.')[2]}"] = "image, frame"
        elif tar_records.is_picture(suffix):
            found[suffix] = "image"
    has_members = any(meaning.startswith("text") for meaning in found.values())
    wanted = reading.texts or (() if has_members else guess_texts(list(peek.fields)))
    found |= {f"json {name}": f"text:{role}" for name, role in wanted if name in peek.fields and name not in found}
    found |= {f"json {name}": "scene id" for name in peek.named if name is not None and name != KEY}
    return found


def _notes(tally: tar_samples.Tally, reading: Reading, peek: Peek) -> Iterator[str]:
    opened = {s for s in tally.suffixes if reading.is_text(s) or tar_records.is_picture(s) or s in JSON_ENDS}
    if unread := Counter({suffix: count for suffix, count in tally.suffixes.items() if suffix not in opened}):
        yield f"members that are neither text nor picture are not read: {_counts(unread)}"
    if tally.passed:
        yield f"entries that belong to no sample are passed over: {_counts(tally.passed)}"
    if is_fetched(peek.fields):
        yield (
            "the tars are img2dataset's; the source `img2dataset` reads them with their parquet, which also names "
            "what was not fetched"
        )
    named = [reading.id] if reading.id not in ("", KEY) else []
    for name in [*named, *(name for name, _ in reading.texts)]:
        if name not in tally.suffixes and f"{name}.gz" not in tally.suffixes and name not in peek.fields:
            yield (
                f"none of the first {peek.samples} samples has a member or json field `{name}` (fields: "
                f"{listed(sorted(peek.fields))})"
            )
    for name, count in peek.unread.items():
        members = sorted(filter(reading.is_text, tally.suffixes))
        yield (
            f"{count} of the first {peek.samples} samples have a text member and other texts in their json's `{name}`, "
            f"which is not read; `--set source.text={','.join([*members, name])}` reads both"
        )
    if peek.named[None]:
        uid = " (`uid` counts only as the 32 hex digits of DataComp; `--set source.id=uid` names them by it)"
        yield (
            f"{peek.named[None]} of the first {peek.samples} samples name no picture (sha256, uid), so scenes are "
            f"named by tar and key{uid if 'uid' in peek.fields else ''}; `--set source.id={KEY}` names them by key "
            "alone, if keys are your own"
        )


def _skipped(inputs: Sequence[Input], files: Sequence[Tar], empty: Sequence[Tar]) -> Iterator[str]:
    if len(files) < len(inputs):
        yield f"{len(inputs) - len(files)} inputs are no tars by their names and are not read"
    if empty:
        yield f"{len(empty)} tars are whole, but hold no sample: {listed([tar.uri for tar in empty])}"


def _counts(counts: Counter[str]) -> str:
    return listed([f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))])
