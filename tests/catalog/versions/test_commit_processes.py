"""Several processes, and processes that are killed: what `catalog.versions.commit` promises beyond one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from catalog.lake import lake
from catalog.versions import audit
from catalog.versions.commit import commit_version
from infra.home import Home

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
COUNTS = "SELECT (SELECT count(*) FROM versions.scenes), (SELECT count(*) FROM versions.rejects), (SELECT count(*) FROM versions.shards), (SELECT count(*) FROM jobs), (SELECT count(*) FROM datasets)"

COMMIT = """
import json, sys
from catalog.versions.commit import commit_version
from infra.home import Home
url, catalog, *pairs = sys.argv[1:]
for dataset, version in zip(pairs[::2], pairs[1::2]):
    done = commit_version(Home(url=url, catalog=catalog), dataset, version)
    print(json.dumps([dataset, version, done.snapshot_id, done.was_there]), flush=True)
"""

# A reader that looks until it sees the last dataset: every answer must be a whole one.
READ = """
import sys, time
from catalog.lake import lake
from infra.home import Home
home, wanted, end = Home(url=sys.argv[1], catalog=sys.argv[2]), int(sys.argv[3]), time.monotonic() + 240
query = '''SELECT (SELECT count(*) FROM datasets), (SELECT count(*) FROM scenes), (SELECT sum(scenes) FROM shards),
    (SELECT count(*) FROM captions), (SELECT coalesce(sum(captions), 0) FROM datasets WHERE is_current), (SELECT count(*) FROM jobs)'''
seen = looks = 0
while seen < wanted and time.monotonic() < end:
    with lake.reading(home) as reader:
        for _ in range(3):
            [(datasets, scenes, in_shards, captions, in_datasets, jobs)] = reader.rows(query)
            assert datasets >= seen, (datasets, seen)
            assert scenes == (in_shards or 0) == 8 * datasets and captions == in_datasets and jobs == datasets
            seen, looks = datasets, looks + 1
print(seen, looks)
"""

# Commits in a process that kills itself at the n-th call of DuckDB: before it (even n) or after it (odd n).
KILL = """
import os, signal, sys
from catalog.versions.commit import commit_version
from infra.home import Home
url, catalog, dataset, version, n = sys.argv[1:]
n, calls = int(n), 0
def watch(frame, event, argument):
    global calls
    if event in ("c_call", "c_return") and getattr(argument, "__name__", "") == "execute":
        if calls == n:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
sys.setprofile(watch)
commit_version(Home(url=url, catalog=catalog), dataset, version)
print(calls)
"""


def start(script: str, home: Home, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", script, home.url, home.catalog, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return out


def rows(home: Home, query: str) -> list[tuple[Any, ...]]:
    with lake.reading(home) as reader:
        return reader.rows(query)


def test_d8_g1_g11_four_committers_land_once_while_two_readers_never_fail(home: Home, publish: Any) -> None:
    """Acceptance line 5: different datasets and versions at once, each reader sees only whole commits."""
    first = publish("d0", "0" * 16)
    commit_version(home, first.dataset, first.version)
    others = [publish(f"d{i}", f"{i}" * 16) for i in range(1, 5)]
    readers = [start(READ, home, "5") for _ in range(2)]
    writers = [start(COMMIT, home, made.dataset, made.version) for made in others]
    landed = [json.loads(finish(writer)) for writer in writers]
    assert [was_there for *_, was_there in landed] == [False] * 4
    assert len({snapshot for _, _, snapshot, _ in landed}) == 4
    for reader in readers:
        seen, looks = map(int, finish(reader).split())
        assert seen == 5 and looks >= 3
    assert rows(home, COUNTS) == [(40, 10, 10, 5, 5)]
    assert audit.verify(home).problems == []


def test_d7_one_version_committed_by_four_processes_at_once_lands_once(home: Home, publish: Any) -> None:
    made = publish()
    # The catalog does not exist yet, so they race to make it, too.
    landed = [json.loads(finish(w)) for w in [start(COMMIT, home, made.dataset, made.version) for _ in range(4)]]
    assert sorted(was_there for *_, was_there in landed) == [False, True, True, True]
    assert len({snapshot for _, _, snapshot, _ in landed}) == 1
    assert rows(home, COUNTS) == [(8, 2, 2, 1, 1)]


def test_g13_two_versions_of_one_dataset_committed_in_turns_both_land_and_one_is_current(
    home: Home, publish: Any
) -> None:
    old, new = publish(version="a" * 16), publish(version="b" * 16)
    both = [
        start(COMMIT, home, "toy", v, "toy", w) for v, w in [(old.version, new.version), (new.version, old.version)]
    ]
    for process in both:
        finish(process)
    assert rows(home, COUNTS) == [(16, 4, 4, 2, 2)]
    assert rows(home, "SELECT count(*) FROM datasets WHERE is_current") == [(1,)]
    assert audit.verify(home).problems == []


def test_d1_d7_sigkill_at_any_statement_of_a_commit_and_a_rerun_give_one_set_of_rows(home: Home, publish: Any) -> None:
    """Killed before and after every DuckDB call, COMMIT included, first while the catalog is made, then in a later commit."""
    for dataset in ("first", "second"):
        made = publish(dataset)
        killed, n = 0, 0
        while True:
            process = start(KILL, home, made.dataset, made.version, str(n))
            _, err = process.communicate(timeout=280)
            if process.returncode == 0:
                break
            assert process.returncode == -signal.SIGKILL, err
            killed, n = killed + 1, n + STEP
        assert killed >= 6
        done = commit_version(home, made.dataset, made.version)
        assert done.was_there
        at = f"SELECT count(*) FROM versions.scenes WHERE dataset = '{dataset}'"
        assert rows(home, at) == [(8,)]
    assert rows(home, COUNTS) == [(16, 4, 4, 2, 2)]
    assert audit.verify(home).problems == []


STEP = 7
"Every seventh place: an odd number, so that places before and after a call take turns."


@pytest.mark.parametrize("delay_s", [0.05, 0.25, 0.45, 0.7])
def test_d1_sigkill_at_a_random_moment_of_a_commit_and_a_rerun_give_one_set_of_rows(
    home: Home, publish: Any, delay_s: float
) -> None:
    """Inside a statement as well, since the moment follows the clock and not the calls."""
    made = publish(shards=20, scenes_per_shard=1)
    process = start(COMMIT, home, made.dataset, made.version)
    while process.poll() is None and not os.path.exists(home.catalog + ".lock"):
        pass
    try:
        process.wait(delay_s)
    except subprocess.TimeoutExpired:
        process.kill()
    process.communicate()
    commit_version(home, made.dataset, made.version)
    assert rows(home, COUNTS) == [(20, 20, 20, 1, 1)]
    assert rows(home, "SELECT is_current FROM datasets") == [(True,)]
    assert audit.verify(home).problems == []
