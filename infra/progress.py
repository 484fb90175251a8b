"""How far a job is: a live line on a terminal, a plain line every 30 s elsewhere, one summary at the end; on stderr.

Invariant: showing progress never fails a job and never touches what it writes.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

from infra.units import duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

INTERVAL_S = 30.0
LIVE_INTERVAL_S = 1.0

_is_hidden: ContextVar[bool] = ContextVar("progress is hidden", default=False)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Show no progress of the jobs that start in this block: a program that calls the library did not ask for any."""
    token = _is_hidden.set(True)
    try:
        yield
    finally:
        _is_hidden.reset(token)


def default_stream() -> IO[str]:
    """Where progress goes: stderr, or nowhere inside `hidden`."""
    return _Nowhere() if _is_hidden.get() else sys.stderr


class _Nowhere(io.StringIO):
    def write(self, text: str, /) -> int:
        return len(text)


class Progress:
    """Counts shards, scenes, texts and rejects, and shows them while the block runs.

    total: shards there are to do. label: what is done, such as `ingest toyworld`. quiet: only the summary.
    stream: where to write (stderr); a terminal gets the live line. `advance` may be called from any thread.
    """

    def __init__(
        self,
        total: int,
        *,
        label: str,
        quiet: bool = False,
        stream: IO[str] | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.total = total
        self.label = label
        self.shards = 0
        self.scenes = 0
        self.texts = 0
        self.rejects: Counter[str] = Counter()
        self.peak_rss_bytes = 0
        self._quiet = quiet
        self._stream = stream if stream is not None else default_stream()
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._started_s = time.monotonic()

    def advance(
        self, shards: int = 0, texts: int = 0, rejects: Mapping[str, int] | None = None, *, scenes: int = 0
    ) -> None:
        """Add to the counters."""
        with self._lock:
            self.shards += shards
            self.scenes += scenes
            self.texts += texts
            self.rejects.update(rejects or {})

    def __enter__(self) -> Self:
        self._started_s = time.monotonic()
        if not self._quiet:
            interval_s = self._interval_s
            if self._stream.isatty():
                self._live = open_live(self._stream)
                interval_s = LIVE_INTERVAL_S
            self._thread = threading.Thread(target=self._show, args=(interval_s,), name="progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._live is not None:
            self._live.stop()
        self._write(self.line(state="done" if kind is None else "stopped"))

    def _show(self, interval_s: float) -> None:
        if self._live is not None:
            self._refresh()
        while not self._ended.wait(interval_s):
            if self._live is not None:
                self._refresh()
            else:
                self._write(self.line())

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(_panel(self.label, self.shards, self.total, self._facts(state=None)), refresh=True)

    def _write(self, line: str) -> None:
        # A closed pipe or a full disk under the log must not fail the job.
        with contextlib.suppress(OSError, ValueError):
            print(line, file=self._stream, flush=True)

    def line(self, *, state: str | None = None) -> str:
        """The counters as one line; `state` (done, stopped) makes it the summary, with the time it took."""
        return f"{self.label}: " + " | ".join(self._facts(state))

    def _facts(self, state: str | None) -> list[str]:
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        current = rss_bytes()
        with self._lock:
            shards, scenes, texts, rejects = self.shards, self.scenes, self.texts, Counter(self.rejects)
            self.peak_rss_bytes = peak = max(self.peak_rss_bytes, current)
        facts = [f"{shards:,}/{self.total:,} shards"]
        facts += [f"{scenes:,} scenes"] if scenes else []
        facts += [f"{texts:,} texts", f"{texts / elapsed_s:,.0f} texts/s", _rejects(rejects)]
        facts += [f"RSS {size(current)}"] if state is None else [f"peak RSS {size(peak)}"]
        if state is not None:
            facts.append(f"{state} in {duration(elapsed_s)}")
        elif 0 < shards < self.total:
            facts.append(f"ETA {duration(elapsed_s / shards * (self.total - shards))}")
        return facts


def open_live(stream: IO[str]) -> Live:
    """A line of rich on a terminal, started; whoever opens it stops it."""
    # 0.03 s, and only a terminal needs it.
    from rich.console import Console
    from rich.live import Live

    # Refreshed by our own thread, so that the line and its rates are computed only when they are shown.
    # A stdout that is a pipe waits for the result and must not be led through the terminal.
    shared = sys.stdout.isatty()
    live = Live(console=Console(file=stream), auto_refresh=False, transient=True, redirect_stdout=shared)
    live.start()
    return live


def _panel(label: str, done: int, total: int, facts: list[str]) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 1))
    head.add_row(Text(label, style="bold"), ProgressBar(total=max(total, 1), completed=done, width=32), facts[0])
    return Group(head, Text(" | ".join(facts[1:]), style="dim"))


def _rejects(rejects: Counter[str]) -> str:
    total = sum(rejects.values())
    if total == 0:
        return "0 rejects"
    shown = ", ".join(f"{reason} {count:,}" for reason, count in rejects.most_common())
    return f"{total:,} rejects ({shown})"


def rss_bytes() -> int:
    """Resident memory of this process and all its living descendants, in bytes; shared pages count in each.

    On a system without /proc: the peak of this process alone. On a cluster: the driver's machine only.
    """
    found = sum(_status_bytes(pid, "VmRSS") for pid in _family())
    return found or _own_peak_bytes()


def peak_rss_bytes() -> int:
    """Sum of the peaks of resident memory of this process and its living descendants, in bytes.

    It bounds the peak of the sum from above. A process that has ended counts no more: ask while the workers live.
    """
    found = sum(_status_bytes(pid, "VmHWM") for pid in _family())
    return found or _own_peak_bytes()


def _own_peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux kibibytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(pid: int, field: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _family() -> list[int]:
    """Ids of this process and its living descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    family = [os.getpid()]
    for pid in family:
        family.extend(children.get(pid, []))
    return family


def _parents() -> Iterator[tuple[int, int]]:
    proc = Path("/proc")
    for entry in proc.iterdir() if proc.is_dir() else ():
        if entry.name.isdigit():
            # A process may end between the listing and the read.
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name in parentheses may itself hold spaces and parentheses.
                yield int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])
