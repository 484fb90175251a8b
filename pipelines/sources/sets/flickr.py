"""Flickr8k and Flickr30k: caption files, Karpathy's JSON, and parquet of the Hugging Face hub.

Invariant: a scene is named by its picture's file name without `.jpg`, so that every form gives the same scenes; the
captions of a picture come from one file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from catalog.schema import SPLIT_PATTERN
from infra.errors import InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats.arrow_columns import as_url
from pipelines.sources.formats.delimited import BOM
from pipelines.sources.formats.documents import load
from pipelines.sources.formats.embedded_images import WRITERS as PICTURE_WRITERS
from pipelines.sources.formats.lines import all_lines
from pipelines.sources.formats.names import base, listed, picture_id
from pipelines.sources.formats.rows import Record, Text, batches
from pipelines.sources.options import check_split
from pipelines.sources.sets import caption_lines, flickr_tables
from pipelines.sources.sets.coco_layouts import KARPATHY, dataset_of, layout_of, pictures

PARQUET: Final = "parquet"
UNLISTED: Final = "rest"
"""Split of a picture that no list names: 91 of Flickr8k."""
WHOLE: Final = "all"
"""Split of every picture when nothing says any."""

SPLIT_NAMES: Final = {"dev": "val", "validation": "val"}
LOST_OF_FLICKR8K: Final = {
    "2258277193_586949ec62": "missing_image: the picture is in no archive of Flickr8k, so 8,091 of its 8,092 are left"
}
MEANINGS: Final = {"picture's file name": "scene id, image uri", "caption": "text:human", "split, or its list": "split"}

SplitRule: TypeAlias = Callable[[str | None, str | None], str]

_LIST = re.compile(r"(?:.*[._-])?(train|dev|val|validation|test)(?:_?20\d\d)?(?:_?images)?\.txt", re.IGNORECASE)
_LISTED = re.compile(r"(.*?)(?:#\d+)?", re.DOTALL)
_ENDING = re.compile(r"\.(?:jpe?g|png)$", re.IGNORECASE)
_CAPTIONS = re.compile(r".*\.token(?:\.txt)?|.*captions.*\.txt|.*\.csv|dataset_.*\.json|.*\.parquet", re.IGNORECASE)
_OTHER = re.compile(r".*(?:lemma|annotations\.txt|crowdflower|expert).*", re.IGNORECASE)
"""Lemmatised captions and ratings, which the folder of Flickr8k holds beside its captions."""


@dataclass(frozen=True, kw_only=True)
class CaptionFile(Input):
    """A file of captions in one form, with the split lists that are read with it."""

    form: str
    lists: tuple[Input, ...] = ()
    named_split: str | None = None
    "Split by the file's name, where several parquet files bear several."

    @property
    def files(self) -> tuple[Input, ...]:
        """The file and the lists."""
        return (self, *self.lists)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One line, picture or row of a caption file."""

    row: int
    picture: str | None
    split: str | None
    texts: list[Text]
    is_repaired: bool = False


class _Flickr(Source):
    """What both sets share. A subclass is a dataclass of its options."""

    split: str
    lost: Mapping[str, str] = {}
    "Scene id -> why its captions are rejected."
    foreign: tuple[re.Pattern[str], str]
    "Pattern of the scene ids of the other set, and its name."

    def __post_init__(self) -> None:
        check_split(self.split)

    def reads(self, name: str) -> bool:
        """Caption files and split lists; lemmatised captions and ratings beside them are left out."""
        name = base(name)
        return not _OTHER.fullmatch(name) and bool(_CAPTIONS.fullmatch(name) or _LIST.fullmatch(name))

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Parses every caption file; of parquet, names and splits alone.

        Raises InputError for a file in an unknown form, for a picture in two files or lists, for splits from two
        sources.
        """
        lists, files, notes = _chosen_files(inputs, self.name)
        splits = {} if self.split else _read_lists(lists)
        files = [replace(file, lists=tuple(lists)) for file in files]
        pieces: list[Piece] = []
        holders: dict[str, str] = {}
        for file in files:
            left = None if limit is None else limit - len(holders)
            if left == 0:
                break
            if file.form == PARQUET:
                found = flickr_tables.pieces(file, left, self._split_rule(file, splits), self._pictures)
            else:
                found = self._survey_lines(file, left, splits, notes)
            for piece, ids in found:
                pieces.append(piece)
                _claim(holders, ids, file)
        self._check_names(holders)
        if splits and limit is None:
            notes += _check_lists(splits, holders, lists)
        if lists and self.split:
            notes.append(f"split lists are not read, as source.split={self.split!r} names one split for all")
        named = {split for piece in pieces for split in piece.scenes_by_split}
        if named == {WHOLE}:
            notes.append(
                "nothing says which scene is of which split, so all are of the split `all`; "
                "add split lists to the inputs, or name one with source.split"
            )
        forms = " and ".join(sorted({file.form for file in files}))
        return Survey(format=f"{self.name}, {forms} form", pieces=pieces, columns=MEANINGS, notes=notes, cuttable=False)

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Rows [start, stop) of one file."""
        file = piece.input_as(CaptionFile)
        rule = self._split_rule(file, {} if self.split else _read_lists(file.lists))
        if file.form == PARQUET:
            yield from flickr_tables.read(file, piece.start, piece.stop, rule, self._pictures)
        else:
            yield from batches(file.uri, self._records(file, piece, rule))

    def _records(self, file: CaptionFile, piece: Piece, rule: SplitRule) -> Iterator[Record]:
        for entry in _entries(file):
            if entry.row >= piece.stop:
                break
            if entry.row >= piece.start:
                id_ = None if entry.picture is None else picture_id(entry.picture)
                lost = self.lost.get(id_ or "")
                yield Record(
                    source_id=id_,
                    split=rule(id_, entry.split),
                    row=entry.row,
                    texts=[(field, role, text, broken or lost) for field, role, text, broken in entry.texts],
                    columns={"image_uri": entry.picture},
                )

    @property
    def _pictures(self) -> bool:
        return bool(getattr(self, "pictures", False))

    def _survey_lines(
        self, file: CaptionFile, left: int | None, splits: Mapping[str, str], notes: list[str]
    ) -> Iterator[tuple[Piece, set[str]]]:
        rule = self._split_rule(file, splits)
        scenes: dict[str, set[str]] = {}
        repaired: list[str] = []
        stop = 0
        seen: set[str] = set()
        for entry in _entries(file):
            id_ = None if entry.picture is None else picture_id(entry.picture)
            if left is not None and len(seen) >= left and id_ not in seen:
                break
            stop = entry.row + 1
            if id_ is not None:
                seen.add(id_)
            scenes.setdefault(rule(id_, entry.split), set()).add(id_ or f"#{entry.row}")
            if entry.is_repaired:
                repaired.append(f"{entry.picture} (row {entry.row:,})")
        if left is None and file.form != KARPATHY and not caption_lines.ends_in_a_line(file):
            notes.append(f"the last line of {file.uri} has no line end; was the file cut short?")
        if repaired:
            notes.append(f"{file.uri}: a missing second separator is read as if it were there: {listed(repaired)}")
        if stop:
            counts = {split: len(ids) for split, ids in sorted(scenes.items())}
            yield Piece(input=file, start=0, stop=stop, scenes_by_split=counts), set().union(*scenes.values())

    def _check_names(self, ids: Collection[str]) -> None:
        """Raises InputError when all pictures have names of the other set."""
        pattern, name = self.foreign
        if ids and all(pattern.fullmatch(id_) for id_ in ids):
            raise InputError(
                f"Pictures have names of {name} (such as {min(ids)}.jpg), not of {self.name}. Use the source {name}."
            )

    def _split_rule(self, file: CaptionFile, splits: Mapping[str, str]) -> SplitRule:
        """(scene id, split that the file names) -> split of the record."""

        def split(id_: str | None, named: str | None) -> str:
            if self.split:
                return self.split
            if named and splits:
                raise InputError(
                    f"{file.uri} says the splits itself, and so does {listed([one.uri for one in file.lists])}. "
                    "Name one of them."
                )
            if splits:
                return splits.get(_ENDING.sub("", id_ or ""), UNLISTED)
            if named is not None and not named.strip():
                raise InputError(
                    f"{file.uri} names no split for {id_}, though it names those of others. "
                    "Fill it in, or name one split for all with source.split."
                )
            named = named or file.named_split or WHOLE
            named = SPLIT_NAMES.get(named, named)
            if not SPLIT_PATTERN.fullmatch(named):
                raise InputError(
                    f"{file.uri} names the split {named!r} for {id_}, which cannot name one (lower-case letters, "
                    "digits, `_`). Are its columns shifted? Name one split for all with source.split."
                )
            return named

        return split


@dataclass(frozen=True, kw_only=True)
class Flickr8k(_Flickr):
    """Flickr8k: the token file, Kaggle's captions.txt, Karpathy's JSON; splits by Flickr_8k.*Images.txt."""

    split: str = ""
    "One split name for all scenes. Empty: by the lists or the files, else `all`."

    name = "flickr8k"
    lost = LOST_OF_FLICKR8K
    foreign = (re.compile(r"[0-9]{5,}"), "flickr30k")

    def reads(self, name: str) -> bool:
        """As for both sets, without parquet."""
        return super().reads(name) and not name.endswith(".parquet")


@dataclass(frozen=True, kw_only=True)
class Flickr30k(_Flickr):
    """Flickr30k: the token file, Kaggle's results.csv, Karpathy's JSON, parquet of the Hugging Face hub."""

    split: str = ""
    "One split name for all scenes. Empty: by the lists or the files, else `all`."
    pictures: bool = False
    "Take the pictures out of parquet, too. 10,000 of them are a shard of 1.4 GB; use fewer scenes_per_shard."

    name = "flickr30k"
    foreign = (re.compile(r"[0-9]{5,}_[0-9a-f]{8,}"), "flickr8k")

    @property
    def writers(self) -> Mapping[str, str]:
        """Pillow, when pictures are taken."""
        return PICTURE_WRITERS if self.pictures else {}


def _chosen_files(inputs: Sequence[Input], dataset: str) -> tuple[list[Input], list[CaptionFile], list[str]]:
    """(split lists, caption files with their form, notes), by uri. Raises InputError when there is no caption file.

    The archive of Karpathy's files holds three sets; the files name their sets, and those of the others are left out.
    """
    every = sorted(inputs, key=lambda source: source.uri)
    lists = [source for source in every if _LIST.fullmatch(base(source.uri))]
    files, notes = [], []
    for source in every:
        name = base(source.uri)
        if source in lists or not _CAPTIONS.fullmatch(name) or _OTHER.fullmatch(name):
            continue
        form, named = _form(source)
        if named is not None and named != dataset:
            notes.append(f"{source.uri} says that it is {named}, and is not read")
        else:
            files.append(CaptionFile(uri=source.uri, url=source.url, form=form))
    if not files:
        found = "; ".join(notes) or listed([source.uri for source in inputs])
        raise InputError(
            f"None of the inputs is a caption file of {dataset} by its name: {found}. "
            "Name the token file, Kaggle's CSV, Karpathy's JSON or parquet."
        )
    parquet = [flickr_tables.split_by_name(file) for file in files if file.form == PARQUET]
    if len(set(parquet)) > 1:
        # One name alone says nothing: lmms-lab calls all of Flickr30k `test`.
        files = [replace(f, named_split=flickr_tables.split_by_name(f) if f.form == PARQUET else None) for f in files]
    return lists, files, notes


def _form(source: Input) -> tuple[str, str | None]:
    """(form, the dataset that the file names)."""
    if source.uri.endswith(".parquet"):
        return PARQUET, None
    if base(source.uri).endswith(".json"):
        document = load(source)
        if layout_of(document, uri=source.uri) != KARPATHY:
            raise InputError(f"{source.uri} is JSON, but not in Karpathy's layout. Name `dataset_flickr30k.json`.")
        return KARPATHY, dataset_of(document)
    return caption_lines.form_of(source), None


def _read_lists(lists: Sequence[Input]) -> dict[str, str]:
    """Picture's name without ending -> split. Raises InputError for a picture in two lists of different splits."""
    found: dict[str, str] = {}
    for source in lists:
        match = _LIST.fullmatch(base(source.uri))
        name = match[1].lower() if match else ""
        split = SPLIT_NAMES.get(name, name)
        for number, line in enumerate(all_lines(source)):
            if number == 0 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise InputError(f"{source.uri} is UTF-16. Convert it to UTF-8, for example with `iconv`.")
            listed_as = _LISTED.fullmatch(as_url(line.removeprefix(BOM).strip()))
            id_ = _ENDING.sub("", picture_id(listed_as[1] if listed_as else ""))
            if id_ and found.setdefault(id_, split) != split:
                raise InputError(
                    f"Picture {id_} is of the split {found[id_]} by one list and of {split} by {source.uri}. "
                    "A scene has one split; remove it from one list."
                )
    return found


def _check_lists(splits: Mapping[str, str], ids: Collection[str], lists: Sequence[Input]) -> list[str]:
    """Notes on what lists and captions do not share. Raises InputError when that is everything: another set's lists."""
    pictures = {_ENDING.sub("", id_) for id_ in ids}
    named = pictures & splits.keys()
    uris = listed([source.uri for source in lists])
    if pictures and not named:
        raise InputError(
            f"None of the {len(splits):,} pictures that {uris} name has a caption here, so no split is known. "
            "Are they lists of another set?"
        )
    notes = []
    if absent := len(splits) - len(named):
        notes.append(f"{absent:,} of {len(splits):,} pictures that {uris} name have no caption here")
    if rest := len(pictures) - len(named):
        notes.append(f"{rest:,} pictures are in no list; their split is `{UNLISTED}`")
    return notes


def _claim(holders: dict[str, str], ids: set[str], file: Input) -> None:
    """Raises InputError for a picture that another file holds: its captions would be counted twice."""
    for id_ in ids:
        if not id_.startswith("#") and holders.setdefault(id_, file.uri) != file.uri:
            message = (
                f"Picture {id_} has captions in {holders[id_]} and in {file.uri}. They are forms of one set; name one."
            )
            raise InputError(message)


def _entries(file: CaptionFile) -> Iterator[_Entry]:
    if file.form == KARPATHY:
        for picture in pictures(load(file), uri=file.uri, split=""):
            yield _Entry(row=picture.row, picture=picture.uri, split=picture.split, texts=picture.texts)
        return
    for row, group in itertools.groupby(caption_lines.captions(file, file.form), key=lambda caption: caption.row):
        found = list(group)
        texts: list[Text] = [(caption.field, "human", caption.text, caption.broken) for caption in found]
        first = found[0]
        yield _Entry(row=row, picture=first.picture, split=first.split, texts=texts, is_repaired=first.is_repaired)
