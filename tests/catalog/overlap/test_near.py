"""`catalog.overlap.near`: the pairs at the threshold, and captions of one template, whose pairs are the square of their number."""

from __future__ import annotations

import random

import duckdb
import pytest

from catalog.lake import lake
from catalog.overlap import near
from catalog.overlap.comparison import Kind, compare
from catalog.overlap.parts import Part
from infra.errors import UsageError
from infra.home import Home
from tests.catalog.datasets import put_dataset

TEMPLATE = "a photo of a very nice red and blue car for sale at the best price number {}"


def near_of(home: Home, left: str, right: str, threshold: float) -> Kind:
    (kind,) = (kind for kind in compare(home, left, right, near_from=threshold).kinds if kind.kind == near.KIND)
    return kind


def test_a_pair_of_exactly_the_threshold_is_near(home: Home) -> None:
    """14 of 25 word pairs are common, and 0.56 * 25 is more than 14 in floats."""
    one = " ".join(f"w{i}" for i in range(20))
    other = " ".join([*(f"w{i}" for i in range(15)), *(f"x{i}" for i in range(6))])
    a, b = set(near.shingles(one)), set(near.shingles(other))
    assert (len(a & b), len(a | b)) == (14, 25) and 0.56 * 25 > 14
    put_dataset(home, "left", {"a": [one]})
    put_dataset(home, "right", {"x": [other]}, source="coco")
    assert near_of(home, "left", "right", 0.56).shared == 1
    assert near_of(home, "left", "right", 0.57).shared == 0


@pytest.mark.parametrize("block", [1, 10_000_000])
def test_captions_of_one_template_keep_few_pairs_and_every_count(
    block: int, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every caption on the left is near to every one on the right: 12 * 16 pairs, and a scene that is near to none."""
    monkeypatch.setattr(near, "BLOCK_CANDIDATES", block)
    kept: list[int] = []
    load = near.load

    def loaded(reader: lake.Lake, *parts: Part, threshold: float) -> None:
        load(reader, *parts, threshold=threshold)
        kept.append(int(reader.rows("SELECT count(*) FROM near_pairs")[0][0]))

    monkeypatch.setattr(near, "load", loaded)
    left: dict[str, list[str]] = {f"l{i}": [TEMPLATE.format(2 * i)] for i in range(12)}
    right: dict[str, list[str]] = {f"r{i}": [TEMPLATE.format(2 * i + 1)] for i in range(16)}
    put_dataset(home, "left", left | {"alone": ["nothing of the kind"]})
    put_dataset(home, "right", right | {"alone": ["other words here"]}, source="coco")
    found = near_of(home, "left", "right", 0.7)
    assert (found.shared, found.left.scenes, found.right.scenes) == (16, 12, 16)
    assert (found.left.captions, found.right.captions) == (12, 16)
    assert 16 <= kept[0] <= 28


def test_each_form_keeps_a_partner_in_each_split_where_it_has_one() -> None:
    draw = random.Random(4)
    pairs = {(draw.randrange(20), draw.randrange(20)) for _ in range(200)}
    splits = {side: {(n, draw.choice("abc")) for n in range(20) for _ in range(2)} for side in "lr"}
    connection = duckdb.connect()
    connection.execute("CREATE TABLE pairs (l BIGINT, r BIGINT)")
    connection.executemany("INSERT INTO pairs VALUES (?, ?)", sorted(pairs))
    for side, rows in splits.items():
        connection.execute(f"CREATE TABLE {side}_splits (number BIGINT, split VARCHAR)")
        connection.executemany(f"INSERT INTO {side}_splits VALUES (?, ?)", sorted(rows))
    kept = set(connection.execute(near._thinned("pairs")).fetchall())
    assert kept < pairs and len(kept) < 2 * 3 * 20

    def reached(some: set[tuple[int, int]]) -> set[tuple[str, int, str]]:
        right = {("l", a, split) for a, b in some for n, split in splits["r"] if n == b}
        return right | {("r", b, split) for a, b in some for n, split in splits["l"] if n == a}

    assert reached(kept) == reached(pairs)


def test_more_candidates_than_can_be_compared_are_refused(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near, "MOST_CANDIDATES", 100)
    put_dataset(home, "left", {f"l{i}": [TEMPLATE.format(2 * i)] for i in range(5)})
    put_dataset(home, "right", {f"r{i}": [TEMPLATE.format(2 * i + 1)] for i in range(5)}, source="coco")
    with pytest.raises(UsageError, match="candidates of nearly equal captions.*Raise --threshold"):
        compare(home, "left", "right", near_from=0.7)
    assert compare(home, "left", "right").kinds
