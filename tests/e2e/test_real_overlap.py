"""Flickr8k beside the 31,014 photos of Flickr30k that Multi30k has: what they share, and leaving it out. Skipped without the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from catalog.lake import lake
from catalog.overlap.comparison import Kind, compare
from catalog.rows import overlaps
from infra.home import Home, resolve
from infra.session import open_workers
from pipelines.ingest.commands import build_request
from pipelines.ingest.job import IngestOutcome, ingest

REAL = Path(os.environ.get("GOODVIEWS_REAL_DATA", Path(__file__).parents[3] / "shared" / "data"))
SPLIT_LISTS = [f"Flickr_8k.{split}Images.txt" for split in ("train", "dev", "test")]


def run(home: Home, source: str, paths: list[Path], dataset: str, *sets: str) -> IngestOutcome:
    request = build_request(source, [str(path) for path in paths], dataset, None, ["views=", *sets], 0.2)
    with open_workers(address=None, num_cpus=0) as workers:
        return ingest(request, home, workers)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    eight = [REAL / "flickr8k" / name for name in ("Flickr8k.token.txt.gz", *SPLIT_LISTS)]
    if not all(path.exists() for path in (*eight, REAL / "multi30k")):
        pytest.skip(f"the real data is not at {REAL} (set GOODVIEWS_REAL_DATA)")
    made = resolve(str(tmp_path_factory.mktemp("home")))
    run(made, "flickr8k", eight, "flickr8k")
    run(made, "multi30k", [REAL / "multi30k"], "multi30k")
    return made


def kinds(home: Home, left: str, right: str) -> dict[str, Kind]:
    return {kind.kind: kind for kind in compare(home, left, right).kinds}


def by_split(kind: Kind) -> dict[tuple[str, str], int]:
    return {(pair.left_split, pair.right_split): pair.left_scenes for pair in kind.by_split}


def test_flickr8k_is_inside_flickr30k_with_other_splits(home: Home) -> None:
    found = compare(home, "flickr8k", "multi30k")
    overlaps.record(home, found)
    id_ = next(kind for kind in found.kinds if kind.kind == "id")
    assert (id_.shared, id_.left.scenes, id_.right.scenes, id_.left.total) == (7_478, 7_478, 7_478, 8_091)
    splits = by_split(id_)
    assert sum(splits.values()) == 7_478
    assert splits["test", "train"] == 871
    assert (splits["train", "test"], splits["val", "test"]) == (173, 36)
    with lake.reading(home) as reader:
        query = "SELECT shared, left_share FROM overlap_counts WHERE kind = 'id'"
        assert reader.rows(query) == [(7_478, 7_478 / 8_091)]


def test_the_captions_of_most_shared_photos_are_the_same(home: Home) -> None:
    found = kinds(home, "flickr8k", "multi30k")
    # Blanks count in `id_and_captions`: 256 photos differ in `onstage`, `close up` and the like.
    assert found["id_and_captions"].shared == 6_758
    assert found["id_and_letters"].shared == 7_014
    # 5 of these have `&amp;` on one side. As the files stand, letter by letter, they are the 7,009 that were counted there.
    run(home, "multi30k", [REAL / "multi30k"], "as-it-stands", "clean.html_entities=false")
    assert kinds(home, "flickr8k", "as-it-stands")["id_and_letters"].shared == 7_009


def test_what_is_evaluated_on_is_left_out(home: Home) -> None:
    outcome = run(home, "multi30k", [REAL / "multi30k"], "clean", 'exclude.sets=["flickr8k:test"]')
    assert sum(outcome.excluded.values()) == 871 + 30 + 28 == 31_014 - outcome.scenes
    assert outcome.texts_read == 155_070 == outcome.texts_kept + sum(outcome.rejects.values())
    left = kinds(home, "flickr8k:test", "clean")
    assert (left["id"].shared, left["caption_set"].shared, left["caption"].shared) == (0, 0, 64)
    with lake.reading(home) as reader:
        query = (
            "SELECT count(DISTINCT scene_key), count(*) FROM rejects WHERE dataset = 'clean' AND reason = 'excluded'"
        )
        assert reader.rows(query) == [(929, outcome.rejects["excluded"])]
        query = "SELECT config->>'$.exclude.sets[0].dataset', rejects FROM jobs WHERE dataset = 'clean'"
        assert reader.rows(query) == [("flickr8k", sum(outcome.rejects.values()))]
