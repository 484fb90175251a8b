"""Run a command line of goodviews in this process and SIGKILL it at a chosen event of the file system.

Usage: killing.py EVENT COUNT DELAY_S ARGUMENTS...  The process kills itself DELAY_S seconds after the COUNT-th EVENT, where
EVENT is `write` (a temporary file is opened), `manifest` or `job` (the rename that publishes it is about to happen) or
`lock` (the commit lock is opened). Events come from Python's audit hooks, so nothing of ours is patched.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time


def main() -> None:
    """Install the hook, then be `goodviews ARGUMENTS`."""
    event, count, delay_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
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

    sys.argv[:] = ["goodviews", *sys.argv[4:]]
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
