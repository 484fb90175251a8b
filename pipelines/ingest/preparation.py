"""Rounds over the whole input that write work files for the shards; a rerun takes up those that are there.

The rounds: keys of excluded sets, the exchange of records, the count of captions. Invariant: every file of a round
depends on the version alone and is published whole, so a rerun of a killed job continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

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
from pipelines.ingest.stamps import Stamps, of_pieces
from pipelines.records import Survey

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass
class MeasuredWorkers:
    """Workers, and the largest peak of resident memory of a process that ran a task for `map`."""

    workers: Workers
    peak_rss_bytes: int = 0

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[tuple[int, Result]]:
        """Like `Workers.map`."""
        for number, (result, rss) in self.workers.map(_Measured(function), tasks):
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
            yield number, result


@dataclass(frozen=True)
class _Measured(Generic[Task, Result]):
    """A function that also returns the peak memory of its process; errors name it by `func`, like a partial."""

    func: Callable[[Task], Result]

    def __call__(self, task: Task) -> tuple[Result, int]:
        return self.func(task), peak_rss_bytes()


def prepare(
    request: Request,
    survey: Survey,
    home: Home,
    tasks: Sequence[ShardTask],
    stamps: Stamps,
    workers: MeasuredWorkers,
) -> int | None:
    """Run the rounds that the job needs; returns the number of texts that the exchange moved, None without exchange."""
    first, texts = tasks[0], None
    if first.exclusion is not None:
        exclusion.publish_keys(home, request.excluded, first.exclusion)
    if first.exchanged is not None:
        texts = _bring_together(request, survey, first.exchanged, stamps, workers)
    if first.cap is not None:
        _find_common_captions(first.cap, tasks, workers, label=request.dataset)
    return texts


def _find_common_captions(cap: Cap, tasks: Sequence[ShardTask], workers: MeasuredWorkers, *, label: str) -> None:
    """Count captions over all shards and write the common ones."""
    if storage.exists(cap.common_url):
        return
    rows = 0
    with Progress(len(tasks), label=f"{label}: counting captions") as progress:
        for _, counted in workers.map(count_captions, tasks):
            rows += counted
            progress.advance(shards=1, texts=counted)
    ranges = caption_cap.slot_ranges(cap, shards=len(tasks), rows=rows)
    for _ in workers.map(caption_cap.find_common, ranges):
        pass
    caption_cap.join(cap, ranges)


def _bring_together(
    request: Request, survey: Survey, exchange: Exchange, stamps: Stamps, workers: MeasuredWorkers
) -> int:
    """Run the rounds of the exchange; returns the number of texts read.

    Raises AccountingError when the second round moved fewer or more texts than the first.
    """
    first = [
        PartitionTask(
            source=request.source, piece=piece, number=i, exchange=exchange, stamps=of_pieces(stamps, [piece])
        )
        for i, piece in enumerate(survey.pieces)
    ]
    second = regroup_tasks(exchange)
    moved = [0, 0]
    with Progress(len(first) + len(second), label=f"{request.dataset}: bringing scenes together") as progress:
        rounds: list[Sequence[PartitionTask | RegroupTask]] = [first, second]
        for i, tasks in enumerate(rounds):
            for _, part in workers.map(_move, tasks):
                moved[i] += part.texts
                progress.advance(shards=1, texts=part.texts)
    if second and moved[0] != moved[1]:
        raise AccountingError(
            f"The first round of the exchange of {request.dataset} moved {moved[0]:,} texts, the second {moved[1]:,}. "
            f"Nothing was committed; delete {exchange.folder} and rerun."
        )
    return moved[0]


def _move(task: PartitionTask | RegroupTask) -> Moved:
    return partition(task) if isinstance(task, PartitionTask) else regroup(task)
