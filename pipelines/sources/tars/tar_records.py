"""Records from the samples of tars: texts, id and pictures.

Invariant: the format of a picture is that of its bytes, whatever its suffix says; a JPEG keeps its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from pipelines.sources.formats.embedded_images import embedded_image, oversized
from pipelines.sources.formats.rows import Record
from pipelines.sources.formats.tar_samples import Sample
from pipelines.sources.tars.tar_places import Tar
from pipelines.sources.tars.tar_texts import Description, Reading

PICTURE_ENDS: Final = ("jpg", "jpeg", "png", "webp")
"""Last parts of suffixes that are pictures: `jpg`, `left.png`."""

PICTURE_BYTES_MAX: Final = 64 << 20
"""Larger pictures are recorded by name, without their bytes, and are rejects."""

FRAME: Final = re.compile(r"f([0-9]{3,9})\.[a-z]+")
"""Suffix of one frame of a scene: `f003.jpg`, as in the view tars of this project."""


def is_picture(suffix: str) -> bool:
    """Whether a member of this suffix is a picture by its name."""
    return suffix.rpartition(".")[2] in PICTURE_ENDS


def wants(reading: Reading, suffix: str, size: int) -> bool:
    """Whether the payload of a member is needed for a record."""
    return reading.wants(suffix, size) or (is_picture(suffix) and size <= PICTURE_BYTES_MAX)


def frame_of(suffix: str) -> int | None:
    """The number of the frame with this suffix; None for a picture that is no frame."""
    match = FRAME.fullmatch(suffix)
    return int(match[1]) if match else None


def records(sample: Sample, row: int, described: Description, tar: Tar) -> Iterator[Record]:
    """The record of a sample; its second picture and those after it are records without texts of the same scene.

    The bytes of the first picture and of every frame are kept: view tars hold one for each scene and frame.
    """
    pictures = sorted((s for s in sample.members if is_picture(s)), key=_order)
    if not pictures:
        columns: dict[str, Any] = {"image_uri": described.url, "image_sha256": described.sha256}
        yield Record(source_id=described.id, split=tar.split, row=row, texts=described.texts, columns=columns)
    frames: set[int | None] = set()
    for number, suffix in enumerate(pictures):
        is_first, data, frame = number == 0, sample.data.get(suffix), frame_of(suffix)
        picture = None if data is None else embedded_image(data)
        # The json describes one picture only, as it was fetched.
        uri, sha256 = (described.url, described.sha256) if is_first else (None, None)
        has_bytes = is_first or (frame is not None and frame not in frames)
        frames.add(frame)
        if picture:
            columns = picture.columns(suffix)
        else:
            fault = oversized(sample.members[suffix].size, f"more than {PICTURE_BYTES_MAX >> 20} MiB")
            columns = {"image_field": suffix, "image_fault": fault}
        columns |= {"image_uri": uri or f"{tar.uri}/{sample.members[suffix].name}", "frame": frame}
        if sha256:
            columns["image_sha256"] = sha256
        if not has_bytes:
            columns["image"] = None
        texts = described.texts if is_first else ()
        yield Record(source_id=described.id, split=tar.split, row=row, texts=texts, columns=columns)


def _order(suffix: str) -> tuple[int, int, int, str]:
    """`jpg` before `png` before `left.jpg`; frames by number behind them."""
    frame = frame_of(suffix)
    return suffix.count("."), -1 if frame is None else frame, PICTURE_ENDS.index(suffix.rpartition(".")[2]), suffix
