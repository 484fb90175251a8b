"""Files by URL over fsspec, and the one way a file of ours comes to exist: whole or not at all.

Invariant: a name that can be seen holds complete, flushed bytes.

Local publication writes a temporary sibling, fsyncs it, renames it and fsyncs the folder. On object stores the
completed upload is the publication, and a failed one is discarded. On any other remote store (SFTP, HDFS, `memory://`)
a temporary sibling is renamed. No commit path relies on a cached listing.
"""

from __future__ import annotations

import contextlib
import functools
import glob as globbing
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final, TypeAlias, cast
from zipfile import ZipInfo

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from infra.errors import InputError, StorageError
from infra.storage import archives
from infra.storage.sentences import sentence

Buffer: TypeAlias = bytes | bytearray | memoryview

TEMPORARY_SUFFIX = ".goodviews-tmp"
READ_BYTES = 8 << 20

OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "r2"})
"Protocols on which an object appears only when its upload is completed."


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size in bytes and sha256 (hex) of one published file."""

    bytes: int
    sha256: str


def join(url: str, *names: str) -> str:
    """`url` with relative names below it, with single slashes."""
    return "/".join([url.rstrip("/"), *(name.strip("/") for name in names)])


def absolute(url: str) -> str:
    """`url` as given when it has a protocol, else the absolute local path; resolves `~`, keeps links."""
    if is_remote(url):
        return url.rstrip("/")
    return os.path.abspath(os.path.expanduser(url.removeprefix("file://")))


def is_remote(url: str) -> bool:
    """Whether `url` names something that is not a plain local path."""
    return "://" in url and not url.startswith("file://")


@functools.lru_cache(maxsize=64)
def _remote_filesystem(protocol_root: str) -> fsspec.AbstractFileSystem:
    # One instance a bucket; listings are never cached, because a commit must see what is there now.
    filesystem, _ = url_to_fs(protocol_root, use_listings_cache=False)
    return filesystem


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The fsspec filesystem of `url` and the path inside it.

    Raises StorageError when the protocol is unknown or its package is missing.
    """
    if not is_remote(url):
        return LocalFileSystem(), absolute(url)
    protocol, _, rest = url.partition("://")
    try:
        fs = _remote_filesystem(f"{protocol}://{rest.split('/', 1)[0]}")
    except (ValueError, ImportError) as error:
        message = (
            f"Cannot open {url}: {error}. Install the fsspec package of that protocol, for example `pip install s3fs`."
        )
        raise StorageError(message) from error
    return fs, str(fs._strip_protocol(url))


def exists(url: str) -> bool:
    """Whether a file or folder is there now."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return os.path.exists(path)
    with sentence("read", url):
        fs.invalidate_cache()
        return bool(fs.exists(path))


def is_folder(url: str) -> bool:
    """Whether a folder (on an object store: a prefix of some name) is there now."""
    fs, path = filesystem(url)
    with sentence("read", url):
        fs.invalidate_cache()
        return bool(fs.isdir(path))


def glob(url: str) -> list[str]:
    """URLs that match the pattern (`*`, `**`, `?`, `[..]`), sorted; hidden names too."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return sorted(globbing.glob(path, recursive=True, include_hidden=True))
    protocol = url.partition("://")[0]
    with sentence("read", url):
        fs.invalidate_cache()
        return sorted(m if "://" in m else f"{protocol}://{m.lstrip('/')}" for m in fs.glob(path))


def stamp(url: str) -> str:
    """Something that changes when the file is replaced or rewritten: size with time and inode, or the store's tag.

    Raises InputError when the file is not there.
    """
    if archives.is_member(url):
        return stamp(archives.archive_of(url))
    fs, path = filesystem(url)
    with sentence("read", url):
        if isinstance(fs, LocalFileSystem):
            facts = os.stat(path)
            return f"{facts.st_size}:{facts.st_mtime_ns}:{facts.st_ino}"
        fs.invalidate_cache()
        info = fs.info(path)
        return ":".join(str(info.get(name)) for name in _STAMP_FIELDS)


_STAMP_FIELDS: Final = (
    "size",
    *("ETag", "etag", "VersionId", "generation", "md5Hash", "content_md5"),  # tags of S3, GCS and Azure
    *("LastModified", "last_modified", "updated", "mtime", "modified", "created"),  # times of these and other stores
)


def size(url: str) -> int:
    """Size of the file in bytes. Raises InputError when it is not there."""
    if archives.is_member(url):
        return archives.entry(archive_directory(archives.archive_of(url)), url).file_size
    fs, path = filesystem(url)
    with sentence("read", url):
        return int(os.stat(path).st_size) if isinstance(fs, LocalFileSystem) else int(fs.info(path)["size"])


def read_bytes(url: str) -> bytes:
    """The whole file. Raises InputError when it is not there."""
    if archives.is_member(url):
        with open_read(url) as file:
            return file.read()
    fs, path = filesystem(url)
    with sentence("read", url):
        return cast(bytes, fs.cat_file(path))


def read_range(url: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of the file."""
    if archives.is_member(url):
        with open_read(url) as file:
            file.seek(start)
            return file.read(stop - start)
    fs, path = filesystem(url)
    with sentence("read", url):
        return cast(bytes, fs.cat_file(path, start=start, end=stop))


def open_read(url: str) -> IO[bytes]:
    """A seekable binary file; of a member of a zip archive too (`archives.member_url`)."""
    if archives.is_member(url):
        archive = archives.archive_of(url)
        entries = archive_directory(archive)
        return archives.open_member(open_read(archive), entries, url)
    fs, path = filesystem(url)
    with sentence("read", url):
        return cast(IO[bytes], fs.open(path, "rb"))


def archive_directory(url: str) -> Mapping[str, ZipInfo]:
    """Member name -> entry of the zip archive at `url`; read again only when the archive changes."""
    return _directory(url, stamp(url))


@functools.lru_cache(maxsize=4)
def _directory(url: str, stamped: str) -> Mapping[str, ZipInfo]:
    with open_read(url) as file:
        return archives.directory(file, url)


def digest(url: str) -> FileRecord:
    """Size and sha256 of a file, read in bounded memory."""
    sha, total = hashlib.sha256(), 0
    with sentence("read", url), open_read(url) as file:
        while block := file.read(READ_BYTES):
            sha.update(block)
            total += len(block)
    return FileRecord(bytes=total, sha256=sha.hexdigest())


def list_files(url: str) -> list[str]:
    """All files below the folder, as sorted paths relative to it; empty when it is not there."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return sorted(_walk(path))
    prefix = path.rstrip("/") + "/"
    with sentence("read", url):
        fs.invalidate_cache()
        return sorted(name[len(prefix) :] for name in fs.find(path) if name.startswith(prefix))


def _walk(root: str) -> Iterator[str]:
    """Files below a local folder, through links to folders too; a link to a folder above is entered once."""
    seen = {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, followlinks=True):
        for name in list(folders):
            real = os.path.realpath(os.path.join(folder, name))
            if real in seen:
                folders.remove(name)
            seen.add(real)
        yield from (os.path.relpath(os.path.join(folder, name), root) for name in names)


def list_names(url: str) -> list[str]:
    """Names directly in the folder (files and folders), sorted; empty when it is not there."""
    fs, path = filesystem(url)
    if isinstance(fs, LocalFileSystem):
        return sorted(os.listdir(path)) if os.path.isdir(path) else []
    with contextlib.suppress(InputError), sentence("read", url):
        fs.invalidate_cache()
        return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in fs.ls(path, detail=False))
    return []


def modified_s(url: str) -> float:
    """Time of last modification, seconds since the epoch."""
    fs, path = filesystem(url)
    with sentence("read", url):
        return os.stat(path).st_mtime if isinstance(fs, LocalFileSystem) else float(fs.modified(path).timestamp())


def remove(url: str) -> None:
    """Remove one file; nothing happens when it is gone already."""
    fs, path = filesystem(url)
    with contextlib.suppress(FileNotFoundError), sentence("remove", url):
        fs.rm_file(path)


def remove_folder(url: str) -> None:
    """Remove a folder and all below it; nothing happens when it is gone already."""
    fs, path = filesystem(url)
    with contextlib.suppress(FileNotFoundError), sentence("remove", url):
        if fs.exists(path):
            fs.rm(path, recursive=True)


def remove_empty_parents(url: str) -> None:
    """Remove the local folder `url` and those above it while they hold nothing; object stores have none."""
    if is_remote(url):
        return
    with contextlib.suppress(OSError):
        while True:
            if os.path.isdir(url):
                os.rmdir(url)
            url = os.path.dirname(url)


def publish(url: str, parts: Buffer | Iterable[Buffer]) -> FileRecord:
    """Write `parts` one after another to `url`, visible only when complete; returns size and sha256.

    Raises StorageError when the disk is full or the store refuses; then nothing is visible under `url`.
    """
    fs, path = filesystem(url)
    pieces = [parts] if isinstance(parts, (bytes, bytearray, memoryview)) else parts
    with sentence("publish", url):
        if isinstance(fs, LocalFileSystem):
            return _publish_local(path, pieces)
        return _publish_remote(fs, path, pieces)


def _publish_local(path: str, parts: Iterable[Buffer]) -> FileRecord:
    folder, name = os.path.split(path)
    _make_folder(folder)
    temporary = os.path.join(folder, _temporary_name(name))
    sha, total = hashlib.sha256(), 0
    try:
        with open(temporary, "xb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                sha.update(view)
                total += len(view)
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(folder)
    return FileRecord(bytes=total, sha256=sha.hexdigest())


def _temporary_name(name: str) -> str:
    # The random part keeps two writers of one name apart; the last rename wins with equal bytes.
    return f".{name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"


def _make_folder(folder: str) -> None:
    """Make the folder and flush the entry of each new one, so that a power cut cannot take it away again."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    if missing:
        os.makedirs(missing[0], exist_ok=True)
        for name in missing:
            sync(os.path.dirname(name))


def _publish_remote(fs: fsspec.AbstractFileSystem, path: str, parts: Iterable[Buffer]) -> FileRecord:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    if OBJECT_STORES.intersection(protocols):
        return _upload(fs, path, parts)
    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/{_temporary_name(name)}"
    if folder.strip("/"):
        fs.makedirs(folder, exist_ok=True)
    try:
        record = _upload(fs, temporary, parts)
        if type(fs).mv is fsspec.AbstractFileSystem.mv:
            # No rename of its own; a copy of one file is whole or not there.
            fs.cp_file(temporary, path)
            fs.rm_file(temporary)
        else:
            fs.mv(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fs.rm_file(temporary)
        raise
    return record


def _upload(fs: fsspec.AbstractFileSystem, path: str, parts: Iterable[Buffer]) -> FileRecord:
    sha, total = hashlib.sha256(), 0
    file: Any = fs.open(path, "wb")
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            sha.update(view)
            total += len(view)
            file.write(view)
        file.close()
    except BaseException:
        _abandon(file)
        raise
    return FileRecord(bytes=total, sha256=sha.hexdigest())


def _abandon(file: Any) -> None:
    """Abort an upload. Closing it, as Python does when it collects an open file, would publish a half of it."""
    if not isinstance(file, AbstractBufferedFile):
        return
    # Before `discard`, which fails too while the store does not answer; `uploads.unfinished` finds what then stays.
    file.closed = True
    with contextlib.suppress(Exception):
        file.discard()


def sync(path: str) -> None:
    """Flush a local file or folder; a folder, so that a rename in it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
