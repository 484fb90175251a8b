"""The commit lock: a lock file beside a SQLite catalog, an advisory lock in Postgres.

Invariant: two processes are never inside `commit_lock` of one catalog. Readers take no lock. When the holder is killed
the lock is free at once: the kernel drops its flock, Postgres its session.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from catalog.lake import database
from infra.errors import ConflictError, StorageError
from infra.home import Home

TIMEOUT_S: Final = 600.0
POLL_S: Final = (0.02, 0.2)
"Bounds of the random pause between two tries; random, so that 16 waiting jobs do not wake together."

ADVISORY_KEY: Final = 0x676F6F6476696577
"The word `goodview` as 64 bits; advisory locks are scoped to one Postgres database."

NETWORK_FILESYSTEMS: Final = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "gpfs",
        "beegfs",
        "beegfs_nodev",
        "orangefs",
        "pvfs2",
        "fuse.sshfs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.goofys",
        "fuse.rclone",
        "fuse.glusterfs",
        "fuse.ceph",
        "fuse.juicefs",
        "fuse.mount-s3",
    ]
)


@contextlib.contextmanager
def commit_lock(home: Home, *, timeout_s: float = TIMEOUT_S) -> Iterator[Callable[[], None]]:
    """Hold the commit lock of the catalog; yields a function that raises ConflictError when it was lost meanwhile.

    Raises ConflictError that names the holder after `timeout_s`, StorageError when SQLite lies on a network filesystem.
    """
    if database.is_postgres(home):
        with _advisory_lock(home, timeout_s) as check:
            yield check
    else:
        refuse_network_filesystem(home)
        with _file_lock(home.catalog + ".lock", timeout_s) as check:
            yield check


def refuse_network_filesystem(home: Home, mounts: str | None = None) -> None:
    """Raises StorageError for a SQLite catalog on a network filesystem; `mounts` replaces /proc/self/mountinfo."""
    kind = filesystem_type(home.catalog, mounts)
    if kind in NETWORK_FILESYSTEMS:
        message = (
            f"The catalog {home.catalog} is a SQLite file on a network filesystem ({kind}), where file locks and "
            "shared memory do not hold between machines and commits get lost. Put it on a local disk, or name a "
            "Postgres catalog, for example `--catalog 'postgres:dbname=goodviews host=db'`."
        )
        raise StorageError(message)


def filesystem_type(path: str, mounts: str | None = None) -> str | None:
    """Type of the filesystem under `path` (which need not exist yet); None where Linux's mount table is missing."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text()
        except OSError:
            return None
    real, best, kind = os.path.realpath(path), -1, None
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        # Blanks in a mount point are written as octal escapes.
        point = fields[4].encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # The last of several mounts on one point hides the others.
        if inside and len(point) >= best:
            best, kind = len(point), right.split()[0]
    return kind


@contextlib.contextmanager
def _file_lock(path: str, timeout_s: float) -> Iterator[Callable[[], None]]:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    deadline = time.monotonic() + timeout_s
    while (descriptor := _try_file_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise _timed_out(path.removesuffix(".lock"), _read_holder(path), timeout_s)
        time.sleep(random.uniform(*POLL_S))
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

        def check() -> None:
            if not _is_still(descriptor, path):
                raise ConflictError(
                    f"The lock file {path} was removed while it was held. Nothing was committed; leave that file "
                    "alone and rerun."
                )

        yield check
    finally:
        # The file stays: after unlinking it, two processes could lock two files of the same name.
        os.close(descriptor)


def _try_file_lock(path: str) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(
            f"Cannot open the lock file {path}: {error.strerror}. A commit needs to write beside the catalog."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        message = (
            f"Cannot lock {path}: {error.strerror}. The filesystem has no file locks; put the catalog on a local "
            "disk, or use Postgres."
        )
        raise StorageError(message) from error
    if _is_still(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def _is_still(descriptor: int, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _read_holder(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip() or "an unknown process"
    return "an unknown process"


@contextlib.contextmanager
def _advisory_lock(home: Home, timeout_s: float) -> Iterator[Callable[[], None]]:
    # Its own session: the lock must outlive DuckDB's transactions and die with this process.
    connection = database.connect_postgres(home, name=f"goodviews process {os.getpid()} on {socket.gethostname()}")
    try:
        deadline = time.monotonic() + timeout_s
        while not _one(connection, "SELECT pg_try_advisory_lock(%s)", ADVISORY_KEY):
            if time.monotonic() >= deadline:
                raise _timed_out(database.shown(home), _advisory_holder(connection), timeout_s)
            time.sleep(random.uniform(*POLL_S))

        def check() -> None:
            try:
                _one(connection, "SELECT 1")
            except Exception as error:  # whatever psycopg raises, the session that held the lock is gone
                message = (
                    f"The session that held the commit lock of {database.shown(home)} broke. Nothing was committed; "
                    "rerun."
                )
                raise ConflictError(message) from error

        yield check
    finally:
        connection.close()


def _one(connection: Any, query: str, *values: object) -> Any:
    row = connection.execute(query, values).fetchone()
    return None if row is None else row[0]


def _advisory_holder(connection: Any) -> str:
    query = """SELECT a.application_name || ' (Postgres session ' || a.pid || ')'
        FROM pg_locks l JOIN pg_stat_activity a USING (pid)
        WHERE l.locktype = 'advisory' AND l.granted AND l.classid::bigint = %s AND l.objid::bigint = %s
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
    return _one(connection, query, ADVISORY_KEY >> 32, ADVISORY_KEY & 0xFFFFFFFF) or "an unknown session"


def _timed_out(catalog: str, holder: str, timeout_s: float) -> ConflictError:
    message = (
        f"The commit lock of {catalog} is held by {holder}; waited {timeout_s:g} s. Nothing was committed; files "
        "that are published are kept. Rerun when that job is done."
    )
    return ConflictError(message)
