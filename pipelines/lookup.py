"""Files of 16-byte keys in ascending order, each with a few bytes that belong to it, looked up by many tasks.

Owns: the format, publication, and the look-up in bounded memory. Does not own: what a key stands for (`catalog.identity`).
Invariant: a key stands in a file once; a look-up gives what the file holds for exactly these 16 bytes, never for a part.

A file: records of 16 + `width` bytes one after another, without a header. A task reads it block by block, and a process keeps
the last block, so that a file of one block (a million keys) is read once a process and not once a task.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from catalog.identity import KEY_BYTES
from infra import storage
from infra.errors import IntegrityError

BLOCK_RECORDS: Final = 1 << 20


def publish(url: str, blocks: Iterable[NDArray[np.uint8]]) -> None:
    """Write blocks of records (n, 16 + width), ascending by key over all blocks."""
    storage.publish(url, (np.ascontiguousarray(block).tobytes() for block in blocks))


def find(url: str, keys: Sequence[bytes], *, width: int) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Which of the keys (N,) the file holds, and the bytes (N, width) that belong to them; zeros where it does not.

    Raises InputError when the file is gone, IntegrityError when it is not of whole records.
    """
    wanted = pa.array(keys, pa.binary(KEY_BYTES))
    found = np.zeros(len(keys), np.bool_)
    values = np.zeros((len(keys), width), np.uint8)
    size, record = storage.size(url), KEY_BYTES + width
    if size % record:
        raise IntegrityError(
            f"{url} has {size:,} bytes, which is no whole number of records of {record}. Delete the work folder it is in and rerun."
        )
    for start in range(0, size if keys else 0, BLOCK_RECORDS * record):
        block = _block(url, start, min(size, start + BLOCK_RECORDS * record), record)
        places = pc.index_in(wanted, value_set=key_array(block[:, :KEY_BYTES]))
        here = np.asarray(places.is_valid())
        found |= here
        values[here] = block[np.asarray(places.drop_null(), np.int64), KEY_BYTES:]
    return found, values


@functools.lru_cache(maxsize=1)
def _block(url: str, start: int, stop: int, record: int) -> NDArray[np.uint8]:
    return np.frombuffer(storage.read_range(url, start, stop), np.uint8).reshape(-1, record)


def key_array(keys_N16: NDArray[np.uint8]) -> pa.FixedSizeBinaryArray:
    """Keys (N, 16) as an Arrow array."""
    buffer = pa.py_buffer(np.ascontiguousarray(keys_N16))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(KEY_BYTES), len(keys_N16), [None, buffer])


def key_bytes(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """Keys as bytes (N, 16)."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
