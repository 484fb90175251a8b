"""Records from the samples of tars: texts, id and pictures of each into a batch under construction.

Owns: which members are pictures and what is kept of them. Does not own: texts and ids (`tar_texts`), encodings (`pictures`).
Invariant: a picture is what its bytes say, whatever its suffix says; JPEG goes through byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipelines.sources.pictures import carried
from pipelines.sources.rows import Builder
from pipelines.sources.tar_samples import Sample
from pipelines.sources.tar_texts import Reading, Text, told

PICTURE_ENDS: Final = ("jpg", "jpeg", "png", "webp")
"""Last parts of suffixes that are pictures: `jpg`, `left.png`."""

PICTURE_BYTES_MAX: Final = 64 << 20
"""Larger pictures are named, not carried."""

MEANINGS: Final = {
    "txt": "text",
    "json": "scene id; text where there is no txt",
    **dict.fromkeys(PICTURE_ENDS, "image"),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the records of a tar belong. uri: of the tar."""

    uri: str
    split: str


def is_picture(suffix: str) -> bool:
    """Whether a member of this suffix is a picture by its name."""
    return suffix.rpartition(".")[2] in PICTURE_ENDS


def wants(reading: Reading, suffix: str, size: int) -> bool:
    """Whether the payload of a member is needed for a record."""
    return reading.wants(suffix, size) or (is_picture(suffix) and size <= PICTURE_BYTES_MAX)


def add(builder: Builder, sample: Sample, row: int, reading: Reading, place: Place) -> None:
    """The record of a sample; its second picture and those after it are records without texts of the same scene."""
    said = told(sample, reading, uri=place.uri)
    pictures = sorted((s for s in sample.members if is_picture(s)), key=_first)
    if not pictures:
        builder.record(said.id, place.split, row, image_uri=said.url, image_sha256=said.sha256)
    for number, suffix in enumerate(pictures):
        data = sample.data.get(suffix)
        picture = None if data is None else carried(data)
        # What the json says is of the picture as it was fetched; it speaks of one only.
        uri, sha256 = (said.url, said.sha256) if number == 0 else (None, None)
        builder.record(
            said.id,
            place.split,
            row,
            image_uri=uri or f"{place.uri}/{sample.members[suffix].name}",
            image_sha256=sha256 or (picture and picture.sha256),
            width=picture and picture.width,
            height=picture and picture.height,
            image=picture.data if picture and number == 0 else None,
        )
        if number == 0:
            add_texts(builder, said.texts)
    if not pictures:
        add_texts(builder, said.texts)


def add_texts(builder: Builder, texts: list[Text]) -> None:
    """The texts of the record that was opened last."""
    for field, role, text, broken in texts:
        builder.text(field, role, text, broken)


def _first(suffix: str) -> tuple[int, int, str]:
    """`jpg` before `png` before `left.jpg`."""
    return suffix.count("."), PICTURE_ENDS.index(suffix.rpartition(".")[2]), suffix
