from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from infra.errors import ConfigError, InputError
from pipelines.sources.formats import tar_samples
from pipelines.sources.tars.webdataset_tars import WebdatasetTars
from tests.pipelines.sources.tar_files import picture, read_bytes, tar_of, write_tar, write_webdataset

SOURCE = WebdatasetTars()
SHA = "ab" * 32
UID = "0123456789abcdef" * 2
FETCHED = {"key": "0001", "status": "success", "error_message": None, "url": "http://a.example/1"}
"""What img2dataset says in each json."""


def doc(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_samples_become_records_with_texts_split_and_picture(read_whole: Any, tmp_path: Path) -> None:
    folder = write_webdataset(tmp_path)
    whole = read_whole(SOURCE, folder / "train-0000.tar", folder / "val-0000.tar")
    assert len(whole.records) == 7 and len(whole.texts) == 13
    assert [r["split"] for r in whole.records] == ["train"] * 6 + ["val"]
    assert [r["source_row"] for r in whole.records] == [0, 1, 2, 3, 4, 5, 0]
    first = whole.records[0]
    assert first["source_id"] == "train-0000.tar#park/0000"
    assert first["image"] == picture(0) and (first["width"], first["height"]) == (8, 9)
    assert first["image_uri"] == "train-0000.tar/park/0000.jpg"
    assert first["image_sha256"] == hashlib.sha256(picture(0)).hexdigest()
    assert {t["role"] for t in whole.texts} == {"human"}
    notes = " ".join(whole.survey.notes)
    assert "train 1, val 1" in notes and "named by tar and key" in notes


@pytest.mark.parametrize(
    ("member", "content", "texts"),
    [
        ("txt", b" a cat ", [("txt", b" a cat ")]),
        ("caption.TXT", b"a cat", [("caption.txt", b"a cat")]),
        ("text", b"a cat", [("text", b"a cat")]),
        ("txt.gz", gzip.compress(b"a cat", mtime=0), [("txt.gz", b"a cat")]),
        ("json", doc(caption="a cat", text="other"), [("caption", b"a cat")]),
        ("json", doc(Captions=["a", "b"]), [("Captions[0]", b"a"), ("Captions[1]", b"b")]),
        ("json", doc(captions=[{"text": "a"}, {"caption": "b"}]), [("captions[0]", b"a"), ("captions[1]", b"b")]),
        ("json.gz", gzip.compress(doc(text="a cat"), mtime=0), [("text", b"a cat")]),
        # A8, A12: what is missing stays one absent text, which becomes a reject; B14: a null does not decide a type.
        ("json", doc(caption=None), [("caption", None)]),
        ("json", doc(captions=["a", None]), [("captions[0]", b"a"), ("captions[1]", None)]),
        ("json", doc(captions=[]), [("txt", None)]),
        ("json", doc(label=3), [("txt", None)]),
        ("json", b'{"caf\x92": 1}', [("txt", None)]),
        ("cls", b"3", [("txt", None)]),
        ("txt", b"", [("txt", b"")]),
        # A10: bytes pass as they are; cleaning names the offset.
        ("txt", b"a caf\x92", [("txt", b"a caf\x92")]),
        ("json", b'{"caption": "a caf\x92"}', [("caption", b"a caf\x92")]),
    ],
)
def test_the_texts_of_a_sample(read_whole: Any, tmp_path: Path, member: str, content: bytes, texts: Any) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"other"), ("1.jpg", picture(1)), (f"1.{member}", content)])
    whole = read_whole(SOURCE, path)
    assert whole.texts_of("a.tar#1") == texts
    assert all(text["broken"] is None for text in whole.texts)


def test_dotted_texts_are_in_the_order_of_their_numbers(read_whole: Any, tmp_path: Path) -> None:
    names = ["10.txt", "2.txt", "txt", "de.txt", "0.txt"]
    path = write_tar(tmp_path / "a.tar", [(f"k.{name}", name.encode()) for name in names])
    assert [field for field, _ in read_whole(SOURCE, path).texts_of("a.tar#k")] == [
        "txt",
        "0.txt",
        "2.txt",
        "10.txt",
        "de.txt",
    ]


@pytest.mark.parametrize(
    ("member", "content", "why"),
    [
        ("json", b'{"caption": "a c', "its json does not parse"),
        ("json", b"[1, 2]", "its json is a list, not an object"),
        ("json", doc(caption=7), "`caption` is a number, not a text"),
        ("json", doc(captions=["a", {"x": 1}]), r"`captions\[1\]` is an object"),
        ("txt.gz", gzip.compress(b"a cat", mtime=0)[:-4], "not whole gzip"),
        ("json.gz", b"no gzip", "not whole gzip"),
    ],
)
def test_what_does_not_parse_is_a_reject_with_its_reason(
    read_whole: Any, tmp_path: Path, member: str, content: bytes, why: str
) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"other"), (f"1.{member}", content)])
    whole = read_whole(SOURCE, path)
    broken = [t["broken"] for t in whole.texts if t["broken"] is not None]
    assert len(broken) == 1
    assert re.search(rf"^malformed_record: .*{why}", broken[0])


def test_a_text_beside_a_broken_json_is_rejected_with_it(read_whole: Any, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.json", b"{"), ("1.txt", b"a cat"), ("2.txt", b"a dog")])
    whole = read_whole(SOURCE, path)
    assert whole.ids == [None, "a.tar#2"]
    assert [(t["field"], t["text"]) for t in whole.texts] == [("txt", b"a cat"), ("txt", b"a dog")]
    assert whole.texts[0]["broken"].startswith("malformed_record: its json does not parse")


def test_texts_over_the_limit_are_rejects_and_never_in_memory(
    read_whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.sources.tars.tar_texts.TEXT_BYTES_MAX", 100)
    bomb = gzip.compress(bytes(10_000))
    assert len(bomb) <= 100
    path = write_tar(tmp_path / "a.tar", [("1.txt", b"x" * 101), ("2.txt.gz", bomb), ("3.txt", b"x" * 100)])
    whole = read_whole(SOURCE, path)
    assert [t["text"] for t in whole.texts] == [None, None, b"x" * 100]
    assert "more than" in whole.texts[0]["broken"] and "unpacks to more" in whole.texts[1]["broken"]


def test_named_texts_have_their_roles_and_absent_ones_are_absent(read_whole: Any, tmp_path: Path) -> None:
    members = [("1.json", doc(alt="Alt", cap="C")), ("1.txt", b"T"), ("2.json", doc(alt="Alt2")), ("2.txt", b"")]
    path = write_tar(tmp_path / "a.tar", members)
    whole = read_whole(WebdatasetTars(text="alt:alt, txt, cap:recap"), path)
    assert [(t["field"], t["role"], t["text"]) for t in whole.texts] == [
        ("alt", "alt", b"Alt"),
        ("txt", "human", b"T"),
        ("cap", "recap", b"C"),
        ("alt", "alt", b"Alt2"),
        ("txt", "human", b""),
        ("cap", "recap", None),
    ]
    assert whole.survey.columns == {"txt": "text:human", "json alt": "text:alt", "json cap": "text:recap"}


@pytest.mark.parametrize(
    ("json_", "id_"),
    [
        ({"sha256": SHA.upper(), "url": "http://a.example/1", "uid": "u"}, SHA),
        ({"sha256": "short", **FETCHED, "url": "HTTP://A.Example:80/1#x", "uid": "u"}, "http://a.example/1"),
        # Elsewhere an address may be of a page, and its pictures would become one scene.
        ({"url": "http://a.example/page", "uid": UID}, UID),
        ({"url": "http://a.example/page"}, "a.tar#sub.v1/0001"),
        ({"uid": UID, "key": "0001"}, UID),
        # Elsewhere it may be of a user, whose pictures would become one scene.
        ({"uid": 7}, "a.tar#sub.v1/0001"),
        ({"uid": "7"}, "a.tar#sub.v1/0001"),
        ({"uid": UID.upper()}, "a.tar#sub.v1/0001"),
        ({"key": "0001"}, "a.tar#sub.v1/0001"),
        ({"dataset": "toyworld", "scene_key": "toy-1", "sha256": SHA}, "toy-1"),
        ({"dataset": "Not Ours", "scene_key": "toy-1", "sha256": SHA}, SHA),
        ({"dataset": "shop", "scene_key": "Not Ours"}, "a.tar#sub.v1/0001"),
        ({"scene_key": "of somebody else"}, "a.tar#sub.v1/0001"),
    ],
)
def test_a3_a_scene_is_named_by_its_picture_and_never_by_the_key_alone(
    read_whole: Any, tmp_path: Path, json_: dict[str, Any], id_: str
) -> None:
    path = write_tar(tmp_path / "a.tar", [("sub.v1/0001.json", doc(caption="a cat", **json_))])
    whole = read_whole(SOURCE, path)
    assert whole.ids == [id_]
    if "sha256" in json_ and len(json_["sha256"]) == 64:
        assert whole.records[0]["image_sha256"] == SHA


def test_a3_joining_on_the_number_of_a_download_is_refused(read_whole: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'key' is the number of a row"):
        WebdatasetTars(id="key")
    own = write_tar(tmp_path / "own.tar", [("0001.txt", b"a cat")])
    assert read_whole(WebdatasetTars(id="__key__"), own).ids == ["0001"]
    path = write_tar(tmp_path / "theirs.tar", [("0001.json", doc(caption="a cat", **FETCHED))])
    with pytest.raises(InputError, match=r"img2dataset's.*holds url"):
        read_whole(WebdatasetTars(id="__key__"), path)


def test_a_named_id_that_is_absent_is_no_id(read_whole: Any, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.json", doc(text="a", n=7)), ("2.txt", b"b")])
    assert read_whole(WebdatasetTars(id="n"), path).ids == ["7", None]
    nowhere = read_whole(WebdatasetTars(id="number"), path)
    assert nowhere.ids == [None, None]
    assert any("none of the first 2 samples has a member or json field `number`" in n for n in nowhere.survey.notes)


def test_pieces_and_limits_read_the_same_records(
    read_whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_webdataset(tmp_path)
    paths = (folder / "train-0000.tar", folder / "val-0000.tar")
    whole = read_whole(SOURCE, *paths)
    assert len(whole.survey.pieces) == 2
    monkeypatch.setattr(tar_samples, "PIECE_BYTES", 1_024)
    parts = read_whole(SOURCE, *paths)
    assert len(parts.survey.pieces) == 7 and parts.survey.pieces[1].offset > 0
    assert (parts.records, parts.texts) == (whole.records, whole.texts)
    for limit in range(1, 8):
        assert read_whole(SOURCE, *paths, limit=limit).records == whole.records[:limit]


def test_a_gzipped_tar_is_the_same_tar(read_whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_webdataset(tmp_path) / "train-0000.tar"
    whole = read_whole(SOURCE, plain)
    packed = tmp_path / "train-0000.tgz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    monkeypatch.setattr(tar_samples, "PIECE_BYTES", 1_024)
    other = read_whole(SOURCE, packed)
    assert len(other.survey.pieces) == 6
    assert [r["image"] for r in other.records] == [r["image"] for r in whole.records]
    assert other.texts == whole.texts


def test_what_could_run_code_is_left_alone_and_named(read_whole: Any, tmp_path: Path) -> None:
    members = [("1.npy", b"n"), ("1.pkl", b"cos\nsystem\n"), ("1.pth", b"p"), ("1.pyd", b"p"), ("1.txt", b"a cat")]
    path = write_tar(tmp_path / "a.tar", members)
    whole = read_whole(SOURCE, path)
    assert len(whole.records) == 1
    assert any("not read: npy 1, pkl 1, pth 1, pyd 1" in note for note in whole.survey.notes)


@pytest.mark.parametrize("option", [{"split": "Not One"}, {"text": "a,,b"}, {"text": "a,a"}])
def test_options_that_mean_nothing_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"source\."):
        WebdatasetTars(**option)


def test_a_tar_without_any_text_is_refused_with_what_it_holds(inputs: Any, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.jpg", picture(1)), ("1.cls", b"1")])
    with pytest.raises(InputError, match=r"no caption\. Members by suffix: cls 1, jpg 1\."):
        SOURCE.survey(inputs(path), None)
    read = WebdatasetTars(text="cls").survey(inputs(path), None)
    assert read.columns["cls"] == "text:human"
    with pytest.raises(InputError, match=r"member `clss`.*Did you mean 'cls'"):
        WebdatasetTars(text="cls,clss").survey(inputs(path), None)


def test_long_names_are_whole(read_whole: Any, tmp_path: Path) -> None:
    """B11: pax and GNU headers carry names of any length, and nothing is cut."""
    key = "folder.v1/" + "k" * 300
    members = [(f"{key}1.txt", b"a"), (f"{key}2.txt", b"b"), ("caf\u00e9/1.txt", b"c")]
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        whole = read_whole(SOURCE, write_tar(tmp_path / "a.tar", members, form))
        assert whole.ids == [f"a.tar#{key}1", f"a.tar#{key}2", "a.tar#caf\u00e9/1"]


def test_entries_that_are_no_files_are_passed_over_and_counted(read_whole: Any, tmp_path: Path) -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            entry = tarfile.TarInfo("1.txt")
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    files = tar_of([("README", b"x"), ("d/._1.txt", b"x"), ("__meta__/1.txt", b"x"), ("1.txt", b"a cat")])
    path = tmp_path / "a.tar"
    path.write_bytes(sink.getvalue()[: 4 * 512] + files)
    whole = read_whole(SOURCE, path)
    assert whole.ids == ["a.tar#1"]
    (note,) = [note for note in whole.survey.notes if "passed over" in note]
    assert note.endswith("files whose name has no key and suffix 3, links 2, devices 1, folders 1")


# --- what is refused, or said -------------------------------------------------------------------------------------


def test_tars_without_a_sample_are_named_and_passed_over(read_whole: Any, inputs: Any, tmp_path: Path) -> None:
    one, nothing = write_tar(tmp_path / "a.tar", [("0.txt", b"a dog")]), write_tar(tmp_path / "b.tar", [])
    whole = read_whole(SOURCE, one, nothing)
    assert whole.ids == ["a.tar#0"] and [piece.input.uri for piece in whole.survey.pieces] == ["a.tar"]
    assert any("1 tars are whole, but hold no sample: b.tar" in note for note in whole.survey.notes)
    with pytest.raises(InputError, match=r"None of b\.tar holds a sample \(nothing at all\)"):
        SOURCE.survey(inputs(nothing), None)
    readme = write_tar(tmp_path / "c.tar", [("README", b"x")])
    with pytest.raises(InputError, match=r"None of b\.tar, c\.tar holds a sample \(files whose name .* 1\)"):
        SOURCE.survey(inputs(nothing, readme), None)


def own(dataset: str, key: str, text: str) -> tuple[str, bytes]:
    """A sample of a view tar of ours."""
    captions = [{"index": 0, "role": "human", "text": text}]
    return f"{key}.json", doc(dataset=dataset, scene_key=key, captions=captions)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (own("coco", "42", "a cat"), own("shop", "42", "red boots"), "1.tar holds coco, 2.tar holds shop"),
        (own("coco", "42", "a cat"), ("0.txt", b"a dog"), "1.tar holds coco, 2.tar holds samples of others"),
        (("0.json", doc(caption="x", sha256=SHA)), own("shop", "42", "a"), "samples of others, 2.tar holds shop"),
    ],
)
def test_scenes_of_several_datasets_are_not_one_by_their_keys(
    inputs: Any, read_whole: Any, tmp_path: Path, first: Any, second: Any, message: str
) -> None:
    paths = [write_tar(tmp_path / "1.tar", [first]), write_tar(tmp_path / "2.tar", [second])]
    with pytest.raises(InputError, match=f"not of one goodviews dataset: .*{message}.*source.id=scene_key"):
        SOURCE.survey(inputs(*paths), None)
    # Packed into one tar, they are met when they are read.
    both = write_tar(tmp_path / "3.tar", [first, ("x" + second[0], second[1])])
    with pytest.raises(InputError, match=r"The sample 'x.*' of 3\.tar is of .*Equal scene keys of two datasets"):
        read_whole(SOURCE, both)


def test_equal_keys_of_two_datasets_are_one_scene_when_asked_for(read_whole: Any, tmp_path: Path) -> None:
    hashed = "h-" + "a" * 32
    paths = [
        write_tar(tmp_path / f"{name}.tar", [own(name, "42", name), own(name, hashed, "x")])
        for name in ("coco", "coco2")
    ]
    assert read_whole(WebdatasetTars(id="scene_key"), *paths).ids == ["42", f"scene_key:{hashed}"] * 2


def test_a_broken_first_sample_does_not_hide_whose_the_tar_is(read_whole: Any, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "1.tar", [("1.json", b"{"), own("coco", "42", "a cat")])
    whole = read_whole(SOURCE, path)
    assert whole.ids == [None, "42"] and [t["broken"] is None for t in whole.texts] == [False, True]


def test_a_uid_of_another_form_is_named(inputs: Any, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{n}.json", doc(uid=7, caption=f"text {n}")) for n in range(3)])
    (note,) = [note for note in SOURCE.survey(inputs(path), None).notes if "named by tar and key" in note]
    assert "3 of the first 3 samples" in note and "`--set source.id=uid`" in note
    assert not any("uid" in note for note in WebdatasetTars(id="uid").survey(inputs(path), None).notes)


def test_texts_of_a_json_that_are_not_read_are_named(inputs: Any, tmp_path: Path) -> None:
    members = [
        ("0.json", doc(captions=["one two", "three four"])),
        ("0.txt", b"five"),
        ("1.json", doc(caption="same")),
        ("1.txt", b" same\n"),
    ]
    path = write_tar(tmp_path / "a.tar", members)
    (note,) = [note for note in SOURCE.survey(inputs(path), None).notes if "not read" in note]
    assert "1 of the first 2 samples" in note and "`captions`" in note and "`--set source.text=txt,captions`" in note
    assert not any("not read" in n for n in WebdatasetTars(text="txt,captions").survey(inputs(path), None).notes)


# --- limits and bytes ---------------------------------------------------------------------------------------------


def test_a_survey_reads_headers_and_not_pictures(inputs: Any, tmp_path: Path) -> None:
    large = [(f"{n}.{end}", data) for n in range(200) for end, data in (("bin", bytes(50_000)), ("txt", b"a dog"))]
    path = write_tar(tmp_path / "a.tar", large)
    files = inputs(path)
    SOURCE.survey(files, None)
    before = read_bytes()
    assert sum(piece.stop for piece in SOURCE.survey(files, None).pieces) == 200
    assert read_bytes() - before < path.stat().st_size / 10


def test_a_limit_ends_the_survey(inputs: Any, tmp_path: Path) -> None:
    paths = [write_tar(tmp_path / f"{n}.tar", [(f"{k}.txt", b"a dog") for k in range(3)]) for n in range(9)]
    paths[8].write_bytes(b"not a tar")
    survey = SOURCE.survey(inputs(*paths), 4)
    assert [(p.input.uri, p.start, p.stop) for p in survey.pieces if p.input] == [("0.tar", 0, 3), ("1.tar", 0, 1)]
    cut = paths[0].read_bytes()[: 2 * 1_024 + 300]
    paths[0].write_bytes(cut)
    assert SOURCE.survey(inputs(paths[0]), 1).pieces[0].stop == 1
    with pytest.raises(InputError, match=r"0\.tar"):
        SOURCE.survey(inputs(paths[0]), None)
