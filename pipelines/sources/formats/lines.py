"""Text inputs as lines of bytes, gzipped or not, in bounded memory.

Gzip is recognised by content, not by name. Bytes are never decoded here.
Invariant: lines are cut at `\\n` only and keep everything else, so joining them gives the file.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import IO, Final, cast

from infra import storage
from infra.errors import InputError
from pipelines.records import Input

MAX_LINE_BYTES: Final = 16 << 20
_BUFFER_BYTES: Final = 1 << 20


_KINDS: Final = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file; run `git lfs pull`"),
    (b"<", "an HTML or XML page, as a failed download leaves it; download the file again"),
    (b"PK", "a zip archive; unpack it, or let its name end in `.zip`"),
    (b"PAR1", "parquet"),
    (b"\x1f\x8b", "gzip; decompress it first"),
    (b"\x28\xb5\x2f\xfd", "zstd; decompress it first"),
    (b"BZh", "bzip2; decompress it first"),
    (b"\xfd7zXZ", "xz; decompress it first"),
)


def kind_of(head: bytes) -> str | None:
    """What a file with these first bytes is, and what to do with it; None when it is unknown."""
    return next((words for beginning, words in _KINDS if head.startswith(beginning)), None)


@contextlib.contextmanager
def open_text(source: Input) -> Iterator[IO[bytes]]:
    """The file, decompressed when it is gzip. Raises InputError when it is missing or its gzip is cut short."""
    with storage.open_read(source.url) as file:
        # The name is not trusted: `.gz` files are often unpacked by the download, and keep their name.
        is_gzip = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        raw = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_gzip else file
        try:
            yield cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER_BYTES))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            message = (
                f"{source.uri} is not whole gzip ({error}). The download or the copy was cut short; fetch it again."
            )
            raise InputError(message) from error


def read_all(source: Input) -> bytes:
    """The whole file, decompressed when it is gzip; for inputs known to be small."""
    with open_text(source) as file:
        return file.read()


def read_lines(source: Input) -> Iterator[bytes]:
    """The lines, with their `\\n`. Raises InputError for a line over MAX_LINE_BYTES, which is no caption."""
    with open_text(source) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise InputError(
                    f"Line {number + 1:,} of {source.uri} is longer than {MAX_LINE_BYTES >> 20} MiB. "
                    "Is it one record a line?"
                )
            yield line
            number += 1


def all_lines(source: Input) -> list[bytes]:
    """The lines of a small file without their `\\n`; a last line without one counts, an empty one after it does not."""
    lines = read_all(source).split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines
