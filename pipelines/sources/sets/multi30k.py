"""Multi30k task 2: five independent English captions of each Flickr30k image, one caption a line.

Invariant: line i of each `<split>.{1..5}.en[.gz]` is of the picture in line i of `<split>_images.txt`. Files of unequal
lengths are refused, because later captions would go to the wrong pictures.
The five files are ordered by length (.1 has the longest caption), so captions must not be chosen by their index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from infra.errors import InputError
from pipelines.records import Batch, Input, Piece, Source, Survey
from pipelines.sources.formats.arrow_columns import as_url
from pipelines.sources.formats.lines import all_lines
from pipelines.sources.formats.names import base, listed, none_read, picture_id
from pipelines.sources.formats.rows import Record, batches

SPLITS: Final = {"train": "train", "val": "val", "test_2016": "test"}
"""Name in the files -> split. `test_2017` has pictures but no English captions of task 2."""

CAPTIONS: Final = 5

_CAPTIONS = re.compile(r"(.+)\.([1-5])\.en")
_IMAGES_END = "_images.txt"


@dataclass(frozen=True, kw_only=True)
class ImageList(Input):
    """The image list of a split, which is the input of its pieces, with the caption files that belong to it."""

    captions: tuple[Input, ...]
    "The files .1 to .5 of the same split."

    @property
    def files(self) -> tuple[Input, ...]:
        """The list and its caption files."""
        return (self, *self.captions)


@dataclass(frozen=True, kw_only=True)
class Multi30k(Source):
    """Multi30k task 2, from any folder that holds the caption files and the image lists."""

    name = "multi30k"
    grouped = False

    def reads(self, name: str) -> bool:
        """Caption files and image lists; translations and other tasks in the same folder are left out."""
        return bool(_CAPTIONS.fullmatch(base(name))) or base(name).endswith(_IMAGES_END)

    def survey(self, inputs: Sequence[Input], limit: int | None) -> Survey:
        """Reads all files (2 MB each at most). Raises InputError when a file is missing or its lines do not match."""
        lists = {base(i.uri).removesuffix(_IMAGES_END): i for i in _once(inputs) if base(i.uri).endswith(_IMAGES_END)}
        captions: dict[str, dict[int, Input]] = {}
        for source in _once(inputs):
            if (match := _CAPTIONS.fullmatch(base(source.uri))) and match[1] in SPLITS:
                captions.setdefault(match[1], {})[int(match[2])] = source
        if not captions:
            raise none_read(inputs, "a caption file of Multi30k task 2", "Name files such as `train.1.en.gz`.")
        pieces: list[Piece] = []
        seen: dict[str, str] = {}
        for file_split in sorted(captions, key=lambda name: lists[name].uri if name in lists else name):
            rows = _check(file_split, lists.get(file_split), captions[file_split], seen)
            left = rows if limit is None else min(rows, limit - sum(piece.stop for piece in pieces))
            if left > 0:
                counts = {SPLITS[file_split]: left}
                files = tuple(captions[file_split][place] for place in range(1, CAPTIONS + 1))
                images = ImageList(uri=lists[file_split].uri, url=lists[file_split].url, captions=files)
                pieces.append(Piece(input=images, start=0, stop=left, scenes_by_split=counts))
        unused = sorted(name + _IMAGES_END for name in lists if name not in captions)
        return Survey(
            format=f"Multi30k task 2, splits {', '.join(sorted(SPLITS[name] for name in captions))}",
            pieces=pieces,
            columns={**{f"{n}.en": "text:human" for n in range(1, CAPTIONS + 1)}, "images.txt": "scene id, image uri"},
            notes=[f"not read, as no captions come with them: {listed(unused)}"] if unused else [],
        )

    def read(self, piece: Piece) -> Iterator[Batch]:
        """Lines of one split; the record of line i has the five texts of line i."""
        images = piece.input_as(ImageList)
        split = SPLITS[base(images.uri).removesuffix(_IMAGES_END)]
        files = [all_lines(source) for source in images.captions]
        records = (
            Record(
                source_id=picture_id(picture),
                split=split,
                row=row,
                texts=[(f"{index}.en", "human", lines[row], None) for index, lines in enumerate(files, start=1)],
                columns={"image_uri": picture},
            )
            for row, picture in enumerate(_pictures(images)[: piece.stop])
            if row >= piece.start
        )
        yield from batches(images.uri, records)


def _once(inputs: Sequence[Input]) -> list[Input]:
    """The inputs by uri. Raises InputError when one file is there twice, plain and gzipped or in two folders."""
    found: dict[str, Input] = {}
    for source in sorted(inputs, key=lambda i: i.uri):
        other = found.setdefault(base(source.uri), source)
        if other is not source and base(source.uri).endswith((".en", _IMAGES_END)):
            message = (
                f"{other.uri} and {source.uri} are the same file of Multi30k. Name one folder, with one of them in it."
            )
            raise InputError(message)
    return list(found.values())


def _pictures(source: Input) -> list[str]:
    return [as_url(line.rstrip(b"\r")) for line in all_lines(source)]


def _check(split: str, images: Input | None, captions: dict[int, Input], seen: dict[str, str]) -> int:
    """Number of lines. Raises InputError for a missing file, unequal lengths, an empty or repeated picture."""
    if images is None:
        raise InputError(
            f"There are captions of {split} but no {split}{_IMAGES_END} among the inputs. "
            "It is in the folder `image_splits` of the data set."
        )
    missing = [f"{split}.{place}.en" for place in range(1, CAPTIONS + 1) if place not in captions]
    if missing:
        raise InputError(f"Of the five caption files of {split}, {listed(missing)} is missing; each scene needs all.")
    pictures = _pictures(images)
    for source in captions.values():
        lines = len(all_lines(source))
        if lines != len(pictures):
            raise InputError(
                f"{source.uri} has {lines:,} lines and {images.uri} has {len(pictures):,}, so captions would go to the "
                "wrong pictures. Fetch both files from one release."
            )
    for line, picture in enumerate(pictures, start=1):
        key = picture_id(picture)
        if not key:
            raise InputError(f"Line {line:,} of {images.uri} is empty. It should name a picture.")
        if key in seen:
            raise InputError(
                f"Picture {picture} stands in {seen[key]} and again in line {line:,} of {images.uri}. "
                "One picture is one scene; remove one."
            )
        seen[key] = images.uri
    return len(pictures)
