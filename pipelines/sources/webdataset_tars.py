"""Tars in the layout of webdataset, whoever wrote them: members of one key are one sample, one sample is of one scene.

Owns: options, splits, pieces, notes on what is not read. Does not own: the rule of keys (`tar_samples`), texts and ids (`tar_texts`),
pictures (`tar_records`). What could run code when it is opened (`pyd`, `pkl`, `pth`) is never read.
Invariant: records are in the order of the tar; scenes are brought together by id, since one picture may be in many samples.
Every header is read once before the job starts, and a broken tar fails then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from catalog.schema import SPLIT_PATTERN
from infra.errors import ConfigError, InputError
from pipelines.sources import Batch, Input, Piece, Source, Survey
from pipelines.sources import layout as lay
from pipelines.sources import tar_records as rec
from pipelines.sources import tar_samples as tars
from pipelines.sources.names import listed, nearest
from pipelines.sources.pictures import WRITERS
from pipelines.sources.rows import Builder
from pipelines.sources.tar_members import open_tar
from pipelines.sources.tar_texts import ID_FIELDS, KEY, Reading, is_fetched, told

TAR_ENDS: Final = (".tar", ".tar.gz", ".tgz")

_SPLIT_WORD = re.compile(r"(?<![a-z])(train|val|valid|validation|dev|test)(?![a-z])", re.IGNORECASE)
_SPLIT_NAMES: Final = {"valid": "val", "validation": "val", "dev": "val"}


@dataclass(frozen=True, kw_only=True)
class TarPiece(Piece):
    """A piece of a tar, and where its first sample begins. Of a gzipped tar the offset is in what comes out, all before it is unpacked."""

    offset: int


@dataclass(frozen=True, kw_only=True)
class WebdatasetTars(Source):
    """Any webdataset tars with texts."""

    text: str = ""
    "Members or json fields, commas between, each `name` or `name:role`. Empty: `txt` members, else a known json field."
    id: str = ""
    "Json field that names the scene, or `__key__`. Empty: sha256, img2dataset's url, or uid of the json, else tar and key."
    split: str = ""
    "Split of all samples. Empty: by a word in the tar's path (`val-0001.tar`), else train."

    name = "webdataset"
    bad_passes = 5
    grouped = True
    needs_input = True
    repairs_byte_escapes = False
    writers = WRITERS

    def __post_init__(self) -> None:
        lay.parse_texts(self.text)
        check_split(self.split)
        check_id(self.id)

    def reads(self, name: str) -> bool:
        """Tars, plain or gzipped."""
        return name.lower().endswith(TAR_ENDS)

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Reads every header. Raises InputError for a broken tar and for samples that are not whole."""
        files = sorted((i for i in inputs if self.reads(i.uri)), key=lambda i: i.uri)
        if not files:
            message = f"None of the inputs is a tar by its name: {listed([i.uri for i in inputs])}. Tars end in {', '.join(TAR_ENDS)}."
            raise InputError(message)
        with ThreadPoolExecutor(tars.HEADER_THREADS) as threads:
            scans = list(threads.map(_scan, files))
        tally = tars.Tally()
        pieces: list[Piece] = []
        left = limit
        for source, (tally_of_tar, cuts) in zip(files, scans, strict=True):
            tally.add(tally_of_tar)
            rows = tally_of_tar.samples if left is None else min(left, tally_of_tar.samples)
            left = None if left is None else left - rows
            stops = [first for first, _ in cuts[1:]] + [rows]
            for (start, offset), stop in zip(cuts, stops, strict=True):
                if start < rows:
                    counts = {split_of(source, self.split): min(stop, rows) - start}
                    piece = TarPiece(
                        input=source, start=start, stop=min(stop, rows), scenes_by_split=counts, offset=offset
                    )
                    pieces.append(piece)
        reading = self._reading()
        _check_texts(reading, tally, files)
        fields = _peek(files, scans, reading)
        if self.id == KEY and is_fetched(fields):
            message = f"The tars are img2dataset's, whose keys are the numbers of rows in one download, so source.id={KEY} would name other pictures after the next. Leave it out; the json holds {listed(sorted(fields.keys() & set(ID_FIELDS)))}."
            raise InputError(message)
        return Survey(
            format=f"webdataset tars, {len(files)} files, {tally.samples:,} samples",
            pieces=pieces,
            columns=_meanings(tally, reading, fields),
            notes=[*_notes(tally, reading, fields), *_split_notes(files, self.split), *_skipped(inputs, files)],
        )

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Samples [start, stop) of one tar."""
        source = piece.input
        if source is None:
            raise InputError("A piece of webdataset tars names no input.")
        reading = self._reading()
        place = rec.Place(uri=source.uri, split=split_of(source, self.split))
        builder = Builder(source.uri)
        offset, row = (piece.offset, piece.start) if isinstance(piece, TarPiece) else (0, 0)

        def wants(key: str, suffix: str, size: int) -> bool:
            return rec.wants(reading, suffix, size)

        with open_tar(source) as file:
            for sample in tars.samples(file, source, wants=wants, offset=offset, row=row):
                if sample.row >= piece.stop:
                    break
                if sample.row < piece.start:
                    continue
                if builder.is_full:
                    yield builder.build()
                rec.add(builder, sample, sample.row, reading, place)
        if not builder.is_empty:
            yield builder.build()

    def _reading(self) -> Reading:
        return Reading(texts=lay.parse_texts(self.text), id=self.id)


def check_id(id_: str) -> None:
    """Raises ConfigError for `key`: joining on the number of a row in one download is refused (A3)."""
    if id_ == "key":
        message = f"The option source.id='key' is the number of a row in one img2dataset download; another download of the same list has other keys. Leave it out (the id is then {', '.join(ID_FIELDS)}), or write `{KEY}` if you chose the names in the tar yourself."
        raise ConfigError(message)


def check_split(split: str) -> None:
    """Raises ConfigError for what is no split name; empty is legal."""
    if split and not SPLIT_PATTERN.fullmatch(split):
        raise ConfigError(f"The option source.split={split!r} is no split name (lower-case letters, digits, `_`).")


def split_of(source: Input, option: str) -> str:
    """The option, else the last of the words train, val, test in the path below the input root, else train."""
    if option:
        return option
    words = [word.lower() for word in _SPLIT_WORD.findall(source.uri)]
    return _SPLIT_NAMES.get(words[-1], words[-1]) if words else lay.FALLBACK_SPLIT


def _scan(source: Input) -> tuple[tars.Tally, list[tuple[int, int]]]:
    tally = tars.Tally()
    with open_tar(source) as file:
        cuts = tars.cuts(file, source, tally)
    return tally, cuts


PEEKED_SAMPLES: Final = 100


def _peek(
    files: Sequence[Input], scans: Sequence[tuple[tars.Tally, list[tuple[int, int]]]], reading: Reading
) -> Counter[str]:
    """How many of the first samples of the first tar that has any hold each json field."""
    fields: Counter[str] = Counter()
    source = next((f for f, (tally, _) in zip(files, scans, strict=True) if tally.samples), None)
    if source is None:
        return fields
    with open_tar(source) as file:
        for sample in tars.samples(file, source, wants=lambda _, suffix, size: reading.wants(suffix, size)):
            if sample.row >= PEEKED_SAMPLES:
                break
            fields.update(told(sample, reading, uri=source.uri).fields)
    return fields


def _check_texts(reading: Reading, tally: tars.Tally, files: Sequence[Input]) -> None:
    """Raises InputError when there can be no text: neither a member that is one, nor a json."""
    if not tally.samples or "json" in tally.suffixes or "json.gz" in tally.suffixes:
        return
    present = [name for name, _ in reading.texts if name in tally.suffixes or f"{name}.gz" in tally.suffixes]
    found = f"Members by suffix: {_counts(tally.suffixes)}."
    if not any(map(reading.is_text, tally.suffixes)):
        message = f"None of the {tally.samples:,} samples of {listed([f.uri for f in files])} has a text or a json, so there is no caption. {found} Name a text member with `--set source.text=<suffix>`."
        raise InputError(message)
    if lacking := [name for name, _ in reading.texts if name not in present]:
        message = f"No sample of {listed([f.uri for f in files])} has a member `{lacking[0]}`, and none has a json.{nearest(lacking[0], tally.suffixes)} {found}"
        raise InputError(message)


def _meanings(tally: tars.Tally, reading: Reading, fields: Counter[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for suffix in sorted(tally.suffixes):
        if reading.is_text(suffix):
            named = (role for name, role in reading.texts if name in (suffix, suffix.removesuffix(".gz")))
            found[suffix] = f"text:{next(named, reading.role)}"
        elif rec.is_picture(suffix):
            found[suffix] = "image"
    has_members = any(meaning.startswith("text") for meaning in found.values())
    wanted = reading.texts or (() if has_members else lay.guess_texts(list(fields)))
    found |= {f"json {name}": f"text:{role}" for name, role in wanted if name in fields and name not in found}
    found |= {f"json {name}": "scene id" for name in _ids(reading, fields)}
    return found


def _notes(tally: tars.Tally, reading: Reading, fields: Counter[str]) -> Iterator[str]:
    unread = Counter(
        {
            suffix: count
            for suffix, count in tally.suffixes.items()
            if not reading.is_text(suffix) and not rec.is_picture(suffix) and suffix not in ("json", "json.gz")
        }
    )
    if unread:
        yield f"members that are neither text nor picture are not read: {_counts(unread)}"
    if tally.passed:
        yield f"entries that belong to no sample are passed over: {_counts(tally.passed)}"
    if is_fetched(fields):
        yield "the tars are img2dataset's; the source `img2dataset` reads them with their parquet, which also names what was not fetched"
    if not tally.samples:
        yield "the tars are whole, but hold no sample"
    named = [reading.id] if reading.id not in ("", KEY) else []
    for name in [*named, *(name for name, _ in reading.texts)]:
        if name not in tally.suffixes and f"{name}.gz" not in tally.suffixes and name not in fields:
            yield f"none of the first {PEEKED_SAMPLES} samples has a member or json field `{name}` (fields: {listed(sorted(fields))})"
    if not reading.id and tally.samples and not _ids(reading, fields):
        yield f"the first samples name no picture (sha256, uid), so scenes are named by tar and key; `--set source.id={KEY}` names them by key alone, if keys are your own"


def _ids(reading: Reading, fields: Counter[str]) -> list[str]:
    """The json fields that name scenes, in the order of their right to."""
    if reading.id:
        return [reading.id] if reading.id in fields else []
    if "dataset" in fields and "scene_key" in fields:
        return ["scene_key"]
    return [name for name in ID_FIELDS if name in fields and (name != "url" or is_fetched(fields))]


def _split_notes(files: Sequence[Input], option: str) -> Iterator[str]:
    counts = Counter(split_of(source, option) for source in files)
    if not option and set(counts) != {lay.FALLBACK_SPLIT}:
        yield f"splits are taken from the paths of the tars: {_counts(counts)}; `--set source.split=<name>` gives all one"


def _skipped(inputs: Sequence[Input], files: Sequence[Input]) -> Iterator[str]:
    if len(files) < len(inputs):
        yield f"{len(inputs) - len(files)} inputs are no tars by their names and are not read"


def _counts(counts: Counter[str]) -> str:
    return listed([f"{name} {count:,}" for name, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))])
