"""At most so many scenes under one caption: which captions are common, and which scenes keep them.

Owns: the count over all shards, the choice, and the reason `common_caption`. Does not own: cleaning, which comes before.
Invariant: exact, and a function of the scenes and the seed alone: a normal form that stands under more than N scenes of the
dataset keeps the N scenes of the smallest rank, the seeded hash of form and scene key. No order, place, shard or worker counts.

Three passes. Each shard writes a row (key of the form, rank) for each distinct form of each of its scenes, sorted by key, with
an index of `SLOTS` ranges of keys. Each partition, a few neighbouring slots of all shards and about `PARTITION_ROWS` rows, counts
and writes the forms that are common with the largest rank that keeps them. Each shard looks its forms up in these. Memory is
bounded by a shard, a partition and a block of the last file. A partition reads a range of every shard's file, so the number of
reads grows with the square of the shards: 2 million at 2,500 shards.

A text of signs alone has no normal form and is never common.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from catalog.overlap.identity import KEY_BYTES, key
from catalog.wording import normal_form
from infra import seeds, storage
from pipelines.arrays import Ints, is_none
from pipelines.ingest import lookup
from pipelines.ingest.group import Scenes

SLOTS: Final = 4096
PARTITION_ROWS: Final = 2_000_000
ROW_BYTES: Final = 2 * KEY_BYTES
INDEX_BYTES: Final = 8 * (SLOTS + 1)
VALUE_BYTES: Final = KEY_BYTES + 8
"Of a common form: the largest rank that keeps it, and under how many scenes it stands."


@dataclass(frozen=True, kw_only=True)
class Cap:
    """The cap of one job; small, because every task carries it. most: scenes under one caption."""

    folder: str
    most: int
    seed: int

    def counts_url(self, shard: int) -> str:
        """Rows of one shard, behind their index."""
        return storage.join(self.folder, f"shard-{shard:06d}.forms")

    def part_url(self, first_slot: int, slots: int) -> str:
        """Common forms of one partition."""
        return storage.join(self.folder, f"slots-{first_slot:04d}-{slots:04d}.common")

    @property
    def common_url(self) -> str:
        """Common forms of the dataset."""
        return storage.join(self.folder, "forms.common")


@dataclass(frozen=True, kw_only=True)
class PartitionTask:
    """A range of slots of all shards."""

    cap: Cap
    shards: int
    first_slot: int
    slots: int


# --- first pass: a shard ------------------------------------------------------------------------------------------


def counted_rows(cap: Cap, shard: int) -> int | None:
    """Rows of a shard that an earlier run wrote; None when it did not."""
    url = cap.counts_url(shard)
    return (storage.size(url) - INDEX_BYTES) // ROW_BYTES if storage.exists(url) else None


def write_counts(scenes: Scenes, cap: Cap, shard: int) -> int:
    """Write the rows of a shard; returns their number."""
    _, keys, ranks = _ranked(scenes, cap)
    rows = np.concatenate([keys, ranks], axis=1)
    rows = rows[_order(keys)]
    # One row a scene and form, also where repeats are kept in a scene.
    rows = rows[_run_starts(rows)] if len(rows) else rows
    slot = rows[:, 0].astype(np.int64) << 4 | rows[:, 1] >> 4
    index = np.searchsorted(slot, np.arange(SLOTS + 1)).astype("<i8")
    storage.publish(cap.counts_url(shard), [index.tobytes(), np.ascontiguousarray(rows).tobytes()])
    return len(rows)


def _ranked(scenes: Scenes, cap: Cap) -> tuple[Ints, NDArray[np.uint8], NDArray[np.uint8]]:
    """Kept texts that say something (T'): their rows, the keys (T', 16) of their forms, the ranks (T', 16) of their scenes."""
    rows = np.flatnonzero(is_none(scenes.reason))
    forms = [normal_form(text) for text in scenes.cleaned.take(rows).to_pylist()]
    said = np.array([bool(form) for form in forms], np.bool_)
    rows = rows[said]
    keys = [key("captions", form) for form in forms if form]
    salt = seeds.derive(cap.seed, "caption_cap").to_bytes(8, "big")
    names = scenes.keys.take(scenes.text_scene[rows]).to_pylist()
    ranks = [_rank(salt, form, name) for form, name in zip(keys, names, strict=True)]
    return rows, lookup.key_bytes(keys), lookup.key_bytes(ranks)


def _rank(salt: bytes, form: bytes, scene_key: str) -> bytes:
    # With the form in it, lest the same scenes keep all of their common captions and others none.
    return hashlib.blake2b(scene_key.encode(), digest_size=KEY_BYTES, key=salt + form).digest()


def _order(*columns: NDArray[np.uint8]) -> Ints:
    """Order of rows by columns of 16 bytes each, the first one first."""
    words = [np.ascontiguousarray(column).view(">u8") for column in columns]
    return np.lexsort([word[:, half] for word in reversed(words) for half in (1, 0)])


def _run_starts(rows: NDArray[np.uint8]) -> Ints:
    """First place of each run of equal rows (N, bytes)."""
    differs = np.any(rows[1:] != rows[:-1], axis=1)
    return np.flatnonzero(np.concatenate([[True], differs]))


# --- second pass: a partition -------------------------------------------------------------------------------------


def partitions(cap: Cap, *, shards: int, rows: int) -> list[PartitionTask]:
    """Ranges of slots of about `PARTITION_ROWS` rows each; the result does not depend on how many there are."""
    count = min(SLOTS, max(1, -(-rows // PARTITION_ROWS)))
    edges = [SLOTS * i // count for i in range(count + 1)]
    return [
        PartitionTask(cap=cap, shards=shards, first_slot=low, slots=high - low)
        for low, high in itertools.pairwise(edges)
    ]


def find_common(task: PartitionTask) -> int:
    """Write the common forms of a partition; returns their number."""
    parts = [_slots(task.cap.counts_url(shard), task.first_slot, task.slots) for shard in range(task.shards)]
    common = _common(np.concatenate(parts), task.cap.most)
    storage.publish(task.cap.part_url(task.first_slot, task.slots), common.tobytes())
    return len(common)


def _slots(url: str, first: int, slots: int) -> NDArray[np.uint8]:
    low, high = (
        int(np.frombuffer(storage.read_range(url, 8 * place, 8 * place + 8), "<i8")[0])
        for place in (first, first + slots)
    )
    data = storage.read_range(url, INDEX_BYTES + ROW_BYTES * low, INDEX_BYTES + ROW_BYTES * high) if high > low else b""
    return np.frombuffer(data, np.uint8).reshape(-1, ROW_BYTES)


def _common(rows: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """Records (n, 16 + VALUE_BYTES) of the forms with more than `most` rows, ascending."""
    rows = rows[_order(rows[:, :KEY_BYTES], rows[:, KEY_BYTES:])]
    if not len(rows):
        return np.zeros((0, KEY_BYTES + VALUE_BYTES), np.uint8)
    starts = _run_starts(rows[:, :KEY_BYTES])
    counts = np.diff(np.append(starts, len(rows)))
    often = counts > most
    last_kept = rows[starts[often] + most - 1]
    number = counts[often].astype("<i8").view(np.uint8).reshape(-1, 8)
    return np.concatenate([last_kept, number], axis=1)


def join(cap: Cap, tasks: list[PartitionTask]) -> None:
    """Put the files of all partitions one behind the other; their keys ascend from one to the next."""
    storage.publish(cap.common_url, _whole(cap, tasks))


def _whole(cap: Cap, tasks: list[PartitionTask]) -> Iterator[bytes]:
    for task in sorted(tasks, key=lambda t: t.first_slot):
        yield storage.read_bytes(cap.part_url(task.first_slot, task.slots))


# --- third pass: a shard ------------------------------------------------------------------------------------------


def apply(scenes: Scenes, cap: Cap) -> Scenes:
    """The same scenes with the reason `common_caption` for texts that their scene does not keep."""
    rows, keys, ranks = _ranked(scenes, cap)
    found, values = lookup.find(cap.common_url, [k.tobytes() for k in keys], width=VALUE_BYTES)
    reason, detail = scenes.reason.copy(), dict(scenes.detail)
    for place in np.flatnonzero(found).tolist():
        if ranks[place].tobytes() > values[place, :KEY_BYTES].tobytes():
            row, count = int(rows[place]), int(values[place, KEY_BYTES:].copy().view("<i8")[0])
            reason[row], detail[row] = "common_caption", f"under {count:,} scenes, {cap.most:,} keep it"
    return dataclasses.replace(scenes, reason=reason, detail=detail)
