"""The demo: it runs the commands that it shows, in order, and stops with the first that fails."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from infra import workflow

REPOSITORY = Path(workflow.__file__).parents[1]


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    """The demo in a process of its own, piped."""
    command = [sys.executable, "-m", "infra.cli", "demo", *words]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_the_demo_ingests_and_asks_the_catalog(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    done = demo("--home", str(home), "--scenes", "60", "--num-cpus", "0")
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^(\d)/(\d)  (.*?) ─", done.stdout, re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == [1, 2, 3, 4, 5, 6]
    commands = re.findall(r"^\$ goodviews (.*)$", done.stdout, re.MULTILINE)
    assert [command.split()[0] for command in commands] == [
        "ingest",
        "catalog",
        "catalog",
        "catalog",
        "catalog",
        "catalog",
    ]
    for shown in ["captions", "rows_digest", "missing_text", "toy-0000", "0 problems", "Try next"]:
        assert shown in done.stdout
    assert (home / "catalog.sqlite").is_file()
    again = subprocess.run(
        [sys.executable, "-m", "infra.cli", *shlex.split(commands[1])], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert again.returncode == 0, "a line that is shown can be typed"


def test_the_demo_stops_with_the_exit_code_of_the_command_that_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = demo("--home", str(tmp_path / "file"), "--scenes", "20", "--num-cpus", "0")
    assert done.returncode == 1
    assert done.stdout.count("$ goodviews") == 1
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr


def test_a_shown_word_is_one_word_for_a_shell() -> None:
    for word in ["plain", "two words", "it's", "SELECT 'a' || $x", 'a "b"', "a'b\"c", "back\\slash'", "`ls`'", "!'"]:
        assert shlex.split(workflow._quoted(word)) == [word]
