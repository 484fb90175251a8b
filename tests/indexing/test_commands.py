"""`goodviews align`, `rotate`, `probe`: the command line, its JSON, its warnings and its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from infra.cli import run
from infra.home import resolve
from tests.indexing.embedding_sets import put_set, related, scene_keys

N = 60


@pytest.fixture
def home(tmp_path: Path) -> str:
    """A home with the sets x, y and the collapsed z over 60 scenes."""
    url = str(tmp_path / "home")
    x, y = related(0, N, 6, 5, noise=0.1)
    for name, vectors in (("x", x), ("y", y), ("z", np.ones_like(x))):
        put_set(resolve(url), name, scene_keys(N), {0: vectors})
    return url


def called(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of one call."""
    assert run(words) == code
    out = capsys.readouterr()
    return out.out, out.err


def rows(text: str) -> list[dict[str, Any]]:
    found = orjson.loads(text)
    assert isinstance(found, list) and found
    return found


def test_align_prints_a_list_of_scores_with_all_that_they_need(home: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["align", "x", "y", "--home", home, "--k", "5", "--permutations", "19", "--bootstrap", "100"]
    out, _ = called(capsys, *words, "--metric", "mutual_knn", "--metric", "cka", "--against", "z", "--json")
    found = rows(out)
    assert [row["metric"] for row in found] == ["mutual_knn", "cka", "mutual_knn", "cka"]
    for row in found:
        assert {"metric", "value", "low", "high", "chance", "k", "n", "ties"} <= set(row)
    for row in found[:2]:
        needed = {"calibrated", "p_value", "left", "right", "layers", "protocol", "selection", "leakage"}
        assert needed | {"without_leaked", "samples", "tokens", "untrained_value"} <= set(row)
    assert found[2]["difference"] == ["x", "z"]
    out, err = called(capsys, *words[:1], "z", *words[2:])
    assert "mutual_knn" in out and "warning: 100% of the items have ties" in err


def test_rotate_prints_the_controls_and_the_map_can_be_applied(home: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rotate", "x", "y", "--home", home, "--bootstrap", "100"]
    out, _ = called(capsys, *words, "--fit-pairs", "30", "--splits", "2", "--curve", "10,20", "--json")
    found = rows(out)
    assert {row["map"] for row in found} == {"rotation", "random", "shuffled"}
    assert {row["pairs"] for row in found} == {10, 20, 30}
    for row in found:
        assert {"metric", "value", "low", "high", "chance", "k", "n", "ties", "map_id", "direction"} <= set(row)
    out, _ = called(capsys, *words, "--apply", found[0]["map_id"])
    assert "random" in out and "shuffled" in out and f"map {found[0]['map_id']}" in out
    out, _ = called(capsys, *words, "--fit-share", "0.5", "--splits", "1", "--map", "linear")
    assert "random" in out and "shuffled" in out and "linear" in out


def test_probe_prints_a_row_a_probe(home: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{key},{i % 2}" for i, (key, _) in enumerate(scene_keys(N))]
    (tmp_path / "l.csv").write_text("\n".join(["scene_key,label", *lines]))
    words = ["probe", "x", "--labels", str(tmp_path / "l.csv"), "--home", home, "--bootstrap", "100"]
    found = rows(called(capsys, *words, "--json")[0])
    assert [row["metric"] for row in found] == ["probe_linear", "probe_knn"]
    assert [row["chance"] for row in found] == [0.5, 0.5]
    assert "knn" in called(capsys, *words, "--kind", "knn")[0]


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["align", "x", "nowhere"], 1, "There is no embedding set 'nowhere'"),
        (["align", "x", "y", "--metric", "knn"], 2, "There is no metric 'knn'"),
        (["align", "x", "y", "--protocol", "prh"], 2, "There is no protocol 'prh'"),
        (["align", "x", "y", "--k", "59"], 1, "60 are in both; a score needs 61"),
        (["align", "x", "y", "--captions", "first"], 2, "no rule 'first'"),
        (["rotate", "x", "y"], 2, "Name exactly one of --fit"),
        (["rotate", "x", "y", "--fit-pairs", "30", "--map", "random"], 2, "random map is a control"),
        (["rotate", "x", "y", "--fit-pairs", "30", "--curve", "a"], 2, "--curve is 'a'"),
        (["rotate", "x", "y", "--fit-pairs", "59"], 1, "leave 1 to score"),
        (["rotate", "x", "y", "--apply", "m", "--fit", "val"], 2, "fits nothing"),
        (["probe", "x", "--labels", "states:place"], 1, "names no dataset"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    home: str, capsys: pytest.CaptureFixture[str], words: list[str], code: int, sentence: str
) -> None:
    out, err = called(capsys, *words, "--home", home, code=code)
    assert out == "" and sentence in " ".join(err.split())
