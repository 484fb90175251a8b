"""`catalog.overlap.comparison`, `near`, `parts`, `overlap_rows` and the command: what two parts of the catalog share."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from typer.testing import CliRunner

from catalog.lake import lake
from catalog.overlap import near
from catalog.overlap.commands import app
from catalog.overlap.comparison import Comparison, Kind, compare
from catalog.overlap.identity import NO_BYTES
from catalog.overlap.parts import parse
from catalog.rows import overlaps
from catalog.versions import rebuild
from infra.errors import InputError, UsageError
from infra.home import Home
from tests.catalog.datasets import image, put_dataset


def kinds(found: Comparison) -> dict[str, Kind]:
    return {kind.kind: kind for kind in found.kinds}


def scenes(found: Comparison) -> dict[str, tuple[int, int, int]]:
    """Shared things, scenes on the left, scenes on the right; only of kinds that share something."""
    counts = {name: (k.shared, k.left.scenes, k.right.scenes) for name, k in kinds(found).items()}
    return {name: count for name, count in counts.items() if any(count)}


# --- what is shared -----------------------------------------------------------------------------------------------


def test_scenes_are_shared_by_photo_by_bytes_and_by_words(home: Home) -> None:
    put_dataset(
        home,
        "eight",
        {
            "a": ["A dog runs .", "Two dogs ."],
            "b": ["Only here", "And here"],
            "c": ["A close up", "x"],
            "d": ["alone"],
        },
        source="flickr8k",
        facts={
            "a": {"source_id": "1000268201_693b08cb0e.jpg"},
            "b": {"source_id": "1111111111_0123456789.jpg"},
            "c": {"source_id": "2222222222_0123456789.jpg"},
            "d": {"source_id": "3333333333_0123456789.jpg", **image("f" * 64)},
        },
    )
    put_dataset(
        home,
        "thirty",
        {
            "k": ["Two dogs.", "a DOG runs"],
            "l": ["Other words", "only here"],
            "m": ["A closeup", "x"],
            "n": ["y"],
            "o": ["Alone!"],
        },
        source="multi30k",
        split="test",
        facts={
            "k": {"source_id": "1000268201"},
            "l": {"source_id": "1111111111"},
            "m": {"source_id": "2222222222"},
            "n": {"source_id": "9999999999", **image("F" * 64)},
            "o": {"source_id": "8888888888"},
        },
    )
    found = compare(home, "eight", "thirty:test")
    assert scenes(found) == {
        "id": (3, 3, 3),
        "sha256": (1, 1, 1),
        "caption": (5, 4, 4),
        "caption_set": (1, 1, 1),
        "id_and_captions": (1, 1, 1),
        "id_and_letters": (2, 2, 2),
    }
    caption = kinds(found)["caption"]
    assert (caption.left.captions, caption.right.captions) == (5, 5)
    assert (caption.left.total, caption.left.share, caption.right.total, caption.right.share) == (4, 1.0, 5, 0.8)
    assert [(p.left_split, p.right_split, p.left_scenes, p.right_scenes) for p in caption.by_split] == [
        ("train", "test", 4, 4)
    ]
    assert found.notes == ()


def test_one_caption_of_many_scenes_counts_every_scene_once(home: Home) -> None:
    put_dataset(home, "left", {f"a{i}": ["a dog runs", "a dog runs!"] for i in range(7)}, source="flickr8k")
    put_dataset(home, "right", {f"b{i}": ["A dog runs."] for i in range(3)}, source="coco")
    found = kinds(compare(home, "left", "right"))["caption"]
    assert (found.shared, found.left.scenes, found.right.scenes) == (1, 7, 3)
    assert (found.left.captions, found.right.captions) == (14, 3)
    assert [(p.left_scenes, p.right_scenes) for p in found.by_split] == [(7, 3)]


def test_texts_of_signs_alone_are_nobodys_caption(home: Home) -> None:
    put_dataset(home, "left", {"a": ["...", "!"], "b": ["?"]})
    put_dataset(home, "right", {"x": ["!!!", "..."], "y": ["-"]}, source="coco")
    found = compare(home, "left", "right", near_from=0.5)
    assert scenes(found) == {}
    assert kinds(found)["caption"].left.known == 0


def test_ids_of_other_namespaces_are_unknown_and_not_different(home: Home) -> None:
    put_dataset(home, "photos", {"a": ["one"]}, source="multi30k", facts={"a": {"source_id": "36979"}})
    picture = {"source_id": "36979", **image(uri="000000036979.jpg")}
    put_dataset(home, "pictures", {"b": ["two"]}, source="coco", facts={"b": picture})
    put_dataset(home, "rows", {"c": ["three"]}, facts={"c": {"source_id": "in.json#0"}})
    found = compare(home, "photos", "pictures")
    assert scenes(found) == {}
    assert found.notes[0] == "ids cannot be compared: those of photos are flickr and those of pictures are coco"
    assert found.notes[1].startswith("images cannot be compared")
    for kind in ("id", "id_and_captions", "id_and_letters"):
        assert not kinds(found)[kind].is_known and kinds(found)[kind].left.known == 0
    rows = compare(home, "photos", "rows")
    assert not kinds(rows)["id"].is_known
    assert rows.notes[0] == "ids cannot be compared: those of rows name nothing outside it"


def test_a_picture_under_many_scenes_is_told_apart_and_no_bytes_are_no_picture(home: Home) -> None:
    texts = {f"a{i}": [f"thing {i}"] for i in range(6)}
    facts: dict[str, dict[str, Any]] = {f"a{i}": image("0" * 64) for i in range(4)}
    put_dataset(home, "web", texts, facts={**facts, "a4": image(NO_BYTES), "a5": image("1" * 64)})
    put_dataset(
        home,
        "test",
        {"x": ["u"], "y": ["v"], "z": ["w"]},
        source="coco",
        facts={"x": image("0" * 64), "y": image(NO_BYTES), "z": image("1" * 64)},
    )
    found = compare(home, "web", "test")
    assert scenes(found) == {"sha256": (1, 1, 1), "sha256_common": (1, 4, 1)}
    assert any("1 shared images stand under more than 3 scenes" in note for note in found.notes)


def test_an_older_version_is_compared_when_it_is_named(home: Home) -> None:
    put_dataset(home, "old", {"a": ["one"]}, version="a" * 16)
    put_dataset(home, "old", {"a": ["two"]}, version="b" * 16)
    put_dataset(home, "new", {"x": ["one"]}, source="coco")
    assert scenes(compare(home, "old", "new")) == {}
    assert scenes(compare(home, f"old@{'a' * 16}", "new"))["caption"] == (1, 1, 1)
    # The versions of one dataset can be compared too.
    assert scenes(compare(home, f"old@{'a' * 16}", "old")) == {"id": (1, 1, 1)}


# --- near ---------------------------------------------------------------------------------------------------------


def made_captions(seed: int, n: int) -> list[list[str]]:
    """Captions of 6 to 14 words of a vocabulary so large that they are near to none by chance."""
    draw = random.Random(seed)
    return [[f"w{draw.randrange(5000)}" for _ in range(draw.randint(6, 14))] for _ in range(n)]


def test_near_pairs_are_those_of_brute_force(home: Home) -> None:
    left = made_captions(1, 150)
    draw = random.Random(2)
    right = [[w if draw.random() > 0.08 else "changed" for w in caption] for caption in left] + made_captions(3, 50)
    texts = [{f"s{i}": [" ".join(words)] for i, words in enumerate(side)} for side in (left, right)]
    put_dataset(home, "left", texts[0])
    put_dataset(home, "right", texts[1], source="coco")

    def similarity(a: list[str], b: list[str]) -> float:
        one, other = set(near.shingles(" ".join(a))), set(near.shingles(" ".join(b)))
        return len(one & other) / len(one | other)

    threshold = 0.6
    best = [max(similarity(a, b) for b in right) for a in left]
    true = sum(value >= threshold for value in best)
    assert 60 < true < 140
    found = kinds(compare(home, "left", "right", near_from=threshold))["near"]
    assert found.threshold == threshold
    # None too many, and of those there are at least 19 in 20; above the threshold more.
    assert 0.95 * true <= found.left.scenes <= true
    assert found.left.captions == found.left.scenes


def test_equal_captions_are_near_and_the_order_of_words_counts(home: Home) -> None:
    put_dataset(home, "left", {"a": ["Man bites dog"], "b": ["Same here"], "c": ["Dog"]})
    put_dataset(home, "right", {"x": ["dog bites man"], "y": ["same HERE."], "z": ["Dog!"]}, source="coco")
    found = kinds(compare(home, "left", "right", near_from=0.9))["near"]
    assert (found.shared, found.left.scenes, found.right.scenes, found.left.known) == (2, 2, 2, 3)


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.7, 0.95])
def test_bands_are_as_long_as_they_may_be(threshold: float) -> None:
    rows = near.rows_a_band(threshold)

    def missed(length: int) -> float:
        return float((1 - threshold**length) ** (near.PERMUTATIONS // length))

    assert missed(rows) <= near.MISSED
    assert rows == 16 or missed(rows + 1) > near.MISSED


@pytest.mark.parametrize("threshold", [0, 1, -1, float("nan")])
def test_a_threshold_that_is_no_similarity_is_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match="lies between 0 and 1"):
        near.rows_a_band(threshold)


# --- names --------------------------------------------------------------------------------------------------------


def test_both_spellings_of_a_split_are_one() -> None:
    assert parse("a@b:test") == parse("a@b/test") == ("a", "b", "test")
    assert parse("a:test") == ("a", None, "test") and parse("a") == ("a", None, None)


@pytest.mark.parametrize("text", ["", ":test", "a@", "a:", "a:b:c", "@v", "a/b/c", "a@b@c"])
def test_another_grammar_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="DATASET"):
        parse(text)


def test_a_name_that_fits_nothing_ends_with_those_that_do(home: Home) -> None:
    put_dataset(home, "photos", {"a": ["one"]})
    put_dataset(home, "web", {"a": ["one"]})
    for word, sentence in {
        "foto": "no dataset 'foto'.* It holds photos, web",
        "photos:test": "no split 'test'. It has train",
        "photos@00": "no version '00' of photos. It holds 0123456789abcdef",
    }.items():
        with pytest.raises(InputError, match=sentence):
            compare(home, word, "web")


def test_a_part_and_itself_are_no_comparison(home: Home) -> None:
    put_dataset(home, "photos", {"a": ["one"]})
    for words in (("photos", "photos"), ("photos", "photos:train"), ("photos:train", "photos@0123456789abcdef:train")):
        with pytest.raises(UsageError, match="one holds the other"):
            compare(home, *words)


# --- catalog and command ------------------------------------------------------------------------------------------


@pytest.fixture
def two(home: Home) -> Home:
    put_dataset(home, "left", {"a": ["one word"], "b": ["two"]})
    put_dataset(home, "right", {"x": ["One word."]}, source="coco", split="test")
    return home


def rows(home: Home) -> list[tuple[Any, ...]]:
    with lake.reading(home) as reader:
        return reader.rows(
            "SELECT kind, left_dataset, right_split, shared, left_scenes, left_share, threshold FROM overlap_counts ORDER BY ALL"
        )


def test_comparing_again_replaces_the_rows_and_a_rebuild_keeps_them(two: Home) -> None:
    for _ in range(2):
        overlaps.record(two, compare(two, "left", "right:test"))
    before = rows(two)
    assert len(before) == 7
    assert ("caption", "left", "test", 1, 1, 0.5, None) in before
    for threshold in (0.7, 0.8, 0.8):
        overlaps.record(two, compare(two, "left", "right:test", near_from=threshold))
    assert len(rows(two)) == 9
    with lake.reading(two) as reader:
        query = "SELECT count(DISTINCT overlap_id), min(snapshot_id) > 0, count(created_at), count(code_version) FROM overlap_counts"
        assert reader.rows(query) == [(1, True, 9, 9)]
    kept = rows(two)
    done = rebuild.rebuild(two)
    assert (done.lost, rows(two)) == (None, kept)
    with lake.reading(two) as reader:
        assert reader.rows(query) == [(1, True, 9, 9)], "h5: the snapshot ids were lost"


def test_the_command_prints_json_or_a_table_and_records(two: Home) -> None:
    place = ["--home", two.url, "--catalog", two.catalog]
    done = CliRunner().invoke(app, ["left", "right:test", "--json", "--no-record", *place])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["kinds"]["caption"]["left"]["share"] == 0.5
    assert facts["kinds"]["caption"]["is_known"] is True and facts["kinds"]["sha256"]["is_known"] is False
    assert rows(two) == []
    table = CliRunner().invoke(app, ["left", "right:test", "--near", *place]).stdout
    assert "A = left@0123456789abcdef (2 scenes)" in table and "1 (50.0%)" in table
    # Unknown is no zero.
    assert next(line for line in table.splitlines() if line.startswith("sha256 ")).split() == ["sha256", *["-"] * 5]
    assert len(rows(two)) == 8


def test_a_memory_limit_that_is_none_is_refused(two: Home) -> None:
    with pytest.raises(UsageError, match="'much' is no size"):
        compare(two, "left", "right:test", memory_limit="much")
