"""`infra.storage.archives`: members of zip archives read where they are."""

from __future__ import annotations

import hashlib
import warnings
import zipfile
from pathlib import Path
from typing import IO

import pytest

from infra import storage
from infra.errors import InputError
from infra.storage import archives

TEXT = b"a dog runs\n" * 5_000


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive with a packed and a stored member, and a folder."""
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.mkdir("deep")
        file.writestr("deep/captions.txt", TEXT)
        file.writestr(zipfile.ZipInfo("stored.txt"), b"as it is")
    return path


def held(path: Path) -> list[str]:
    return sorted(storage.archive_directory(str(path)))


def test_a_member_is_a_file_like_any_other(archive: Path) -> None:
    assert held(archive) == ["deep/captions.txt", "stored.txt"]
    url = archives.member_url(str(archive), "deep/captions.txt")
    assert archives.is_member(url) and archives.archive_of(url) == str(archive)
    assert storage.size(url) == len(TEXT)
    assert storage.read_bytes(url) == TEXT
    assert storage.read_range(url, 11_000, 11_011) == TEXT[11_000:11_011]
    assert storage.digest(url).sha256 == hashlib.sha256(TEXT).hexdigest()
    with storage.open_read(url) as file:
        assert file.readline() == b"a dog runs\n"
        file.seek(-4, 2)
        assert file.read() == TEXT[-4:]


def test_a_member_changes_when_its_archive_does(archive: Path) -> None:
    url = archives.member_url(str(archive), "stored.txt")
    before = storage.stamp(url)
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("more", b"x")
    assert storage.stamp(url) != before


def test_a_url_with_a_protocol_names_its_archive(archive: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/archives/set.zip", archive.read_bytes())
    try:
        url = archives.member_url("memory://archives/set.zip", "deep/captions.txt")
        assert archives.archive_of(url) == "memory://archives/set.zip"
        assert storage.read_bytes(url) == TEXT
    finally:
        memory.rm("/archives", recursive=True)


@pytest.mark.parametrize("keep", [0, 1, 100, 300])
def test_an_archive_that_was_cut_short_is_an_error(archive: Path, keep: int) -> None:
    archive.write_bytes(archive.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"set\.zip is not a whole zip archive"):
        held(archive)


def test_damaged_bytes_are_an_error_and_never_short_data(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[data.index(b"as it is")] ^= 1
    archive.write_bytes(data)
    with pytest.raises(InputError, match=r"stored\.txt in .*set\.zip is damaged"):
        storage.read_bytes(archives.member_url(str(archive), "stored.txt"))


def test_two_members_of_one_name_are_refused(archive: Path) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(archive, "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("stored.txt", b"other")
    with pytest.raises(InputError, match=r"holds two files named stored\.txt"):
        held(archive)


def test_encrypted_and_absent_members_are_refused(archive: Path) -> None:
    with pytest.raises(InputError, match="holds no file gone"):
        storage.read_bytes(archives.member_url(str(archive), "gone"))
    data = bytearray(archive.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = 0
        while (start := data.find(signature, start)) >= 0:
            data[start + flags] |= 1
            start += 4
    archive.write_bytes(data)
    with pytest.raises(InputError, match=r"stored\.txt in .* is encrypted"):
        storage.read_bytes(archives.member_url(str(archive), "stored.txt"))


def test_damage_is_a_sentence_when_a_reader_seeks_over_it(archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[data.index(b"as it is")] ^= 1
    archive.write_bytes(data)
    url = archives.member_url(str(archive), "stored.txt")
    with storage.open_read(url) as file, pytest.raises(InputError, match="is damaged"):
        file.seek(0, 2)


def test_the_directory_is_parsed_once_for_all_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as file:
        for number in range(50):
            file.writestr(f"{number}.txt", str(number))
    parsed: list[str] = []
    real = archives.directory

    def directory(file: IO[bytes], url: str) -> dict[str, zipfile.ZipInfo]:
        parsed.append(url)
        return real(file, url)

    monkeypatch.setattr(archives, "directory", directory)
    for number in range(50):
        url = archives.member_url(str(path), f"{number}.txt")
        assert storage.size(url) == len(str(number)) and storage.read_bytes(url) == str(number).encode()
    assert parsed == [str(path)]
