"""The public files as they are: counts measured on them, and every text accounted for. Skipped where they are absent."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from infra.errors import InputError, RejectBudgetError
from infra.home import resolve
from infra.session import open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest

REAL = Path(os.environ.get("GOODVIEWS_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))


def real(*names: str) -> list[str]:
    paths = [REAL / name for name in names]
    if not all(p.exists() for p in paths):
        pytest.skip(f"the real data is not at {REAL} (set GOODVIEWS_REAL_DATA)")
    return [str(p) for p in paths]


def run(source: str, paths: list[str], home: Path, sets: list[str] | None = None, budget: float = 0.2) -> IngestOutcome:
    request = build_request(source, paths, source, None, sets or [], budget)
    with open_workers(address=None, num_cpus=0) as workers:
        outcome = ingest(request, resolve(str(home)), workers)
    assert outcome.texts_read == outcome.texts_kept + sum(outcome.rejects.values())
    return outcome


def table(outcome: IngestOutcome, kind: str) -> pa.Table:
    return ds.dataset(Path(outcome.url) / kind, format="parquet").to_table()


def captions_before_cleaning(outcome: IngestOutcome) -> Counter[int]:
    """Number of scenes by number of texts read, kept or not."""
    read: Counter[str] = Counter()
    for scene in table(outcome, "scenes").select(["scene_key", "captions"]).to_pylist():
        read[scene["scene_key"]] += len(scene["captions"])
    for reject in table(outcome, "rejects").to_pylist():
        read[reject["scene_key"]] += 1
    return Counter(read.values())


def test_multi30k(tmp_path: Path) -> None:
    outcome = run("multi30k", real("multi30k"), tmp_path)
    assert (outcome.scenes, outcome.texts_read) == (31_014, 155_070)
    splits = Counter(table(outcome, "scenes")["split"].to_pylist())
    assert splits == {"train": 29_000, "val": 1_014, "test": 1_000}
    # 34 images have equal captions, one of them three; 22 captions describe a picture that did not load.
    rejects = table(outcome, "rejects").to_pylist()
    assert len({r["scene_key"] for r in rejects if r["reason"] == "exact_repeat"}) == 34
    assert outcome.rejects == {"broken_picture": 22, "exact_repeat": 35, "normalised_repeat": 11}
    assert captions_before_cleaning(outcome) == {5: 31_014}


def test_a6_coco_val2017(tmp_path: Path) -> None:
    outcome = run("coco", real("coco/captions_val2017.json.gz"), tmp_path)
    assert (outcome.scenes, outcome.texts_read) == (5_000, 25_014)
    assert captions_before_cleaning(outcome) == {5: 4_987, 6: 12, 7: 1}
    # Case, a final period or white space make the ten: "A man blowing out candles on a cake", with and without period.
    assert outcome.rejects == {"exact_repeat": 4, "normalised_repeat": 10}
    texts = [c["text"] for s in table(outcome, "scenes")["captions"].to_pylist() for c in s]
    assert not any(t != t.strip() or "  " in t or "\n" in t for t in texts)


def test_laion_alt_texts_through_table(tmp_path: Path) -> None:
    paths = real("imgtext/img2dataset_test_10000.parquet")
    sets = ["source.text=TEXT:alt", "source.image=URL"]
    outcome = run("table", paths, tmp_path, sets)
    assert outcome.texts_read == 10_000
    assert outcome.scenes == outcome.texts_kept
    grouped = run("table", paths, tmp_path, [*sets, "source.id=URL"])
    # One URL stands twice.
    assert grouped.texts_read == 10_000
    assert len(set(table(grouped, "scenes")["scene_key"].to_pylist())) == grouped.scenes == 9_999


def captions_by_scene(outcome: IngestOutcome) -> dict[str, list[str]]:
    rows = table(outcome, "scenes").select(["scene_key", "captions"]).to_pylist()
    return {row["scene_key"]: [c["text"] for c in row["captions"]] for row in rows}


def test_flickr8k_token_file_and_kaggle_csv_give_the_same_scenes(tmp_path: Path) -> None:
    lists = [f"flickr8k/Flickr_8k.{split}Images.txt" for split in ("train", "dev", "test")]
    token = run("flickr8k", real("flickr8k/Flickr8k.token.txt.gz", *lists), tmp_path / "token")
    assert (token.texts_read, token.scenes) == (40_460, 8_091)
    assert token.rejects["malformed_record"] == 1 and token.rejects["missing_image"] == 4
    stray = [r for r in table(token, "rejects").to_pylist() if r["reason"] == "malformed_record"]
    assert [r["text"] for r in stray] == ["people waiting for the subway"] and ".jpg.1'" in stray[0]["detail"]
    splits = Counter(table(token, "scenes")["split"].to_pylist())
    assert splits == {"train": 6_000, "val": 1_000, "test": 1_000, "rest": 91}
    kaggle = run("flickr8k", real("flickr8k/captions_kaggle.txt.gz"), tmp_path / "kaggle")
    assert (kaggle.texts_read, kaggle.scenes) == (40_455, 8_091)
    assert captions_by_scene(kaggle) == captions_by_scene(token)


def test_msrvtt_out_of_its_zips(tmp_path: Path) -> None:
    archives = real("msrvtt/train_val_annotation.zip", "msrvtt/test_videodatainfo.json.zip")
    outcome = run("msrvtt", archives, tmp_path / "official")
    assert (outcome.scenes, outcome.texts_read) == (10_000, 200_000)
    assert outcome.rejects == {"exact_repeat": 14_632, "normalised_repeat": 16}
    splits = Counter(table(outcome, "scenes")["split"].to_pylist())
    assert splits == {"train": 6_513, "val": 497, "test": 2_990}
    assert captions_before_cleaning(outcome) == {20: 10_000}
    retrieval = run("msrvtt", [*archives, *real("msrvtt/MSRVTT_JSFUSION_test.csv")], tmp_path / "1ka")
    assert Counter(table(retrieval, "scenes")["split"].to_pylist()) == {"train": 9_000, "test": 1_000}
    assert retrieval.texts_read == 9_000 * 20 + 1_000
    assert any(note.startswith("372 of 1,000 test clips") for note in retrieval.notes)


@pytest.mark.parametrize(
    ("source", "path", "damage", "message"),
    [
        ("flickr8k", "flickr8k/Flickr8k.token.txt.gz", lambda d: d[: len(d) // 2], "is not whole gzip"),
        ("flickr8k", "flickr8k/captions_1000.txt", lambda d: d.replace(b",", b";"), "no caption file"),
        ("flickr8k", "flickr8k/captions_1000.txt", lambda d: d.replace(b".jpg", b""), "5,000 of 5,000 texts"),
        ("msrvtt", "msrvtt/train_val_annotation.zip", lambda d: d[: len(d) // 2], "is not a whole zip archive"),
        ("msrvtt", "msrvtt/MSRVTT_JSFUSION_test.csv", lambda d: d.replace(b";", b"|"), "no list of clips"),
        ("coco", "coco/captions_val2017.json.gz", lambda d: d[: len(d) // 2], "is not whole gzip"),
    ],
)
def test_a_broken_copy_fails_with_its_reason(
    source: str, path: str, damage: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    (whole,) = map(Path, real(path))
    copy = tmp_path / whole.name
    copy.write_bytes(damage(whole.read_bytes()))
    with pytest.raises((InputError, RejectBudgetError), match=message):
        run(source, [str(copy)], tmp_path / "home")
    assert not list((tmp_path / "home").rglob("job.json"))


def test_a_windows_byte_a_cut_caption_and_a_shifted_row_cost_their_texts_alone(tmp_path: Path) -> None:
    (whole,) = map(Path, real("flickr8k/captions_1000.txt"))
    lines = whole.read_bytes().splitlines(keepends=True)
    name, text = lines[1].rstrip().split(b",", 1)
    lines[1] = name + b",A child\x92s dress\n"
    lines[2] = name + b',"' + text[:10] + b"\n" + text[10:] + b'"\n'
    lines[3] = text + b"," + name + b"\n"
    copy = tmp_path / "captions.txt"
    copy.write_bytes(b"".join(lines))
    outcome = run("flickr8k", [str(copy)], tmp_path / "home")
    assert outcome.texts_read == 5_000
    assert outcome.rejects["invalid_utf8"] == 1 and outcome.rejects["malformed_record"] == 1
    assert " ".join(text.decode().split()) in captions_by_scene(outcome)[name.decode().removesuffix(".jpg")]
