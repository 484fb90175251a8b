"""Same version, same bytes: whatever the CPUs, the order of the inputs, the folder they are in, or the place they go to."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.home import resolve
from infra.session import Workers, open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest

REPOSITORY = Path(__file__).parents[2]


def write_inputs(folder: Path) -> list[str]:
    """Five files of alt texts in which rows of one image stand far apart."""
    folder.mkdir(parents=True)
    paths = []
    for f in range(5):
        rows = [(f"img-{(7 * i + f) % 60:02d}", f"A thing {i} seen in file {f} &amp; liked") for i in range(40)]
        table = pa.table({"image": [i for i, _ in rows], "caption": [c for _, c in rows]})
        paths.append(str(folder / f"part-{f}.parquet"))
        pq.write_table(table, paths[-1])
    return paths


SETS = ["source.text=caption:alt", "source.id=image", "scenes_per_shard=16"]


def run(paths: list[str], home: Path, workers: Workers, sets: list[str] | None = None) -> IngestOutcome:
    request = build_request("table", paths, "things", None, sets or SETS, 0.2)
    return ingest(request, resolve(str(home)), workers)


def in_process(paths: list[str], home: Path, sets: list[str] | None = None) -> IngestOutcome:
    with open_workers(address=None, num_cpus=0) as workers:
        return run(paths, home, workers, sets)


def digests(home: Path) -> dict[str, str]:
    files = [p for p in (home / "datasets").rglob("*") if p.is_file()]
    assert len(files) > 20
    return {str(p.relative_to(home)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("inputs") / "here")


@pytest.fixture(scope="module")
def reference(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("reference")
    in_process(paths, home)
    return home


def test_order_of_inputs_and_number_of_arrow_threads_change_nothing(
    paths: list[str], reference: Path, tmp_path: Path
) -> None:
    before = pa.cpu_count()
    pa.set_cpu_count(1 if before > 1 else 2)
    try:
        in_process([paths[i] for i in (3, 1, 4, 0, 2)], tmp_path)
    finally:
        pa.set_cpu_count(before)
    assert digests(tmp_path) == digests(reference)


def test_another_folder_of_the_same_inputs_changes_nothing(reference: Path, tmp_path: Path) -> None:
    in_process([str(Path(write_inputs(tmp_path / "else" / "where")[0]).parent)], tmp_path / "home")
    assert digests(tmp_path / "home") == digests(reference)


def test_two_ray_workers_give_the_bytes_of_one_process(
    paths: list[str], reference: Path, tmp_path: Path, ray_workers: Workers
) -> None:
    assert ray_workers.slots == 2
    run(list(reversed(paths)), tmp_path, ray_workers)
    assert digests(tmp_path) == digests(reference)


def test_one_ray_cpu_gives_the_same_bytes_through_the_command_line(
    paths: list[str], reference: Path, tmp_path: Path
) -> None:
    words = ["ingest", "table", "--dataset", "things", "--num-cpus", "1", "--home", str(tmp_path), "--json"]
    words += [w for path in paths for w in ("--input", path)] + [w for s in SETS for w in ("--set", s)]
    done = subprocess.run(
        [sys.executable, "-m", "infra.cli", *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["texts_read"] == 200
    assert digests(tmp_path) == digests(reference)


def test_other_content_is_another_version_beside_the_old_one(paths: list[str], reference: Path, tmp_path: Path) -> None:
    first = in_process(paths, tmp_path)
    changed = [
        in_process(paths, tmp_path, [*SETS, "seed=1"]),
        in_process(paths, tmp_path, [*SETS[:2], "scenes_per_shard=17"]),
        in_process(paths, tmp_path, [*SETS, "clean.repeats=false"]),
        in_process(paths[:4], tmp_path),
    ]
    versions = [first.version, *(o.version for o in changed)]
    assert len(set(versions)) == 5
    there = {p.name for p in (tmp_path / "datasets" / "things").iterdir() if p.is_dir()}
    assert there == set(versions)
    assert digests(tmp_path).items() >= {k: v for k, v in digests(reference).items() if "current" not in k}.items()


def test_d12_a_resumed_job_reuses_its_shards_and_budgets_are_no_content(paths: list[str], tmp_path: Path) -> None:
    first = in_process(paths, tmp_path)
    request = build_request("table", paths, "things", None, SETS, 0.9)
    with open_workers(address=None, num_cpus=0) as workers:
        again = ingest(request, resolve(str(tmp_path)), workers)
    assert again.version == first.version
    assert (first.was_there, again.was_there) == (False, True)
    assert again.shards_reused == again.shards


GOLDEN = {
    "rows of train-00000": "fee723d5e157918e",
    "rows of train-00001": "197d4c4dda496e3d",
    "rows of val-00002": "17d205b913f4abfd",
    "views/bad/pass-00/train-00000.tar": "84acc58635b26864",
    "views/bad/pass-00/train-00001.tar": "2c15edd3d9cacedd",
    "views/bad/pass-00/val-00002.tar": "8f8da33ae3b10295",
    "views/bad/pass-01/train-00000.tar": "c562468dede1b404",
    "views/bad/pass-01/train-00001.tar": "9c51c421ebc81d08",
    "views/bad/pass-01/val-00002.tar": "79f8ee31a30d2380",
    "views/bad/pass-02/train-00000.tar": "8593056d86fe0088",
    "views/bad/pass-02/train-00001.tar": "8ee5990eadbdde0b",
    "views/bad/pass-02/val-00002.tar": "3a157d4345997b7b",
    "views/bad/pass-03/train-00000.tar": "d823f3c0bf7bec7e",
    "views/bad/pass-03/train-00001.tar": "e2d321b39ae60452",
    "views/bad/pass-03/val-00002.tar": "481f0091d2cacbdc",
    "views/bad/pass-04/train-00000.tar": "13a2f8bf2a2dc710",
    "views/bad/pass-04/train-00001.tar": "4370cc28803c472d",
    "views/bad/pass-04/val-00002.tar": "8f8da33ae3b10295",
    "views/good/train-00000.tar": "943654852239a3ee",
    "views/good/train-00001.tar": "44fcdce7ffc08059",
    "views/good/val-00002.tar": "e27471cde8b5f764",
    "all parquet": "48419c19a4acc719",
}
"""sha256 of every file of the tiny world below, made with pyarrow 26.0.1; see the test for what to do when they change."""


def test_small_golden_digests_hold(tmp_path: Path) -> None:
    """Bytes are a contract: when this fails, raise TRANSFORM_VERSION or LAYOUT_VERSION, then freeze the new digests."""
    sets = ["source.scenes=12", "source.images=false", "source.defects=0.2", "scenes_per_shard=6"]
    request = build_request("toyworld", [], "tiny", None, sets, 0.9)
    with open_workers(address=None, num_cpus=0) as workers:
        outcome = ingest(request, resolve(str(tmp_path)), workers)
    folder = tmp_path / "datasets" / "tiny" / outcome.version
    manifests = [json.loads(p.read_bytes()) for p in sorted((folder / "manifests").iterdir())]
    rows = {f"rows of {m['split']}-{m['shard']:05d}": m["rows_digest"] for m in manifests}
    tars = {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*.tar"))
    }
    found = rows | tars
    if pa.__version__ == "26.0.1":
        parquet = sorted(folder.rglob("*.parquet"))
        found["all parquet"] = hashlib.sha256(b"".join(p.read_bytes() for p in parquet)).hexdigest()
    assert len(tars) >= 12
    assert {name: digest[:16] for name, digest in found.items()} == {
        name: digest for name, digest in GOLDEN.items() if name in found
    }
