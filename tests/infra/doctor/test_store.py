"""Every promise that publication relies on, broken on purpose by a store, is named."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from infra import storage
from infra.doctor import store as store_checks
from infra.doctor.findings import Circumstances, Finding
from infra.errors import StorageError
from infra.home import Home


def findings(url: str) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in store_checks.store(Circumstances(home=Home(url=url, catalog="x"))):
        found.setdefault(finding.check, []).append(finding)
    return found


def states(url: str) -> dict[str, list[str]]:
    return {name: [finding.state for finding in found] for name, found in findings(url).items()}


def test_a_local_folder_keeps_its_promises_and_the_probe_leaves_nothing(tmp_path: Path) -> None:
    assert states(str(tmp_path)) == {"store": ["ok"], "clock": ["ok"]}
    found = findings(str(tmp_path / "not" / "yet"))
    assert "is not there yet" in found["store"][0].found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
def test_s3_keeps_its_promises_and_the_probe_leaves_nothing(s3_home: Home) -> None:
    assert states(s3_home.url) == {"store": ["ok"], "clock": ["ok"]}
    assert storage.list_files(s3_home.url) == []


def test_no_home_is_not_looked_at() -> None:
    assert list(store_checks.store(Circumstances(home=None))) == []


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="is no folder"):
        findings(str(tmp_path / "file" / "home"))
    found = findings("nosuch://bucket/home")
    assert [f.state for f in found["store"]] == ["broken"] and "pip install" in found["store"][0].found


class Store(MemoryFileSystem):  # type: ignore[misc]
    """A store under the name of an object store; `fault` says what it does wrong."""

    protocol = "r2"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fault = ""
    skew_s = 0.0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb" and self.fault != "half":
            # As on S3: what is written appears when it is closed.
            return Whole(self, path, mode, block_size=1 << 20)
        return super()._open(path, mode, **options)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        return [] if self.fault == "stale listing" else super().find(path, *arguments, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return bytes(super().cat_file(path, start, end, **options))

    def rm_file(self, path: str) -> None:
        if self.fault != "nothing goes":
            super().rm_file(path)

    def modified(self, path: str) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.skew_s)


class Whole(fsspec.spec.AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.gathered = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.buffer.seek(0)
        self.gathered += self.buffer.read()
        if final and not (self.fs.fault == "old state" and self.path in self.fs.store):
            content = b"" if self.fs.fault == "other bytes" else self.gathered
            with MemoryFileSystem._open(self.fs, self.path, "wb") as file:
                file.write(content)
        return True


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    fsspec.register_implementation("r2", Store, clobber=True)
    Store.store.clear()
    yield f"r2://{tmp_path.name}/home"
    Store.fault, Store.skew_s = "", 0.0


def test_the_double_without_a_fault_is_fine(store: str) -> None:
    assert states(store) == {"store": ["ok"], "clock": ["ok"]}


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("half", "can be seen before it is complete"),
        ("stale listing", "a listing after a write shows"),
        ("old state", "still read in its old state"),
        ("other bytes", "what is read back is not what was written"),
        ("nothing goes", "a file that was removed can still be seen"),
    ],
)
def test_a_promise_that_is_broken_is_named(store: str, fault: str, sentence: str) -> None:
    Store.fault = fault
    found = findings(store)["store"]
    assert {f.state for f in found} == {"broken"}
    assert any(sentence in f.found for f in found), found


@pytest.mark.parametrize(
    ("skew_s", "state"), [(0.5, "ok"), (-0.9, "ok"), (60.0, "advice"), (-60.0, "advice"), (3600.0, "broken")]
)
def test_a_store_whose_clock_is_off_is_named(store: str, skew_s: float, state: str) -> None:
    Store.skew_s = skew_s
    (clock,) = findings(store)["clock"]
    assert clock.state == state
    if state != "ok":
        assert ("ahead of" if skew_s > 0 else "behind") in clock.found
