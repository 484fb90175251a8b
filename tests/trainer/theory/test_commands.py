"""`goodviews theory`: what it prints, what it leaves in the catalog, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from catalog.lake import lake
from catalog.rows.theory import latest_checks
from infra.cli import run as goodviews
from infra.home import resolve
from trainer.theory import grid, theorems

SMALL = ["--states", "12", "--dims", "3", "--worlds", "2", "--steps", "6"]
ASKED = [
    "max_good_error", "rows_below", "max_below_error", "rows_above", "max_above_deviation",
    "special_error", "special_r", "special_naive_r",
]  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("GOODVIEWS_CATALOG", raising=False)
    return str(tmp_path / "home")


def test_verify_prints_its_verdict_and_records_every_row(home: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert goodviews(["theory", "verify", *SMALL, "--json", "--home", home]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[name] is not None for name in ASKED] == [True] * 8
    assert found["rows_below"] + found["rows_above"] == 12
    assert max(found["max_good_error"], found["max_below_error"], found["max_above_deviation"]) <= 1e-12
    assert (found["special_r"], found["special_naive_r"]) == (3, 2)
    with lake.reading(resolve(home)) as reader:
        check = latest_checks(reader)["grid"]
    assert check.theory_id == found["theory_id"]
    assert {name: check.result[name] for name in ASKED} == {name: found[name] for name in ASKED}
    rows = list(grid.run_grid(grid.GridConfig(states=12, dims=3, worlds=2, steps=6)))
    for regime in ("below", "above", "special"):
        wanted = [(row.world, row.beta, row.error) for row in rows if row.regime == regime]
        assert [(p["world"], p["beta"], p["error"]) for p in check.points[regime]] == wanted


def test_verify_again_replaces_its_rows_and_other_settings_stand_beside(
    home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], [], ["--seed", "1"]):
        assert goodviews(["theory", "verify", *SMALL, *more, "--home", home]) == 0
    lines = capsys.readouterr().out.splitlines()
    first_words = [line.split("  ")[0] for line in lines[:5]]
    assert first_words == ["regime", "good views", "bad, below", "bad, above", "bad, all kept"]
    assert lines[5].startswith("Sorting the values and dropping the first would count 2")
    assert lines[6].startswith("Other positives: 0 of 399 errors"), "one pair has no gap left"
    assert lines[:7] == lines[7:14] and len(lines) == 21
    with lake.reading(resolve(home)) as reader:
        assert reader.rows("SELECT seed, count(*) FROM main.theory GROUP BY ALL ORDER BY ALL") == [(0, 1), (1, 1)]
        query = (
            "SELECT count(*) FROM main.theory_values WHERE series <> 'mismatch' AND name = 'error' GROUP BY theory_id"
        )
        assert reader.rows(query) == [(14,), (14,)]
        assert latest_checks(reader)["grid"].seed == 1


def test_a_claim_that_fails_ends_with_1_after_its_rows_are_kept(
    home: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theorems, "count_lost", lambda world, nuisance, dims: 1)
    assert goodviews(["theory", "verify", *SMALL, "--home", home]) == 1
    said = capsys.readouterr().err
    assert "it does not hold that" in said and "as many directions are lost as counted" in said
    with lake.reading(resolve(home)) as reader:
        assert reader.rows("SELECT kind FROM main.theory") == [("grid",)]


def test_plot_draws_what_is_recorded_and_says_when_nothing_is(
    home: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert goodviews(["theory", "verify", *SMALL, "--home", home]) == 0
    capsys.readouterr()
    assert goodviews(["theory", "plot", "--out", str(tmp_path / "plots"), "--home", home]) == 0
    written = capsys.readouterr().out.splitlines()
    assert [Path(path).name for path in written] == ["theory-threshold.svg", "theory-threshold.png"]
    assert Path(written[1]).read_bytes().startswith(b"\x89PNG")
    assert goodviews(["theory", "bridge", "--seeds", "0", "--home", home]) == 2
    with lake.writing(resolve(home)) as writer:
        writer.connection.execute("DELETE FROM main.theory")
    assert goodviews(["theory", "plot", "--home", home]) == 1
    assert "Run `goodviews theory verify` first" in capsys.readouterr().err


def test_bridge_trains_both_arms_and_records_them(home: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["theory", "bridge", "--seeds", "2", "--weight", "4", "--steps", "4", "--batch", "64", "--home", home]
    assert goodviews([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kinds = [f"{arm}: {loss}" for arm in ("good", "bad") for loss in ("whitening", "SIGReg, w 4")]
    assert [kind["name"] for kind in found["kinds"]] == kinds
    for kind in kinds:
        assert [point["seed"] for point in found["series"][kind]] == [0, 1]
        exact = 0 if kind.startswith("good") else 4
        assert [point["exact_error"] for point in found["series"][kind]] == pytest.approx([exact] * 2, abs=1e-10)
    with lake.reading(resolve(home)) as reader:
        check = latest_checks(reader)["bridge"]
    assert check.points == {kind: found["series"][kind] for kind in kinds}
    assert (check.theory_id, check.result["beta"]) == (found["theory_id"], found["beta"])


def test_settings_without_a_meaning_are_one_sentence(home: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert goodviews(["theory", "verify", "--states", "5", "--home", home]) == 2
    assert "Give at least 6 with --states" in capsys.readouterr().err
    assert not Path(home).exists()
