"""Storage: a file that can be seen is whole, whatever happens while it is written, on every kind of store."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pytest
from fsspec.spec import AbstractBufferedFile
from hypothesis import given
from hypothesis import strategies as st

from infra import storage
from infra.errors import InputError, StorageError


class Bucket(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """An object store in memory: an object appears when its upload is completed, as on S3."""

    protocol = "r2"
    objects: ClassVar[dict[str, bytes]] = {}
    cachable = False

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return Upload(self, path, mode, block_size=64, cache_type="none") if mode == "wb" else super()._open(path, mode)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        prefix = path.strip("/") + "/" if path.strip("/") else ""
        names = {
            prefix + rest.partition("/")[0]: "/" in rest
            for name in self.objects
            if name.startswith(prefix) and (rest := name.removeprefix(prefix))
        }
        if not names and path not in self.objects:
            raise FileNotFoundError(path)
        entries = [
            {"name": n, "type": "directory" if is_folder else "file", "size": len(self.objects.get(n, b""))}
            for n, is_folder in (names or {path: False}).items()
        ]
        return entries if detail else [e["name"] for e in entries]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return self.objects[path][start:end]

    def _rm(self, path: str) -> None:
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)

    def modified(self, path: str) -> datetime:
        self.info(path)
        return datetime(2026, 1, 1, tzinfo=UTC)


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    """Parts gather unseen; only the last, final one makes the object."""

    def _initiate_upload(self) -> None:
        self.gathered = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.buffer.seek(0)
        self.gathered += self.buffer.read()
        if final:
            Bucket.objects[self.path] = self.gathered
        return True


@pytest.fixture(params=["local", "memory", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty folder on each kind of store."""
    if request.param == "local":
        yield str(tmp_path / "a b[1]*é")
        return
    fsspec.register_implementation("r2", Bucket, clobber=True)
    Bucket.objects.clear()
    url = f"{'memory' if request.param == 'memory' else 'r2'}://{tmp_path.name}/deep"
    yield url
    storage.remove_folder(url)


def broken_after(*parts: bytes) -> Iterator[bytes]:
    yield from parts
    raise RuntimeError("the writer broke")


def names_in(folder: str) -> list[str]:
    return storage.list_files(folder)


def test_what_is_published_is_read_back_with_its_size_and_digest(folder: str) -> None:
    url = storage.join(folder, "sub", "file.bin")
    parts: list[storage.Buffer] = [
        b"abc",
        bytearray(b"d"),
        memoryview(b"ef"),
        memoryview(b""),
        memoryview(pa.py_buffer(b"gh")),
    ]
    record = storage.publish(url, parts)
    assert record == storage.FileRecord(bytes=8, sha256=hashlib.sha256(b"abcdefgh").hexdigest())
    assert storage.read_bytes(url) == b"abcdefgh"
    assert storage.read_range(url, 2, 5) == b"cde"
    assert storage.size(url) == 8
    assert storage.digest(url) == record
    assert names_in(folder) == ["sub/file.bin"]
    assert storage.list_names(folder) == ["sub"]


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_parts_are_joined_in_order(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    url = str(tmp_path_factory.getbasetemp() / "joined.bin")
    record = storage.publish(url, iter(parts))
    whole = b"".join(parts)
    assert storage.read_bytes(url) == whole
    assert record == storage.FileRecord(bytes=len(whole), sha256=hashlib.sha256(whole).hexdigest())


def test_nothing_is_visible_before_the_last_part(folder: str) -> None:
    url = storage.join(folder, "file.bin")
    seen: list[bool] = []

    def parts() -> Iterator[bytes]:
        for _ in range(4):
            yield b"x" * 100
            seen.append(storage.exists(url))

    storage.publish(url, parts())
    assert seen == [False] * 4
    assert storage.exists(url)


def test_b16_a_writer_that_raises_leaves_nothing(folder: str) -> None:
    with pytest.raises(RuntimeError, match="the writer broke"):
        storage.publish(storage.join(folder, "file.bin"), broken_after(b"x" * 100, b"y" * 100))
    assert names_in(folder) == []


def test_a_writer_that_raises_leaves_the_older_file_as_it_was(folder: str) -> None:
    url = storage.join(folder, "file.bin")
    storage.publish(url, b"old")
    with pytest.raises(RuntimeError):
        storage.publish(url, broken_after(b"n" * 200))
    assert storage.read_bytes(url) == b"old"
    storage.publish(url, b"new")
    assert storage.read_bytes(url) == b"new"
    assert names_in(folder) == ["file.bin"]


def test_listings_are_never_stale(folder: str) -> None:
    assert names_in(folder) == []
    assert storage.list_names(folder) == []
    for i in (2, 0, 1):
        storage.publish(storage.join(folder, f"{i}.bin"), b"x")
        assert storage.exists(storage.join(folder, f"{i}.bin"))
    assert names_in(folder) == ["0.bin", "1.bin", "2.bin"]


def test_d4_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")

    def parts() -> Iterator[bytes]:
        yield b"x" * 1000
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"y")

    with pytest.raises(StorageError, match="the disk is full") as caught:
        storage.publish(str(tmp_path / "out" / "file.bin"), parts())
    assert str(tmp_path) in str(caught.value)
    assert names_in(str(tmp_path)) == []


def test_c7_a_small_disk_that_fills_up_holds_no_half_file(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        storage.publish(str(disk / "first.bin"), b"x" * 100_000)
        with pytest.raises(StorageError, match="the disk is full"):
            storage.publish(str(disk / "second.bin"), [b"y" * 100_000, b"z" * 100_000])
        assert names_in(str(disk)) == ["first.bin"]
        assert storage.size(str(disk / "first.bin")) == 100_000
    finally:
        subprocess.run(["umount", str(disk)], check=True)


KILLED = """
import sys, time
from infra import storage
def parts():
    yield b"x" * 1000
    print("half", flush=True)
    time.sleep(600)
storage.publish(sys.argv[1], parts())
"""


def test_c17_a_killed_writer_leaves_only_a_temporary_sibling(tmp_path: Path) -> None:
    url = str(tmp_path / "file.bin")
    root = str(Path(storage.__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", KILLED, url], stdout=subprocess.PIPE, cwd=root)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not storage.exists(url)
    (left,) = storage.list_names(str(tmp_path))
    assert left.startswith(".file.bin.")
    assert left.endswith(storage.TEMPORARY_SUFFIX)


def test_a_missing_file_is_an_input_error_that_names_it(folder: str) -> None:
    url = storage.join(folder, "absent.bin")
    storage.publish(storage.join(folder, "there.bin"), b"x")
    for read in (storage.size, storage.digest, storage.modified_s):
        with pytest.raises(InputError, match="no such file") as caught:
            read(url)
        assert url in str(caught.value)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        storage.publish(str(tmp_path / "taken"), b"x")
    with pytest.raises(InputError, match="is a folder"):
        storage.read_bytes(str(tmp_path / "taken"))
    assert storage.list_names(str(tmp_path)) == ["taken"]


def test_a_file_in_the_place_of_a_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError, match="Nothing was published"):
        storage.publish(str(tmp_path / "file" / "below.bin"), b"x")


def test_a_folder_that_goes_while_a_file_is_published_is_a_storage_error(tmp_path: Path) -> None:
    folder = tmp_path / "work"

    def parts() -> Iterator[bytes]:
        yield b"x"
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    url = str(folder / "file.bin")
    with pytest.raises(StorageError, match="its folder or bucket is not there") as caught:
        storage.publish(url, parts())
    assert url in str(caught.value) and list(tmp_path.iterdir()) == []


def test_an_unknown_protocol_names_the_package_to_install() -> None:
    with pytest.raises(StorageError, match="pip install"):
        storage.exists("nosuch://bucket/key")


def test_removing_is_quiet_about_what_is_gone(folder: str) -> None:
    url = storage.join(folder, "a", "file.bin")
    storage.publish(url, b"x")
    storage.remove_folder(storage.join(folder, "b"))
    storage.remove(url)
    storage.remove(url)
    assert names_in(folder) == []
    storage.publish(url, b"x")
    storage.remove_folder(folder)
    storage.remove_folder(folder)
    assert names_in(folder) == []


def test_only_empty_folders_are_removed(tmp_path: Path) -> None:
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    storage.publish(str(tmp_path / "full" / "file.bin"), b"x")
    storage.remove_empty_parents(str(tmp_path / "empty" / "deep" / "gone"))
    storage.remove_empty_parents(str(tmp_path / "full"))
    assert storage.list_names(str(tmp_path)) == ["full"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/home/", "s3://bucket/home"),
        ("memory://x", "memory://x"),
        ("file:///data/x", "/data/x"),
        ("/data/x/", "/data/x"),
        ("/data/./y/../x", "/data/x"),
    ],
)
def test_absolute_urls(url: str, expected: str) -> None:
    assert storage.absolute(url) == expected


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert storage.absolute("home") == str(tmp_path / "home")
    assert storage.absolute("~/home") == str(tmp_path / "me" / "home")


def test_names_are_joined_with_single_slashes() -> None:
    assert storage.join("s3://bucket/", "/a/", "b") == "s3://bucket/a/b"
    assert storage.join("/data") == "/data"
