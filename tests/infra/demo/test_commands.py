"""The demo: it runs the commands that it shows, in order, and stops with the first that fails."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from infra.cli import run as goodviews
from infra.demo import commands, tour
from infra.demo.tour import DemoConfig, Step
from infra.errors import InputError

REPOSITORY = Path(commands.__file__).parents[2]
VERSION = "0123456789abcdef"


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    """The demo in a process of its own, piped."""
    command = [sys.executable, "-m", "infra.cli", "demo", *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def steps(config: DemoConfig) -> list[Step]:
    return [*tour.ingest_steps(config), *tour.scoring_steps(config, VERSION)]


def test_the_demo_goes_from_the_world_to_the_page() -> None:
    verbs = [step.command[0] for step in steps(DemoConfig(home="h"))]
    order = list(dict.fromkeys(verbs))
    # What needs no training comes first, while the trainings run in the background.
    assert order == ["ingest", "catalog", "embed", "probe", "theory", "train", "align", "rotate", "report"]
    assert Counter(verbs) == {"ingest": 1, "catalog": 3, "train": 3, "embed": 4, "align": 3, "rotate": 3, "probe": 4, "theory": 1, "report": 1}  # fmt: skip
    assert verbs[-1] == "catalog", "it ends with a table out of the catalog"
    more = Counter(step.command[0] for step in steps(DemoConfig(home="h", seeds=3)))
    assert (more["train"], more["embed"], more["align"]) == (9, 10, 9)


def test_the_arms_differ_in_their_arm_and_in_nothing_else() -> None:
    config = DemoConfig(home="h", seeds=2)
    trainings = [step for step in steps(config) if step.command[0] == "train"]
    assert len(trainings) == 6
    bare = {
        tuple(word for word in step.command if word not in (*tour.ARMS, "0", "1", step.run_id)) for step in trainings
    }
    assert len(bare) == 1
    assert len({step.run_id for step in trainings}) == 6
    assert all(step.run_id in step.command for step in trainings)


@pytest.mark.parametrize("change", [{"epochs": 5}, {"scenes": 200}])
def test_a_run_is_named_by_all_that_decides_it(change: dict[str, int]) -> None:
    config = DemoConfig(home="h")
    other = DemoConfig(home="elsewhere", **change)
    version = VERSION if "epochs" in change else "another"
    assert tour.run_id(config, VERSION, "good", 0) == tour.run_id(DemoConfig(home="elsewhere"), VERSION, "good", 0)
    assert tour.run_id(config, VERSION, "good", 0) != tour.run_id(other, version, "good", 0)


@pytest.mark.parametrize(
    ("status", "verb"), [(None, "train --recipe"), ("finished", "runs show"), ("running", "train --resume"), ("failed", "train --resume")]
)  # fmt: skip
def test_what_an_earlier_demo_did_is_not_done_again(status: str | None, verb: str) -> None:
    step = next(step for step in steps(DemoConfig(home="a home")) if step.command[0] == "train")
    known = {} if status is None else {str(step.run_id): status}
    again = commands._resumed(step, known)
    assert " ".join(again.command).startswith(verb)
    assert again.command[-2:] == ["--home", "a home"]
    assert step.run_id in again.command
    assert (again.why == step.why) == (status is None)
    embed = next(step for step in steps(DemoConfig(home="h")) if step.command[0] == "embed")
    assert commands._resumed(embed, {str(step.run_id): "finished"}) == embed


def test_a_missing_encoder_is_missed_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", absent)
    with pytest.raises(InputError, match="pip install"):
        commands.demo(home=str(tmp_path / "h"), seeds=1, scenes=100, epochs=2, num_cpus=0)
    assert not (tmp_path / "h").exists()


def test_the_demo_stops_with_the_exit_code_of_the_command_that_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = demo("--home", str(tmp_path / "file"), "--scenes", "100", "--num-cpus", "0")
    assert done.returncode == 1
    assert done.stdout.count("$ goodviews") == 1
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--scenes", "5"], ["--seeds", "0"], ["--epochs", "1"]])
def test_a_demo_too_small_to_show_anything_is_refused(words: list[str]) -> None:
    assert goodviews(["demo", *words]) == 2


def test_a_shown_word_is_one_word_for_a_shell() -> None:
    for word in ["plain", "two words", "it's", "SELECT 'a' || $x", 'a "b"', "a'b\"c", "back\\slash'", "`ls`'", "!'"]:
        assert shlex.split(commands._quoted(word)) == [word]
    for step in steps(DemoConfig(home="a home")):
        assert shlex.split(" ".join(map(commands._quoted, step.command))) == list(step.command)
