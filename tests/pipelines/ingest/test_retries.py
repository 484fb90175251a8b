"""A task that is tried again begins anew: nothing of the first try is kept, doubled or lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.errors import StorageError
from infra.home import resolve
from infra.session import open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest
from pipelines.records import Batch, Piece
from pipelines.sources.tables.table import Table
from pipelines.sources.toyworld.source import Toyworld

SETS = ["source.scenes=40", "source.image_px=16", "scenes_per_shard=10"]


def broken_read(piece: Piece, read: Callable[[Piece], Iterator[Batch]]) -> Iterator[Batch]:
    """The first half of the piece, and then a device that hiccups."""
    yield from read(dataclasses.replace(piece, stop=(piece.start + piece.stop) // 2))
    raise OSError(5, "Input/output error")


@dataclass(frozen=True, kw_only=True)
class FlakyToyworld(Toyworld):
    """Breaks in the middle of its first reads."""

    def read(self, piece: Piece) -> Iterator[Batch]:
        if _counted(self) <= BREAKS["toyworld"]:
            return broken_read(piece, super().read)
        return super().read(piece)


@dataclass(frozen=True, kw_only=True)
class FlakyTable(Table):
    """The same for a source whose records are exchanged before they are shards."""

    def read(self, piece: Piece) -> Iterator[Batch]:
        if _counted(self) <= BREAKS["table"]:
            return broken_read(piece, super().read)
        return super().read(piece)


BREAKS = {"toyworld": 0, "table": 0}
"How many reads of each source break; the tests run tasks in this process."
_reads: list[object] = []


def _counted(source: object) -> int:
    _reads.append(source)
    return len(_reads)


@pytest.fixture(autouse=True)
def nothing_breaks() -> Iterator[None]:
    yield
    BREAKS.update(toyworld=0, table=0)
    _reads.clear()


def run(folder: Path, source: str, paths: list[str], sets: list[str], flaky: type | None) -> IngestOutcome:
    request = build_request(source, paths, "toy", None, sets, 0.2)
    if flaky is not None:
        given: Any = request.source
        fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
        request = dataclasses.replace(request, source=flaky(**fields))
    with open_workers(address=None, num_cpus=0) as workers:
        return ingest(request, resolve(str(folder)), workers)


def files(outcome: IngestOutcome) -> dict[str, bytes]:
    root = Path(outcome.url)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def captions(folder: Path) -> list[str]:
    path = folder / "in.csv"
    path.write_text("id,text\n" + "".join(f"{i % 40},caption {i}\n" for i in range(120)))
    return [str(path)]


@pytest.mark.parametrize("source", ["toyworld", "table"])
def test_d6_a_read_that_breaks_half_way_is_begun_anew_and_the_bytes_are_the_same(tmp_path: Path, source: str) -> None:
    paths, sets = ([], SETS) if source == "toyworld" else (captions(tmp_path), ["source.text=text", "source.id=id"])
    flaky = FlakyToyworld if source == "toyworld" else FlakyTable
    wanted = run(tmp_path / "whole", source, paths, sets, None)
    BREAKS[source] = 3
    done = run(tmp_path / "flaky", source, paths, sets, flaky)
    assert len(_reads) > 3
    assert (done.version, done.texts_read, done.texts_kept) == (wanted.version, wanted.texts_read, wanted.texts_kept)
    assert files(done) == files(wanted) and len(files(done)) > 5


def test_d6_a_read_that_goes_on_breaking_fails_the_job_and_commits_nothing(tmp_path: Path) -> None:
    BREAKS["toyworld"] = 100
    with pytest.raises(StorageError, match="failed 4 times, the last time with OSError"):
        run(tmp_path / "flaky", "toyworld", [], SETS, FlakyToyworld)
    assert not list((tmp_path / "flaky").rglob("job.json")) and not list((tmp_path / "flaky").rglob("manifests"))
    BREAKS["toyworld"] = 0
    done = run(tmp_path / "flaky", "toyworld", [], SETS, FlakyToyworld)
    assert files(done) == files(run(tmp_path / "whole", "toyworld", [], SETS, None))
