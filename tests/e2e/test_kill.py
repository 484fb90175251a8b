"""Killed at any moment and rerun, a job ends with the same bytes, every row once, and nothing left over."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
WORLD = ["toyworld", "--set", "source.scenes=90", "--set", "source.image_px=16", "--scenes-per-shard", "20"]
LOCAL = [*WORLD, "--num-cpus", "0"]
COMMIT_S = 1.5
"Longer than a commit takes here, so that kills fall before, inside and after it."


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def run(command: list[str], *, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "--home", str(home)], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


def goodviews(*words: str, home: Path) -> str:
    done = run([sys.executable, "-m", "infra.cli", *words], home=home)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_of(home: Path) -> dict[str, bytes]:
    """Every file below datasets/ and work/, and what is in it."""
    found = [p for folder in ("datasets", "work") for p in (home / folder).rglob("*") if p.is_file()]
    return {str(p.relative_to(home)): p.read_bytes() for p in found}


def rows_of(home: Path) -> list[dict[str, object]]:
    sql = (
        "SELECT (SELECT count(*) FROM versions.scenes) AS scenes, (SELECT count(DISTINCT scene_key) FROM versions.scenes) AS keys,"
        " (SELECT count(*) FROM versions.rejects) AS rejects, (SELECT count(*) FROM versions.states) AS states,"
        " (SELECT count(*) FROM versions.shards) AS shards, (SELECT count(*) FROM jobs) AS jobs,"
        " (SELECT count(*) FROM datasets) AS datasets"
    )
    return json.loads(goodviews("catalog", "sql", sql, "--json", home=home))


def assert_equals_uninterrupted(home: Path, reference: Path, *, ingest: list[str]) -> None:
    goodviews("ingest", *ingest, home=home)
    goodviews("catalog", "gc", "--delete", "--older-than-hours", "0", home=home)
    assert files_of(home) == files_of(reference)
    assert rows_of(home) == rows_of(reference)
    goodviews("catalog", "verify", home=home)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("reference")
    goodviews("ingest", *LOCAL, home=home)
    assert len(files_of(home)) > 30
    yield home
    shutil.rmtree(home)


def kills() -> list[tuple[str, int, float]]:
    """22 moments: inside a write, between data and manifest, between manifests and commit, inside the commit."""
    rng = random.Random(0)
    inside_write = [("write", rng.randrange(1, 40), rng.uniform(0, 0.002)) for _ in range(6)]
    before_manifest = [("manifest", n, 0.0) for n in rng.sample(range(1, 6), 5)]
    before_commit = [("job", 1, 0.0), ("job", 1, 0.0005), ("job", 1, 0.005)]
    inside_commit = [("lock", 1, rng.uniform(0, COMMIT_S)) for _ in range(8)]
    return [*inside_write, *before_manifest, *before_commit, *inside_commit]


@pytest.mark.parametrize(("event", "count", "delay_s"), kills())
def test_d1_a_killed_process_is_finished_by_a_rerun(
    reference: Path, tmp_path: Path, event: str, count: int, delay_s: float
) -> None:
    killed = run(
        [sys.executable, str(HERE / "killing.py"), event, str(count), str(delay_s), "ingest", *LOCAL], home=tmp_path
    )
    # A commit can be over before a late kill comes; every earlier moment must really have been hit.
    assert killed.returncode == -signal.SIGKILL or (event == "lock" and killed.returncode == 0), killed.stderr
    assert_equals_uninterrupted(tmp_path, reference, ingest=LOCAL)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_d1_a_killed_ray_job_is_finished_by_a_rerun(reference: Path, tmp_path: Path, share: float) -> None:
    manifests = tmp_path / "datasets" / "toyworld"
    wanted = round(share * len(list((reference / "datasets" / "toyworld").glob("*/manifests/*.json"))))
    command = [sys.executable, "-m", "infra.cli", "ingest", *WORLD, "--num-cpus", "2", "--home", str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while len(list(manifests.glob("*/manifests/*.json"))) < wanted and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert_equals_uninterrupted(tmp_path, reference, ingest=LOCAL)


def test_d4_a_full_disk_is_one_sentence_and_publishes_no_half(reference: Path, tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        full = run([sys.executable, "-m", "infra.cli", "ingest", *LOCAL], home=disk)
        assert full.returncode == 1
        assert "the disk is full" in full.stderr
        assert "Traceback" not in full.stderr
        finished = files_of(reference)
        for name, data in files_of(disk).items():
            assert finished[name] == data, f"{name} is half a file"
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert_equals_uninterrupted(disk, reference, ingest=LOCAL)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
