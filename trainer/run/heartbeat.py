"""The live line of a training: rank 0 leaves its pulse in the folder of the run, the command shows it on stderr.

Owns: the pulse file and how it looks. Does not own: any number that is kept (see `trainer.run.record`).
Invariant: the pulse travels by file, because rank 0 may be a process on another machine of a Ray cluster whose output
nobody reads; showing it never fails a training.
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

if TYPE_CHECKING:
    from rich.live import Live

PULSE_S = 2.0
"Between two pulses on a local disk; ten times that on an object store, where each is a request."
PLAIN_INTERVAL_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """How a training stands. mfu: share of the device's peak, None on a CPU. stall: share of time spent waiting for data."""

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


def line(pulse: Pulse) -> str:
    """The pulse as one line."""
    parts = [f"step {pulse.step:,}/{pulse.steps:,}", f"epoch {pulse.epoch}"]
    parts += [f"{name} {value:.4g}" for name, value in pulse.losses.items()]
    parts += [f"{pulse.samples_per_s:,.0f} samples/s", f"{pulse.tokens_per_s:,.0f} tokens/s"]
    parts += [f"MFU {pulse.mfu:.1%}"] if pulse.mfu is not None else []
    parts += [f"data stall {pulse.stall:.0%}"] if pulse.stall >= 0.005 else []
    parts += [f"ETA {duration(pulse.eta_s)}"] if pulse.eta_s is not None else []
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as people say them: `9 s`, `4 min 05 s`, `3 h 50 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


class PulseWriter:
    """Leaves the pulse below the folder of a run, not more often than is useful."""

    def __init__(self, url: str) -> None:
        self._url = _url_of(url)
        self._interval_s = PULSE_S * (10 if storage.is_remote(url) else 1)
        self._last_s = -1e9

    def write(self, pulse: Pulse) -> None:
        """Publish the pulse, unless one went out just now; a failure to do so is no failure of the training."""
        now = time.monotonic()
        if now - self._last_s < self._interval_s and pulse.step < pulse.steps and pulse.alarm is None:
            return
        self._last_s = now
        with contextlib.suppress(GoodviewsError, OSError):
            storage.publish(self._url, orjson.dumps(pulse))


def read_pulse(url: str) -> Pulse | None:
    """The last pulse below the folder of a run, or None."""
    try:
        return Pulse(**orjson.loads(storage.read_bytes(_url_of(url))))
    except (GoodviewsError, OSError, ValueError, TypeError):
        return None


def _url_of(url: str) -> str:
    return storage.join(url, "pulse.json")


class LiveLine:
    """Shows the pulse of a run while the block runs: one live line on a terminal, else a line every 30 s."""

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
            # Only a terminal needs it.
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(file=self._stream), auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
            self._interval_s = PULSE_S / 2
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._show()
        if self._live is not None:
            self._live.stop()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._show()

    def _show(self) -> None:
        pulse = read_pulse(self._url)
        # A pulse from before a restart says nothing of now.
        if pulse is None or pulse.written_at <= self._shown_at:
            return
        self._shown_at = pulse.written_at
        with contextlib.suppress(OSError, ValueError):
            if pulse.alarm is not None and pulse.alarm != self._last_alarm:
                self._last_alarm = pulse.alarm
                print(f"ALARM {self._label}: {pulse.alarm}", file=self._stream, flush=True)
            text = f"{self._label}: {line(pulse)}"
            if self._live is not None:
                self._live.update(text, refresh=True)
            else:
                print(text, file=self._stream, flush=True)
