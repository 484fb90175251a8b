"""How the input of a job is cut into shards.

Owns: the number of shards of each split, and whether records stream into them or go through the exchange.
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
    """Shards of the job. direct: for each shard the pieces it reads; empty when records go through the exchange."""

    shards: tuple[tuple[str, int], ...]
    direct: tuple[tuple[Piece, ...], ...]
    buckets: Buckets
    keys_are_unique: bool
    "Equal source ids always meet in one shard, so a repeated key across shards is impossible."


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
            f"The input of source {request.source.name!r} holds no row ({survey.format}). Check the files, or raise --limit."
        )
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
    """Pieces of one split, one scene a row, regrouped into shards of `size` rows."""
    shard: list[Piece] = []
    room = size
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start + room)
            split = next(iter(piece.scenes_by_split))
            shard.append(Piece(input=piece.input, start=start, stop=stop, scenes_by_split={split: stop - start}))
            room -= stop - start
            start = stop
            if room == 0:
                yield tuple(shard)
                shard, room = [], size
    if shard:
        yield tuple(shard)
