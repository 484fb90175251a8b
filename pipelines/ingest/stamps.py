"""Bind what a job writes to the bytes that its version names.

Invariant: a task publishes nothing from a file that changed since its stamp was taken, and stamps are taken before the
files are surveyed and digested. Shards, exchange files and counts that a rerun finds thus hold the digested bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from infra import storage
from infra.errors import IntegrityError
from pipelines.records import Batch, Input, Piece, Source

Stamps: TypeAlias = Mapping[str, str]
"Url -> `storage.stamp` of an input file."

TICK_S: Final = 0.02
"A local file system may give one time to two writes this close together (a tick of the kernel's clock is 1 to 10 ms)."


def take_stamps(files: Iterable[Input]) -> dict[str, str]:
    """The stamp of each file. Waits a tick, so that a write from now on gives every file another stamp."""
    stamps = {file.url: storage.stamp(file.url) for file in files}
    time.sleep(TICK_S)
    return stamps


def of_pieces(stamps: Stamps, pieces: Iterable[Piece]) -> dict[str, str]:
    """The stamps of the files of these pieces, for the task that reads them."""
    inputs = [piece.input for piece in pieces if piece.input is not None]
    return {file.url: stamps[file.url] for taken in inputs for file in taken.files}


def read_pieces(source: Source, pieces: Sequence[Piece], stamps: Stamps) -> Iterator[Batch]:
    """The records of the pieces. Raises IntegrityError at their end for a file that changed since it was stamped."""
    for piece in pieces:
        yield from source.read(piece)
    check_unchanged(stamps)


def check_unchanged(stamps: Stamps) -> None:
    """Raises IntegrityError for a file that was changed or replaced since its stamp was taken."""
    for url, stamp in stamps.items():
        if storage.stamp(url) != stamp:
            raise IntegrityError(
                f"{url} was changed while it was read, so the version would not hold what its name says. Nothing "
                "was committed, and nothing that was read after the change is kept; rerun when no program writes to "
                "the file."
            )
