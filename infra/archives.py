"""Files inside zip archives, as if they lay beside them.

Owns: the URL of a member (`zip://MEMBER::ARCHIVE`, as fsspec chains them), what an archive holds, and reading a member. Does not
own: opening the archive itself (`storage`). Invariant: nothing is ever unpacked to disk, so no member can leave its place; a damaged
archive, a wrong checksum or an encrypted member is an InputError at the read that meets it, never short data.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
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


def members(file: IO[bytes], archive: str) -> list[str]:
    """Names of the files in an opened archive, sorted. Raises InputError for one that is damaged or names a file twice."""
    names = sorted(info.filename for info in _open(file, archive).infolist() if not info.is_dir())
    twice = next((name for name, following in zip(names, names[1:], strict=False) if name == following), None)
    if twice is not None:
        message = f"{archive} holds two files named {twice}, so it is not clear which is meant. Pack it again."
        raise InputError(message)
    return names


def member_size(file: IO[bytes], url: str) -> int:
    """Size in bytes of a member, unpacked."""
    return _info(_open(file, archive_of(url)), url).file_size


def open_member(file: IO[bytes], url: str) -> IO[bytes]:
    """A seekable binary file of the member; closing it closes `file`. Raises InputError when it cannot be read."""
    archive = _open(file, archive_of(url))
    info = _info(archive, url)
    if info.flag_bits & _ENCRYPTED:
        raise InputError(f"{_words(url)} is encrypted. Unpack it yourself and name the file.")
    try:
        return cast(IO[bytes], io.BufferedReader(_Member(archive.open(info), file, url)))
    except _DAMAGE as error:
        raise InputError(f"{_words(url)} cannot be read: {error}. Unpack it yourself and name the file.") from error


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
            message = (
                f"{_words(self._url)} is damaged ({error}). The download or the copy was cut short; fetch it again."
            )
            raise InputError(message) from error
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._member.seek(offset, whence)

    def tell(self) -> int:
        return self._member.tell()

    def close(self) -> None:
        if not self.closed:
            self._member.close()
            self._file.close()
        super().close()


def _open(file: IO[bytes], archive: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except _DAMAGE as error:
        message = (
            f"{archive} is not a whole zip archive ({error}). The download or the copy was cut short; fetch it again."
        )
        raise InputError(message) from error


def _info(archive: zipfile.ZipFile, url: str) -> zipfile.ZipInfo:
    name = url.removeprefix(PREFIX).rpartition("::")[0]
    try:
        return archive.getinfo(name)
    except KeyError as error:
        raise InputError(f"{archive_of(url)} holds no file {name}. Was the archive replaced?") from error


def _words(url: str) -> str:
    name, _, archive = url.removeprefix(PREFIX).rpartition("::")
    return f"{name} in {archive}"
