"""The publisher: every record by name, and no error that gets lost on a thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import storage
from infra.storage.publisher import Publisher


def test_the_publisher_returns_every_record_by_name(tmp_path: Path) -> None:
    publisher = Publisher(in_flight=2)
    for i in range(9):
        publisher.submit(f"file-{i}", str(tmp_path / f"{i}.bin"), [b"x" * i])
    records = publisher.finish()
    assert {name: record.bytes for name, record in records.items()} == {f"file-{i}": i for i in range(9)}
    assert len(storage.list_files(str(tmp_path))) == 9


def test_the_publisher_raises_the_first_error_and_refuses_a_name_twice(tmp_path: Path) -> None:
    publisher = Publisher()
    publisher.submit("good", str(tmp_path / "good.bin"), b"x")
    publisher.submit("bad", str(tmp_path / "bad.bin"), broken_after(b"x"))
    with pytest.raises(ValueError, match="'good' was submitted before"):
        publisher.submit("good", str(tmp_path / "other.bin"), b"x")
    with pytest.raises(RuntimeError, match="the writer broke"):
        publisher.finish()
    assert storage.list_files(str(tmp_path)) == ["good.bin"]


def broken_after(*parts: bytes) -> Iterator[bytes]:
    yield from parts
    raise RuntimeError("the writer broke")
