"""Cut the input of a job into shards.

Invariant: the plan depends on the survey and the content options alone, never on machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infra.errors import InputError
from pipelines.ingest.exchange import Buckets
from pipelines.ingest.request import Request
from pipelines.records import Piece, Survey


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shards of the job. direct: the pieces that each shard reads; empty when records go through the exchange."""

    shards: tuple[tuple[str, int], ...]
    direct: tuple[tuple[Piece, ...], ...]
    buckets: Buckets
    keys_are_unique: bool
    "Equal source ids always meet in one shard, so no key can repeat across shards."


def plan_shards(request: Request, survey: Survey) -> Plan:
    """Cut the input into shards, numbered over all splits in order of the splits' names.

    Raises InputError when the input holds no row.
    """
    size = request.config.scenes_per_shard
    by_split: Counter[str] = Counter()
    for piece in survey.pieces:
        by_split.update(piece.scenes_by_split)
    by_split = Counter({split: count for split, count in by_split.items() if count})
    if not by_split:
        raise InputError(
            f"The input of source {request.source.name!r} holds no row ({survey.format}). Check the files, or raise "
            "--limit."
        )
    # Shards read their rows directly if a row is a scene, files can be cut anywhere, and no piece mixes splits.
    streams = not request.source.grouped and survey.cuttable and all(len(p.scenes_by_split) <= 1 for p in survey.pieces)
    shards: list[tuple[str, int]] = []
    direct: list[tuple[Piece, ...]] = []
    buckets: dict[str, tuple[int, int]] = {}
    for split in sorted(by_split):
        count = -(-by_split[split] // size)
        buckets[split] = (len(shards), count)
        shards += [(split, len(shards) + i) for i in range(count)]
        if streams:
            direct += _cut([p for p in survey.pieces if split in p.scenes_by_split], size)
    return Plan(
        shards=tuple(shards),
        direct=tuple(direct),
        buckets=Buckets(by_split=buckets),
        keys_are_unique=not streams and len(by_split) == 1,
    )


def _cut(pieces: Sequence[Piece], size: int) -> Iterator[tuple[Piece, ...]]:
    """Pieces of one split, cut and regrouped into shards of `size` rows, one scene for each row."""
    shard: list[Piece] = []
    left = size
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start + left)
            split = next(iter(piece.scenes_by_split))
            shard.append(Piece(input=piece.input, start=start, stop=stop, scenes_by_split={split: stop - start}))
            left -= stop - start
            start = stop
            if left == 0:
                yield tuple(shard)
                shard, left = [], size
    if shard:
        yield tuple(shard)
