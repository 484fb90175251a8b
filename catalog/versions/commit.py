"""Commit a published version to the catalog as one snapshot.

Invariant: after any kill or repetition a version is in the catalog at most once. The transaction looks before it adds,
because DuckLake would register a file twice and double its rows without an error.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow as pa

from catalog import layout, schema
from catalog.lake import database, lake, transaction
from catalog.lake.lake import Lake
from catalog.manifest import Manifest
from catalog.versions.current import write_pointer
from catalog.versions.published import Version, read_version
from infra import storage
from infra.errors import ConflictError, IntegrityError, StorageError
from infra.home import Home
from infra.version import code_version

ATTEMPTS = 3
"Of whole transactions, each with DuckLake's own retries; under the lock only a foreign writer can make one fail."
FILES_A_CALL: Final = 1000


@dataclass(frozen=True, kw_only=True)
class JobStats:
    """What a job cost; no part of its version. Kept in the catalog only, so a rebuild without one leaves it null."""

    started_at: float
    "Seconds since the epoch."
    seconds: float
    peak_rss_bytes: int | None = None
    "Of the largest process of the job."
    workers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Committed:
    """The snapshot in which the version is current, and whether its rows were in the catalog before."""

    snapshot_id: int
    was_there: bool


def commit_version(home: Home, dataset: str, version: str, *, stats: JobStats | None = None) -> Committed:
    """Bring a published version into the catalog and make it the current one of its dataset.

    Raises InputError when the version is unfinished, IntegrityError or AccountingError when its files or counts are not
    what its manifests say, ConflictError when the lock or the transaction cannot be had; then the catalog is as before.
    """
    found = read_version(home, dataset, version)
    with lake.writing(home) as writer:
        committed = commit_into(writer, home, found, stats=stats)
        # Under the lock, so that pointers follow the order of commits. After a kill before this line a rerun writes it.
        write_pointer(home, dataset, version)
    return committed


def commit_into(
    writer: Lake,
    home: Home,
    found: Version,
    *,
    stats: JobStats | None,
    created_at: float | None = None,
    current: bool = True,
) -> Committed:
    """Commit with an open lake; retries the whole transaction a bounded number of times."""
    try:
        _check_footers(writer, found)
    except lake.TransactionConflict as error:
        message = (
            f"The catalog {database.shown(home)} broke off before the commit of {found.name}: "
            f"{database.scrub(home, str(error))}. The shards are kept, rerun."
        )
        raise StorageError(message) from error
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _commit_once(writer, found, stats=stats, created_at=created_at, current=current)
        except lake.TransactionConflict as error:
            reason = database.scrub(home, str(error))
            if attempt == ATTEMPTS:
                message = (
                    f"The catalog {database.shown(home)} refused the commit of {found.name} {ATTEMPTS} times "
                    f"({reason}). Another program writes to it; rerun when that is done, the shards are kept."
                )
                raise ConflictError(message) from error
            time.sleep(random.uniform(0.05, 0.5) * attempt)
        except lake.DatabaseError as error:
            message = (
                f"The catalog {database.shown(home)} could not take {found.name}: "
                f"{database.scrub(home, str(error))}. The shards are kept; rerun, which adds what did not land."
            )
            raise StorageError(message) from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def _commit_once(
    writer: Lake, found: Version, *, stats: JobStats | None, created_at: float | None, current: bool
) -> Committed:
    with transaction.rolled_back_on_error(writer):
        rows = writer.rows(
            "SELECT is_current FROM main.datasets WHERE dataset = ? AND version = ?",
            [found.job.dataset, found.job.version],
        )
        _refuse_half_state(writer, found, rows=len(rows))
        if rows:
            _refuse_other_content(writer, found)
        if rows == [(True,)] or (rows and not current):
            writer.connection.execute("ROLLBACK")
            return Committed(snapshot_id=writer.current_snapshot(), was_there=True)
        if not rows:
            _add_files(writer, found)
            _insert_shards(writer, found)
            _insert_job(writer, found, stats)
            _insert_dataset(writer, found, created_at)
        if current:
            _make_current(writer, found)
        lake.sync_table(writer, "versions", "shards")
        counts = f"{found.job.scenes} scenes, {found.job.captions} captions, {len(found.manifests)} shards"
        transaction.commit(writer, f"{'make current' if rows else 'add'} {found.name}: {counts}")
    # Not the current one: another writer's snapshot may be newer by now.
    snapshot = writer.rows(f"SELECT * FROM ducklake_last_committed_snapshot({lake.quote(lake.ALIAS)})")[0][0]
    return Committed(snapshot_id=int(snapshot), was_there=bool(rows))


def registered_files(reader: Lake, kind: str) -> set[str]:
    """Files that the current snapshot names for a kind. Raises IntegrityError when it names one twice."""
    table = f"{lake.quote(lake.ALIAS)}, {lake.quote(kind)}, schema => 'versions'"
    files: set[str] = set()
    for (url,) in reader.rows(f"SELECT data_file FROM ducklake_list_files({table})"):
        if lake.spelled(url) in files:
            message = (
                f"The catalog holds {url} twice, so its rows count double. Rebuild it with `goodviews catalog rebuild`."
            )
            raise IntegrityError(message)
        files.add(lake.spelled(url))
    return files


def _refuse_half_state(writer: Lake, found: Version, *, rows: int) -> None:
    """Raises IntegrityError unless all files of the version are registered with its row, or none without it."""
    for kind in schema.SCHEMAS:
        wanted, have = set(version_urls(writer, found, kind)), registered_files(writer, kind)
        if rows > 1 or (wanted - have if rows else wanted & have):
            message = (
                f"The catalog holds a part of {found.name} ({rows} dataset rows, {len(wanted & have):,} of "
                f"{len(wanted):,} {kind} files), which no commit of goodviews leaves behind. Rebuild it with "
                "`goodviews catalog rebuild`."
            )
            raise IntegrityError(message)


def _refuse_other_content(writer: Lake, found: Version) -> None:
    """Raises IntegrityError when the catalog holds other shards: a version is a function of its inputs."""
    for detail in shard_differences(writer, found):
        message = (
            f"{found.name} is in the catalog with other content: {detail} One of the two was damaged; see `goodviews "
            "catalog verify`, and to take what is on disk run `goodviews catalog rebuild`."
        )
        raise IntegrityError(message)


def shard_differences(reader: Lake, found: Version) -> Iterator[str]:
    """A sentence for each shard row of the catalog that is not what its manifest says."""
    query = "SELECT * FROM versions.shards WHERE dataset = ? AND version = ? ORDER BY shard"
    cursor = reader.connection.execute(query, [found.job.dataset, found.job.version])
    rows: list[dict[str, Any]] = cursor.to_arrow_table().to_pylist()
    wanted = sorted(shard_table(found.manifests).to_pylist(), key=lambda row: int(row["shard"]))
    if [row["shard"] for row in rows] != [row["shard"] for row in wanted]:
        yield f"the catalog holds {len(rows)} shard rows, the job record names {len(wanted)} shards."
        return
    for have, want in zip(rows, wanted, strict=True):
        if different := [name for name in want if have[name] != want[name]]:
            shard = schema.shard_name(want["split"], want["shard"])
            yield f"shard {shard} differs from its manifest in {', '.join(different)}."


def version_urls(writer: Lake, found: Version, kind: str) -> list[str]:
    """The parquet files of one kind, spelled as the catalog spells them, in the order of `found.files(kind)`."""
    folder = storage.join(writer.root, "datasets", found.job.dataset, found.job.version)
    return [lake.spelled(storage.join(folder, file.path)) for _, file in found.files(kind)]


def _groups(items: Sequence[Any]) -> list[Sequence[Any]]:
    return [items[i : i + FILES_A_CALL] for i in range(0, len(items), FILES_A_CALL)]


def _check_footers(writer: Lake, found: Version) -> None:
    """Rows, dataset, version and split of each file, from its footer, are those of its manifest."""
    for kind in schema.SCHEMAS:
        for group in _groups(list(zip(version_urls(writer, found, kind), found.files(kind), strict=True))):
            paths = lake.quote_list([lake.exact(url) for url, _ in group])
            ends = ", ".join(
                f"{end}(stats_{end}_value) FILTER (path_in_schema = '{column}')"
                for column in ("dataset", "version", "split")
                for end in ("min", "max")
            )
            query = f"""SELECT file_name, any_value(num_rows), {ends} FROM parquet_file_metadata({paths})
                LEFT JOIN parquet_metadata({paths}) USING (file_name) GROUP BY file_name"""
            try:
                facts = {lake.spelled(row[0]): row[1:] for row in writer.rows(query)}
            except lake.TransactionConflict:
                raise  # the database behind the lake, not the file
            except lake.DatabaseError as error:
                raise IntegrityError(
                    f"A {kind} file of {found.name} is not readable as parquet: {' '.join(str(error).split())}. "
                    "Delete its manifest and rerun `goodviews ingest`."
                ) from error
            for url, (manifest, file) in group:
                _check_footer(found, manifest, file.path, expected=file.rows, facts=facts.get(url))


def _check_footer(
    found: Version, manifest: Manifest, path: str, *, expected: int, facts: tuple[Any, ...] | None
) -> None:
    # Statistics are optional, but those that are there must be right, since DuckLake skips files by them.
    wanted = [manifest.dataset, manifest.dataset, manifest.version, manifest.version, manifest.split, manifest.split]
    if facts is None or facts[0] != expected:
        rows = "no rows" if facts is None else f"{facts[0]:,} rows"
        raise IntegrityError(
            f"File {path} of {found.name} holds {rows}, its manifest says {expected:,}. Delete its manifest and "
            "rerun `goodviews ingest`."
        )
    wrong = [
        f"{value!r} instead of {right!r}"
        for value, right in zip(facts[1:], wanted, strict=True)
        if value not in (None, right)
    ]
    if wrong:
        raise IntegrityError(
            f"File {path} of {found.name} holds rows of another dataset, version or split ({wrong[0]}). Delete "
            "its manifest and rerun `goodviews ingest`."
        )


def _add_files(writer: Lake, found: Version) -> None:
    for kind in schema.SCHEMAS:
        for group in _groups(version_urls(writer, found, kind)):
            # hive_partitioning off: a HOME below `version=9/` would overwrite the column of that name.
            files = lake.quote_list([lake.exact(url) for url in group])
            writer.connection.execute(
                f"CALL ducklake_add_data_files({lake.quote(lake.ALIAS)}, {lake.quote(kind)}, {files}, schema => "
                "'versions', hive_partitioning => false)"
            )


def _shard_row(m: Manifest) -> dict[str, object]:
    names = (
        "dataset version split shard seed scenes captions texts_read texts_kept repaired scenes_without_caption "
        "bad_passes bad_repeats rows_digest"
    )
    return {
        **{name: getattr(m, name) for name in names.split()},
        "rejects": sum(m.rejects.values()),
        "rejects_by_reason": sorted(m.rejects.items()),
        "captions_per_scene": sorted((int(n), count) for n, count in m.captions_per_scene.items()),
        "bytes": sum(f.bytes for f in m.files),
        "files": [
            {
                "path": f.path,
                "kind": f.kind,
                "bytes": f.bytes,
                "sha256": f.sha256,
                "rows": f.rows,
                "bad_pass": f.bad_pass,
            }
            for f in m.files
        ],
    }


def shard_table(manifests: Sequence[Manifest]) -> pa.Table:
    """The rows of `versions.shards` that these manifests make."""
    return pa.Table.from_pylist([_shard_row(m) for m in manifests], schema=layout.SHARDS)


def _insert_shards(writer: Lake, found: Version) -> None:
    writer.connection.register("incoming_shards", shard_table(found.manifests))
    writer.connection.execute("INSERT INTO versions.shards BY NAME SELECT * FROM incoming_shards ORDER BY shard")
    writer.connection.unregister("incoming_shards")


def _job_id(found: Version) -> str:
    # A version lands once, so this names its job, before and after a rebuild.
    return f"ingest:{found.name}"


def _totals(found: Version) -> dict[str, object]:
    job = found.job
    return {
        "shards": len(found.manifests),
        "scenes": job.scenes,
        "captions": job.captions,
        "texts_read": job.texts_read,
        "texts_kept": job.texts_kept,
        "rejects": sum(job.rejects.values()),
    }


def _insert_job(writer: Lake, found: Version, stats: JobStats | None) -> None:
    job = found.job
    row = {
        "job_id": _job_id(found),
        "kind": "ingest",
        "dataset": job.dataset,
        "version": job.version,
        "config": job.content,
        "inputs": orjson.dumps(job.inputs).decode(),
        "code_version": code_version(),
        "started_at": stats and stats.started_at,
        "seconds": stats and stats.seconds,
        "workers": stats and stats.workers,
        "peak_rss_bytes": stats and stats.peak_rss_bytes,
        "rejects_by_reason": job.rejects,
        **_totals(found),
    }
    writer.insert("main.jobs", row)


def _insert_dataset(writer: Lake, found: Version, created_at: float | None) -> None:
    source = found.job.content.get("source")
    row = {
        "dataset": found.job.dataset,
        "version": found.job.version,
        "is_current": False,
        "source": source if isinstance(source, str) else None,
        "job_id": _job_id(found),
        "created_at": time.time() if created_at is None else created_at,
        **_totals(found),
    }
    writer.insert("main.datasets", row)


def _make_current(writer: Lake, found: Version) -> None:
    # One statement for both directions: an UPDATE reads every row of the table, .08 s at 330 versions.
    dataset, version = found.job.dataset, found.job.version
    writer.connection.execute(
        "UPDATE main.datasets SET is_current = (version = ?) WHERE dataset = ? AND is_current <> (version = ?)",
        [version, dataset, version],
    )
