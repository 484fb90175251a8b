"""Verify published files against their manifests, and the catalog against both.

Invariant: nothing is changed, and every disagreement is one problem with its address.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from catalog import schema
from catalog.lake import database, lake
from catalog.lake.lake import Lake
from catalog.manifest import JobRecord, Manifest, ShardFile
from catalog.rows import embeddings
from catalog.versions.commit import registered_files, shard_differences, version_urls
from catalog.versions.current import read_pointer
from catalog.versions.published import (
    Version,
    disagreements,
    folder_sizes,
    missing_or_resized,
    read_manifest,
    read_records,
)
from infra import storage
from infra.errors import GoodviewsError, InputError, IntegrityError
from infra.home import Home

HASH_THREADS: Final = 4
UNIQUE_MEMORY = "1GB"
CURRENT_TRIES: Final = 3


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One disagreement. `path` is relative to the version, or names the table of the catalog."""

    dataset: str
    version: str
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.dataset}@{self.version} {self.path}: {self.detail}"


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What was looked at and what is wrong; `bytes` were hashed, or only measured when quick."""

    versions: int
    files: int
    bytes: int
    problems: list[Problem]


def verify(home: Home, *, dataset: str | None = None, quick: bool = False) -> Audit:
    """Compare files, manifests and catalog of all versions and embedding sets, or of the versions of one dataset.

    quick: compare sizes instead of hashes. Raises InputError for an unknown dataset.
    """
    # Disk before catalog: what is committed in between is then in both.
    found, problems = _versions_on_disk(home, dataset)
    if dataset is not None and not found and not problems:
        raise InputError(
            f"There is no dataset {dataset!r} in {home.datasets()}. Published there: "
            f"{', '.join(storage.list_names(home.datasets())) or 'none'}."
        )
    files, size = 0, 0
    for version, finished in found:
        count, total, wrong = _check_files(version, finished=finished, quick=quick)
        files, size, problems = files + count, size + total, problems + wrong
    problems += _check_catalog(home, [version for version, finished in found if finished], dataset)
    if dataset is None:
        problems += _check_sets(home, quick=quick)
    return Audit(versions=len(found), files=files, bytes=size, problems=problems)


def _check_sets(home: Home, *, quick: bool) -> Iterator[Problem]:
    try:
        for embedding_id, path, detail in _set_problems(home, quick=quick):
            yield Problem(dataset="embeddings", version=embedding_id, path=path, detail=detail)
    except (lake.DatabaseError, IntegrityError):
        return  # the catalog cannot be read; `_check_catalog` reports that


def _set_problems(home: Home, *, quick: bool) -> Iterator[tuple[str, str, str]]:
    """(id, file or table, sentence) of what is wrong with the published sets; `quick` compares sizes, not hashes."""
    ids = embeddings.set_ids(home)
    try:
        with lake.reading(home) as reader:
            counts = dict(reader.rows("SELECT embedding_id, count(*) FROM main.embeddings GROUP BY ALL"))
    except InputError:
        counts = {}
    for embedding_id in sorted({*ids, *counts}):
        if counts.get(embedding_id, 0) != 1 or embedding_id not in ids:
            there = "a manifest" if embedding_id in ids else "no manifest"
            detail = (
                f"the catalog has {counts.get(embedding_id, 0)} rows for this set, and its folder has {there}. Rerun "
                "`goodviews embed`, or `goodviews catalog rebuild`."
            )
            yield embedding_id, "main.embeddings", detail
        if embedding_id in ids:
            for path, detail in _set_file_problems(home, embedding_id, quick=quick):
                yield embedding_id, path, detail


def _set_file_problems(home: Home, embedding_id: str, *, quick: bool) -> Iterator[tuple[str, str]]:
    try:
        record = embeddings.read_record(home, embedding_id)
    except IntegrityError as error:
        yield embeddings.MANIFEST, str(error)
        return
    for file in record.files:
        url = embeddings.set_url(home, embedding_id, file.path)
        if not storage.exists(url):
            yield file.path, "it is missing; rerun `goodviews embed`."
        elif storage.size(url) != file.bytes or not (quick or embeddings.is_whole(home, record, file)):
            yield file.path, "it is not what its manifest says, so it was changed; rerun `goodviews embed`."


def check_unique_keys(files: Sequence[str], *, dataset: str) -> None:
    """Raises IntegrityError when two scenes in these parquet files have one scene_key, in bounded memory.

    Keys are compared by a 64-bit hash first, which gives 0.02 false candidates for 940 million keys; candidates are
    compared as text.
    """
    if not files:
        return
    scan = (
        f"read_parquet({lake.quote_list([lake.exact(url) for url in files])}, hive_partitioning = false, filename = "
        "true)"
    )
    with lake.parquet_reader(files, memory_limit=UNIQUE_MEMORY) as connection:
        try:
            connection.execute(
                f"CREATE TEMP TABLE suspects AS SELECT hash(scene_key) AS h FROM {scan} GROUP BY h HAVING count(*) > 1"
            )
            query = f"""SELECT scene_key, list(source_id ORDER BY filename, source_id),
                    list(filename ORDER BY filename, source_id), count(*)
                FROM {scan} WHERE hash(scene_key) IN (SELECT h FROM suspects)
                GROUP BY scene_key HAVING count(*) > 1 ORDER BY scene_key LIMIT 1"""
            row = connection.execute(query).fetchone()
        except lake.DatabaseError as error:
            raise IntegrityError(
                f"The scene files of {dataset} cannot be read to check their keys: {' '.join(str(error).split())}."
            ) from error
    if row:
        key, ids, names, count = row
        message = (
            f"Scene key {key!r} of {dataset} stands for {count} scenes: source ids {ids[0]!r} in {names[0]} "
            f"and {ids[1]!r} in {names[1]}. Keys must be unique, or scenes would be mixed. Check that no input is "
            "named twice and that ids differ between files."
        )
        raise IntegrityError(message)


def _versions_on_disk(home: Home, dataset: str | None) -> tuple[list[tuple[Version, bool]], list[Problem]]:
    """(version, whether it has a job record) of all that publish something, and what could not be read."""
    found: list[tuple[Version, bool]] = []
    problems: list[Problem] = []
    for name in storage.list_names(home.datasets()):
        if dataset not in (None, name) or not schema.DATASET_PATTERN.fullmatch(name):
            continue
        for version in storage.list_names(home.datasets(name)):
            finished = storage.exists(home.datasets(name, version, schema.JOB_PATH))
            shards = [
                m.removesuffix(".json")
                for m in storage.list_names(home.datasets(name, version, "manifests"))
                if m.endswith(".json")
            ]
            try:
                if finished:
                    found.append((read_records(home, name, version), True))
                elif shards:
                    found.append((_unfinished(home, name, version, shards), False))
            except GoodviewsError as error:
                problems.append(Problem(dataset=name, version=version, path=schema.JOB_PATH, detail=str(error)))
    return found, problems


def _unfinished(home: Home, dataset: str, version: str, shards: Sequence[str]) -> Version:
    folder = home.datasets(dataset, version)
    manifests = [read_manifest(folder, name) for name in shards]
    job = JobRecord(
        dataset=dataset,
        version=version,
        content={},
        inputs=[],
        shards=list(shards),
        scenes=0,
        captions=0,
        texts_read=0,
        texts_kept=0,
        rejects={},
    )
    return Version(folder=folder, job=job, manifests=manifests)


def _check_files(version: Version, *, finished: bool, quick: bool) -> tuple[int, int, list[Problem]]:
    def problem(path: str, detail: str) -> Problem:
        return Problem(dataset=version.job.dataset, version=version.job.version, path=path, detail=detail)

    sizes, files = folder_sizes(version.folder), version.files()
    broken = missing_or_resized(version, sizes)
    problems = [problem(path, detail) for path, detail in broken]
    if finished:
        problems += [problem(subject, detail) for subject, detail in disagreements(version)]
        problems += [
            problem(path, "no manifest names this file; see `goodviews catalog gc`.")
            for path in unnamed(version, sizes)
        ]
    if not quick:
        whole = [(m, f) for m, f in files if f.path not in {path for path, _ in broken}]
        problems += [problem(path, detail) for path, detail in _changed(version, whole)]
    return len(files), sum(sizes.get(f.path, 0) for _, f in files), problems


def unnamed(version: Version, sizes: dict[str, int]) -> list[str]:
    """Files below a version that neither its job record nor its manifests name; temporary siblings are left to `gc`."""
    named = {
        schema.JOB_PATH,
        *(f"manifests/{name}.json" for name in version.job.shards),
        *(f.path for _, f in version.files()),
    }
    return [path for path in sorted(sizes) if path not in named and not path.endswith(storage.TEMPORARY_SUFFIX)]


def _changed(version: Version, files: Sequence[tuple[Manifest, ShardFile]]) -> Iterator[tuple[str, str]]:
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        records = pool.map(lambda pair: _digest(storage.join(version.folder, pair[1].path)), files)
        for (manifest, file), found in zip(files, records, strict=True):
            if found != file.sha256:
                shard = schema.shard_name(manifest.split, manifest.shard)
                yield (
                    file.path,
                    (
                        f"its sha256 is {found}, the manifest of {shard} says {file.sha256}. It was changed after "
                        "publication; delete that manifest and rerun `goodviews ingest`."
                    ),
                )


def _digest(url: str) -> str:
    try:
        return storage.digest(url).sha256
    except GoodviewsError as error:
        return f"unknown ({error})"


# --- catalog ------------------------------------------------------------------------------------------------------


def _check_catalog(home: Home, versions: Sequence[Version], dataset: str | None) -> list[Problem]:
    everything = dataset or "*"
    try:
        with lake.reading(home) as reader:
            return _compare_all(reader, home, versions, dataset)
    except lake.DatabaseError as error:
        detail = f"it cannot be read: {database.scrub(home, str(error))}. Rebuild it with `goodviews catalog rebuild`."
        return [Problem(dataset=everything, version="*", path="catalog", detail=detail)]
    except (IntegrityError, InputError) as error:
        if isinstance(error, InputError) and not versions:
            raise
        return [Problem(dataset=everything, version="*", path="catalog", detail=str(error))]


def _compare_all(reader: Lake, home: Home, versions: Sequence[Version], dataset: str | None) -> list[Problem]:
    # No transaction around it: one unreadable file would end it, and hide what is wrong with the others.
    rows = _dataset_rows(reader, dataset)
    registered = {kind: registered_files(reader, kind) for kind in schema.SCHEMAS}
    problems: list[Problem] = []
    problems += _statistics_that_differ(reader)
    recorded = {kind: _recorded(reader, kind) for kind in schema.SCHEMAS}
    for version in versions:
        key = (version.job.dataset, version.job.version)
        mine = [row for row in rows if (row["dataset"], row["version"]) == key]
        for path, detail in _compare(reader, home, version, mine, registered):
            problems.append(Problem(dataset=key[0], version=key[1], path=path, detail=detail))
        for path, detail in _recorded_otherwise(reader, version, recorded):
            problems.append(Problem(dataset=key[0], version=key[1], path=path, detail=detail))
    known = {(row["dataset"], row["version"]) for row in rows}
    for name, version_name in sorted(known):
        if not storage.exists(home.datasets(name, version_name, schema.JOB_PATH)):
            detail = (
                "the catalog shows this version, but its folder has no job record. Restore the folder, or run "
                "`goodviews catalog rebuild`."
            )
            problems.append(Problem(dataset=name, version=version_name, path="main.datasets", detail=detail))
    if dataset is None:
        problems += _orphans(reader, registered, known)
    return problems + [p for name in sorted({name for name, _ in known}) for p in _check_current(reader, home, name)]


_OF_TABLE: Final = f"""FROM {lake.METADATA}.ducklake_data_file f
    JOIN {lake.METADATA}.ducklake_table t ON t.table_id = f.table_id AND t.end_snapshot IS NULL
    JOIN {lake.METADATA}.ducklake_schema s ON s.schema_id = t.schema_id AND s.end_snapshot IS NULL
    WHERE f.end_snapshot IS NULL AND s.schema_name = 'versions'"""


def _recorded(reader: Lake, kind: str) -> dict[str, tuple[int, int]]:
    """Url -> (rows, bytes) as the lake records them. `count(*)` and the pruning of files trust these numbers."""
    query = (
        f"SELECT f.path, f.record_count, f.file_size_bytes {_OF_TABLE} AND t.table_name = ? AND f.path_is_relative = 0"
    )
    return {lake.spelled(url): (int(rows), int(size)) for url, rows, size in reader.rows(query, [kind])}


def _recorded_otherwise(
    reader: Lake, version: Version, recorded: dict[str, dict[str, tuple[int, int]]]
) -> Iterator[tuple[str, str]]:
    """(table, sentence) for each file of a version whose rows or bytes the lake records otherwise than its manifest."""
    for kind in schema.SCHEMAS:
        for url, (_, file) in zip(version_urls(reader, version, kind), version.files(kind), strict=True):
            rows, size = recorded[kind].get(url, (file.rows, file.bytes))
            if (rows, size) != (file.rows, file.bytes):
                detail = (
                    f"the catalog records {rows:,} rows and {size:,} bytes of {file.path}, its manifest {file.rows:,} "
                    f"and {file.bytes:,}. Run `goodviews catalog rebuild`."
                )
                yield f"versions.{kind}", detail


def _statistics_that_differ(reader: Lake) -> Iterator[Problem]:
    """A problem for each table whose recorded number of rows is not the sum over its files."""
    query = f"""SELECT t.table_name, any_value(a.record_count), sum(f.record_count) {
        _OF_TABLE.replace("WHERE", f"JOIN {lake.METADATA}.ducklake_table_stats a ON a.table_id = t.table_id WHERE")
    } GROUP BY t.table_name ORDER BY t.table_name"""
    for table, total, in_files in reader.rows(query):
        if total != in_files:
            detail = (
                f"the catalog records {total:,} rows in all, its files {in_files:,}. Run `goodviews catalog rebuild`."
            )
            yield Problem(dataset="*", version="*", path=f"versions.{table}", detail=detail)


def _dataset_rows(reader: Lake, dataset: str | None) -> list[dict[str, Any]]:
    names = ["dataset", "version", "is_current", "shards", "scenes", "captions", "texts_read", "texts_kept", "rejects"]
    rows = reader.records(f"SELECT {', '.join(names)} FROM main.datasets ORDER BY ALL")
    return [row for row in rows if dataset in (None, row["dataset"])]


def _orphans(reader: Lake, registered: dict[str, set[str]], known: AbstractSet[tuple[str, str]]) -> Iterator[Problem]:
    """Registered files of versions that have no dataset row: plain names never show them, `versions` does."""
    start = lake.spelled(storage.join(reader.root, "datasets")) + "/"
    found: dict[tuple[str, str], int] = {}
    for path in (path for files in registered.values() for path in files):
        parts = path.removeprefix(start).split("/")
        key = (parts[0], parts[1]) if path.startswith(start) and len(parts) > 2 else ("*", path)
        found[key] = found.get(key, 0) + 1
    # Asked again, because a commit may have landed since the rows were read.
    known = known | {(row["dataset"], row["version"]) for row in _dataset_rows(reader, None)}
    for (name, version), count in sorted(found.items()):
        if (name, version) not in known:
            detail = f"the catalog holds {count} files of it but no dataset row. Run `goodviews catalog rebuild`."
            yield Problem(dataset=name, version=version, path="versions.*", detail=detail)


def _check_current(reader: Lake, home: Home, dataset: str) -> Iterator[Problem]:
    pointer: str | None = None
    try:
        for _ in range(CURRENT_TRIES):
            current = [row["version"] for row in _dataset_rows(reader, dataset) if row["is_current"]]
            pointer = read_pointer(home, dataset)
            if current == [pointer]:
                return
            # A commit writes the pointer just after the rows.
            time.sleep(0.5)
    except IntegrityError as error:
        yield Problem(dataset=dataset, version="*", path=schema.CURRENT_PATH, detail=str(error))
        return
    detail = (
        f"the catalog shows version {', '.join(current) or 'none'}, {schema.CURRENT_PATH} says {pointer}. "
        "Rerun `goodviews ingest` for the one that should be current."
    )
    yield Problem(dataset=dataset, version="*", path=schema.CURRENT_PATH, detail=detail)


def _compare(
    reader: Lake, home: Home, version: Version, rows: Sequence[dict[str, Any]], registered: dict[str, set[str]]
) -> Iterator[tuple[str, str]]:
    job = version.job
    wanted_files = {kind: set(version_urls(reader, version, kind)) for kind in schema.SCHEMAS}
    if len(rows) != 1:
        half = any(wanted_files[kind] & registered[kind] for kind in schema.SCHEMAS)
        advice = "Run `goodviews catalog rebuild`." if rows or half else "Rerun `goodviews ingest`."
        yield "main.datasets", f"the catalog has {len(rows)} rows for this version, not one. {advice}"
        return
    wanted = {"shards": len(version.manifests), "rejects": sum(job.rejects.values())}
    wanted |= {name: getattr(job, name) for name in ("scenes", "captions", "texts_read", "texts_kept")}
    for name, value in wanted.items():
        if rows[0][name] != value:
            yield "main.datasets", f"the catalog counts {rows[0][name]:,} {name}, the job record {value:,}."
    at = "WHERE dataset = ? AND version = ?"
    jobs = reader.rows(f"SELECT count(*) FROM main.jobs {at} AND kind = 'ingest'", [job.dataset, job.version])[0][0]
    if jobs != 1:
        yield "main.jobs", f"the catalog has {jobs} ingest jobs for this version, not one."
    for kind in schema.SCHEMAS:
        expected = sum(f.rows for _, f in version.files(kind))
        try:
            found = reader.rows(f"SELECT count(*) FROM versions.{kind} {at}", [job.dataset, job.version])[0][0]
        except lake.DatabaseError as error:
            yield f"versions.{kind}", f"the catalog cannot read its rows: {database.scrub(home, str(error))}."
        else:
            if found != expected:
                yield f"versions.{kind}", f"the catalog holds {found:,} rows, the manifests say {expected:,}."
        if missing := wanted_files[kind] - registered[kind]:
            yield f"versions.{kind}", f"{len(missing)} files are not in the catalog, for example {min(missing)}."
    yield from (("versions.shards", detail) for detail in shard_differences(reader, version))
