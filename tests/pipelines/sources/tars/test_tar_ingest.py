"""Tars through the whole job: what is kept, what is rejected and why, and what comes back out of our own tars."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from catalog.versions.audit import verify
from infra import storage
from infra.errors import InputError, IntegrityError, RejectBudgetError
from infra.home import Home, resolve
from infra.session import open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest
from pipelines.records import Input
from pipelines.sources.tars.webdataset_tars import WebdatasetTars
from tests.pipelines.sources.tar_files import picture, tar_of, write_img2dataset, write_tar, write_webdataset


def run(source: str, paths: list[str], home: Home, sets: list[str] | None = None, budget: float = 1.0) -> IngestOutcome:
    request = build_request(source, paths, source, None, sets or [], budget)
    with open_workers(address=None, num_cpus=0) as workers:
        outcome = ingest(request, home, workers)
    assert outcome.texts_read == outcome.texts_kept + sum(outcome.rejects.values())
    return outcome


def table(outcome: IngestOutcome, kind: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = ds.dataset(Path(outcome.url) / kind, format="parquet").to_table().to_pylist()
    assert rows
    return rows


def captions(outcome: IngestOutcome) -> dict[str, list[tuple[str, str]]]:
    """(role, text) of each scene by key."""
    return {s["scene_key"]: [(c["role"], c["text"]) for c in s["captions"]] for s in table(outcome, "scenes")}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return resolve(str(tmp_path / "home"))


def test_every_bad_text_of_a_tar_is_a_reject_with_its_reason_and_place(tmp_path: Path, home: Home) -> None:
    """A8, A10, A12: missing, empty and broken texts have a reason; the others of the tar stay with their pictures."""
    samples: dict[str, list[tuple[str, bytes]]] = {
        "a": [("jpg", picture(1)), ("txt", b"a cat")],
        "b": [("jpg", picture(2))],
        "c": [("jpg", picture(3)), ("txt", b"")],
        "d": [("txt", b"nan")],
        "e": [("txt", b"a caf\x92")],
        "f": [("json", b"{'caption': 'no json'}")],
        "g": [("json", b'{"captions": ["a dog", "a dog", "A dog!", null, 3]}')],
    }
    members = [(f"{key}.{suffix}", data) for key, parts in samples.items() for suffix, data in parts]
    outcome = run("webdataset", [str(write_tar(tmp_path / "in" / "zoo.tar", members))], home)
    assert outcome.rejects == {
        "exact_repeat": 1,
        "invalid_utf8": 1,
        "malformed_record": 2,
        "missing_text": 4,
        "normalised_repeat": 1,
    }
    rejects = table(outcome, "rejects")
    assert {(r["source_uri"], r["source_row"], r["reason"]) for r in rejects if r["field"] in ("txt", "json")} == {
        ("zoo.tar", 1, "missing_text"),
        ("zoo.tar", 2, "missing_text"),
        ("zoo.tar", 3, "missing_text"),
        ("zoo.tar", 4, "invalid_utf8"),
        ("zoo.tar", 5, "malformed_record"),
    }
    (bytes_row,) = [r for r in rejects if r["reason"] == "invalid_utf8"]
    assert bytes_row["detail"] == "byte 0x92 at offset 5" and bytes_row["raw"] == b"a caf\x92"
    assert sorted(s["source_id"] for s in table(outcome, "scenes")) == ["zoo.tar#a", "zoo.tar#g"]
    assert verify(home).problems == []


def test_b10_a_lenient_reader_cannot_drop_nearly_everything(tmp_path: Path, home: Home) -> None:
    members = [("0.txt", b"a cat"), *((f"{n}.jpg", picture(n)) for n in range(1, 9))]
    path = write_tar(tmp_path / "in" / "a.tar", members)
    with pytest.raises(RejectBudgetError, match=r"8 of 9 texts .*missing_text 8"):
        run("webdataset", [str(path)], home, budget=0.5)


def test_our_own_good_and_bad_tars_read_back_as_the_scenes_that_they_are(tmp_path: Path, home: Home) -> None:
    sets = ["source.scenes=60", "source.image_px=16", "source.defects=0", "scenes_per_shard=20"]
    made = run("toyworld", [], home, sets)
    back = run("webdataset", [f"{made.url}/views/good"], home)
    assert captions(back) == captions(made) and len(captions(made)) == 60
    pictures = {s["scene_key"]: s["images"][0]["sha256"] for s in table(made, "scenes")}
    assert {s["scene_key"]: s["images"][0]["sha256"] for s in table(back, "scenes")} == pictures
    splits = {s["scene_key"]: s["split"] for s in table(made, "scenes")}
    assert {s["scene_key"]: s["split"] for s in table(back, "scenes")} == splits and len(set(splits.values())) == 3
    bad = run("webdataset", [f"{made.url}/views/bad"], home)
    kept = {key: {text for _, text in texts} for key, texts in captions(bad).items()}
    assert kept == {key: {text for _, text in texts} for key, texts in captions(made).items()}
    assert verify(home).problems == []


def test_hashed_keys_and_frames_of_our_own_tars_read_back_as_they_are(tmp_path: Path, home: Home) -> None:
    """A scene named by a url has a hashed key, which must not be hashed again; 70 frames are one record of texts."""
    samples = [
        (f"clip {n}/0", [*((f"f{k:03d}.jpg", picture(k + n)) for k in range(70)), ("txt", b"a dog runs %d" % n)])
        for n in range(2)
    ]
    members = [(f"{key}.{suffix}", data) for key, parts in samples for suffix, data in parts]
    write_tar(tmp_path / "in" / "val" / "0.tar", members)
    made = run("webdataset", [str(tmp_path / "in")], home, ["views=good,bad"])
    assert made.rejects == {} and len(captions(made)) == 2
    assert all(key.startswith("h-") for key in captions(made))
    back = run("webdataset", [f"{made.url}/views/good"], home)
    bad = run("webdataset", [f"{made.url}/views/bad/pass-00"], home)
    assert captions(made) == captions(back) == captions(bad)
    frames = {
        outcome.version: {
            s["scene_key"]: [(i["sha256"], i["frame"], i["width"]) for i in s["images"]]
            for s in table(outcome, "scenes")
        }
        for outcome in (made, back)
    }
    assert frames[made.version] == frames[back.version]
    assert [frame for _, frame, _ in next(iter(frames[back.version].values()))] == list(range(70))
    assert {s["split"] for s in table(back, "scenes")} == {"val"}
    assert verify(home).problems == []


def test_one_picture_in_too_many_samples_is_still_an_oversized_group(tmp_path: Path, home: Home) -> None:
    members = [(f"{n}.json", json.dumps({"caption": f"text {n}", "sha256": "ab" * 32}).encode()) for n in range(65)]
    path = write_tar(tmp_path / "in" / "a.tar", [*members, ("x.txt", b"a dog")])
    outcome = run("webdataset", [str(path)], home)
    assert outcome.rejects == {"oversized_group": 65} and len(captions(outcome)) == 1
    assert {r["detail"] for r in table(outcome, "rejects")} == {"65 records, at most 64"}


def test_img2dataset_and_webdataset_give_one_picture_one_key(tmp_path: Path, home: Home) -> None:
    folder = write_img2dataset(tmp_path / "in")
    full = run("img2dataset", [str(folder)], home)
    assert full.rejects == {"missing_image": 2, "missing_text": 1} and full.scenes == 14
    plain = run("webdataset", [str(folder / "*.tar")], home)
    # One takes them in the order of keys, the other as they came.
    assert {k: sorted(t for _, t in c) for k, c in captions(plain).items()} == {
        k: sorted(t for _, t in c) for k, c in captions(full).items()
    }
    rejects = {r["source_id"]: (r["source_uri"], r["source_row"], r["detail"]) for r in table(full, "rejects")}
    url = "https://pictures.example/0/3.jpg"
    assert rejects[url] == ("00000.tar", 3, "failed_to_download: HTTP Error 404: Not Found")
    assert verify(home).problems == []


def test_a_picture_in_two_splits_is_refused(tmp_path: Path, home: Home) -> None:
    data = [("1.json", json.dumps({"caption": "a cat", "sha256": "ab" * 32}).encode())]
    for split in ("train", "val"):
        write_tar(tmp_path / "in" / f"{split}.tar", data)
    with pytest.raises(IntegrityError, match="abab"):
        run("webdataset", [str(tmp_path / "in")], home)


def test_tars_in_a_bucket_are_the_tars_on_disk(s3_home: Home, tmp_path: Path, read_whole: Any) -> None:
    folder = write_webdataset(tmp_path / "in")
    local = read_whole(WebdatasetTars(), folder / "train-0000.tar", folder / "val-0000.tar")
    bucket = s3_home.url.rsplit("/", 1)[0]
    for path in sorted(folder.iterdir()):
        storage.publish(f"{bucket}/in/{path.name}", [path.read_bytes()])
    source = WebdatasetTars()
    names = [path.name for path in sorted(folder.iterdir())]
    survey = source.survey([Input(uri=name, url=f"{bucket}/in/{name}") for name in names], None)
    records = [r for piece in survey.pieces for batch in source.read(piece) for r in batch.records.to_pylist()]
    assert records == local.records and len(records) == 7
    cut = (folder / "train-0000.tar").read_bytes()[:3_000]
    storage.publish(f"{bucket}/in/cut.tar", [cut])
    with pytest.raises(InputError, match=r"cut\.tar ends at byte 3,000"):
        source.survey([Input(uri="cut.tar", url=f"{bucket}/in/cut.tar")], None)


# --- the public files ---------------------------------------------------------------------------------------------

SAMPLES = {
    "clipretrieval_image1.tar": 4,
    "clipretrieval_image2.tar": 3,
    "clipretrieval_image3.tar": 2,
    "clipretrieval_image4.tar": 2,
    "wds_compressed.tar": 3,
    "wds_mpdata.tar": 100,
    "wds_tendata.tar": 100,
}


def test_all_public_tars_go_in_and_every_sample_is_accounted_for(real_data: Path, home: Home) -> None:
    outcome = run("webdataset", [str(real_data / "imgtext")], home)
    assert outcome.texts_read == sum(SAMPLES.values())
    assert dict(outcome.rejects) == {"missing_text": outcome.texts_read - 3}
    assert {s["source_uri"] for s in table(outcome, "scenes")} == {"wds_compressed.tar"}
    assert verify(home).problems == []


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_broken_copies_of_public_tars_are_refused(real_data: Path, tmp_path: Path, name: str) -> None:
    data = (real_data / "imgtext" / name).read_bytes()
    with tarfile.open(real_data / "imgtext" / name) as tar:
        last = tar.getmembers()[-1]
    path = tmp_path / "copy.tar"
    source = WebdatasetTars()
    for broken, message in (
        (data[: last.offset_data + last.size // 2], rf"inside its member '{last.name}'"),
        (data[: last.offset], "without an end mark"),
        (data[:512] + data[1_024:], "damaged at byte|without an end mark"),
        (b"\xff" * 512 + data[512:], "no tar"),
        (data + data, "joined by `cat`"),
        (b"", "is empty"),
    ):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=message):
            survey = source.survey([Input(uri="copy.tar", url=str(path))], None)
            assert [batch for piece in survey.pieces for batch in source.read(piece)]


def test_public_lists_of_urls_are_not_taken_for_what_was_fetched(real_data: Path, tmp_path: Path) -> None:
    for name in ("img2dataset_test_1000.parquet", "img2dataset_test_bbox.parquet", "img2dataset_sample_image.parquet"):
        listed = real_data / "imgtext" / name
        with pytest.raises(InputError, match="no file that this source reads"):
            build_request("img2dataset", [str(listed)], None, None, [], 1.0)
        shutil.copy(listed, tmp_path / "00000.parquet")
        request = build_request("img2dataset", [str(tmp_path)], None, None, [], 1.0)
        with pytest.raises(InputError, match=r"00000\.parquet is no metadata of img2dataset: .*Is it a list of URLs"):
            request.source.survey(request.inputs, None)


def test_public_pictures_with_public_texts_make_scenes(real_data: Path, tmp_path: Path, home: Home) -> None:
    """Real JPEG bytes under real alt texts, as img2dataset puts them together."""
    texts = pq.read_table(real_data / "imgtext" / "img2dataset_test_1000.parquet")["TEXT"].to_pylist()
    members: list[tuple[str, bytes]] = []
    for place, name in enumerate(sorted(SAMPLES)[:4]):
        with tarfile.open(real_data / "imgtext" / name) as tar:
            for entry in tar:
                opened = tar.extractfile(entry)
                assert opened is not None
                key = f"{place}{len(members):08d}"
                members += [(f"{key}.jpg", opened.read()), (f"{key}.txt", texts[len(members)].encode())]
    path = tmp_path / "in" / "00000.tar"
    path.parent.mkdir()
    path.write_bytes(tar_of(members))
    outcome = run("img2dataset", [str(path)], home)
    assert outcome.texts_read == outcome.scenes == 11
    assert all(s["images"][0]["width"] for s in table(outcome, "scenes"))
