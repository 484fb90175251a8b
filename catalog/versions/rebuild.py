"""Rebuild the catalog from the records on disk, and replace the old one in one step.

Invariant: until the replacement the old catalog is unchanged, and the replacement is one SQLite transaction or one
rename. The old catalog is copied beside the new one, and a file that holds tables of others is never replaced. Snapshot
ids start again, so rows that recorded one (runs, embeddings, alignments) keep their dataset versions and lose the id.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
import shutil
import sqlite3
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from catalog import schema
from catalog.lake import database, lake
from catalog.lake.lock import commit_lock
from catalog.rows import embeddings
from catalog.versions.commit import JobStats, commit_into
from catalog.versions.current import current_versions, read_pointer, write_pointer
from catalog.versions.published import read_version
from infra import storage
from infra.errors import ConflictError, GoodviewsError, InputError, IntegrityError, StorageError
from infra.home import Home

CARRIED: Final = ("runs", "metrics", "embeddings", "alignments", "overlap_counts", "theory", "theory_values")
"Tables that no manifest of a dataset holds; embedding sets have manifests of their own."
KEPT_SUFFIX: Final = ".before-rebuild"


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """What the new catalog holds, and notes for the user."""

    versions: int
    carried_rows: int
    lost: str | None
    "Why rows that no manifest holds could not be carried over."
    kept: str | None
    "Where the old catalog was copied; None when there was none, and on Postgres."
    notes: list[str]


def rebuild(home: Home) -> Rebuilt:
    """Rebuild the catalog of `home` from its job records and manifests.

    Raises IntegrityError or AccountingError for a version whose files or counts are wrong, ConflictError for a Postgres
    database that is not empty and for a SQLite file that holds tables of others, InputError for a HOME that is not
    there; then the old catalog is as before.
    """
    if not storage.exists(home.url):
        raise InputError(f"There is no HOME {home.url}. Check --home; `goodviews ingest` makes a new one.")
    database.refuse_foreign(home)
    if database.is_postgres(home):
        _refuse_filled_postgres(home)
        return _fill(home, home, old=None)
    with commit_lock(home):
        folder, name = os.path.split(home.catalog)
        temporary = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}{storage.TEMPORARY_SUFFIX}")
        try:
            with _old_catalog(home) as (old, unreadable):
                rebuilt = _fill(dataclasses.replace(home, catalog=temporary), home, old=old)
            kept = _keep(home.catalog)
            _swap(temporary, home)
        finally:
            for ending in ("", "-wal", "-shm", "-journal", ".lock"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary + ending)
    return dataclasses.replace(rebuilt, lost=unreadable or rebuilt.lost, kept=kept)


def _keep(path: str) -> str | None:
    """Copy the old catalog to a name of its own beside it; returns the name, None when there is nothing to copy."""
    if not os.path.exists(path) or os.path.getsize(path) == 0:
        return None
    numbered = (
        f"{path}{KEPT_SUFFIX}{ending}" for ending in itertools.chain([""], map("-{}".format, itertools.count(2)))
    )
    kept = next(name for name in numbered if not os.path.exists(name))
    temporary = kept + storage.TEMPORARY_SUFFIX
    try:
        # SQLite's own copy holds what stands in the write-ahead log, too.
        with (
            contextlib.closing(sqlite3.connect(f"file:{urllib.parse.quote(path)}?mode=ro", uri=True)) as old,
            contextlib.closing(sqlite3.connect(temporary)) as copy,
        ):
            old.backup(copy)
    except sqlite3.DatabaseError:
        # Damaged, so it is copied as it is.
        shutil.copyfile(path, temporary)
    os.replace(temporary, kept)
    return kept


@contextlib.contextmanager
def _old_catalog(home: Home) -> Iterator[tuple[lake.Lake | None, str | None]]:
    """The old catalog when it opens, and else the reason, unless there simply is none."""
    with contextlib.ExitStack() as stack:
        opened: tuple[lake.Lake | None, str | None]
        try:
            # A catalog of another HOME is accepted: rebuild is the remedy after HOME was moved.
            opened = stack.enter_context(lake.reading(home, any_home=True)), None
        except InputError:
            opened = None, None
        except GoodviewsError as error:
            opened = None, str(error)
        yield opened


def _fill(new: Home, home: Home, *, old: lake.Lake | None) -> Rebuilt:
    notes: list[str] = []
    lost, carried = None, 0
    versions = list(_finished(home))
    try:
        measured, shown = (_measured(old), current_versions(old)) if old else ({}, {})
    except lake.DatabaseError as error:
        old, measured, shown, lost = None, {}, {}, database.scrub(home, str(error))
    by_dataset: dict[str, list[str]] = {}
    for dataset, version in versions:
        by_dataset.setdefault(dataset, []).append(version)
    current = {name: _current(home, name, found, shown.get(name), notes) for name, found in by_dataset.items()}
    with lake.writing(new) as writer:
        for dataset, version in versions:
            stats, created_at = measured.get((dataset, version), (None, None))
            found = read_version(home, dataset, version)
            is_current = version == current[dataset]
            commit_into(writer, new, found, stats=stats, created_at=created_at, current=is_current)
            if is_current:
                write_pointer(home, dataset, version)
        try:
            carried = sum(_carry(writer, old, table) for table in CARRIED) if old else 0
        except lake.DatabaseError as error:
            lost = database.scrub(home, str(error))
        carried += _restore_sets(writer, home, notes)
    return Rebuilt(versions=len(versions), carried_rows=carried, lost=lost, kept=None, notes=notes)


def _restore_sets(writer: lake.Lake, home: Home, notes: list[str]) -> int:
    """Rows of embedding sets that are published but that no old catalog brought; returns their number."""
    known = {row[0] for row in writer.rows("SELECT embedding_id FROM main.embeddings")}
    restored = 0
    for embedding_id in embeddings.set_ids(home):
        if embedding_id in known:
            continue
        try:
            record = embeddings.read_record(home, embedding_id)
        except IntegrityError as error:
            notes.append(str(error))
            continue
        # The new catalog numbers its snapshots from the start.
        embeddings.insert(writer, dataclasses.replace(record, snapshot_id=None))
        restored += 1
    return restored


def _finished(home: Home) -> Iterator[tuple[str, str]]:
    for dataset in storage.list_names(home.datasets()):
        if schema.DATASET_PATTERN.fullmatch(dataset):
            for version in storage.list_names(home.datasets(dataset)):
                if storage.exists(home.datasets(dataset, version, schema.JOB_PATH)):
                    yield dataset, version


def _current(home: Home, dataset: str, versions: list[str], shown: str | None, notes: list[str]) -> str | None:
    """The version to show: that of the old catalog, else that of the pointer on disk, else the only one."""
    for version in (shown, read_pointer(home, dataset)):
        if version in versions:
            return version
    if len(versions) == 1:
        return versions[0]
    notes.append(
        f"{dataset} has versions {', '.join(versions)} and {schema.CURRENT_PATH} names none of them, so plain names "
        "show none. Rerun `goodviews ingest` for the one that should be current."
    )
    return None


def _measured(old: lake.Lake) -> dict[tuple[str, str], tuple[JobStats | None, float | None]]:
    """What only the old catalog knows of a version: cost of its job, time of its first commit."""
    query = """SELECT d.dataset, d.version, epoch(d.created_at), epoch(j.started_at), j.seconds, j.peak_rss_bytes,
            j.workers FROM main.datasets d LEFT JOIN main.jobs j USING (job_id)"""
    found: dict[tuple[str, str], tuple[JobStats | None, float | None]] = {}
    for dataset, version, created_at, started_at, seconds, peak, workers in old.rows(query):
        known = started_at is not None and seconds is not None
        stats = (
            JobStats(started_at=started_at, seconds=seconds, peak_rss_bytes=peak, workers=workers) if known else None
        )
        found[dataset, version] = stats, created_at
    return found


def _carry(writer: lake.Lake, old: lake.Lake, table: str) -> int:
    there = "SELECT 1 FROM duckdb_tables() WHERE database_name = ? AND schema_name = 'main' AND table_name = ?"
    if not old.rows(there, [lake.ALIAS, table]):
        return 0  # of an older layout
    columns = [str(row[0]) for row in old.rows(f"DESCRIBE main.{table}")]
    new_columns = {str(row[0]) for row in writer.rows(f"DESCRIBE main.{table}")}
    chosen = [name for name in columns if name in new_columns]
    # A comparison names its two versions, which the snapshot of now holds. What a run or a set saw of other datasets
    # belongs to a history that is gone.
    snapshot = str(writer.current_snapshot()) if table == "overlap_counts" else "NULL"
    picked = ", ".join(
        f"{snapshot}::BIGINT AS snapshot_id" if name == "snapshot_id" else lake.identifier(name) for name in chosen
    )
    rows: Any = old.connection.execute(f"SELECT {picked} FROM main.{table}").to_arrow_table()
    if rows.num_rows:
        writer.connection.register("carried", rows)
        writer.connection.execute(f"INSERT INTO main.{table} BY NAME SELECT * FROM carried")
        writer.connection.unregister("carried")
    return int(rows.num_rows)


def _refuse_filled_postgres(home: Home) -> None:
    try:
        with lake.reading(home, any_home=True) as reader:
            count = reader.rows("SELECT count(*) FROM main.datasets")[0][0]
    except InputError:
        return
    message = (
        f"The database {database.shown(home)} holds a catalog of {count} versions already, and a rebuild writes only "
        "into an empty one. Make one (`createdb goodviews2`), rebuild into it with --catalog, and use it from then on."
    )
    raise ConflictError(message)


def _swap(temporary: str, home: Home) -> None:
    """Put the new catalog in the place of the old one, for readers that have it open as well."""
    try:
        if os.path.exists(home.catalog):
            # Not a rename: the write-ahead log of the old file would be replayed into the new one. The backup is one
            # transaction of SQLite itself, so that readers see the old catalog or the new one.
            with (
                contextlib.closing(sqlite3.connect(temporary)) as new,
                contextlib.closing(sqlite3.connect(home.catalog, timeout=30)) as target,
            ):
                new.backup(target)
                return
    except sqlite3.OperationalError as error:
        raise StorageError(
            f"The new catalog could not take the place of {home.catalog}: {error}. The old one is as before; "
            "close the programs that write to it and rerun."
        ) from error
    except sqlite3.DatabaseError:
        # The old file is no database (any more): nobody can be reading it.
        for ending in ("-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(home.catalog + ending)
    _settle(temporary)
    os.replace(temporary, home.catalog)
    storage.sync(os.path.dirname(home.catalog))


def _settle(path: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    storage.sync(path)
