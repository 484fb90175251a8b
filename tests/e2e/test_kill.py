"""Killed at any moment and rerun, a job ends with the same bytes, every row once, and nothing left over."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from catalog.lake.queries import run_select
from catalog.versions.audit import verify
from catalog.versions.collect import collect
from infra.home import resolve
from infra.session import open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
SETS = ["source.scenes=90", "source.image_px=16", "scenes_per_shard=20"]
WORDS = ["ingest", "toyworld", *(word for option in SETS for word in ("--set", option))]
COMMIT_S = 0.6
"Longer than a commit takes here, so that kills fall before, inside and after it."


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def run(command: list[str], *, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "--home", str(home)], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


def ingest_here(home: Path) -> IngestOutcome:
    """The same job in this process."""
    with open_workers(address=None, num_cpus=0) as workers:
        return ingest(build_request("toyworld", [], None, None, SETS, 0.2), resolve(str(home)), workers)


def files_of(home: Path) -> dict[str, bytes]:
    """Every file below datasets/ and work/, and what is in it."""
    found = [p for folder in ("datasets", "work") for p in (home / folder).rglob("*") if p.is_file()]
    return {str(p.relative_to(home)): p.read_bytes() for p in found}


def rows_of(home: Path) -> dict[str, int]:
    counts = [f"(SELECT count(*) FROM {name}) AS {name.replace('.', '_')}" for name in TABLES]
    keys = "(SELECT count(DISTINCT scene_key) FROM versions.scenes) AS keys"
    out = io.StringIO()
    run_select(resolve(str(home)), f"SELECT {', '.join([*counts, keys])}", out=out, as_json=True)
    (row,) = json.loads(out.getvalue())
    return dict(row)


TABLES = ["versions.scenes", "versions.rejects", "versions.states", "versions.shards", "jobs", "datasets"]


@dataclass(frozen=True)
class Reference:
    """What an ingest that nobody killed leaves behind."""

    files: dict[str, bytes]
    rows: dict[str, int]


def assert_a_rerun_ends_like(reference: Reference, home: Path) -> None:
    ingest_here(home)
    collect(resolve(str(home)), delete=True, older_than_hours=0)
    assert collect(resolve(str(home)), older_than_hours=0).strays == []
    assert files_of(home) == reference.files
    assert rows_of(home) == reference.rows
    assert verify(resolve(str(home))).problems == []


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    home = tmp_path_factory.mktemp("reference")
    ingest_here(home)
    made = Reference(files=files_of(home), rows=rows_of(home))
    assert len(made.files) > 30
    assert made.rows["versions_scenes"] == made.rows["keys"] == 90
    shutil.rmtree(home)
    return made


@pytest.fixture(scope="module")
def warm() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported what an ingest needs, and runs each command in a fork of itself."""
    command = [sys.executable, str(HERE / "killing.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


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
    warm: subprocess.Popen[str], reference: Reference, tmp_path: Path, event: str, count: int, delay_s: float
) -> None:
    home, log = tmp_path / "home", tmp_path / "log"
    assert warm.stdin is not None and warm.stdout is not None
    moment = [str(log), event, str(count), str(delay_s)]
    print(json.dumps([*moment, *WORDS, "--num-cpus", "0", "--home", str(home)]), file=warm.stdin, flush=True)
    code = int(warm.stdout.readline())
    # A commit can be over before a late kill comes; every earlier moment must really have been hit.
    assert code == -signal.SIGKILL or (event == "lock" and code == 0), log.read_text()
    assert_a_rerun_ends_like(reference, home)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_d1_a_killed_ray_job_is_finished_by_a_rerun(reference: Reference, tmp_path: Path, share: float) -> None:
    manifests = tmp_path / "datasets" / "toyworld"
    wanted = round(share * sum("/manifests/" in name for name in reference.files))
    command = [sys.executable, "-m", "infra.cli", *WORDS, "--num-cpus", "2", "--home", str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while len(list(manifests.glob("*/manifests/*.json"))) < wanted and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert_a_rerun_ends_like(reference, tmp_path)


def test_d4_a_full_disk_is_one_sentence_and_publishes_no_half(reference: Reference, tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        full = run([sys.executable, "-m", "infra.cli", *WORDS, "--num-cpus", "0"], home=disk)
        assert full.returncode == 1
        assert "the disk is full" in full.stderr
        assert "Traceback" not in full.stderr
        published = {name: data for name, data in files_of(disk).items() if name.startswith("datasets/")}
        for name, data in published.items():
            assert reference.files[name] == data, f"{name} is half a file"
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert_a_rerun_ends_like(reference, disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
