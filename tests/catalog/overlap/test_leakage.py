"""`catalog.overlap.leakage` and `catalog.wording`: what a training set has seen of the scored scenes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.overlap.leakage import Leaks, find_leaks
from catalog.overlap.parts import Part
from catalog.wording import PYTHON_FUNCTION, normal_form, sql_normal_form
from infra.errors import InputError
from infra.home import Home
from tests.catalog.datasets import put_dataset

Put = Callable[..., Part]


@pytest.fixture
def put(home: Home) -> Put:
    """`put_dataset` below the home of the test."""
    return functools.partial(put_dataset, home)


def found(seen: Leaks) -> dict[str, list[str]]:
    return {kind: sorted(keys) for kind, keys in seen.keys.items()}


def test_each_kind_of_leak_is_found_and_nothing_else(home: Home, put: Put) -> None:
    training = put("web", {"a": ["A dog runs.", "Other"], "b": ["STRASSE 1"], "c": ["alone"], "d": ["..."]})
    scored = put(
        "photos",
        {
            "p1": ["nothing", "A dog runs."],
            "p2": ["a DOG, runs"],
            "p3": ["Straße 1!"],
            "p4": ["a dog walks", "dog runs a"],
            "p5": ["!!!"],
            "a": ["new words"],
        },
        split="test",
        source="coco",
    )
    seen = find_leaks(home, training, scored, ["p1", "p2", "p3", "p4", "p5", "a"])
    assert found(seen) == {"exact": ["p1"], "normalised": ["p1", "p2", "p3"], "scene": [], "source_id": []}
    assert seen.counts == {"exact": 1, "normalised": 3, "scene": 0, "source_id": 0, "any": 3}


def test_only_the_scenes_that_are_scored_count(home: Home, put: Put) -> None:
    training = put("web", {"a": ["one"], "b": ["two"]})
    scored = put("photos", {"p": ["one"], "q": ["two"]}, split="test")
    assert find_leaks(home, training, scored, ["q", "zzz"]).leaked == {"q"}


def test_scenes_of_the_same_dataset_leak_by_key_and_those_of_the_same_kind_of_source_by_id(
    home: Home, put: Put
) -> None:
    training = put("web", {"a": ["one"], "b": ["two"]})
    assert found(find_leaks(home, training, training, ["b"])) == {
        "exact": ["b"],
        "normalised": ["b"],
        "scene": ["b"],
        "source_id": [],
    }
    copy = put("copy", {"a": ["other"], "x": ["words"]}, split="test")
    assert found(find_leaks(home, training, copy, ["a", "x"]))["source_id"] == ["a"]
    foreign = put("foreign", {"a": ["other"]}, split="test", source="coco")
    assert find_leaks(home, training, foreign, ["a"]).leaked == frozenset()


def test_roles_that_were_not_trained_on_or_not_scored_do_not_leak(home: Home, put: Put) -> None:
    training = put("web", {"a": ["alt/one", "recap/two"]})
    scored = put("photos", {"p": ["alt/one"], "q": ["recap/two"]}, split="test")

    def leaked(trained: tuple[str, ...], shown: tuple[str, ...]) -> frozenset[str]:
        trained_part, shown_part = (
            Part(dataset=p.dataset, version=p.version, split=p.split, roles=r)
            for p, r in ((training, trained), (scored, shown))
        )
        return find_leaks(home, trained_part, shown_part, ["p", "q"]).leaked

    assert leaked((), ()) == {"p", "q"}
    assert leaked(("alt",), ()) == {"p"}
    assert leaked(("alt", "recap"), ("recap",)) == {"q"}


def test_a_part_that_is_not_there_is_no_proof_of_innocence(home: Home, put: Put) -> None:
    scored = put("photos", {"p": ["one"]}, split="test")
    with pytest.raises(InputError, match="holds no scene of gone@0"):
        find_leaks(home, Part(dataset="gone", version="0"), scored, ["p"])


TEXTS = st.text(st.one_of(st.characters(max_codepoint=127), st.sampled_from("ßİıſKÅéκ中किা́½")), max_size=12)


@given(st.lists(TEXTS, min_size=1, max_size=20))
def test_the_normal_form_in_sql_is_that_of_python(texts: list[str]) -> None:
    texts = [t.replace("\x00", " ") for t in texts]
    with duckdb.connect() as connection:
        connection.create_function(PYTHON_FUNCTION, normal_form, ["VARCHAR"], "VARCHAR")
        query = f"SELECT {sql_normal_form('t')} FROM (SELECT unnest(?::VARCHAR[]) AS t)"
        assert [row[0] for row in connection.execute(query, [texts]).fetchall()] == [normal_form(t) for t in texts]
