"""The public files as they are: counts measured on them, and every text accounted for. Skipped where they are absent."""

import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from infra.home import resolve
from infra.session import open_workers
from pipelines.commands import build_request
from pipelines.ingest import Outcome, ingest

REAL = Path(os.environ.get("GOODVIEWS_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))


def real(*names: str) -> list[str]:
    paths = [REAL / name for name in names]
    if not all(p.exists() for p in paths):
        pytest.skip(f"the real data is not at {REAL} (set GOODVIEWS_REAL_DATA)")
    return [str(p) for p in paths]


def run(source: str, paths: list[str], home: Path, sets: list[str] | None = None, budget: float = 0.2) -> Outcome:
    request = build_request(source, paths, source, None, sets or [], budget)
    with open_workers(address=None, num_cpus=0) as workers:
        outcome = ingest(request, resolve(str(home)), workers)
    assert outcome.texts_read == outcome.texts_kept + sum(outcome.rejects.values())
    return outcome


def table(outcome: Outcome, kind: str) -> pa.Table:
    return ds.dataset(Path(outcome.url) / kind, format="parquet").to_table()


def captions_before_cleaning(outcome: Outcome) -> Counter[int]:
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
