"""Find files that no snapshot and no manifest names, and delete them on request.

Looks only at HOME/datasets, HOME/embeddings, HOME/work, HOME/lake, temporary siblings of the catalog and, on S3,
uploads to HOME's own folders.
Invariants: a file that a manifest, a job record or any snapshot names is never removed; a file that our layout does not
know belongs to somebody else and stays; nothing younger than the grace period is touched, because a running job may be
about to name it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from catalog import schema
from catalog.lake import database, lake
from catalog.lake.lock import commit_lock
from catalog.manifest import JobRecord
from catalog.rows import embeddings
from catalog.versions.published import read_manifest
from infra import storage
from infra.errors import GoodviewsError, InputError, StorageError
from infra.home import Home
from infra.storage import uploads

GRACE_HOURS: Final = 24.0
OUR_FOLDERS: Final = ("scenes", "states", "rejects", "views", "manifests")
"Folders of a version that only we write to."
HOME_FOLDERS: Final = (
    "alignments",
    "cache",
    "datasets",
    "embeddings",
    "indexes",
    "lake",
    "maps",
    "reports",
    "runs",
    "work",
)
"Folders of HOME that only we upload to."


@dataclass(frozen=True, kw_only=True)
class Stray:
    """One file that nothing names, or the parts of one upload to `url` that was not completed (then with its id)."""

    url: str
    bytes: int
    why: str
    upload_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What was found, and what was left alone because it could not be checked."""

    strays: list[Stray]
    left_alone: list[str]


def collect(home: Home, *, delete: bool = False, older_than_hours: float = GRACE_HOURS) -> Collection:
    """Find strays older than the grace period; with `delete`, remove them.

    The commit lock is held only while the lake's own files are checked, as a commit writes them before it names them.
    """
    young_s = older_than_hours * 3600
    left_alone: list[str] = []
    found = [*_work(home, young_s), *_temporary(home), *_versions(home, left_alone), *_sets(home, young_s, left_alone)]
    strays = [*_old_enough(found, young_s), *_uploads(home, young_s, left_alone)]
    with commit_lock(home):
        strays += _old_enough(_lake_files(home, left_alone), young_s)
        if delete:
            for stray in strays:
                if stray.upload_id is not None:
                    uploads.abort(stray.url, upload_id=stray.upload_id)
                    continue
                # Asked again: a job that was resumed meanwhile may have written the file anew and be about to name it.
                if _age_s(stray.url) >= young_s:
                    storage.remove(stray.url)
                    _remove_empty_parents(home, stray.url)
    return Collection(strays=strays, left_alone=left_alone)


def _old_enough(found: Iterable[tuple[str, str]], young_s: float) -> Iterator[Stray]:
    for url, why in found:
        try:
            if _age_s(url) >= young_s:
                yield Stray(url=url, bytes=storage.size(url), why=why)
        except InputError:
            continue  # its job has just renamed or removed it


def _uploads(home: Home, young_s: float, left_alone: list[str]) -> Iterator[Stray]:
    """Uploads that a killed job, or a store that went away, left without an end; no listing shows their parts."""
    folders = tuple(storage.join(home.url, name) + "/" for name in HOME_FOLDERS)
    try:
        for upload in uploads.unfinished(home.url):
            if upload.url.startswith(folders) and time.time() - upload.began_s >= young_s:
                why = "upload that was never completed"
                size = uploads.uploaded_bytes(upload)
                yield Stray(url=upload.url, bytes=size, why=why, upload_id=upload.upload_id)
    except StorageError as error:
        left_alone.append(f"unfinished uploads: {error}")


def _age_s(url: str) -> float:
    try:
        return time.time() - storage.modified_s(url)
    except InputError:
        return -1.0


def _work(home: Home, young_s: float) -> Iterator[tuple[str, str]]:
    """Files of jobs that have written nothing for the whole grace period; a long job may still need its first files."""
    files: dict[str, list[str]] = {}
    for path in storage.list_files(home.work()):
        files.setdefault(path.split("/")[0], []).append(home.work(path))
    for urls in files.values():
        if min(map(_age_s, urls)) >= young_s:
            yield from ((url, "left over from a job that did not finish") for url in urls)


def _temporary(home: Home) -> Iterator[tuple[str, str]]:
    """Temporary siblings of atomic publication: below datasets, embeddings and lake, and beside the catalog."""
    why = "temporary file of a write that was cut off"
    # Object stores have none: there an upload is there when it is complete.
    ours = (home.datasets(), home.lake_data, storage.join(home.url, "embeddings"))
    for folder in () if storage.is_remote(home.url) else ours:
        for path in storage.list_files(folder):
            if path.endswith(storage.TEMPORARY_SUFFIX):
                yield storage.join(folder, path), why
    if not home.catalog.startswith("postgres:"):
        folder = os.path.dirname(home.catalog)
        # SQLite adds its own endings to the name of a rebuild's temporary catalog.
        endings = tuple(f"{storage.TEMPORARY_SUFFIX}{ending}" for ending in ("", "-wal", "-shm", "-journal", ".lock"))
        start = f".{os.path.basename(home.catalog)}."
        for name in storage.list_names(folder):
            if name.startswith(start) and name.endswith(endings):
                yield storage.join(folder, name), why


def _sets(home: Home, young_s: float, left_alone: list[str]) -> Iterator[tuple[str, str]]:
    """Vectors that no manifest names. A set without one is a job that may still run, so its youngest file decides."""
    for embedding_id in embeddings.set_ids(home, published=False):
        folder = embeddings.set_url(home, embedding_id, "vectors")
        urls = [storage.join(folder, path) for path in storage.list_files(folder) if path.endswith(".parquet")]
        if not storage.exists(embeddings.set_url(home, embedding_id, embeddings.MANIFEST)):
            if urls and min(map(_age_s, urls)) >= young_s:
                yield from ((url, "its embedding set was never published") for url in urls)
            continue
        try:
            record = embeddings.read_record(home, embedding_id)
        except GoodviewsError as error:
            left_alone.append(f"{folder}: {error}")
            continue
        named = {embeddings.set_url(home, embedding_id, file.path) for file in record.files}
        yield from ((url, "its manifest does not name it") for url in urls if url not in named)


def _versions(home: Home, left_alone: list[str]) -> Iterator[tuple[str, str]]:
    try:
        registered = _registered(home)
    except (GoodviewsError, lake.DatabaseError) as error:
        left_alone.append(f"{home.datasets()}, of which the catalog may name files: {database.scrub(home, str(error))}")
        return
    for dataset in storage.list_names(home.datasets()):
        if not schema.DATASET_PATTERN.fullmatch(dataset):
            continue
        for version in storage.list_names(home.datasets(dataset)):
            folder = home.datasets(dataset, version)
            try:
                named = _named(home, dataset, version)
            except GoodviewsError as error:
                left_alone.append(f"{folder}: {error}")
                continue
            why = "no manifest names it" if named else "its version has no manifest"
            for path in storage.list_files(folder):
                url = storage.join(folder, path)
                ours = path.split("/")[0] in OUR_FOLDERS and "/" in path and not path.endswith(storage.TEMPORARY_SUFFIX)
                if ours and path not in named and lake.spelled(url) not in registered:
                    yield url, why


def _named(home: Home, dataset: str, version: str) -> set[str]:
    """Paths that the records of a version name. Raises GoodviewsError when a record cannot be read."""
    folder = home.datasets(dataset, version)
    shards = {
        name.removesuffix(".json")
        for name in storage.list_names(storage.join(folder, "manifests"))
        if name.endswith(".json")
    }
    job_url = storage.join(folder, schema.JOB_PATH)
    if storage.exists(job_url):
        shards |= set(JobRecord.from_json(storage.read_bytes(job_url), url=job_url).shards)
    named: set[str] = set()
    for shard in shards:
        named.add(f"manifests/{shard}.json")
        named |= {file.path for file in read_manifest(folder, shard).files}
    return named


def _registered(home: Home) -> set[str]:
    """Absolute paths that any snapshot names, spelled below this HOME. Raises GoodviewsError when it cannot tell."""
    try:
        with lake.reading(home) as reader:
            rows = reader.rows(f"SELECT path FROM {lake.METADATA}.ducklake_data_file WHERE NOT path_is_relative")
            root = lake.spelled(reader.root)
    except InputError:
        # Before the first commit there is no catalog, and no lake; a lake without its catalog is another matter.
        if storage.list_files(home.lake_data):
            raise
        return set()
    paths = (lake.spelled(path) for (path,) in rows)
    return {lake.spelled(home.url) + path.removeprefix(root) if path.startswith(root) else path for path in paths}


def _lake_files(home: Home, left_alone: list[str]) -> Iterator[tuple[str, str]]:
    files = [path for path in storage.list_files(home.lake_data) if not path.endswith(storage.TEMPORARY_SUFFIX)]
    if not files:
        return
    try:
        with lake.reading(home) as reader:
            tables = ("ducklake_data_file", "ducklake_delete_file", "ducklake_files_scheduled_for_deletion")
            rows = [row for table in tables for row in reader.rows(f"SELECT path FROM {lake.METADATA}.{table}")]
    except (GoodviewsError, lake.DatabaseError) as error:
        # Without the right catalog every file there would look like garbage.
        left_alone.append(f"{home.lake_data}: {database.scrub(home, str(error))}")
        return
    # By base name: DuckLake's names hold a UUID, and keeping a file too many does no harm.
    named = {str(path).rsplit("/", 1)[-1] for (path,) in rows}
    for path in files:
        if path.endswith(".parquet") and path.rsplit("/", 1)[-1] not in named:
            yield storage.join(home.lake_data, path), "no snapshot names it"


def _remove_empty_parents(home: Home, url: str) -> None:
    """Remove the folders above a removed file as far as they are empty; those of DuckLake are its own."""
    roots = (home.datasets(), home.work(), storage.join(home.url, "embeddings"))
    folder = url.rpartition("/")[0]
    while not storage.is_remote(folder) and folder.startswith(tuple(root + "/" for root in roots)):
        try:
            os.rmdir(folder)
        except OSError:
            return
        folder = folder.rpartition("/")[0]
