"""Members of a tar, header after header (ustar, GNU long names, pax); nothing is ever extracted.

Invariant: every member of the archive is seen, or InputError says where it broke. `tarfile` and webdataset take a
damaged header, or the seam of two tars joined by `cat`, for the end, and lose the rest silently; so `tarfile` parses
single headers only. An archive must have its end mark (512 zero bytes): a tar whose writer died lacks it.
"""

from __future__ import annotations

import contextlib
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Final, cast

from infra import storage
from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.formats.arrow_columns import as_url
from pipelines.sources.formats.lines import kind_of, open_text

BLOCK: Final = 512
EXTENSION_BYTES_MAX: Final = 1 << 20
"""Longest GNU name or pax header; real ones are a few hundred bytes."""

MEMBER_BYTES_MAX: Final = 1 << 53

FILE: Final = "file"
FOLDER: Final = "folder"
LINK: Final = "link"
DEVICE: Final = "device"

_KINDS: Final = {
    **dict.fromkeys((tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE), FILE),
    tarfile.DIRTYPE: FOLDER,
    **dict.fromkeys((tarfile.LNKTYPE, tarfile.SYMTYPE), LINK),
    **dict.fromkeys((tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE), DEVICE),
}
_PAX: Final = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSIONS: Final = (*_PAX, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_END: Final = bytes(BLOCK)
_GZIP: Final = b"\x1f\x8b"

NOTHING_BYTES_MAX: Final = 10_240
"""Size of an archive without members, by all writers; a longer file of zeros was left by a failed download or disk."""


@dataclass(frozen=True, slots=True)
class Member:
    """One entry. name: a byte outside UTF-8 is written `%NN`. start, size: of its payload, in bytes.

    offset: of its first header; a long name has a header of its own before that of the member.
    """

    name: str
    kind: str
    offset: int
    start: int
    size: int

    @property
    def stop(self) -> int:
        """Offset of the next header: payloads are padded to whole blocks."""
        return self.start + -(-self.size // BLOCK) * BLOCK


@contextlib.contextmanager
def open_tar(source: Input) -> Iterator[IO[bytes]]:
    """The tar, decompressed when it is gzip. Raises InputError when it is missing or its gzip is cut short."""
    with open_text(source) as file:
        yield file


@contextlib.contextmanager
def open_headers(source: Input) -> Iterator[IO[bytes]]:
    """The tar for its headers; a plain local file is not buffered, so a payload costs a seek. Raises as `open_tar`."""
    is_local = not storage.is_remote(source.url)
    if is_local and storage.read_range(source.url, 0, len(_GZIP)) != _GZIP:
        with open(storage.absolute(source.url), "rb", buffering=0) as file:
            yield cast(IO[bytes], file)
        return
    with open_tar(source) as packed:
        yield packed


def members(file: IO[bytes], source: Input, *, offset: int = 0) -> Iterator[Member]:
    """The entries from the header at `offset` on; the caller may read elsewhere in between.

    Raises InputError for a file that is no tar, a damaged header, a cut payload, a missing end mark and data behind it.
    """
    at, last = offset, None
    defaults: dict[str, str] = {}
    while member := _next(file, source, at, last, defaults):
        yield member
        at, last = member.stop, member


def payload(file: IO[bytes], source: Input, member: Member) -> bytes:
    """The bytes of a member. Raises InputError when the tar ends inside them."""
    file.seek(member.start)
    data = file.read(member.size)
    if len(data) < member.size:
        raise _cut(source, member, member.start + len(data))
    return data


@dataclass(kw_only=True)
class _Headers:
    """The headers before one member. offset: of the first. end: after the last. pax: fields of pax headers."""

    offset: int
    end: int
    long_name: str | None = None
    pax: dict[str, str] = field(default_factory=dict)


def _next(file: IO[bytes], source: Input, at: int, last: Member | None, defaults: dict[str, str]) -> Member | None:
    """The entry whose headers begin at `at`; None at the end mark. defaults: fields of global pax headers, updated."""
    found = _Headers(offset=at, end=at)
    while True:
        header = _header(file, source, found.end, last)
        if header is None:
            if found.end != at:
                raise _damaged(source, at, f"a long name has no member; {_known(last)}")
            return None
        if header.type not in _EXTENSIONS:
            found.end += BLOCK
            found.pax = {**defaults, **found.pax}
            return _member(source, header, found)
        data = _extension(file, source, found.end, header.size)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            found.long_name = as_url(data.partition(b"\0")[0])
        elif header.type in _PAX:
            found.pax.update(_records(data, source, found.end))
        elif header.type == tarfile.XGLTYPE:
            defaults.update(_records(data, source, found.end))
        found.end += BLOCK + -(-header.size // BLOCK) * BLOCK


def _member(source: Input, header: tarfile.TarInfo, found: _Headers) -> Member:
    # POSIX.1-2001: a pax field replaces that of the ustar header, which holds 100 bytes of name and sizes up to 8 GiB.
    name = found.pax.get("path") or found.long_name or as_url(header.name.encode("utf-8", "surrogateescape"))
    if header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in found.pax):
        raise InputError(
            f"The member {name!r} of {source.uri} (byte {found.offset:,}) is sparse, so its bytes are not those of the "
            "file. Repack the tar without `--sparse`."
        )
    size = header.size
    if "size" in found.pax:
        size = int(found.pax["size"]) if re.fullmatch(r"[0-9]{1,20}", found.pax["size"]) else -1
    if not 0 <= size < MEMBER_BYTES_MAX:
        raise _damaged(source, found.offset, f"the member {name!r} claims {size:,} bytes")
    kind = _KINDS.get(header.type, DEVICE)
    if kind == FILE and name.endswith("/"):
        kind = FOLDER  # tars older than POSIX mark folders only so
    if kind != FILE and header.type in tarfile.SUPPORTED_TYPES:
        size = 0  # by the standard no data follows a folder, a link or a device, whatever its size field is
    return Member(name, kind, found.offset, found.end, size)


def _header(file: IO[bytes], source: Input, at: int, last: Member | None) -> tarfile.TarInfo | None:
    """The header at `at`; None when it is the end mark, after which only zeros may follow."""
    file.seek(at)
    block = file.read(BLOCK)
    if block == _END:
        _check_end(file, source, at, last)
        return None
    if len(block) < BLOCK:
        end = file.seek(0, 2)
        if last is not None and end < last.start + last.size:
            raise _cut(source, last, end)
        raise _ended(source, at, block, last)
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError) as error:
        if at == 0:
            raise InputError(f"{source.uri} is no tar: {_what_it_is(block)}.") from error
        raise _damaged(source, at, f"{error}; {_known(last)}") from error


def _check_end(file: IO[bytes], source: Input, at: int, last: Member | None) -> None:
    seen = at + BLOCK
    while data := file.read(BLOCK << 8):
        if data.count(0) < len(data):
            where = seen + next(place for place, byte in enumerate(data) if byte)
            hint = (
                "Two tars joined by `cat`? Name them one by one."
                if at
                else "A download that left a hole? Fetch it again."
            )
            raise InputError(
                f"{source.uri} goes on at byte {where:,}, after its end mark at {at:,} ({_known(last)}). {hint}"
            )
        seen += len(data)
    if at == 0 and seen > NOTHING_BYTES_MAX:
        raise InputError(
            f"{source.uri} is {seen:,} bytes of zeros, as a download or a disk leaves a hole; "
            f"a tar of nothing has {NOTHING_BYTES_MAX:,} at most. Fetch it again, or leave it out."
        )


def _known(last: Member | None) -> str:
    return "no member comes before" if last is None else f"the last whole member is {last.name!r}"


def _ended(source: Input, at: int, block: bytes, last: Member | None) -> InputError:
    if at == 0:
        found = "is empty (0 bytes), as a full disk leaves it" if not block else f"is no tar: {_what_it_is(block)}"
        return InputError(f"{source.uri} {found}. Fetch it again, or leave it out.")
    return InputError(
        f"{source.uri} ends at byte {at + len(block):,} without an end mark; {_known(last)}. "
        "It was cut short, or its writer was not closed. Fetch it again; if it is known to be whole, `head -c 1024 "
        "/dev/zero >> FILE` adds the mark."
    )


def _cut(source: Input, member: Member, end: int) -> InputError:
    return InputError(
        f"{source.uri} ends at byte {end:,} inside its member {member.name!r}, which goes to "
        f"{member.start + member.size:,}. The tar was cut short; fetch it again."
    )


def _damaged(source: Input, at: int, what: str) -> InputError:
    return InputError(f"{source.uri} is damaged at byte {at:,}: {what}. Fetch it again, or leave it out.")


def _what_it_is(block: bytes) -> str:
    kind = kind_of(block)
    if kind == "parquet":
        return "it is parquet; name the tars only"
    return f"it is {kind}" if kind else f"it begins with {block[:8]!r}; name tars only"


# --- extended headers ---------------------------------------------------------------------------------------------


def _extension(file: IO[bytes], source: Input, at: int, size: int) -> bytes:
    if not 0 <= size <= EXTENSION_BYTES_MAX:
        raise _damaged(source, at, f"an extended header claims {size:,} bytes")
    data = file.read(size)
    if len(data) < size:
        raise _damaged(source, at, "the tar ends inside an extended header")
    return data


def _records(data: bytes, source: Input, at: int) -> dict[str, str]:
    """Keys and values of a pax header: records `LENGTH KEY=VALUE\\n`, POSIX.1-2001."""
    found: dict[str, str] = {}
    rest = data
    while rest.strip(b"\0"):
        digits, _, _ = rest[:21].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, equals, value = rest[len(digits) + 1 : length].partition(b"=")
        if not equals or length > len(rest) or not value.endswith(b"\n"):
            raise _damaged(source, at, f"a pax header holds {rest[:24]!r}")
        found[as_url(key)] = as_url(value[:-1])
        rest = rest[length:]
    return found
