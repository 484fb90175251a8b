"""Read a version from disk (job record, manifests, file sizes) and check that counts agree.

Invariant: what `read_version` returns passed every check that needs no reading of data files. Tar block lists are
dropped, since those of 94,000 shards would not fit in memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from catalog import schema
from catalog.manifest import PICTURE_COUNTS, JobRecord, Manifest, ShardFile, picture_totals
from infra import storage
from infra.errors import AccountingError, InputError, IntegrityError
from infra.home import Home

THREADS: Final = 8
ADVICE: Final = "Delete its manifest and rerun `goodviews ingest`."


@dataclass(frozen=True, kw_only=True)
class Version:
    """One published version; `manifests` in the order of `job.shards`."""

    folder: str
    job: JobRecord
    manifests: list[Manifest]

    @property
    def name(self) -> str:
        """`dataset@version`, for messages."""
        return f"{self.job.dataset}@{self.job.version}"

    def files(self, kind: str | None = None) -> list[tuple[Manifest, ShardFile]]:
        """All files of one kind, or of every kind, with the manifest that names each."""
        return [(m, f) for m in self.manifests for f in m.files if kind is None or f.kind == kind]


def read_version(home: Home, dataset: str, version: str) -> Version:
    """Read the records of a version and check names, sizes and counts.

    Raises InputError when it has no job record, IntegrityError, AccountingError.
    """
    found = read_records(home, dataset, version)
    check_accounts(found)
    problems = missing_or_resized(found, folder_sizes(found.folder))
    if problems:
        more = f" ({len(problems) - 1} more files are wrong too.)" if len(problems) > 1 else ""
        raise IntegrityError(problems[0][1] + more)
    return found


def read_records(home: Home, dataset: str, version: str) -> Version:
    """The job record and the manifests it names, without looking at files or counts."""
    folder = home.datasets(dataset, version)
    job_url = storage.join(folder, schema.JOB_PATH)
    if not storage.exists(job_url):
        if dataset not in (known := storage.list_names(home.datasets())):
            message = f"There is no dataset {dataset!r} in {home.datasets()}. Known are {', '.join(known) or 'none'}."
            raise InputError(message)
        message = (
            f"{dataset}@{version} has no {schema.JOB_PATH} in {folder}: its ingest did not finish. Rerun `goodviews "
            "ingest`; finished shards are kept."
        )
        raise InputError(message)
    job = JobRecord.from_json(storage.read_bytes(job_url), url=job_url)
    if (job.dataset, job.version) != (dataset, version):
        raise IntegrityError(
            f"{job_url} says that it is {job.dataset}@{job.version}. The folder was renamed or copied; give it "
            "back its own name."
        )
    if len(set(job.shards)) != len(job.shards):
        raise IntegrityError(
            f"{job_url} names a shard twice, which would double its scenes. Delete the file and rerun `goodviews "
            "ingest`."
        )
    with ThreadPoolExecutor(THREADS) as pool:
        manifests = list(pool.map(lambda name: read_manifest(folder, name, job=job), job.shards))
    return Version(folder=folder, job=job, manifests=manifests)


def read_manifest(folder: str, name: str, *, job: JobRecord | None = None) -> Manifest:
    """One manifest without its tar blocks. Raises IntegrityError when it is missing, or not of this version or name."""
    url = storage.join(folder, f"manifests/{name}.json")
    try:
        manifest = Manifest.from_json(storage.read_bytes(url), url=url)
    except InputError as error:
        raise IntegrityError(
            f"{url} is missing, though {schema.JOB_PATH} names it. Rerun `goodviews ingest`, which makes the "
            "shard again."
        ) from error
    if schema.shard_name(manifest.split, manifest.shard) != name:
        raise IntegrityError(
            f"{url} holds the manifest of {schema.shard_name(manifest.split, manifest.shard)}. {ADVICE}"
        )
    if job is not None and (manifest.dataset, manifest.version) != (job.dataset, job.version):
        raise IntegrityError(
            f"{url} belongs to {manifest.dataset}@{manifest.version}, not to {job.dataset}@{job.version}. {ADVICE}"
        )
    for file in manifest.files:
        parts = file.path.split("/")
        if not parts[0] or ".." in parts or "\0" in file.path:
            raise IntegrityError(f"{url} names the file {file.path!r}, which lies outside its version. {ADVICE}")
    return dataclasses.replace(manifest, files=[dataclasses.replace(f, blocks=None) for f in manifest.files])


def folder_sizes(folder: str) -> dict[str, int]:
    """Size of every file below the folder by relative path, in one uncached listing."""
    fs, path = storage.filesystem(folder)
    fs.invalidate_cache()
    prefix = path.rstrip("/") + "/"
    found = fs.find(path, detail=True)
    return {name[len(prefix) :]: int(info["size"]) for name, info in found.items() if name.startswith(prefix)}


def missing_or_resized(found: Version, sizes: dict[str, int]) -> list[tuple[str, str]]:
    """(path, sentence) of every file that is absent, empty, named twice, or not of its manifest's size."""
    problems, seen = [], set()
    for manifest, file in found.files():
        size, wrong = sizes.get(file.path), None
        if file.path in seen:
            wrong = "is named twice in the manifests, which would double its rows."
        elif size is None:
            wrong = "is missing."
        elif size == 0:
            wrong = f"has 0 bytes, as after a full disk; its manifest says {file.bytes:,}. Free space."
        elif size != file.bytes:
            wrong = f"has {size:,} bytes, its manifest says {file.bytes:,}. It was changed or cut off."
        if wrong:
            shard = schema.shard_name(manifest.split, manifest.shard)
            problems.append((file.path, f"File {file.path} of shard {shard} of {found.name} {wrong} {ADVICE}"))
        seen.add(file.path)
    return problems


def check_accounts(found: Version) -> None:
    """Raises AccountingError for the first disagreement of `disagreements`."""
    for _, sentence in disagreements(found):
        raise AccountingError(sentence)


def disagreements(found: Version) -> Iterator[tuple[str, str]]:
    """(subject, sentence) of every count that does not add up: within a manifest, and between manifests and the job."""
    for part in found.manifests:
        shard = schema.shard_name(part.split, part.shard)
        for text in _manifest_disagreements(part):
            advice = "A row was lost or counted twice; this is a bug, nothing was committed."
            yield shard, f"Shard {shard} of {found.name} {text}. {advice}"
    job = found.job
    for name in ("scenes", "captions", "texts_read", "texts_kept"):
        total, counted = sum(getattr(m, name) for m in found.manifests), getattr(job, name)
        if total != counted:
            text = f"The job of {found.name} counts {counted:,} {name}, its manifests {total:,}."
            yield schema.JOB_PATH, f"{text} Rows were lost or counted twice; rerun `goodviews ingest`."
    pictures = picture_totals(found.manifests)
    if pictures != {name: getattr(job, name) for name in PICTURE_COUNTS}:
        text = f"The job of {found.name} counts other pictures than its manifests, which make {pictures}."
        yield schema.JOB_PATH, f"{text} Rerun `goodviews ingest`."
    by_reason = sum_by_key(m.rejects for m in found.manifests)
    if by_reason != {k: v for k, v in job.rejects.items() if v}:
        text = f"The job of {found.name} counts rejects {dict(job.rejects)}, its manifests {by_reason}."
        yield schema.JOB_PATH, f"{text} Rerun `goodviews ingest`."


def _manifest_disagreements(m: Manifest) -> Iterator[str]:
    rejects, histogram = sum(m.rejects.values()), m.captions_per_scene
    scene_rows, reject_rows = (sum(f.rows for f in m.files if f.kind == kind) for kind in ("scenes", "rejects"))
    scenes, captions = sum(histogram.values()), sum(int(n) * v for n, v in histogram.items())
    if m.texts_read != m.texts_kept + rejects:
        yield f"read {m.texts_read:,} texts but kept {m.texts_kept:,} and rejected {rejects:,}"
    if m.texts_kept != m.captions:
        yield f"kept {m.texts_kept:,} texts but holds {m.captions:,} captions"
    if scenes != m.scenes:
        yield f"holds {m.scenes:,} scenes but its captions-per-scene counts add up to {scenes:,}"
    if captions != m.captions:
        yield f"holds {m.captions:,} captions but its captions-per-scene counts make {captions:,}"
    if scene_rows != m.scenes:
        yield f"holds {m.scenes:,} scenes but its scene files {scene_rows:,} rows"
    pictures = sum((m.pictures_rejected or {}).values())
    if m.pictures_read is not None and m.pictures_read != (m.pictures_kept or 0) + pictures:
        yield f"read {m.pictures_read:,} pictures but kept {m.pictures_kept or 0:,} and rejected {pictures:,}"
    if reject_rows != rejects + pictures:
        yield f"counts {rejects + pictures:,} rejects but its reject files {reject_rows:,} rows"


def sum_by_key(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sum of several {key: count}, without zero counts."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return {key: count for key, count in sorted(total.items()) if count}
