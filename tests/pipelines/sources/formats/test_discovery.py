from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from infra import storage
from infra.errors import InputError
from pipelines.sources.formats.discovery import find_inputs


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of data, and files beside them that are none."""
    for name in (
        "b/2.parquet",
        "b/deep/3.parquet",
        "a/1.parquet",
        "a/_SUCCESS",
        "a/.hidden.parquet",
        ".git/config",
        "b/_temporary/0.parquet",
        "b/.2.parquet.9-ff.goodviews-tmp",
        "b/4.parquet.goodviews-tmp",
        "odd[1].parquet",
    ):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path / "data"


ALL = ["a/1.parquet", "b/2.parquet", "b/deep/3.parquet", "odd[1].parquet"]


def test_a_folder_is_the_files_below_it_without_the_hidden(tree: Path) -> None:
    root, inputs = find_inputs([str(tree)])
    assert root == str(tree)
    assert [i.uri for i in inputs] == ALL
    assert [i.url for i in inputs] == [str(tree / name) for name in ALL]


def test_files_are_named_from_the_deepest_folder_that_has_them_all(tree: Path) -> None:
    assert find_inputs([str(tree / "b/deep/3.parquet")])[1][0].uri == "3.parquet"
    root, inputs = find_inputs([str(tree / "b/deep/3.parquet"), str(tree / "b/2.parquet")])
    assert (root, [i.uri for i in inputs]) == (str(tree / "b"), ["2.parquet", "deep/3.parquet"])


def test_order_and_form_of_the_paths_do_not_matter(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    expected = find_inputs([str(tree / "a"), str(tree / "b")])
    assert [i.uri for i in expected[1]] == ["a/1.parquet", "b/2.parquet", "b/deep/3.parquet"]
    for paths in (
        ["b", "a"],
        ["./a/1.parquet", "a/../b", "a"],
        ["[ab]"],
        ["*/*.parquet", "**/3.parquet"],
        [f"file://{tree}/a", "b/"],
    ):
        assert find_inputs(paths) == expected


def test_a_path_that_exists_is_no_pattern(tree: Path) -> None:
    (tree / "odd1.parquet").write_bytes(b"x")
    assert [i.uri for i in find_inputs([str(tree / "odd[1].parquet")])[1]] == ["odd[1].parquet"]
    assert [i.uri for i in find_inputs([str(tree / "odd[0-9].parquet")])[1]] == ["odd1.parquet"]


def test_a_hidden_file_is_taken_when_it_is_named(tree: Path) -> None:
    assert find_inputs([str(tree / "a/.hidden.parquet")])[1][0].uri == ".hidden.parquet"
    assert [i.uri for i in find_inputs([str(tree / "a/_*")])[1]] == ["_SUCCESS"]
    assert [i.uri for i in find_inputs([str(tree / "a/*")])[1]] == ["1.parquet"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("*.csv", r"matches no file \(looked for .*\*\.csv\)\. The folder .* is there"),
        ("none/*.csv", "There is no folder .*none"),
        ("a/1.parqet", r"There is no file or folder .*1\.parqet\. Did you mean '1\.parquet'\?"),
        ("empty", "holds no files"),
        ("empt*", "holds no files"),
    ],
)
def test_d2_what_matches_nothing_is_refused_with_what_was_looked_for(tree: Path, path: str, message: str) -> None:
    (tree / "empty").mkdir()
    (tree / "empty" / ".keep").write_bytes(b"")
    with pytest.raises(InputError, match=message):
        find_inputs([str(tree / "a"), str(tree / path)])


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="No input was named"):
        find_inputs([])


def test_links_are_followed_as_files(tree: Path) -> None:
    os.symlink(tree / "a" / "1.parquet", tree / "b" / "link.parquet")
    assert "link.parquet" in [i.uri for i in find_inputs([str(tree / "b")])[1]]


@pytest.fixture
def remote() -> Iterator[str]:
    """A folder of an object store in memory."""
    fs = fsspec.filesystem("memory")
    for name in ("x/1.parquet", "x/y/2.parquet", "x/_SUCCESS", "z/3.parquet"):
        with fs.open(f"/bucket/{name}", "wb") as file:
            file.write(b"x")
    yield "memory://bucket"
    fs.rm("/bucket", recursive=True)


def test_urls_are_expanded_like_paths(remote: str) -> None:
    root, inputs = find_inputs([f"{remote}/x"])
    assert (root, [i.uri for i in inputs]) == (f"{remote}/x", ["1.parquet", "y/2.parquet"])
    _, inputs = find_inputs([f"{remote}/*/*.parquet"])
    assert [i.url for i in inputs] == [f"{remote}/x/1.parquet", f"{remote}/z/3.parquet"]
    with pytest.raises(InputError, match="matches no file"):
        find_inputs([f"{remote}/x/*.csv"])
    with pytest.raises(InputError, match=r"Did you mean '1\.parquet'"):
        find_inputs([f"{remote}/x/2.parquet"])


def test_inputs_of_two_stores_are_refused(remote: str, tree: Path) -> None:
    with pytest.raises(InputError, match="local files, memory://bucket"):
        find_inputs([f"{remote}/x", str(tree)])


def test_a_remote_file_is_read_as_a_local_one_is(remote: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pipelines.sources.tables.table import Table

    rows = {"caption": ["a", "b"]}
    with fsspec.open(f"{remote}/t/a.parquet", "wb") as file:
        pq.write_table(pa.table(rows), file)
    with fsspec.open(f"{remote}/t/b.csv", "wb") as file:
        file.write(b"caption\nc\n")
    inputs = find_inputs([f"{remote}/t"])[1]
    texts = [
        text
        for piece in Table().survey(inputs, None).pieces
        for batch in Table().read(piece)
        for text in batch.texts["text"].to_pylist()
    ]
    assert texts == [b"a", b"b", b"c"]


def test_a_zip_archive_stands_for_the_files_in_it_that_the_source_reads(tree: Path) -> None:
    with zipfile.ZipFile(tree / "set.zip", "w") as file:
        for name in ("in/5.parquet", "README.md", "__MACOSX/in/._5.parquet", "in/.6.parquet"):
            file.writestr(name, b"x")

    def reads(name: str) -> bool:
        return name.endswith(".parquet")

    names = [i.uri for i in find_inputs([str(tree)], reads)[1]]
    assert names == [*ALL, "set.zip/in/5.parquet"]
    named = find_inputs([str(tree / "set.zip")], reads)[1]
    assert [(i.uri, storage.read_bytes(i.url)) for i in named] == [("set.zip/in/5.parquet", b"x")]
    with pytest.raises(InputError, match=r"set\.zip is no file that this source reads, by its name, and holds none"):
        find_inputs([str(tree / "set.zip")], lambda name: name.endswith(".csv"))


def test_a_damaged_archive_in_a_folder_changes_nothing_and_a_named_one_fails(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reads(name: str) -> bool:
        return name.endswith(".parquet")

    (tree / "pictures.ZIP").write_bytes(b"PK\x03\x04 cut")
    assert [i.uri for i in find_inputs([str(tree)], reads)[1]] == ALL
    assert "pictures.ZIP is left out" in caplog.text
    with pytest.raises(InputError, match="is not a whole zip archive"):
        find_inputs([str(tree / "pictures.ZIP")], reads)


def test_an_archive_beside_what_was_unpacked_from_it_is_refused(tree: Path) -> None:
    with zipfile.ZipFile(tree / "all.zip", "w") as file:
        file.writestr("in/2.parquet", b"x")
    with pytest.raises(InputError, match=r"all\.zip/in/2\.parquet and b/2\.parquet have one name and one size"):
        find_inputs([str(tree)], lambda name: name.endswith(".parquet"))
    # Another size is another file, and so are two equal names without an archive.
    (tree / "b" / "2.parquet").write_bytes(b"xy")
    assert len(find_inputs([str(tree)], lambda name: name.endswith(".parquet"))[1]) == len(ALL) + 1
