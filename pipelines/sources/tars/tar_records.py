"""Records from the samples of tars: texts, id and pictures of each into a batch under construction.

Owns: which members are pictures and what is kept of them. Does not own: texts and ids (`tar_texts`), encodings (`pictures`).
Invariant: a picture is what its bytes say, whatever its suffix says; JPEG goes through byte by byte.
"""

from __future__ import annotations

import re
from typing import Final

from pipelines.sources.formats.embedded_images import carried
from pipelines.sources.formats.rows import Builder
from pipelines.sources.formats.tar_samples import Sample
from pipelines.sources.tars.tar_places import Tar
from pipelines.sources.tars.tar_texts import Reading, Text, Told

PICTURE_ENDS: Final = ("jpg", "jpeg", "png", "webp")
"""Last parts of suffixes that are pictures: `jpg`, `left.png`."""

PICTURE_BYTES_MAX: Final = 64 << 20
"""Larger pictures are named, not carried."""

FRAME: Final = re.compile(r"f([0-9]{3,9})\.[a-z]+")
"""Suffix of one frame of a scene: `f003.jpg`, as in our own view tars."""


def is_picture(suffix: str) -> bool:
    """Whether a member of this suffix is a picture by its name."""
    return suffix.rpartition(".")[2] in PICTURE_ENDS


def wants(reading: Reading, suffix: str, size: int) -> bool:
    """Whether the payload of a member is needed for a record."""
    return reading.wants(suffix, size) or (is_picture(suffix) and size <= PICTURE_BYTES_MAX)


def frame_of(suffix: str) -> int | None:
    """The number of the frame that a picture of this suffix is; None of a picture that is none."""
    match = FRAME.fullmatch(suffix)
    return int(match[1]) if match else None


def add(builder: Builder, sample: Sample, row: int, said: Told, tar: Tar) -> None:
    """The record of a sample; its second picture and those after it are records without texts of the same scene.

    Carried are the first picture and every frame: view tars hold one a scene and frame.
    """
    pictures = sorted((s for s in sample.members if is_picture(s)), key=_order)
    if not pictures:
        builder.record(said.id, tar.split, row, image_uri=said.url, image_sha256=said.sha256)
        add_texts(builder, said.texts)
    frames: set[int | None] = set()
    for number, suffix in enumerate(pictures):
        data, frame = sample.data.get(suffix), frame_of(suffix)
        picture = None if data is None else carried(data)
        # What the json says is of the picture as it was fetched; it speaks of one only.
        uri, sha256 = (said.url, said.sha256) if number == 0 else (None, None)
        is_carried = number == 0 or (frame is not None and frame not in frames)
        frames.add(frame)
        builder.record(
            said.id,
            tar.split,
            row,
            image_uri=uri or f"{tar.uri}/{sample.members[suffix].name}",
            image_sha256=sha256 or (picture and picture.sha256),
            width=picture and picture.width,
            height=picture and picture.height,
            frame=frame,
            image=picture.data if picture and is_carried else None,
        )
        if number == 0:
            add_texts(builder, said.texts)


def add_texts(builder: Builder, texts: list[Text]) -> None:
    """The texts of the record that was opened last."""
    for field, role, text, broken in texts:
        builder.text(field, role, text, broken)


def _order(suffix: str) -> tuple[int, int, int, str]:
    """`jpg` before `png` before `left.jpg`; frames by number behind them."""
    frame = frame_of(suffix)
    return suffix.count("."), -1 if frame is None else frame, PICTURE_ENDS.index(suffix.rpartition(".")[2]), suffix
