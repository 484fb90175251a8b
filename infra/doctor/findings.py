"""Checks of a machine: run apart from one another, each of them a line or a few with what to do.

Invariants: each check runs in a process of its own with a limit of time, so one that crashes, hangs or raises is a line
and never the end; a check leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Literal, TypeAlias

from infra.errors import GoodviewsError, UsageError
from infra.home import Home

GROUP: Final = "goodviews.checks"
TIMEOUT_S: Final = 120.0
AT_ONCE: Final = 3
"Checks that run side by side; each is mostly the import of a library."
SECRET_WORDS: Final = ("SECRET", "TOKEN", "PASSWORD", "PASSWD", "CREDENTIAL", "ACCESS_KEY", "API_KEY")
"A variable of the environment with one of these in its name holds what nobody must read here."

State: TypeAlias = Literal["ok", "advice", "broken"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check saw. state: `broken` for what will fail, `advice` for what may cost time or room later.

    advice: what to do, for all but `ok`.
    """

    check: str
    state: State
    found: str
    advice: str | None = None


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a check may look at. home is None where none could be named; with_ray: whether Ray may be started."""

    home: Home | None
    with_ray: bool = False


Check: TypeAlias = Callable[[Circumstances], Iterator[Finding]]


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check=check, state="ok", found=found)


def advise(check: str, found: str, advice: str) -> Finding:
    """It works, and this may be worth doing."""
    return Finding(check=check, state="advice", found=found, advice=advice)


def broken(check: str, found: str, advice: str) -> Finding:
    """It will fail until this is done."""
    return Finding(check=check, state="broken", found=found, advice=advice)


def examine(circumstances: Circumstances, *, only: Sequence[str] = (), timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """The findings of all checks or of those named, by name. Raises UsageError for an unknown name."""
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name in only:
        if name not in known:
            raise UsageError(f"There is no check {name!r}. Checks: {', '.join(sorted(known))}.")
    names = sorted(set(only) or known)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda name: _examine_apart(known[name], circumstances, timeout_s), names)
        return [finding for findings in found for finding in findings]


def _examine_apart(entry: EntryPoint, circumstances: Circumstances, timeout_s: float) -> list[Finding]:
    """Run one check in its own process. Its input goes through a pipe, since other users can read command lines."""
    home = circumstances.home
    told = {"home": home and {"url": home.url, "catalog": home.catalog}, "with_ray": circumstances.with_ray}
    # -P: a folder `catalog` where the user stands must not hide ours.
    command = [sys.executable, "-P", "-m", "infra.doctor.findings", entry.name, entry.value]
    try:
        done = subprocess.run(
            command, input=json.dumps(told), capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        advice = (
            "Something it asks hangs, most often a store or a network file system that does not answer. Mend that and"
            " ask again."
        )
        return [broken(entry.name, f"the check did not end within {timeout_s:g} s", advice)]
    last = (done.stdout.splitlines() or [""])[-1]
    if done.returncode == 0 and last.startswith("["):
        return [_without_secrets(Finding(**finding)) for finding in json.loads(last)]
    said = (done.stderr.strip().splitlines() or ["without a word"])[-1]
    how = _ending(done.returncode)
    advice = "A library that it loads crashes here. Install it anew with the pinned version of constraints.txt."
    return [_without_secrets(broken(entry.name, f"the check ended {how}: {said}", advice))]


def _ending(code: int) -> str:
    if code >= 0:
        return f"with exit status {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _without_secrets(finding: Finding) -> Finding:
    """The finding with every secret of the environment struck out; the checks themselves name none, libraries may."""
    hidden = [
        value
        for name, value in os.environ.items()
        if len(value) >= 6 and any(word in name.upper() for word in SECRET_WORDS) and not os.path.exists(value)
    ]

    def clean(text: str) -> str:
        for value in hidden:
            text = text.replace(value, "***")
        return text

    return replace(finding, found=clean(finding.found), advice=finding.advice and clean(finding.advice))


def _examine_here(name: str, value: str, told: str) -> list[Finding]:
    facts = json.loads(told)
    home = Home(**facts["home"]) if facts["home"] else None
    circumstances = Circumstances(home=home, with_ray=facts["with_ray"])
    try:
        check: Check = EntryPoint(name, value, GROUP).load()
        return list(check(circumstances))
    except GoodviewsError as error:
        return [broken(name, str(error), "Mend that and ask again.")]
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        return [broken(name, f"the package {missing} is not installed", f"Run `pip install {missing}`.")]
    except Exception as error:  # noqa: BLE001  (whatever a library raises is a line)
        found = f"the check raised {type(error).__name__}: {' '.join(str(error).split())}"
        return [broken(name, found, "What it looks at is broken, or the check is; please report it with this line.")]


if __name__ == "__main__":
    print(json.dumps([asdict(finding) for finding in _examine_here(sys.argv[1], sys.argv[2], sys.stdin.read())]))
