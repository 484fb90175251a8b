"""The demo's own command lines, on a world so small that nothing is learned in it: each works, and the page is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.cli import run as goodviews
from infra.demo import commands, tour
from infra.demo.tour import DemoConfig, Step


def answer(step: Step, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """The rows of a step that asks the catalog."""
    capsys.readouterr()
    assert goodviews([*step.command, "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return rows


@pytest.mark.timeout(900)
def test_the_whole_job_in_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = DemoConfig(home=str(tmp_path / "home"), scenes=240, epochs=2)
    for step in tour.ingest_steps(config):
        assert goodviews(list(step.command)) == 0, step.title
    capsys.readouterr()
    assert goodviews(tour.version_query(config)) == 0
    ((world,),) = (json.loads(capsys.readouterr().out),)
    steps = tour.scoring_steps(config, world["version"])
    for step in steps:
        assert goodviews(list(step.command)) == 0, step.title
    rows = answer(steps[-1], capsys)
    assert {row["encoder"] for row in rows} == {*tour.ARMS, "untrained", "chance"}
    scores = {str(row["encoder"]): row for row in rows}
    # 10 of the other scored scenes, whatever was learned.
    assert 0.1 < float(str(scores["chance"]["mutual_knn"])) < 0.4
    for arm in tour.ARMS:
        low, value, high = (float(str(scores[arm][name])) for name in ("low", "mutual_knn", "high"))
        assert 0 < low < value < high < 1
    page = Path(config.page).read_text()
    assert all(f"{arm}, seed 0" in page for arm in tour.ARMS)
    absent = ("is in the catalog yet", "keeps its picks", "keeps its neighbours", "No map was fitted")
    assert [words for words in absent if words in page] == []
    assert goodviews(["runs", "list", "--json", "--home", config.home]) == 0
    known = {run["run_id"]: run["status"] for run in json.loads(capsys.readouterr().out)}
    again = [commands._resumed(step, known) for step in steps]
    assert [step.command[:2] for step in again if step.run_id] == [["runs", "show"]] * len(tour.ARMS)
    for step in (again[3], steps[0], steps[-2]):
        assert goodviews(list(step.command)) == 0, f"{step.title}, a second time"
