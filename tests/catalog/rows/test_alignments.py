"""`catalog.rows.alignments`: one row a score, and older catalogs gain its columns."""

from __future__ import annotations

import dataclasses
import math

import pytest

from catalog import layout
from catalog.lake import lake
from catalog.rows.alignments import AlignmentRow, digest_of, record_alignments
from catalog.versions.rebuild import rebuild
from infra.home import Home
from tests.catalog.stored_rows import list_alignments

ROW = AlignmentRow(
    left_id="0" * 16,
    left_name="good",
    right_id="1" * 16,
    right_name="images",
    metric="mutual_knn",
    value=0.125,
    low=0.12,
    high=0.13,
    chance=0.01,
    k=10,
    n=1_000,
    ties=0.0,
    dataset="toy",
    protocol="plain",
    samples=7,
    scored="a" * 16,
    details={"undefined": 1, "selection": ["a"]},
    dataset_versions={"toy": "v"},
    code_version="0.1.0",
    created_at=1_700_000_000.0,
)


def test_a_score_has_one_row_and_comes_back_whole(home: Home) -> None:
    record_alignments(home, [ROW, dataclasses.replace(ROW, k=5)])
    snapshot = record_alignments(home, [dataclasses.replace(ROW, value=0.5, created_at=1_700_000_001.0)])
    first, second = list_alignments(home)
    assert (first["value"], first["k"], second["value"], second["k"]) == (0.5, 10, 0.125, 5)
    assert first["snapshot_id"] == snapshot
    assert first["details"] == {"undefined": 1, "selection": ["a"], "scored": "a" * 16}
    assert first["dataset_versions"] == {"toy": "v"}
    for name in ("low", "high", "chance", "n", "ties", "samples", "left_name", "metric", "direction", "pairs"):
        assert first[name] == getattr(ROW, name), name


@pytest.mark.parametrize(
    "change",
    [
        {"metric": "cka"},
        {"pairs": 30},
        {"direction": "left_to_right"},
        {"left_id": "2" * 16},
        {"seed": 1},
        {"n": 999},
        {"scored": "b" * 16},
    ],
)
def test_another_score_is_another_row(change: dict[str, object]) -> None:
    assert dataclasses.replace(ROW, **change).alignment_id != ROW.alignment_id  # type: ignore[arg-type]


def test_another_value_of_the_same_score_is_the_same_row() -> None:
    assert dataclasses.replace(ROW, value=0.9, low=None, created_at=0.0).alignment_id == ROW.alignment_id


def test_a_digest_tells_lists_apart_that_are_cut_or_ordered_otherwise() -> None:
    cuts = [(["a", "b"],), (["b", "a"],), (["a"], ["b"]), (["a b"],), (["ab"],), (["a", "b"], [])]
    assert len({digest_of(*parts) for parts in cuts}) == len(cuts)
    assert digest_of(["a", "b"]) == digest_of(iter(("a", "b")))


def test_an_undefined_score_is_kept_and_leads_no_board(home: Home) -> None:
    record_alignments(home, [ROW, dataclasses.replace(ROW, left_name="bad", left_id="3" * 16, value=math.nan)])
    assert len(list_alignments(home)) == 2
    with lake.reading(home) as reader:
        assert reader.rows("SELECT place, left_name FROM main.leaderboard") == [(1, "good")]


def test_rows_of_other_pairs_and_directions_share_no_board(home: Home) -> None:
    rows = [dataclasses.replace(ROW, pairs=p, direction=d, value=p / 100) for p in (10, 30) for d in ("a", "b")]
    record_alignments(home, rows)
    with lake.reading(home) as reader:
        assert reader.rows("SELECT place FROM main.leaderboard") == [(1,)] * 4


def test_scores_by_another_rule_share_no_board_but_those_through_another_map_do(home: Home) -> None:
    rules = ["one caption a scene", "mean of captions", f"map {'1' * 16} fitted on x", f"map {'2' * 16} fitted on x"]
    rows = [
        dataclasses.replace(ROW, selection=rule, left_id=str(n) * 16, value=0.1 * n) for n, rule in enumerate(rules, 1)
    ]
    record_alignments(home, rows)
    with lake.reading(home) as reader:
        found = reader.rows("SELECT selection, place FROM main.leaderboard ORDER BY value")
    assert found == list(zip(rules, [1, 1, 2, 1], strict=True))


def test_a_catalog_of_layout_1_gains_the_columns_and_keeps_its_rows(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = layout.tables()["main.alignments"]
    new = ", pairs BIGINT, direction VARCHAR, details VARCHAR"
    assert columns.endswith(new)
    with monkeypatch.context() as past:
        past.setattr(layout, "NUMBER", 1)
        past.setitem(layout._COLUMNS, "main.alignments", columns.removesuffix(new))
        past.setattr(layout, "_ADDED", {})
        board = layout.VIEWS["main.leaderboard"].replace(", pairs, direction ", " ")
        past.setattr(
            layout, "VIEWS", {**layout.VIEWS, "main.leaderboard": board, "versions.layout": "SELECT 1 AS number"}
        )
        with lake.writing(home) as writer:
            writer.connection.execute(
                "INSERT INTO main.alignments (alignment_id, metric, value) VALUES ('old', 'cka', .3)"
            )
    record_alignments(home, [ROW])
    with lake.reading(home) as reader:
        found = reader.rows("SELECT metric, value, pairs, details IS NULL FROM main.alignments ORDER BY metric")
        assert found == [("cka", 0.3, None, True), ("mutual_knn", 0.125, None, False)]
        assert len(reader.rows("SELECT * FROM main.leaderboard")) == 2
    assert [row["details"] for row in list_alignments(home) if row["metric"] == "cka"] == [{}]


def test_a_rebuild_carries_scores_over(home: Home) -> None:
    record_alignments(home, [ROW])
    rebuild(home)
    (row,) = list_alignments(home)
    details = {**ROW.details, "scored": ROW.scored}
    assert (row["value"], row["details"], row["snapshot_id"]) == (0.125, details, None)
