"""Run a command line of goodviews in this process and SIGKILL it at a chosen event of the file system.

Usage: killing.py EVENT COUNT DELAY_S ARGUMENTS...  The process kills itself DELAY_S seconds after the COUNT-th EVENT, where
EVENT is `write` (a temporary file is opened), `manifest` or `job` (the rename that publishes it is about to happen) or
`lock` (the commit lock is opened). Events come from Python's audit hooks, so nothing of ours is patched.

Without arguments it reads a JSON list [LOG, EVENT, COUNT, DELAY_S, ARGUMENTS...] from each line of stdin, does the same in a
fork of this process, whose output goes to the file LOG, and prints the exit code of the fork (minus the signal that ended
it). Most of the time of so small a job is that of the imports, which are done once so.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence


def main() -> None:
    """Run the command line of the arguments, or those that stdin gives."""
    if sys.argv[1:]:
        _run(sys.argv[1:])
    else:
        _serve()


def _serve() -> None:
    # Only imports: a process that has started no thread can be forked.
    for name in ("infra.cli", "catalog.versions.commit", "pipelines.ingest.job", "pipelines.sources.toyworld.source"):
        importlib.import_module(name)

    for line in sys.stdin:
        log, *words = json.loads(line)
        pid = os.fork()
        if pid == 0:
            with open(log, "wb") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            _run(words)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(words: Sequence[str]) -> None:
    """Install the hook, then be `goodviews ARGUMENTS`, which ends this process."""
    event, count, delay_s = words[0], int(words[1]), float(words[2])
    seen = 0

    def kill() -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event != _event_of(name, arguments):
            return
        seen += 1
        if seen == count:
            if delay_s > 0:
                threading.Thread(target=kill).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    from infra.cli import main as goodviews

    sys.argv[:] = ["goodviews", *words[3:]]
    goodviews()


def _event_of(name: str, arguments: tuple[object, ...]) -> str | None:
    path = str(arguments[0]) if arguments else ""
    if name == "open" and path.endswith(".goodviews-tmp"):
        return "write"
    if name == "open" and path.endswith(".lock"):
        return "lock"
    if name == "os.rename":
        target = str(arguments[1])
        if "/manifests/" in target:
            return "manifest"
        if target.endswith("/job.json"):
            return "job"
    return None


if __name__ == "__main__":
    main()
