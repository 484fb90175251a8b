"""Cap the number of scenes under one caption: find common captions, choose the scenes that keep them.

Invariant: exact, and a function of the scenes and the seed alone. A normal form that stands under more than N scenes of
the dataset stays in the N scenes of the smallest rank, which is a seeded hash of form and scene key; order, shards and
workers have no effect. A text of signs alone has no normal form and is never common.

Three passes. Each shard writes a row (key of the form, rank) for each distinct form of each of its scenes, sorted by
key, with an index of `SLOTS` ranges of keys. Each range of slots, of about `PARTITION_ROWS` rows over all shards, is
counted, and its common forms are written with the largest rank that keeps them. Each shard looks its forms up in these.
Memory is bounded by a shard, a range and a block of the last file. A range is read from the file of every shard, so the
number of reads grows with the square of the shards: 2 million at 2,500 shards.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from catalog.overlap.identity import KEY_BYTES, key
from infra import seeds, storage
from pipelines.arrays import Ints, run_lengths, run_starts
from pipelines.ingest import lookup
from pipelines.ingest.group import Scenes, kept_forms

SLOTS: Final = 4096
PARTITION_ROWS: Final = 2_000_000
ROW_BYTES: Final = 2 * KEY_BYTES
INDEX_BYTES: Final = 8 * (SLOTS + 1)
VALUE_BYTES: Final = KEY_BYTES + 8
"Data of a common form: the largest rank that keeps it, and the number of its scenes."


@dataclass(frozen=True, kw_only=True)
class Cap:
    """The cap of one job; small, because every task carries it. most: scenes that keep a common caption."""

    folder: str
    most: int
    seed: int

    def counts_url(self, shard: int) -> str:
        """File of one shard: the index, then the rows."""
        return storage.join(self.folder, f"shard-{shard:06d}.forms")

    def part_url(self, first_slot: int, slots: int) -> str:
        """Common forms of one range of slots."""
        return storage.join(self.folder, f"slots-{first_slot:04d}-{slots:04d}.common")

    @property
    def common_url(self) -> str:
        """Common forms of the dataset."""
        return storage.join(self.folder, "forms.common")


@dataclass(frozen=True, kw_only=True)
class RangeTask:
    """A range of slots of all shards."""

    cap: Cap
    shards: int
    first_slot: int
    slots: int


# --- first pass: a shard ------------------------------------------------------------------------------------------


def counted_rows(cap: Cap, shard: int) -> int | None:
    """Number of rows that an earlier run wrote for a shard; None if it did not."""
    url = cap.counts_url(shard)
    return (storage.size(url) - INDEX_BYTES) // ROW_BYTES if storage.exists(url) else None


def write_counts(scenes: Scenes, cap: Cap, shard: int) -> int:
    """Write the rows of a shard; returns their number."""
    _, keys, ranks = _ranked(scenes, cap)
    rows = np.concatenate([keys, ranks], axis=1)
    rows = rows[_order(keys)]
    # One row for each scene and form, also where a scene keeps repeats: the sort is stable and the texts of a scene are
    # neighbours, so equal rows are neighbours too.
    rows = rows[run_starts(rows)]
    slot = rows[:, 0].astype(np.int64) << 4 | rows[:, 1] >> 4  # the first 12 bits of the key: SLOTS is 2**12
    index = np.searchsorted(slot, np.arange(SLOTS + 1)).astype("<i8")
    storage.publish(cap.counts_url(shard), [index.tobytes(), np.ascontiguousarray(rows).tobytes()])
    return len(rows)


def _ranked(scenes: Scenes, cap: Cap) -> tuple[Ints, NDArray[np.uint8], NDArray[np.uint8]]:
    """Kept texts with a normal form (T'): their rows, keys (T', 16) of their forms, ranks (T', 16) of their scenes."""
    rows, forms = kept_forms(scenes)
    keys = [key("captions", form) for form in forms]
    salt = seeds.derive(cap.seed, "caption_cap").to_bytes(8, "big")
    names = scenes.keys.take(scenes.text_scene[rows]).to_pylist()
    ranks = [_rank(salt, form, name) for form, name in zip(keys, names, strict=True)]
    return rows, lookup.key_bytes(keys), lookup.key_bytes(ranks)


def _rank(salt: bytes, form: bytes, scene_key: str) -> bytes:
    # The form is part of the hash: otherwise the same scenes would keep all their common captions and others none.
    return hashlib.blake2b(scene_key.encode(), digest_size=KEY_BYTES, key=salt + form).digest()


def _order(*columns: NDArray[np.uint8]) -> Ints:
    """Order of rows by columns of 16 bytes, the first column first; as big-endian halves, bytes sort as numbers."""
    words = [np.ascontiguousarray(column).view(">u8") for column in columns]
    return np.lexsort([word[:, half] for word in reversed(words) for half in (1, 0)])


# --- second pass: a range of slots --------------------------------------------------------------------------------


def slot_ranges(cap: Cap, *, shards: int, rows: int) -> list[RangeTask]:
    """Ranges of slots of about `PARTITION_ROWS` rows each; their number does not change the common forms."""
    count = min(SLOTS, max(1, -(-rows // PARTITION_ROWS)))
    edges = [SLOTS * i // count for i in range(count + 1)]
    return [
        RangeTask(cap=cap, shards=shards, first_slot=low, slots=high - low) for low, high in itertools.pairwise(edges)
    ]


def find_common(task: RangeTask) -> int:
    """Write the common forms of a range; returns their number."""
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
    """Records (n, 16 + VALUE_BYTES) of the forms with more than `most` rows, ascending by key."""
    rows = rows[_order(rows[:, :KEY_BYTES], rows[:, KEY_BYTES:])]
    starts = run_starts(rows[:, :KEY_BYTES])
    counts = run_lengths(starts, len(rows))
    often = counts > most
    # Rows of a form ascend by rank, so row `most` - 1 has the largest rank that keeps it.
    last_kept = rows[starts[often] + most - 1]
    number = counts[often].astype("<i8").view(np.uint8).reshape(-1, 8)
    return np.concatenate([last_kept, number], axis=1)


def join(cap: Cap, tasks: list[RangeTask]) -> None:
    """Concatenate the files of all ranges; their keys ascend from one to the next."""
    ordered = sorted(tasks, key=lambda task: task.first_slot)
    storage.publish(cap.common_url, (storage.read_bytes(cap.part_url(t.first_slot, t.slots)) for t in ordered))


# --- third pass: a shard ------------------------------------------------------------------------------------------


def apply(scenes: Scenes, cap: Cap) -> Scenes:
    """The same scenes with the reason `common_caption` for the texts that their scene does not keep."""
    rows, keys, ranks = _ranked(scenes, cap)
    found, values = lookup.find(cap.common_url, [k.tobytes() for k in keys], width=VALUE_BYTES)
    reason, detail = scenes.reason.copy(), dict(scenes.detail)
    for place in np.flatnonzero(found).tolist():
        if ranks[place].tobytes() > values[place, :KEY_BYTES].tobytes():
            row, count = int(rows[place]), int(values[place, KEY_BYTES:].copy().view("<i8")[0])
            reason[row], detail[row] = "common_caption", f"under {count:,} scenes, {cap.most:,} keep it"
    return dataclasses.replace(scenes, reason=reason, detail=detail)
