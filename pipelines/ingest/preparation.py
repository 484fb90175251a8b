"""What the tasks of a job's shards find in its work folder before the first of them begins.

Owns: the order of the rounds that look at the whole input: keys of excluded sets, the exchange, the count of captions.
Does not own: what a round does (`exclusion`, `exchange`, `caption_cap`).
Invariant: every file of a round is a function of the version and is published whole, so a killed job goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from infra import storage
from infra.errors import AccountingError
from infra.home import Home
from infra.progress import Progress, peak_rss_bytes
from infra.session import Workers
from pipelines.ingest import caption_cap, exclusion
from pipelines.ingest.caption_cap import Cap
from pipelines.ingest.exchange import Exchange, Moved, PartitionTask, RegroupTask, partition, regroup, regroup_tasks
from pipelines.ingest.request import Request
from pipelines.ingest.shards import ShardTask, count_captions
from pipelines.records import Survey


def prepare(
    request: Request, survey: Survey, home: Home, tasks: Sequence[ShardTask], workers: Workers
) -> tuple[int | None, int]:
    """What the tasks of the shards find in the work folder; returns the texts that the exchange moved, and the peak RSS."""
    first = tasks[0]
    texts, peak = None, 0
    if first.exclusion is not None:
        exclusion.publish_keys(home, request.excluded, first.exclusion)
    if first.exchanged is not None:
        texts, peak = _bring_together(request, survey, first.exchanged, workers)
    if first.cap is not None:
        peak = max(peak, _find_common_captions(first.cap, tasks, workers, label=request.dataset))
    return texts, peak


def _find_common_captions(cap: Cap, tasks: Sequence[ShardTask], workers: Workers, *, label: str) -> int:
    """Count captions over all shards and write those that are common; returns the largest peak RSS of a worker."""
    if storage.exists(cap.common_url):
        return 0
    rows, peak = 0, 0
    with Progress(len(tasks), label=f"{label}: counting captions") as progress:
        for _, (counted, rss) in workers.map(_measured_count, tasks):
            rows, peak = rows + counted, max(peak, rss)
            progress.advance(shards=1, texts=counted)
    parts = caption_cap.partitions(cap, shards=len(tasks), rows=rows)
    for _, (_, rss) in workers.map(_measured_partition, parts):
        peak = max(peak, rss)
    caption_cap.join(cap, parts)
    return peak


def _bring_together(request: Request, survey: Survey, exchange: Exchange, workers: Workers) -> tuple[int, int]:
    """Run the rounds of the exchange; returns the number of texts read and the largest peak RSS of a worker.

    Raises AccountingError when a round moved fewer or more texts than the one before.
    """
    first = [
        PartitionTask(source=request.source, piece=piece, number=i, exchange=exchange)
        for i, piece in enumerate(survey.pieces)
    ]
    second = regroup_tasks(exchange)
    moved, peak = [0, 0], 0
    with Progress(len(first) + len(second), label=f"{request.dataset}: bringing scenes together") as progress:
        rounds: list[Sequence[PartitionTask | RegroupTask]] = [first, second]
        for i, tasks in enumerate(rounds):
            for _, (part, rss) in workers.map(_measured_move, tasks):
                moved[i] += part.texts
                peak = max(peak, rss)
                progress.advance(shards=1, texts=part.texts)
    if second and moved[0] != moved[1]:
        raise AccountingError(
            f"The first round of the exchange of {request.dataset} moved {moved[0]:,} texts, the second {moved[1]:,}. Nothing was committed; delete {exchange.folder} and rerun."
        )
    return moved[0], peak


def _measured_move(task: PartitionTask | RegroupTask) -> tuple[Moved, int]:
    result = partition(task) if isinstance(task, PartitionTask) else regroup(task)
    return result, peak_rss_bytes()


def _measured_count(task: ShardTask) -> tuple[int, int]:
    return count_captions(task), peak_rss_bytes()


def _measured_partition(task: caption_cap.PartitionTask) -> tuple[int, int]:
    return caption_cap.find_common(task), peak_rss_bytes()
