"""Heartbeat of a training: rank 0 writes it into the folder of the run, the command shows it on stderr.

Invariant: the heartbeat goes through a file, because rank 0 may run on another machine of a Ray cluster, whose output
nobody reads. Writing and showing it never fail a training.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

import orjson

from infra import progress, storage
from infra.errors import GoodviewsError
from infra.units import duration

if TYPE_CHECKING:
    from rich.live import Live

INTERVAL_S = 2.0
"Between two heartbeats on a local disk; ten times that on an object store, where each one is a request."
PLAIN_INTERVAL_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """State of a training. mfu: share of the device's peak, None on a CPU; stall: share of time waiting for data."""

    step: int
    steps: int
    epoch: int
    losses: Mapping[str, float] = field(default_factory=dict)
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    stall: float = 0.0
    mfu: float | None = None
    eta_s: float | None = None
    alarm: str | None = None
    written_at: float = 0.0


def line(heartbeat: Heartbeat) -> str:
    """The heartbeat as a line for people."""
    parts = [f"step {heartbeat.step:,}/{heartbeat.steps:,}", f"epoch {heartbeat.epoch}"]
    parts += [f"{name} {value:.4g}" for name, value in heartbeat.losses.items()]
    parts += [f"{heartbeat.samples_per_s:,.0f} samples/s", f"{heartbeat.tokens_per_s:,.0f} tokens/s"]
    parts += [f"MFU {heartbeat.mfu:.1%}"] if heartbeat.mfu is not None else []
    parts += [f"data stall {heartbeat.stall:.0%}"] if heartbeat.stall >= 0.005 else []
    parts += [f"ETA {duration(heartbeat.eta_s)}"] if heartbeat.eta_s is not None else []
    return " | ".join(parts)


class HeartbeatWriter:
    """Writes heartbeats into the folder of a run, at most every `INTERVAL_S`."""

    def __init__(self, url: str) -> None:
        self._url = _url_of(url)
        self._interval_s = INTERVAL_S * (10 if storage.is_remote(url) else 1)
        self._last_s = -1e9

    def write(self, heartbeat: Heartbeat) -> None:
        """Publish the heartbeat unless the last one is recent; alarms and the last step are always published."""
        now = time.monotonic()
        if now - self._last_s < self._interval_s and heartbeat.step < heartbeat.steps and heartbeat.alarm is None:
            return
        self._last_s = now
        with contextlib.suppress(GoodviewsError, OSError):
            storage.publish(self._url, orjson.dumps(heartbeat))


def read_heartbeat(url: str) -> Heartbeat | None:
    """The last heartbeat in the folder of a run; None when there is none or it cannot be read."""
    try:
        return Heartbeat(**orjson.loads(storage.read_bytes(_url_of(url))))
    except (GoodviewsError, OSError, ValueError, TypeError):
        return None


def _url_of(url: str) -> str:
    return storage.join(url, "pulse.json")


class LiveLine:
    """Shows the heartbeat while the block runs: a live line on a terminal, elsewhere a line every 30 s."""

    def __init__(
        self, url: str, *, label: str, stream: IO[str] | None = None, interval_s: float = PLAIN_INTERVAL_S
    ) -> None:
        self._url = url
        self._label = label
        self._stream = stream if stream is not None else progress.default_stream()
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._live: Live | None = None
        self._shown_at = time.time()
        self._last_alarm: str | None = None
        self._thread = threading.Thread(target=self._run, name="live line", daemon=True)

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._live = progress.open_live(self._stream)
            self._interval_s = INTERVAL_S / 2
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        # Once more, so that the last step is shown however short the training was.
        self._show()
        if self._live is not None:
            self._live.stop()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._show()

    def _show(self) -> None:
        heartbeat = read_heartbeat(self._url)
        # One from before a restart is out of date.
        if heartbeat is None or heartbeat.written_at <= self._shown_at:
            return
        self._shown_at = heartbeat.written_at
        with contextlib.suppress(OSError, ValueError):
            if heartbeat.alarm is not None and heartbeat.alarm != self._last_alarm:
                self._last_alarm = heartbeat.alarm
                print(f"ALARM {self._label}: {heartbeat.alarm}", file=self._stream, flush=True)
            text = f"{self._label}: {line(heartbeat)}"
            if self._live is not None:
                self._live.update(text, refresh=True)
            else:
                print(text, file=self._stream, flush=True)
