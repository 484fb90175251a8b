"""COCO captions in three layouts: the official JSON, Karpathy's JSON, and BLIP's lists.

Karpathy's Flickr30k and Flickr8k files have his layout and are read as well. All captions of a picture are kept; real
pictures have 5 to 7 (A6).
Invariant: a scene is named by the number of its picture (`42`) in every layout and year, so that scenes join; captions
are in the order of their ids, never of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from infra.errors import InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats.documents import load
from pipelines.sources.formats.names import base, listed, none_read
from pipelines.sources.formats.rows import Record, batches
from pipelines.sources.options import check_choice, check_split
from pipelines.sources.sets.coco_layouts import KARPATHY, Picture, dataset_of, layout_of, pictures

RESTVAL: Final = ("train", "keep", "drop")
MEANINGS: Final = {
    "id / cocoid / file name": "scene id",
    "file_name / filepath, filename / image": "image uri",
    "width": "image width",
    "height": "image height",
    "caption / sentences.raw": "text:human",
}

_CAPTION_FILE = re.compile(r"captions_.*\.json|dataset_.*\.json|.*karpathy.*\.json", re.IGNORECASE)
# `val` in `captions_val2017.json` and `coco_karpathy_val.json`, but not in `interval.json`.
_SPLIT = re.compile(r"(?:^|[_-])(train|val|test)(?:\d{4})?(?=[._-])")


@dataclass(frozen=True, kw_only=True)
class Coco(Source):
    """COCO captions. All captions of all pictures; a picture without captions is kept as a record."""

    split: str = ""
    "Split of files that do not say it themselves. Empty: from the file name (`captions_val2017.json` is val)."
    restval: str = "train"
    "Karpathy's 30,504 pictures `restval`: `train` reads them as train, like the papers, `keep` as restval, `drop` not."

    name = "coco"

    def __post_init__(self) -> None:
        check_choice("restval", self.restval, RESTVAL)
        check_split(self.split)

    def reads(self, name: str) -> bool:
        """JSON, plain or gzipped."""
        return base(name).lower().endswith(".json")

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Parses every file. Raises InputError for other JSON, and for a picture that two files hold."""
        files, notes = _files_of_coco(*_caption_files(inputs))
        pieces: list[Piece] = []
        formats: set[str] = set()
        holders: dict[str, str] = {}
        uris: dict[str, str | None] = {}
        restval = 0
        for source in files:
            document = load(source)
            formats.add(layout_of(document, uri=source.uri))
            left = None if limit is None else limit - sum(piece.stop for piece in pieces)
            scenes: dict[str, set[str]] = {}
            stop = 0
            for picture in self._pictures(document, source):
                if picture.id is not None and uris.setdefault(picture.id, picture.uri) != picture.uri:
                    raise InputError(
                        f"Picture {picture.id} of {source.uri} is {uris[picture.id]} and {picture.uri}: two files of "
                        "one name, whose captions would become one scene. Rename one, or give the entries a `cocoid`."
                    )
                if picture.id is not None and holders.setdefault(picture.id, source.uri) != source.uri:
                    raise InputError(
                        f"Picture {picture.id} is in {holders[picture.id]} and in {source.uri}. "
                        "Files of 2014, 2017 and Karpathy hold the same pictures under other splits; "
                        "name the files of one."
                    )
                if picture.is_orphan or (left is not None and picture.row >= left):
                    continue
                stop = picture.row + 1
                restval += picture.split == "restval"
                if split := self._named(picture.split):
                    scenes.setdefault(split, set()).add(picture.id or "")
            if stop or left is None:
                counts = {split: len(ids) for split, ids in sorted(scenes.items())}
                pieces.append(Piece(input=source, start=0, stop=stop, scenes_by_split=counts))
        if restval:
            words = {"train": "are read as train", "keep": "keep their own split", "drop": "are left out"}
            notes.append(f"{restval:,} pictures of the split restval {words[self.restval]} (`source.restval`)")
        layouts = " and ".join(sorted(formats))
        return Survey(
            format=f"COCO captions, {layouts} layout", pieces=pieces, columns=MEANINGS, notes=notes, cuttable=False
        )

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Pictures [start, stop) of one file; its orphans come with the piece that begins at 0."""
        yield from batches(piece.input_as(Input).uri, self._records(piece))

    def _records(self, piece: Piece) -> Iterator[Record]:
        source = piece.input_as(Input)
        for picture in self._pictures(load(source), source):
            inside = piece.start == 0 if picture.is_orphan else piece.start <= picture.row < piece.stop
            split = self._named(picture.split)
            if inside and split:
                columns = {"image_uri": picture.uri, "width": picture.width, "height": picture.height}
                yield Record(source_id=picture.id, split=split, row=picture.row, texts=picture.texts, columns=columns)

    def _pictures(self, document: object, source: Input) -> Iterator[Picture]:
        has_splits = layout_of(document, uri=source.uri) == KARPATHY
        if has_splits and self.split:
            raise InputError(
                f"{source.uri} names the split of each picture, but source.split={self.split!r} names one for all. "
                "Leave the option out."
            )
        split = self.split or ("" if has_splits else _split_of(source))
        return pictures(document, uri=source.uri, split=split)

    def _named(self, split: str) -> str | None:
        """The split of the records; None: they are left out."""
        if split != "restval" or self.restval == "keep":
            return split
        return "train" if self.restval == "train" else None


def _caption_files(inputs: Sequence[Input]) -> tuple[list[Input], list[str]]:
    """Files with a known name, else every JSON file, and notes; the zip of COCO also holds boxes and keypoints."""
    every = sorted((i for i in inputs if base(i.uri).lower().endswith(".json")), key=lambda i: i.uri)
    known = [i for i in every if _CAPTION_FILE.fullmatch(base(i.uri))]
    files = known or every
    if not files:
        raise none_read(inputs, "JSON", "Name `captions_*.json` or Karpathy's `dataset_coco.json`.")
    skipped = len(inputs) - len(files)
    return files, [f"{skipped} inputs are no caption files by their names and are not read"] if skipped else []


def _files_of_coco(files: list[Input], notes: list[str]) -> tuple[list[Input], list[str]]:
    """The archive of Karpathy's files holds COCO, Flickr8k and Flickr30k: of several sets only COCO is read.

    Raises InputError for several sets without it.
    """
    karpathy = [source for source in files if base(source.uri).startswith("dataset_")]
    datasets = {source.uri: "coco" for source in files} | {s.uri: dataset_of(load(s)) or "coco" for s in karpathy}
    if len(set(datasets.values())) == 1:
        return files, notes
    kept = [source for source in files if datasets[source.uri] == "coco"]
    others = [f"{uri} ({name})" for uri, name in datasets.items() if name != "coco"]
    if not kept:
        raise InputError(f"The inputs are of several datasets: {listed(others)}. Name the files of one.")
    return kept, [*notes, f"files of other datasets are not read: {listed(others)}"]


def _split_of(source: Input) -> str:
    match = _SPLIT.search(base(source.uri))
    if not match:
        message = (
            f"The name {source.uri} does not say its split (train, val, test). Say it with `--set source.split=<name>`."
        )
        raise InputError(message)
    return match[1]
