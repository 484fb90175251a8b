"""Files of sorted 16-byte keys with a few bytes of data each, looked up in bounded memory.

Invariant: a key is in a file once; a look-up compares all 16 bytes. `catalog.overlap.identity` makes the keys.

A file: records of 16 + `width` bytes one after another, without a header. A task reads it block by block, and a process
keeps the last block, so a file of one block (a million keys) is read once for each process, not for each task.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from catalog.overlap.identity import KEY_BYTES
from infra import storage
from infra.errors import IntegrityError

BLOCK_RECORDS: Final = 1 << 20


def publish(url: str, blocks: Iterable[NDArray[np.uint8]]) -> None:
    """Write blocks of records (n, 16 + width), ascending by key over all blocks."""
    storage.publish(url, (np.ascontiguousarray(block).tobytes() for block in blocks))


def find(url: str, keys: Sequence[bytes], *, width: int) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Which of the keys (N,) the file holds, and their data (N, width), zeros for the others.

    Raises InputError when the file is gone, IntegrityError when its size is no multiple of a record.
    """
    wanted = key_bytes(keys)
    found = np.zeros(len(keys), np.bool_)
    values = np.zeros((len(keys), width), np.uint8)
    size, record = storage.size(url), KEY_BYTES + width
    if size % record:
        raise IntegrityError(
            f"{url} has {size:,} bytes, which is no whole number of records of {record}. Delete the work folder it is "
            "in and rerun."
        )
    for start in range(0, size if keys else 0, BLOCK_RECORDS * record):
        heads, block = _block(url, start, min(size, start + BLOCK_RECORDS * record), record)
        here, places = _places(heads, block, wanted)
        found[here] = True
        values[here] = block[places, KEY_BYTES:]
    return found, values


def _places(
    heads: NDArray[np.uint64], block: NDArray[np.uint8], wanted: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of `wanted` that the block holds, and their places in it."""
    # NumPy has no 16-byte numbers to bisect: the first half is bisected, the second half is compared.
    head = _heads(wanted)
    first, last = np.searchsorted(heads, head), np.searchsorted(heads, head, side="right")
    rows: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    # One step unless two keys of the block share a first half (probability 2**-64 for a pair of digests).
    for step in range(int((last - first).max(initial=0))):
        candidates = np.flatnonzero(first + step < last)
        place = first[candidates] + step
        same = np.all(block[place, 8:KEY_BYTES] == wanted[candidates, 8:], axis=1)
        rows.append(candidates[same])
        places.append(place[same])
    none = [np.zeros(0, np.int64)]
    return np.concatenate(rows or none), np.concatenate(places or none)


@functools.lru_cache(maxsize=1)
def _block(url: str, start: int, stop: int, record: int) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    block = np.frombuffer(storage.read_range(url, start, stop), np.uint8).reshape(-1, record)
    return _heads(block), block


def _heads(rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The first 8 bytes of each row as numbers of the same order."""
    return np.ascontiguousarray(rows[:, :8]).view(">u8").reshape(-1).astype(np.uint64)


def key_bytes(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """Keys as bytes (N, 16)."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
