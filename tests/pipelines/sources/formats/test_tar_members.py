"""Tars as writers, copies and disks break them: a sentence each, and never a short read that looks whole."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.errors import InputError
from pipelines.records import Input
from pipelines.sources.formats.tar_members import BLOCK, FILE, Member, members, open_tar, payload
from tests.pipelines.sources.tar_files import tar_of

FILES = [("0001.txt", b"a cat"), ("0002.txt", b"b" * 700), ("0003.txt", b"")]
TAR = tar_of(FILES)
END = 4 * BLOCK + 2 * BLOCK
"""Three headers, payloads of one and two blocks."""


def read(path: Path, data: bytes) -> list[tuple[Member, bytes]]:
    """All members with their payloads."""
    path.write_bytes(data)
    source = Input(uri=path.name, url=str(path))
    with open_tar(source) as file:
        return [(member, payload(file, source, member)) for member in members(file, source)]


def test_members_are_what_tarfile_finds(tmp_path: Path) -> None:
    found = read(tmp_path / "a.tar", TAR)
    assert [(member.name, data) for member, data in found] == FILES
    with tarfile.open(fileobj=io.BytesIO(TAR)) as tar:
        assert [(m.offset, m.start, m.size) for m, _ in found] == [(t.offset, t.offset_data, t.size) for t in tar]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b"", r"a\.tar is empty \(0 bytes\), as a full disk"),
        (b"PAR1" + bytes(2_000), r"a\.tar is no tar: it is parquet"),
        (b"PK\x03\x04" + bytes(2_000), r"no tar: it is a zip archive"),
        (b"<!DOCTYPE html>" + b" " * 2_000, r"no tar: it is an HTML or XML page"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"no tar: it is a Git LFS pointer"),
        (b"\x28\xb5\x2f\xfd" + bytes(2_000), r"no tar: it is zstd"),
        (b"0123456789" * 100, r"no tar: it begins with b'01234567'"),
        (TAR[:100], r"no tar"),
        (TAR[: 3 * BLOCK + 5], r"ends at byte 1,541 inside its member '0002\.txt', which goes to 2,236"),
        (TAR[:1_024], r"ends at byte 1,024 without an end mark; the last whole member is '0001\.txt'"),
        (TAR[:600], r"ends at byte 600 without an end mark|goes on at|last whole member is '0001"),
        (TAR[: 2 * BLOCK + 100], r"ends at byte 1,124 without an end mark; the last whole member is '0001\.txt'"),
        (TAR[:END], r"without an end mark; the last whole member is '0003\.txt'.*head -c 1024 /dev/zero"),
        (TAR[:END] + b"\1" * 512 + bytes(1_024), r"damaged at byte 3,072: .*the last whole member is '0003\.txt'"),
        (TAR[: 2 * BLOCK] + b"x" + TAR[2 * BLOCK + 1 :], r"damaged at byte 1,024: .*last whole member is '0001\.txt'"),
        (TAR + TAR, r"goes on at byte 10,240, after its end mark at 3,072 .*joined by `cat`"),
        (bytes(20_480), r"a\.tar is 20,480 bytes of zeros, as a download or a disk leaves a hole"),
        (gzip.compress(bytes(1 << 21)), r"is 2,097,152 bytes of zeros"),
        (bytes(20_000) + TAR, r"goes on at byte 20,000, after its end mark at 0 .*left a hole"),
        (gzip.compress(TAR)[:-20], r"a\.tar is not whole gzip"),
    ],
)
def test_b9_b18_a_broken_tar_says_where_it_broke(tmp_path: Path, broken: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path / "a.tar", broken)


@pytest.mark.parametrize("whole", [TAR[: END + BLOCK], TAR[: END + 2 * BLOCK], TAR, TAR + bytes(1 << 20)])
def test_one_block_of_zeros_ends_a_tar_and_more_may_follow(tmp_path: Path, whole: bytes) -> None:
    assert [member.name for member, _ in read(tmp_path / "a.tar", whole)] == [name for name, _ in FILES]


def test_an_archive_of_nothing_is_legal(tmp_path: Path) -> None:
    assert read(tmp_path / "a.tar", tar_of([])) == []


@given(cut=st.integers(0, END - 1))
def test_b9_no_cut_before_the_end_mark_looks_whole(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    with pytest.raises(InputError):
        read(tmp_path_factory.getbasetemp() / "cut.tar", TAR[:cut])


def entry(edit: Callable[[tarfile.TarInfo], None], form: Literal[1, 2], data: bytes = b"") -> bytes:
    """One member whose header was edited, without an end mark."""
    info = tarfile.TarInfo("1.txt")
    edit(info)
    return info.tobuf(form) + data + bytes(-len(data) % BLOCK)


def raw_entry(kind: bytes, data: bytes, size: int | None = None) -> bytes:
    """A header of this type with any payload."""
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, len(data) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % BLOCK)


def test_sizes_beyond_eight_gib_are_read_from_either_form(tmp_path: Path) -> None:
    def large(info: tarfile.TarInfo) -> None:
        info.size = 9 << 30

    forms: tuple[Literal[1], Literal[2]] = (1, 2)  # GNU, pax
    for form in forms:
        with pytest.raises(InputError, match=r"inside its member '1\.txt', which goes to 9,663,67\d,\d{3}"):
            read(tmp_path / "a.tar", entry(large, form) + TAR)


def test_a_global_header_counts_for_all_that_follow(tmp_path: Path) -> None:
    record = b"18 comment=a tree\n"
    assert len(record) == 18
    found = read(tmp_path / "a.tar", raw_entry(tarfile.XGLTYPE, record) + TAR)
    assert [member.name for member, _ in found] == [name for name, _ in FILES]


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (raw_entry(tarfile.XHDTYPE, b"no record"), r"damaged at byte 0: a pax header holds b'no record'"),
        (raw_entry(tarfile.XHDTYPE, b"99 path=short\n"), "a pax header holds"),
        (raw_entry(tarfile.XHDTYPE, b"15 size=-00001\n"), r"claims -1 bytes"),
        (raw_entry(tarfile.XHDTYPE, b"26 size=99999999999999999\n"), r"claims 99,999,999,999,999,999 bytes"),
        (raw_entry(tarfile.XHDTYPE, b"22 GNU.sparse.major=1\n"), r"member '0001\.txt' of a\.tar .*is sparse"),
        (raw_entry(tarfile.GNUTYPE_SPARSE, b""), r"member 'header' of a\.tar .*is sparse"),
        (raw_entry(tarfile.GNUTYPE_LONGNAME, b"", size=1 << 40), r"extended header claims 1,099,511,627,776 bytes"),
    ],
)
def test_headers_that_cannot_be_followed_are_refused(tmp_path: Path, headers: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path / "a.tar", headers + TAR)


def test_a_long_name_without_its_member_is_refused(tmp_path: Path) -> None:
    lonely = raw_entry(tarfile.GNUTYPE_LONGNAME, b"long.txt\0")
    with pytest.raises(InputError, match=r"damaged at byte 0: a long name has no member"):
        read(tmp_path / "a.tar", lonely + bytes(1_024))
    with pytest.raises(InputError, match=r"inside an extended header"):
        read(tmp_path / "a.tar", lonely[: BLOCK + 3])


def test_nothing_outside_the_tar_is_touched(tmp_path: Path) -> None:
    data = tar_of([("../../up.txt", b"up"), ("/tmp/abs.txt", b"abs")])
    assert [member.kind for member, _ in read(tmp_path / "a.tar", data)] == [FILE, FILE]
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
