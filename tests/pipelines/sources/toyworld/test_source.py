from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from PIL import Image

from infra.errors import ConfigError, InputError
from pipelines.records import Piece
from pipelines.sources.toyworld.camera import DRAWS as PICTURE_DRAWS
from pipelines.sources.toyworld.camera import picture
from pipelines.sources.toyworld.draws import Dice, uniforms
from pipelines.sources.toyworld.source import BATCH_SCENES, BROKEN_PICTURES, MOST_PIECES, Toyworld
from pipelines.sources.toyworld.states import COLOURS, KINDS, PLACES, RELATIONS, SIZES, SKIES, State, Thing, draw_states
from pipelines.sources.toyworld.writers import (
    COLOUR_WORDS,
    DRAWS,
    NOUNS,
    PLACE_WORDS,
    SKY_SENTENCES,
    SKY_WORDS,
    WRITERS,
    write,
)

TALES = Toyworld(scenes=400, images=False, defects=0.0)

GOLDEN = "108d7e9bc76142bafbe6a1e16fb3bc5032fa31640235c4a350f3cf27bd90ff2b"
"""sha256 of captions and states of a tiny world; it changes with `toyworld.WORLD`, and with nothing else."""


def states_of(whole: Any) -> list[dict[str, Any]]:
    return [json.loads(record["state"]) for record in whole.records]


def test_captions_and_states_are_frozen(read_whole: Any) -> None:
    whole = read_whole(Toyworld(scenes=25, images=False, defects=0.2, seed=3))
    lines = [record["state"] for record in whole.records] + [repr(text["text"]) for text in whole.texts]
    assert len(lines) == 25 + 125
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == GOLDEN


def test_a_scene_is_the_same_in_any_piece(read_whole: Any, read_pieces: Any) -> None:
    source = Toyworld(scenes=40)
    whole = read_whole(source)
    bounds = [0, 1, 2, 17, 39, 40]
    pieces = [Piece(input=None, start=a, stop=b, scenes_by_split={}) for a, b in pairwise(bounds)]
    assert read_pieces(source, pieces) == (whole.records, whole.texts)


def test_another_number_of_scenes_or_captions_leaves_the_others_as_they_were(read_whole: Any) -> None:
    few, many = read_whole(Toyworld(scenes=20, images=False)), read_whole(Toyworld(scenes=30, images=False, captions=7))
    assert many.records[:20] == few.records
    clean, more = (
        Toyworld(scenes=9, images=False, defects=0.0),
        Toyworld(scenes=9, images=False, defects=0.0, captions=7),
    )
    kept = [t for t in read_whole(more).texts if int(t["field"][8:-1]) < 5]
    assert kept == read_whole(clean).texts


def test_another_seed_is_another_world(read_whole: Any) -> None:
    one, two = read_whole(Toyworld(scenes=20)), read_whole(Toyworld(scenes=20, seed=1))
    assert sum(a["state"] == b["state"] for a, b in zip(one.records, two.records, strict=True)) <= 1
    assert all(a["image"] != b["image"] for a, b in zip(one.records, two.records, strict=True))


def test_records_say_all_of_a_scene(read_whole: Any) -> None:
    whole = read_whole(Toyworld(scenes=12, image_px=48))
    record = whole.records[7]
    assert (record["source_id"], record["source_uri"], record["source_row"]) == ("toy-0000007", "toyworld", 7)
    assert record["image_uri"] == "toy-0000007.jpg"
    assert record["image_sha256"] == hashlib.sha256(record["image"]).hexdigest()
    image = Image.open(io.BytesIO(record["image"]))
    assert (
        (image.format, image.mode, image.size)
        == ("JPEG", "RGB", (48, 48))
        == ("JPEG", "RGB", (record["width"], record["height"]))
    )
    assert "exif" not in image.info
    state = json.loads(record["state"])
    assert list(state) == sorted(state) and list(state["things"][0]) == sorted(state["things"][0])
    assert whole.texts_of("toy-0000007")[4][0] == "caption[4]"


def test_a_world_without_pictures_does_not_depend_on_pillow(read_whole: Any) -> None:
    assert set(Toyworld().writers) == {"toyworld", "pillow"} and set(Toyworld(images=False).writers) == {"toyworld"}
    record = read_whole(Toyworld(scenes=1, images=False)).records[0]
    assert record["image"] is None and record["image_uri"] is None and record["width"] is None


def test_splits_have_their_shares_and_the_survey_counts_them(read_whole: Any) -> None:
    source = Toyworld(scenes=3_000, images=False, captions=1, val=0.1, test=0.2)
    whole = read_whole(source)
    counts = Counter(record["split"] for record in whole.records)
    surveyed: Counter[str] = Counter()
    for piece in whole.survey.pieces:
        surveyed.update(piece.scenes_by_split)
    assert counts == surveyed
    # Three standard deviations of a binomial of 3,000 draws are 0.022 at most.
    assert abs(counts["val"] / 3_000 - 0.1) < 0.022 and abs(counts["test"] / 3_000 - 0.2) < 0.022


def test_a_large_world_has_few_pieces_and_a_small_one_enough_for_all_cpus() -> None:
    assert len(Toyworld(scenes=2 * BATCH_SCENES).survey([], None).pieces) == 2
    pieces = Toyworld(scenes=3_000_000, images=False).survey([], None).pieces
    assert len(pieces) <= MOST_PIECES and pieces[-1].stop == 3_000_000
    assert [piece.stop for piece in Toyworld(scenes=50).survey([], 7).pieces] == [7]


def test_all_values_of_all_attributes_occur() -> None:
    states = draw_states(0, np.arange(2_000))
    things = [thing for state in states for thing in state.things]
    assert {t.kind for t in things} == set(KINDS) and {t.colour for t in things} == set(COLOURS)
    assert {t.size for t in things} == set(SIZES) and {t.count for t in things} == {1, 2, 3}
    assert {s.place for s in states} == set(PLACES) and {s.sky for s in states} == set(SKIES)
    assert {r for s in states for r in s.relations} == set(RELATIONS)
    assert {len(s.things) for s in states} == {1, 2, 3}
    assert len(set(states)) > 1_950
    for state in states:
        assert len(set(state.relations)) == len(state.relations) == len(state.things) - 1
        assert len({t.kind for t in state.things}) == len(state.things)


def test_captions_differ_within_a_scene_and_have_the_length_of_real_ones(read_whole: Any) -> None:
    whole = read_whole(TALES)
    texts = [text["text"].decode() for text in whole.texts]
    assert len(texts) == 2_000
    distinct = [len(set(texts[start : start + 5])) for start in range(0, 2_000, 5)]
    assert sum(distinct) > 0.995 * 2_000
    lengths = np.array([len(text.split()) for text in texts])
    assert lengths.min() >= 4 and lengths.max() <= 50
    assert 10 <= lengths.mean() <= 18
    assert np.mean((lengths >= 5) & (lengths <= 25)) > 0.9


def words(state: dict[str, Any], text: str) -> dict[str, bool]:
    """Which attributes of the first group and of the scene a caption tells."""
    first, low = state["things"][0], text.lower()
    return {
        "kind": any(form in low for forms in NOUNS[first["kind"]] for form in forms),
        "colour": any(word in low for word in COLOUR_WORDS[first["colour"]]),
        "place": any(word in low for word in PLACE_WORDS[state["place"]]),
        "sky": any(word in low for word in (*SKY_WORDS[state["sky"]], *SKY_SENTENCES[state["sky"]])),
    }


def test_captions_tell_most_of_the_state_and_each_writer_leaves_something_out(read_whole: Any) -> None:
    whole = read_whole(TALES)
    states = states_of(whole)
    told = [words(states[text["record"]], text["text"].decode()) for text in whole.texts]
    shares = {name: np.mean([t[name] for t in told]) for name in ("kind", "colour", "place", "sky")}
    # Slips of the pen hide a few words.
    assert shares["kind"] > 0.97 and shares["colour"] > 0.8 and shares["place"] > 0.8
    assert 0.4 < shares["sky"] < 0.8


def test_captions_tell_nothing_that_is_not_so() -> None:
    draws = uniforms(5, "test", np.arange(len(WRITERS) * 200), DRAWS).tolist()
    states = draw_states(5, np.arange(200))
    for number, state in enumerate(states):
        kinds = {thing.kind for thing in state.things}
        for place, writer in enumerate(WRITERS):
            text = write(writer, state, Dice(draws[number * len(WRITERS) + place])).lower()
            tokens = set(text.replace(",", " ").replace(".", " ").split())
            for kind in set(KINDS) - kinds:
                assert not tokens & {form for forms in NOUNS[kind] for form in forms if " " not in form}, (kind, text)
            for sky in set(SKIES) - {state.sky}:
                assert not any(phrase in text for phrase in SKY_WORDS[sky]), (sky, text)
            for where in set(PLACES) - {state.place}:
                assert not any(phrase in text for phrase in PLACE_WORDS[where]), (where, text)


def test_the_wording_depends_on_writer_and_draw_not_on_the_state() -> None:
    # The same writer with the same draws takes the same pattern for another colour.
    draws = uniforms(0, "test", np.arange(50), DRAWS).tolist()
    for draw in draws:
        texts = []
        for colour in ("blue", "green"):
            thing = Thing(kind="dog", colour=colour, size="large", count=2)
            text = write(WRITERS[1], State(things=(thing,), relations=(), place="snow", sky="night"), Dice(draw))
            for word in COLOUR_WORDS[colour]:
                text = text.replace(word, "COLOUR").replace(word.capitalize(), "COLOUR")
            texts.append(text)
        assert texts[0] == texts[1]


def test_no_caption_and_no_picture_runs_out_of_draws() -> None:
    things = tuple(Thing(kind=k, colour="red", size="large", count=n) for k, n in (("dog", 3), ("cat", 2), ("bus", 2)))
    # A draw just below 1 takes every loop and every chance to its end, one of 0 the other ends.
    for place in PLACES:
        for sky in SKIES:
            state = State(things=things, relations=("left", "above"), place=place, sky=sky)
            for value in (0.0, 0.5, 1 - 2**-53):
                assert picture(state, Dice([value] * PICTURE_DRAWS), px=16, grain=0)
                for writer in WRITERS:
                    assert write(writer, state, Dice([value] * DRAWS))


def test_defects_are_as_many_as_asked_and_of_every_kind(read_whole: Any) -> None:
    clean, broken = read_whole(TALES), read_whole(Toyworld(scenes=400, images=False, defects=0.2))
    found: Counter[str] = Counter()
    by_scene: dict[int, list[bytes | None]] = {}
    for sound, text in zip(clean.texts, broken.texts, strict=True):
        siblings = by_scene.setdefault(text["record"], [])
        if text["text"] != sound["text"]:
            raw = text["text"]
            shouted = [s.rstrip(b".!").upper() + b"!!" for s in siblings if s]
            names: dict[bytes | None, str] = {
                None: "missing",
                b"": "empty",
                **{b.encode(): "broken picture" for b in BROKEN_PICTURES},
            }
            found[names.get(raw) or ("exact" if raw in siblings else "normalised" if raw in shouted else "other")] += 1
        siblings.append(text["text"])
    assert set(found) == {"missing", "empty", "broken picture", "exact", "normalised"}
    # 2,000 draws at 0.2: three standard deviations are 54.
    assert abs(sum(found.values()) - 400) < 54


def pixels(state: State, draws: Any, grain: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(Image.open(io.BytesIO(picture(state, Dice(draws), px=64, grain=grain)))).astype(np.int64)


DOG = Thing(kind="dog", colour="red", size="large", count=1)
BALL = Thing(kind="ball", colour="blue", size="small", count=1)
BEACH = State(things=(DOG, BALL), relations=("left",), place="beach", sky="sunny")


@pytest.mark.parametrize(
    "other",
    [
        replace(BEACH, things=(replace(DOG, kind="cat"), BALL)),
        replace(BEACH, things=(replace(DOG, colour="green"), BALL)),
        replace(BEACH, things=(replace(DOG, size="small"), BALL)),
        replace(BEACH, things=(replace(DOG, count=2), BALL)),
        replace(BEACH, things=(DOG, replace(BALL, colour="purple"))),
        replace(BEACH, things=(DOG,), relations=()),
        replace(BEACH, relations=("above",)),
        replace(BEACH, place="farm"),
        replace(BEACH, sky="night"),
    ],
)
def test_every_attribute_can_be_seen(other: State) -> None:
    # With the nuisance held still, noise changes a value by 12 of 255 at most (and a little in the JPEG).
    draws = uniforms(0, "test", np.arange(1), PICTURE_DRAWS)[0].tolist()
    still = pixels(BEACH, draws)
    assert np.abs(pixels(BEACH, draws, grain=1) - still).max() < 40
    assert (np.abs(pixels(other, draws) - still).max(axis=2) > 40).sum() >= 20


def test_pictures_of_one_state_differ_by_pose_and_light() -> None:
    state = State(
        things=(Thing(kind="car", colour="blue", size="large", count=1),), relations=(), place="street", sky="rainy"
    )
    draws = uniforms(0, "test", np.arange(8), PICTURE_DRAWS).tolist()
    assert len({pixels(state, d).tobytes() for d in draws}) == 8


def test_inputs_are_refused(inputs: Any, write_text: Any) -> None:
    with pytest.raises(InputError, match="toy world reads no files, but 1 inputs are named"):
        Toyworld().survey(inputs(write_text("a.csv", b"")), None)


@pytest.mark.parametrize(
    "options",
    [{"scenes": 0}, {"captions": 0}, {"image_px": 4}, {"val": 0.6, "test": 0.6}, {"val": -0.1}, {"defects": 2.0}],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Toyworld(**options)
