"""Commands that run beside each other in child processes, and are shown one after another."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Final, Self

POLL_S: Final = 0.2
GRACE_S: Final = 20.0
"What a child gets to publish a checkpoint when the demo is interrupted."


class Background:
    """Child processes of `goodviews` commands, started in the order given, as many at a time as there are CPUs.

    A context manager; children that still run at its end are ended.
    """

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._waiting = list(enumerate(commands))
        self._children: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        self._most = os.cpu_count() or 1

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.clear()
        for child, output in self._children.values():
            # After Ctrl-C the child has the signal already, and goes on to its checkpoint.
            if child.poll() is None and sys.exc_info()[0] is not KeyboardInterrupt:
                child.terminate()
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            output.close()

    def show(self, number: int) -> int:
        """Copy the output of a command to stdout until it ends; returns its exit code."""
        while number not in self._children:
            time.sleep(POLL_S)
            self._start()
        child, output = self._children[number]
        while True:
            ended = child.poll() is not None
            text = output.read()
            if text:
                sys.stdout.write(text.decode(errors="replace"))
                sys.stdout.flush()
            if ended and not text:
                return int(child.returncode)
            self._start()
            if not text:
                time.sleep(POLL_S)

    def _start(self) -> None:
        running = sum(child.poll() is None for child, _ in self._children.values())
        while self._waiting and running < self._most:
            number, command = self._waiting.pop(0)
            # A file and not a pipe: a child whose turn to be shown is late must not wait for a reader.
            output = tempfile.NamedTemporaryFile()  # noqa: SIM115  (closed in __exit__)
            with open(output.name, "ab") as sink:
                words = [sys.executable, "-m", "infra.cli", *command]
                child = subprocess.Popen(words, stdout=sink, stderr=sink, env={**os.environ, "PYTHONUNBUFFERED": "1"})
            self._children[number] = child, output
            running += 1
