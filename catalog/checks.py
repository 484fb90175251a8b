"""Check DuckDB and its extensions, the metadata database, and the commit lock, for `doctor`.

Invariant: the catalog is opened read-only; the lock is tried on a file of its own, never on the one that jobs wait for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

from catalog.lake import database, extensions, lake
from catalog.lake.lock import filesystem_type, refuse_network_filesystem
from infra import storage
from infra.doctor.findings import Circumstances, Finding, advise, broken, ok
from infra.doctor.machine import existing_parent
from infra.errors import GoodviewsError, InputError, StorageError
from infra.home import Home

LEAST_POSTGRES: Final = 12
"The oldest that DuckLake's documentation names."


def duckdb(_: Circumstances) -> Iterator[Finding]:
    """DuckDB and its extensions: each loads from a wheel, without a network."""
    from_wheels = []
    for name in extensions.NAMES:
        install = f"Run `pip install {extensions.package(name)}`."
        try:
            lake.try_extension(name)
        except StorageError as error:
            yield broken("duckdb", str(error), install)
        except lake.DatabaseError as error:
            found = f"the extension {name} of DuckDB {version('duckdb')} does not load: {' '.join(str(error).split())}"
            yield broken("duckdb", found, install)
        else:
            if extensions.wheel_file(name) is not None:
                from_wheels.append(name)
            else:
                found = f"the extension {name} was downloaded by DuckDB; a machine without a network cannot do that"
                yield advise("duckdb", found, install)
    if from_wheels:
        yield ok("duckdb", f"DuckDB {version('duckdb')} loads {', '.join(from_wheels)} from wheels, offline")


def catalog(circumstances: Circumstances) -> Iterator[Finding]:
    """The catalog opens and answers, and its lock shuts others out."""
    home = circumstances.home
    if home is None:
        return
    yield from _postgres(home) if database.is_postgres(home) else _sqlite(home)
    try:
        with lake.reading(home) as reader:
            datasets = reader.rows("SELECT count(*) FROM main.datasets WHERE is_current")[0][0]
        yield ok("catalog", f"{database.shown(home)} answers; it holds {datasets} datasets")
    except InputError:
        yield ok("catalog", f"there is no catalog at {database.shown(home)} yet; the first `goodviews ingest` makes it")
    except lake.OtherHomeError as error:
        yield broken("catalog", str(error), "Check --home and --catalog: the one does not belong to the other.")
    except (GoodviewsError, lake.DatabaseError) as error:
        found = database.scrub(home, str(error))
        yield broken(
            "catalog",
            found,
            "Run `goodviews catalog verify`; `goodviews catalog rebuild` makes a new one from the files.",
        )


def _sqlite(home: Home) -> Iterator[Finding]:
    try:
        refuse_network_filesystem(home)
    except StorageError as error:
        yield broken("lock", str(error), "Move it before two jobs commit at once.")
        return
    folder = existing_parent(os.path.dirname(home.catalog))
    kind = filesystem_type(folder) or "an unknown kind of file system"
    path = os.path.join(folder, f".goodviews-doctor-{secrets.token_hex(6)}{storage.TEMPORARY_SUFFIX}")
    try:
        is_exclusive = _is_lock_exclusive(path)
    except StorageError as error:
        yield broken(
            "lock", str(error), "Check --catalog and the rights on that folder; a commit writes beside the catalog."
        )
        return
    except OSError as error:
        found = f"file locks do not work in {folder} ({kind}): {error.strerror}"
        yield broken("lock", found, "Put the catalog on a local disk with --catalog, or use Postgres.")
        return
    if is_exclusive:
        yield ok("lock", f"file locks in {folder} ({kind}) shut a second writer out")
    else:
        found = f"two locks of one file in {folder} ({kind}) were both granted, so two commits could run at once"
        yield broken("lock", found, "Put the catalog on a local disk with --catalog, or use Postgres.")


def _is_lock_exclusive(path: str) -> bool:
    """Whether a second open file cannot lock what a first one has locked.

    Raises StorageError where no file can be made, OSError where there are no locks.
    """
    with contextlib.ExitStack() as stack:
        descriptors = []
        for _ in range(2):
            try:
                descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            except OSError as error:
                raise StorageError(f"no file can be made in {os.path.dirname(path)}: {error.strerror}") from error
            stack.callback(os.close, descriptors[-1])
        stack.callback(os.unlink, path)
        fcntl.flock(descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(descriptors[1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _postgres(home: Home) -> Iterator[Finding]:
    with contextlib.closing(database.connect_postgres(home, name="goodviews doctor")) as connection:
        number = connection.info.server_version // 10_000
    found = f"Postgres {number} accepts the connection; commits are serialised by its advisory locks"
    if number < LEAST_POSTGRES:
        yield broken("lock", found, f"DuckLake needs Postgres {LEAST_POSTGRES} or newer.")
    else:
        yield ok("lock", found)
