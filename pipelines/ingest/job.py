"""The ingest job: source files in, a committed version of a dataset out.

Invariant: a version is the digest of what decides its bytes (`request`); CPUs, paths, order of inputs and budgets are
not in it. A rerun after any kill keeps published shards, makes the others, and commits the version once.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from catalog import schema
from catalog.lake import database
from catalog.manifest import InputFile, JobRecord, picture_totals
from catalog.overlap import exclusion as catalog_exclusion
from catalog.versions.audit import check_unique_keys
from catalog.versions.commit import JobStats, commit_version
from infra import storage
from infra.errors import AccountingError, InputError, RejectBudgetError, StorageError
from infra.home import Home
from infra.progress import Progress
from infra.session import Workers
from pipelines.ingest import exclusion
from pipelines.ingest.caption_cap import Cap
from pipelines.ingest.exchange import Exchange, plan_exchange
from pipelines.ingest.exclusion import Exclusion
from pipelines.ingest.plan import Plan, plan_shards
from pipelines.ingest.preparation import MeasuredWorkers, prepare
from pipelines.ingest.request import Request, content_of, digest_inputs, input_files, version_of
from pipelines.ingest.shards import PublishedShard, ShardTask, ViewConfig, publish_shard, published_shard
from pipelines.ingest.stamps import Stamps, check_unchanged, of_pieces, take_stamps
from pipelines.ingest.tables import Origin
from pipelines.records import Survey

_log = logging.getLogger(__name__)

OF_RECORD: Final = ("dataset", "version", "scenes", "captions", "texts_read", "texts_kept", "rejects")
"What an outcome repeats of the job record."


@dataclass(frozen=True, kw_only=True)
class IngestOutcome:
    """Result of an ingestion.

    excluded: scenes that were left out, by set and kind of match. seconds: wall time without the start of Ray.
    peak_rss_bytes: largest peak of resident memory of one worker process.
    """

    dataset: str
    version: str
    snapshot_id: int
    was_there: bool
    shards: int
    shards_reused: int
    scenes: int
    captions: int
    texts_read: int
    texts_kept: int
    rejects: Mapping[str, int]
    excluded: Mapping[str, int]
    seconds: float
    peak_rss_bytes: int
    url: str
    notes: Sequence[str]


def ingest(request: Request, home: Home, workers: Workers) -> IngestOutcome:
    """Run the whole job and commit its version, or nothing when it raises.

    Raises InputError for bad inputs, RejectBudgetError over budget, AccountingError if a text was lost, IntegrityError
    for colliding scene keys, ConflictError or StorageError for a catalog that cannot take it.
    """
    started = time.time()
    database.check(home)
    request = replace(request, excluded=exclusion.resolve(home, request.dataset, request.config.exclude))
    # Taken before the first read: the survey, the digests and every task then saw the same bytes, or the job ends.
    stamps = take_stamps(request.inputs)
    survey = request.source.survey(request.inputs, request.config.limit)
    for note in survey.notes:
        _log.warning("%s: %s", request.dataset, note)
    files = input_files(survey)
    stamps = {file.url: stamps[file.url] for file in files}
    digests = digest_inputs(files, workers)
    content = content_of(request)
    version = version_of(request.dataset, content, digests)
    plan = plan_shards(request, survey)
    place = _Place(home=home, dataset=request.dataset, version=version)
    measured = MeasuredWorkers(workers)
    done = _run(request, survey, plan, place, stamps, measured)
    record = _record(request, version, content, digests, done)
    _check(request, record, survey)
    check_unchanged(stamps)
    if not plan.keys_are_unique:
        # A key that repeats across shards shows only here, when all scenes are written.
        paths = [storage.join(place.version_url, schema.scenes_path(*_split_shard(d.name))) for d in done if d.scenes]
        check_unique_keys(paths, dataset=request.dataset)
    # The record comes last: with it, every file of the version is complete and the commit can be repeated.
    storage.publish(storage.join(place.version_url, schema.JOB_PATH), record.to_json())
    peak = measured.peak_rss_bytes
    stats = JobStats(started_at=started, seconds=time.time() - started, peak_rss_bytes=peak, workers=workers.slots)
    committed = commit_version(home, request.dataset, version, stats=stats)
    _clear(place.work_url)
    return IngestOutcome(
        **{name: getattr(record, name) for name in OF_RECORD},
        snapshot_id=committed.snapshot_id,
        was_there=committed.was_there,
        shards=len(done),
        shards_reused=sum(shard.was_there for shard in done),
        excluded=_scenes_left_out(request, home, version),
        seconds=time.time() - started,
        peak_rss_bytes=peak,
        url=place.version_url,
        notes=list(survey.notes),
    )


# --- run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Place:
    """URL of the version, and of the work folder that the job removes at its end."""

    home: Home
    dataset: str
    version: str

    @property
    def version_url(self) -> str:
        return self.home.datasets(self.dataset, self.version)

    @property
    def work_url(self) -> str:
        return self.home.work("ingest", self.dataset, self.version)


def _run(
    request: Request, survey: Survey, plan: Plan, place: _Place, stamps: Stamps, workers: MeasuredWorkers
) -> list[PublishedShard]:
    """Publish all shards; returns their totals in shard order."""
    exchange = None if plan.direct else plan_exchange(place.work_url, survey.pieces, plan.buckets)
    tasks = _shard_tasks(request, plan, place, exchange, stamps)
    done = _already_published(tasks, place.version_url, workers)
    texts_in = None
    if len(done) < len(tasks):
        try:
            texts_in = prepare(request, survey, place.home, tasks, stamps, workers)
        except (InputError, StorageError):
            # Another job of this version may have finished meanwhile and removed the work folder under this one.
            done = _already_published(tasks, place.version_url, workers)
            if len(done) < len(tasks):
                raise
    missing = [i for i in range(len(tasks)) if i not in done]
    with Progress(len(missing), label=f"{request.dataset}: writing shards") as progress:
        for number, shard in workers.map(publish_shard, [tasks[i] for i in missing]):
            done[missing[number]] = shard
            progress.advance(shards=1, texts=shard.texts_read, rejects=shard.rejects, scenes=shard.scenes)
    ordered = [done[i] for i in range(len(tasks))]
    arrived = sum(d.texts_read for d in ordered)
    if texts_in is not None and texts_in != arrived:
        raise AccountingError(
            f"{texts_in:,} texts were read from the input of {request.dataset} but {arrived:,} arrived in its shards. "
            f"Nothing was committed; delete {place.version_url} and {place.work_url}, then rerun."
        )
    return ordered


def _already_published(
    tasks: Sequence[ShardTask], version_url: str, workers: MeasuredWorkers
) -> dict[int, PublishedShard]:
    """Totals of the shards that an earlier run published whole, by place in `tasks`."""
    # One listing in place of a request for each shard, which an object store answers in milliseconds each.
    there = set(storage.list_names(storage.join(version_url, "manifests")))
    known = [i for i, task in enumerate(tasks) if _manifest_name(task) in there]
    # Not measured: a check of files tells nothing about the memory that the job needs.
    found = {known[place]: shard for place, shard in workers.workers.map(published_shard, [tasks[i] for i in known])}
    return {i: shard for i, shard in found.items() if shard is not None}


def _manifest_name(task: ShardTask) -> str:
    return schema.manifest_path(task.origin.split, task.origin.shard).rsplit("/", 1)[-1]


def _clear(work_url: str) -> None:
    """Remove the work folder. The version is committed already, so `gc` may remove what this leaves."""
    try:
        storage.remove_folder(work_url)
    except StorageError as error:
        _log.info("`goodviews catalog gc` will remove the work folder: %s", error)
    storage.remove_empty_parents(work_url)


def _shard_tasks(
    request: Request, plan: Plan, place: _Place, exchange: Exchange | None, stamps: Stamps
) -> list[ShardTask]:
    config = request.config
    views = ViewConfig(
        good="good" in config.view_names,
        bad="bad" in config.view_names,
        images=config.images,
        bad_passes=request.source.bad_passes,
        seed=config.seed,
    )
    is_recorded = storage.exists(storage.join(place.version_url, schema.JOB_PATH))
    excluded, cap, most = None, None, config.max_scenes_per_caption
    if request.excluded:
        excluded = Exclusion(
            url=storage.join(place.work_url, "excluded.keys"),
            names=tuple(part.name for part in request.excluded),
            kinds=config.exclude.kinds,
            source=request.source.name,
        )
    if most is not None:
        cap = Cap(folder=storage.join(place.work_url, "captions"), most=most, seed=config.seed)
    return [
        ShardTask(
            origin=Origin(dataset=request.dataset, version=place.version, split=split, shard=shard),
            version_url=place.version_url,
            source=request.source,
            clean=config.clean,
            views=views,
            is_recorded=is_recorded,
            pieces=plan.direct[i] if plan.direct else (),
            stamps=of_pieces(stamps, plan.direct[i]) if plan.direct else {},
            exchanged=exchange,
            exclusion=excluded,
            cap=cap,
        )
        for i, (split, shard) in enumerate(plan.shards)
    ]


def _scenes_left_out(request: Request, home: Home, version: str) -> dict[str, int]:
    """Scenes left out by set and kind of match, with a warning for each set that matched none."""
    if not request.excluded:
        return {}
    found = catalog_exclusion.scenes_left_out(home, request.dataset, version)
    for part in request.excluded:
        if not any(detail.startswith(f"{part.name} by ") for detail in found):
            beyond = " beyond those of the sets named before" if len(request.excluded) > 1 else ""
            _log.warning("%s: no scene was left out for %s%s", request.dataset, part.name, beyond)
    return found


# --- checks and record --------------------------------------------------------------------------------------------


def _check(request: Request, record: JobRecord, survey: Survey) -> None:
    """Raise unless every text is accounted for, some are kept, and the rejects are within budget."""
    read, kept, rejected = record.texts_read, record.texts_kept, sum(record.rejects.values())
    if read != kept + rejected:
        raise AccountingError(
            f"{request.dataset}: {read} texts read, {kept} kept, {rejected} rejected. A text was lost; nothing was "
            "committed. This is a bug."
        )
    if read == 0:
        raise InputError(
            f"The input of {request.dataset} holds no text ({survey.format}). Check the column or the files."
        )
    # Texts that the user left out say nothing about the quality of the input, so they are in neither part of the rate.
    chosen = {reason: record.rejects[reason] for reason in ("excluded", "common_caption") if reason in record.rejects}
    judged, bad = read - sum(chosen.values()), rejected - sum(chosen.values())
    rate = bad / judged if judged else 0.0
    if rate > request.max_reject_rate:
        by_count = Counter(record.rejects).most_common()
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in by_count if reason not in chosen)
        raise RejectBudgetError(
            f"{bad:,} of {judged:,} texts of {request.dataset} were rejected ({rate:.1%}, budget "
            f"{request.max_reject_rate:.1%}): {reasons}. Nothing was committed. Look at the rejects/ folder of the "
            "version, or raise --max-reject-rate."
        )
    if kept == 0:
        left = ", ".join(f"{count:,} were left out as {reason}" for reason, count in chosen.items())
        why = f" ({left})" if left else ""
        raise InputError(f"No text of {request.dataset} was kept{why}. Look at the rejects/ folder of the version.")


def _record(
    request: Request, version: str, content: Mapping[str, Any], inputs: list[InputFile], done: Sequence[PublishedShard]
) -> JobRecord:
    rejects: Counter[str] = Counter()
    for shard in done:
        rejects.update(shard.rejects)
    totals = {name: sum(getattr(d, name) for d in done) for name in ("scenes", "captions", "texts_read", "texts_kept")}
    return JobRecord(
        dataset=request.dataset,
        version=version,
        content=content,
        inputs=inputs,
        shards=[d.name for d in done],
        rejects=dict(sorted(rejects.items())),
        **totals,
        **picture_totals(done),
    )


def _split_shard(name: str) -> tuple[str, int]:
    split, _, number = name.rpartition("-")
    return split, int(number)
