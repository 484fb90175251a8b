"""The main job with HOME and inputs in S3 (moto's server, over HTTP) and the catalog in Postgres: as on a local disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra import cli, storage
from infra.home import Home
from tests.conftest import POSTGRES_PASSWORD
from tests.infra.broken_connections import proxied

REPOSITORY = Path(__file__).parents[2]
SECRETS = ("hush-hush", POSTGRES_PASSWORD, "s3 cret")
TOYWORLD = [
    "ingest",
    "toyworld",
    "--set",
    "source.scenes=12",
    "--set",
    "source.image_px=16",
    "--scenes-per-shard",
    "10",
]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def cloud(s3_home: Home, postgres_catalog: str) -> Home:
    """HOME in S3, catalog in Postgres."""
    return Home(url=s3_home.url, catalog=postgres_catalog)


@pytest.fixture
def local(tmp_path: Path) -> Home:
    """HOME and catalog on disk."""
    return Home(url=str(tmp_path / "home"), catalog=str(tmp_path / "home" / "catalog.sqlite"))


@pytest.fixture
def captions(tmp_path: Path) -> list[Path]:
    """A release like multi30k: five captions of each of 46 pictures."""
    folder = tmp_path / "release"
    folder.mkdir()
    for split, size in (("train", 40), ("val", 4), ("test_2016", 2)):
        (folder / f"{split}_images.txt").write_text("".join(f"{split}{i}.jpg\n" for i in range(size)))
        for n in range(1, 6):
            lines = [f"caption {n} of picture {i} in {split}\n" for i in range(size)]
            # Rejects of two reasons.
            lines[0] = "\n" if n == 2 else lines[0]
            (folder / f"{split}.{n}.en").write_text(
                "".join(lines).replace("caption 4 of picture 1 ", "caption 3 of picture 1 ")
            )
    return sorted(folder.iterdir())


def words_of(home: Home, words: Sequence[str]) -> list[str]:
    return [*words, "--home", home.url, "--catalog", home.catalog]


def answer(capsys: pytest.CaptureFixture[str], home: Home, *words: str) -> Any:
    """What a command prints as JSON."""
    capsys.readouterr()
    code = cli.run(words_of(home, [*words, "--json"]))
    out, err = capsys.readouterr()
    assert code == 0, err
    assert not any(secret in out + err for secret in SECRETS)
    return json.loads(out)


def ingested(capsys: pytest.CaptureFixture[str], home: Home, *words: str) -> dict[str, Any]:
    return dict(answer(capsys, home, *words, "--num-cpus", "0"))


def files_of(home: Home, outcome: dict[str, Any]) -> dict[str, bytes]:
    folder = home.datasets(outcome["dataset"], outcome["version"])
    return {path: storage.read_bytes(storage.join(folder, path)) for path in storage.list_files(folder)}


def stamps_of(home: Home) -> dict[str, str]:
    return {path: storage.stamp(storage.join(home.url, path)) for path in storage.list_files(home.url)}


def test_s3_and_postgres_hold_what_a_local_disk_holds_byte_for_byte(
    cloud: Home, local: Home, captions: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = cloud.url.removesuffix("/a home")
    for path in captions:
        storage.publish(storage.join(bucket, "in", path.name), path.read_bytes())
    cases = [
        (TOYWORLD, TOYWORLD),
        (
            ["ingest", "multi30k", "--input", str(captions[0].parent)],
            ["ingest", "multi30k", "--input", storage.join(bucket, "in")],
        ),
    ]
    for on_disk, in_store in cases:
        there, here = ingested(capsys, cloud, *in_store), ingested(capsys, local, *on_disk)
        assert there["url"].startswith("s3://") and there["version"] == here["version"]
        wanted = files_of(local, here)
        assert {path.split("/")[0] for path in wanted} >= {"scenes", "views", "manifests", "job.json"}
        assert files_of(cloud, there) == wanted
    assert there["rejects"] == {"exact_repeat": 3, "missing_text": 3}

    queries = [
        "SELECT dataset, version, scenes, captions, texts_read, rejects FROM datasets ORDER BY ALL",
        "SELECT * FROM captions ORDER BY ALL",
        "SELECT dataset, shard, bytes, files FROM shards ORDER BY ALL",
    ]
    for query in queries:
        rows = answer(capsys, cloud, "catalog", "sql", query)
        assert rows == answer(capsys, local, "catalog", "sql", query) and rows
    assert answer(capsys, cloud, "catalog", "verify")["problems"] == []

    before = stamps_of(cloud), len(answer(capsys, cloud, "catalog", "snapshots"))
    for _, in_store in cases:
        again = ingested(capsys, cloud, *in_store)
        assert again["was_there"] and again["shards_reused"] == again["shards"]
    after = stamps_of(cloud)
    # The job's record and the pointer to the current version are written by each job, always the same.
    written = {path for path in after if before[0].get(path) != after[path]}
    assert all(path.endswith(("/current.json", "/job.json")) for path in written) and before[0].keys() == after.keys()
    assert len(answer(capsys, cloud, "catalog", "snapshots")) == before[1]
    assert answer(capsys, cloud, "catalog", "gc", "--older-than-hours", "0") == []


JOBS = """
import sys
from infra import cli
import catalog.versions.commit, pipelines.ingest.job
print("ready", flush=True)
sys.stdin.readline()
words, home, number = sys.argv[3:], ["--home", sys.argv[1], "--catalog", sys.argv[2]], sys.argv[3]
for name in ("own-" + number, "shared"):
    code = cli.run([*words[1:], "--dataset", name, *home, "--num-cpus", "0"])
    if code: sys.exit(code)
"""


def test_d8_g11_eight_jobs_that_commit_at_once_land_once_each(
    postgres_catalog: str, local: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of eight processes ingests a dataset of its own and then one that all of them ingest. The files lie on disk."""
    home = Home(url=local.url, catalog=postgres_catalog)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOBS, home.url, home.catalog, str(i), *TOYWORLD, "--json"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for i in range(8)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ended = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, ended
    outcomes = [outcome for out, _ in ended for outcome in objects(out)]
    assert len(outcomes) == 16
    assert not any(o["was_there"] for o in outcomes if o["dataset"] != "shared")
    assert sorted(o["was_there"] for o in outcomes if o["dataset"] == "shared") == [False] + [True] * 7
    counted = "(SELECT count(*) FROM {0}) AS {0}"
    query = "SELECT " + ", ".join(counted.format(name) for name in ("datasets", "jobs", "scenes", "shards"))
    assert answer(capsys, home, "catalog", "sql", query) == [
        {"datasets": 9, "jobs": 9, "scenes": 9 * 12, "shards": 9 * outcomes[0]["shards"]}
    ]
    assert answer(capsys, home, "catalog", "verify")["problems"] == []


def objects(text: str) -> list[Any]:
    """The JSON objects that stand one after another in a text."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


def test_a_connection_lost_in_an_upload_publishes_nothing_and_a_rerun_finishes(
    cloud: Home, s3_endpoint: str, local: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    # Good tars of three parts each.
    table.write_text("text\n" + "".join(f"{i} {'word' * 150}\n" for i in range(9_000)))
    words = [
        "ingest",
        "table",
        "--dataset",
        "long",
        "--input",
        str(table),
        "--set",
        "source.text=text:alt",
        "--views",
        "good",
    ]
    seen: list[str] = []

    def gone_since_the_second_part(line: str) -> int | None:
        if "/views/good/" in line and "partNumber=2&" in line:
            seen.append(line)
        return (100_000 if line == seen[0] else 0) if seen else None

    with proxied(s3_endpoint) as proxy:
        proxy.rule = gone_since_the_second_part
        environment = {
            **os.environ,
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_MAX_ATTEMPTS": "1",
            "FSSPEC_S3": json.dumps({"default_block_size": 5 << 20}),
        }
        command = [sys.executable, "-m", "infra.cli", *words_of(cloud, words), "--num-cpus", "0"]
        failed = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and seen
    (sentence,) = [line for line in failed.stderr.splitlines() if line.startswith("error:")]
    assert "Cannot publish s3://" in sentence and "Nothing was published under that name" in sentence
    assert "Traceback" not in failed.stderr and not any(secret in failed.stderr for secret in SECRETS)

    there = storage.list_files(cloud.url)
    assert not [path for path in there if "/views/" in path or "/manifests/" in path or path.endswith("job.json")]
    (left,) = answer(capsys, cloud, "catalog", "gc", "--older-than-hours", "24")
    assert left["why"] == "upload that was never completed" and left["bytes"] >= 5 << 20
    finished, wanted = ingested(capsys, cloud, *words), ingested(capsys, local, *words)
    assert files_of(cloud, finished) == files_of(local, wanted)
    answer(capsys, cloud, "catalog", "gc", "--older-than-hours", "24", "--delete")
    assert answer(capsys, cloud, "catalog", "gc", "--older-than-hours", "0") == []
    assert answer(capsys, cloud, "catalog", "verify")["problems"] == []


def test_doctor_looks_at_a_store_and_a_server_and_says_no_secret(cloud: Home, s3_endpoint: str) -> None:
    def examined(**environment: str) -> tuple[int, list[dict[str, str]]]:
        command = [sys.executable, "-m", "infra.cli", *words_of(cloud, ["doctor", "--json"])]
        command += ["--only", "store", "--only", "catalog"]
        done = subprocess.run(
            command, env={**os.environ, **environment}, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert not any(secret in done.stdout + done.stderr for secret in SECRETS) and "Traceback" not in done.stderr
        return done.returncode, json.loads(done.stdout)

    code, found = examined()
    assert code == 0
    assert [(f["check"], f["state"]) for f in found] == [(n, "ok") for n in ("lock", "catalog", "store", "clock")]
    assert storage.list_files(cloud.url) == []
    with proxied(s3_endpoint) as proxy:
        proxy.rule = lambda line: 0
        code, found = examined(AWS_ENDPOINT_URL=proxy.url, AWS_MAX_ATTEMPTS="1")
    (store,) = [f for f in found if f["check"] == "store"]
    assert code == 1 and store["state"] == "broken" and cloud.url in store["found"]
