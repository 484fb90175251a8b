"""Files inside zip archives, as if they lay beside them.

Invariant: nothing is ever unpacked to disk, so no member can leave its place; a damaged archive, a wrong checksum or an
encrypted member is an InputError at the read that meets it, never short data.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import IO, Final, cast

from infra.errors import InputError

PREFIX: Final = "zip://"
ENDING: Final = ".zip"
_ENCRYPTED: Final = 0x1
_DAMAGE: Final = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError)
"""What the reader of archives lets out when bytes are wrong; NotImplementedError (an odd packing) is a RuntimeError."""


def member_url(archive: str, member: str) -> str:
    """URL of a member of the archive at URL or path `archive`."""
    return f"{PREFIX}{member}::{archive}"


def is_member(url: str) -> bool:
    """Whether `url` names a member of an archive."""
    return url.startswith(PREFIX) and "::" in url


def archive_of(url: str) -> str:
    """URL of the archive that holds the member."""
    return url.removeprefix(PREFIX).rpartition("::")[2]


def directory(file: IO[bytes], archive: str) -> dict[str, zipfile.ZipInfo]:
    """Member name -> entry of an opened archive. Raises InputError when it is damaged or names a file twice."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in _opened(lambda: zipfile.ZipFile(file), archive).infolist():
        if info.is_dir():
            continue
        if found.setdefault(info.filename, info) is not info:
            message = (
                f"{archive} holds two files named {info.filename}, so it is not clear which is meant. Pack it again."
            )
            raise InputError(message)
    return found


def entry(entries: Mapping[str, zipfile.ZipInfo], url: str) -> zipfile.ZipInfo:
    """The entry of a member. Raises InputError when the archive does not hold it."""
    name = url.removeprefix(PREFIX).rpartition("::")[0]
    if name not in entries:
        raise InputError(f"{archive_of(url)} holds no file {name}. Was the archive replaced?")
    return entries[name]


def open_member(file: IO[bytes], entries: Mapping[str, zipfile.ZipInfo], url: str) -> IO[bytes]:
    """A seekable binary file of the member; closing it closes `file`. Raises InputError when it cannot be read."""
    info = entry(entries, url)
    if info.flag_bits & _ENCRYPTED:
        raise InputError(f"{_words(url)} is encrypted. Unpack it yourself and name the file.")
    archive = _opened(lambda: _Known(file, entries), archive_of(url))
    try:
        return cast(IO[bytes], io.BufferedReader(_Member(archive.open(info), file, url)))
    except _DAMAGE as error:
        raise InputError(f"{_words(url)} cannot be read: {error}. Unpack it yourself and name the file.") from error


class _Known(zipfile.ZipFile):
    """An archive with its directory read once: parsing it for each member costs the square of their number."""

    def __init__(self, file: IO[bytes], entries: Mapping[str, zipfile.ZipInfo]) -> None:
        self._entries = entries
        super().__init__(file)

    def _RealGetContents(self) -> None:
        self.filelist = list(self._entries.values())
        self.NameToInfo = dict(self._entries)


class _Member(io.RawIOBase):
    """The bytes of a member, with a sentence for what is damaged."""

    def __init__(self, member: IO[bytes], file: IO[bytes], url: str) -> None:
        self._member, self._file, self._url = member, file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._member.read(len(buffer))
        except _DAMAGE as error:
            raise _damaged(self._url, error) from error
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        try:
            return self._member.seek(offset, whence)  # forward by reading, so it can meet damage too
        except _DAMAGE as error:
            raise _damaged(self._url, error) from error

    def tell(self) -> int:
        return self._member.tell()

    def close(self) -> None:
        if not self.closed:
            self._member.close()
            self._file.close()
        super().close()


def _damaged(url: str, error: Exception) -> InputError:
    return InputError(f"{_words(url)} is damaged ({error}). The download or the copy was cut short; fetch it again.")


def _opened(make: Callable[[], zipfile.ZipFile], archive: str) -> zipfile.ZipFile:
    try:
        return make()
    except _DAMAGE as error:
        message = (
            f"{archive} is not a whole zip archive ({error}). The download or the copy was cut short; fetch it again."
        )
        raise InputError(message) from error


def _words(url: str) -> str:
    name, _, archive = url.removeprefix(PREFIX).rpartition("::")
    return f"{name} in {archive}"
