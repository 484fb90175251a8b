"""Inputs that change while a job reads them: nothing that was read after the change is published or reused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from infra.errors import GoodviewsError, IntegrityError
from infra.home import resolve
from infra.session import Workers, open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest
from pipelines.ingest.stamps import check_unchanged, take_stamps
from pipelines.records import Input

FORMATS = {
    "parquet": lambda table, path: pq.write_table(table, path, row_group_size=4),
    "csv": lambda table, path: pyarrow.csv.write_csv(table, path),
    "jsonl": lambda table, path: path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist())),
}
WAYS = {
    "direct": [],
    "exchange": ["source.id=image"],
    "capped": ["max_scenes_per_caption=3"],
}


class Killed(BaseException):
    pass


class Disturbed:
    """Workers that call `change` after the first task that read the input, and end the job some tasks later."""

    def __init__(self, workers: Workers, change: Callable[[], None], *, die_after: int | None) -> None:
        self._workers, self._change, self._die_after, self._done = workers, change, die_after, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workers, name)

    def map(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        name = getattr(getattr(function, "func", function), "__name__", "")
        for done in self._workers.map(function, tasks):
            yield done
            self._done += name in ("publish_shard", "_move", "count_captions")
            if self._done == 1:
                self._change()
            if self._done == self._die_after:
                raise Killed


def write(path: Path, kind: str, *, of: str, rows: int, first: int) -> None:
    table = pa.table(
        {
            "image": [f"img-{first + i:03d}" for i in range(rows)],
            "caption": [f"a {of} thing number {first + i}" for i in range(rows)],
        }
    )
    FORMATS[kind](table, path)


def run(folder: Path, kind: str, home: Path, way: str, workers: Any) -> IngestOutcome:
    sets = ["source.text=caption", "scenes_per_shard=4", *WAYS[way]]
    inputs = [str(folder / f"a_big.{kind}"), str(folder / f"z_small.{kind}")]
    return ingest(build_request("table", inputs, "made", None, sets, 0.2), resolve(str(home)), workers)


def texts(outcome: IngestOutcome) -> list[str]:
    captions = ds.dataset(f"{outcome.url}/scenes", partitioning=None).to_table(columns=["captions"])["captions"]
    return sorted(caption["text"] for scene in captions.to_pylist() for caption in scene)


CASES = [
    *itertools.product(FORMATS, WAYS, [0]),
    # A Ray job takes a second, and its tasks read a file as those of one process do.
    *(("parquet", way, 2) for way in WAYS),
    ("csv", "exchange", 2),
]


@pytest.mark.parametrize("end", ["runs on", "is killed"])
@pytest.mark.parametrize(("kind", "way", "cpus"), CASES)
def test_a_rerun_after_the_input_was_restored_holds_the_original_texts_alone(
    tmp_path: Path, kind: str, way: str, end: str, cpus: int, request: pytest.FixtureRequest
) -> None:
    folder, home = tmp_path / "in", tmp_path / "home"
    folder.mkdir()
    small = folder / f"z_small.{kind}"
    write(folder / f"a_big.{kind}", kind, of="big", rows=24, first=0)
    write(small, kind, of="small", rows=8, first=100)
    original = small.read_bytes()
    wanted = sorted(
        [f"a big thing number {i}" for i in range(24)] + [f"a small thing number {100 + i}" for i in range(8)]
    )

    def change() -> None:
        write(small, kind, of="other", rows=8, first=100)

    with open_workers(address=None, num_cpus=0) as none:
        workers = none if cpus == 0 else request.getfixturevalue("ray_workers")
        # The job dies after the task that reads the changed file, wherever that stands.
        reads_small = 7 if (kind, way) in (("parquet", "direct"), ("parquet", "capped")) else 2
        disturbed = Disturbed(workers, change, die_after=None if end == "runs on" else reads_small)
        with pytest.raises((GoodviewsError, Killed)) as raised:
            run(folder, kind, home, way, disturbed)
        if end == "runs on":
            assert isinstance(raised.value, IntegrityError) and "was changed while it was read" in str(raised.value)
        small.write_bytes(original)
        again = run(folder, kind, home, way, workers)
    assert texts(again) == wanted
    with open_workers(address=None, num_cpus=0) as none:
        clean = run(folder, kind, tmp_path / "clean", way, none)
    assert (clean.version, texts(clean)) == (again.version, wanted)


def test_a_change_of_equal_size_just_after_the_stamp_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for i in range(20):
        path.write_text(f"text\n{i:02d}\n")
        stamps = take_stamps([Input(uri="a.csv", url=str(path))])
        check_unchanged(stamps)
        path.write_text(f"text\n{i:02d}\n".replace(f"{i:02d}", f"{i + 50:02d}"))
        with pytest.raises(IntegrityError, match="was changed while it was read"):
            check_unchanged(stamps)


def test_stamps_of_a_store_change_with_the_object() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe("/stamped/a.csv", b"one")
    stamps = take_stamps([Input(uri="a.csv", url="memory://stamped/a.csv")])
    check_unchanged(stamps)
    fs.pipe("/stamped/a.csv", b"two")
    with pytest.raises(IntegrityError, match=r"stamped/a\.csv was changed"):
        check_unchanged(stamps)
