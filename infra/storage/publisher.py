"""Files published in the background while the next ones are built.

Invariant: after `finish` has returned every file is published; after it has raised, one is not, and the rest are whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from infra import storage
from infra.storage import Buffer, FileRecord


class Publisher:
    """Publishes files on background threads, so that flushing one overlaps with building the next.

    Hashing, writing and fsync release the interpreter lock. `finish` waits and returns the records by name, and
    raises the first error. At most `in_flight` files are held in memory.
    """

    def __init__(self, *, in_flight: int = 3) -> None:
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="publish")
        self._slots = threading.BoundedSemaphore(in_flight)
        self._pending: dict[str, Future[FileRecord]] = {}

    def submit(self, name: str, url: str, parts: Buffer | Iterable[Buffer]) -> None:
        """Publish `parts` at `url` in the background, under `name`. Raises ValueError for a name that is taken."""
        if name in self._pending:
            raise ValueError(f"{name!r} was submitted before; its record would be lost")
        self._slots.acquire()
        future = self._threads.submit(storage.publish, url, parts)
        future.add_done_callback(lambda _: self._slots.release())
        self._pending[name] = future

    def finish(self) -> dict[str, FileRecord]:
        """Wait for all files; returns their records by name."""
        try:
            return {name: future.result() for name, future in self._pending.items()}
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)
