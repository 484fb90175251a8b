"""The command line root: fast help, one sentence an error, and the exit code that every ending has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from infra import cli

REPOSITORY = Path(cli.__file__).parents[1]

HEAVY = ["duckdb", "faiss", "fsspec", "numpy", "pyarrow", "ray", "rich", "torch", "transformers"]

PLUGIN = '''
"""Do odd things in tests.

More of it.
"""
import os, sys
open(os.environ["IMPORT_MARK"], "w").close()
import typer
from infra import errors
app = typer.Typer()

@app.command()
def odd(what: str, rows: int = 3) -> None:
    """Do one odd thing."""
    if what == "interrupt": raise KeyboardInterrupt
    if what == "bug": raise LookupError("no such thing")
    if what == "pipe": raise BrokenPipeError(32, "a connection broke")
    if what == "print":
        for i in range(rows): print(i)
        return
    if what == "wait":
        print("waiting", flush=True)
        import time
        for _ in range(6000): time.sleep(0.01)
    if what == "three": return 3
    raise getattr(errors, what)("What happened.")
'''


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python in which another distribution offers the commands `odd` and `lacking`."""
    site = tmp_path / "site"
    (site / "odd_things").mkdir(parents=True)
    (site / "odd_things" / "__init__.py").write_text("raise RuntimeError('the parent package was imported')")
    (site / "odd_commands.py").write_text(PLUGIN)
    (site / "odd_lacking.py").write_text('"""Need what is not there."""\nimport a_package_that_is_not_there\n')
    information = site / "odd_things-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-things\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[goodviews.commands]\nodd = odd_commands:app\nlacking = odd_lacking:app\nnested = odd_things.deep:app\n"
    )
    (site / "odd_things" / "deep.py").write_text('"""Lie below a heavy package."""\nraise RuntimeError\n')
    return {"PYTHONPATH": str(site), "IMPORT_MARK": str(tmp_path / "imported")}


def goodviews(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "infra.cli", *words],
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["ingst"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom infra import cli\n"
        f"cli.run({words!r})\n"
        f"print('heavy:', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.stdout.splitlines()[-1] == "heavy: []", done.stderr


def test_help_shows_every_command_with_a_line_of_its_own() -> None:
    names = {entry.name for entry in entry_points(group=cli.GROUP)}
    assert names >= {"catalog", "demo", "ingest"}
    done = goodviews("--help", COLUMNS="200")
    assert done.returncode == 0
    for name in names:
        (line,) = [x for x in done.stdout.splitlines() if x.startswith(f"  {name} ")]
        assert line.split(maxsplit=1)[1].endswith("."), "the first line of the module's docstring"
    assert goodviews(COLUMNS="200").stdout == done.stdout


def test_the_version_is_the_one_of_the_distribution() -> None:
    done = goodviews("--version")
    assert (done.returncode, done.stdout) == (0, f"goodviews {version('goodviews')}\n")


def test_commands_of_other_distributions_are_shown_without_being_imported(plugin: dict[str, str]) -> None:
    done = goodviews("--help", COLUMNS="200", **plugin)
    assert done.returncode == 0, done.stderr
    assert "odd      Do odd things in tests." in done.stdout
    assert "nested   Lie below a heavy package." in done.stdout
    assert not Path(plugin["IMPORT_MARK"]).exists()


def test_an_app_of_one_command_is_that_command(plugin: dict[str, str]) -> None:
    done = goodviews("odd", "print", **plugin)
    assert (done.returncode, done.stdout) == (0, "0\n1\n2\n")
    shown = goodviews("odd", "--help", **plugin)
    assert shown.returncode == 0
    assert "goodviews odd [OPTIONS]" in shown.stdout


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("GoodviewsError", 1),
        ("InputError", 1),
        ("StorageError", 1),
        ("IntegrityError", 1),
        ("AccountingError", 1),
        ("UsageError", 2),
        ("ConfigError", 2),
        ("RejectBudgetError", 3),
        ("ConflictError", 4),
    ],
)
def test_an_error_is_its_sentence_and_its_exit_code(plugin: dict[str, str], kind: str, code: int) -> None:
    done = goodviews("odd", kind, **plugin)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "error: What happened.\n")


def test_an_unexpected_error_shows_its_traceback_and_says_that_it_is_a_bug(plugin: dict[str, str]) -> None:
    done = goodviews("odd", "bug", **plugin)
    assert done.returncode == 1
    assert "LookupError: no such thing" in done.stderr
    assert "odd_commands.py" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: this is a bug in goodviews.")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ingst"], "error: There is no command 'ingst'. Did you mean `goodviews ingest`?"),
        (["zzz"], "error: There is no command 'zzz'. Commands: align, catalog, "),
        (["--verbos"], "error: No such option: --verbos"),
        (["odd"], "error: Missing argument"),
        (["odd", "print", "--rowz", "3"], "error: No such option: --rowz"),
        (["odd", "print", "--rows", "many"], "error: Invalid value for '--rows'"),
        (["lacking"], "error: `goodviews lacking` needs the package a_package_that_is_not_there"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_2(
    plugin: dict[str, str], words: list[str], sentence: str
) -> None:
    done = goodviews(*words, **plugin)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(sentence)
    assert done.stdout == ""


def test_a_number_that_a_command_returns_is_its_exit_code(plugin: dict[str, str]) -> None:
    assert goodviews("odd", "three", **plugin).returncode == 3


def test_an_interrupt_ends_with_130(plugin: dict[str, str]) -> None:
    done = goodviews("odd", "interrupt", **plugin)
    assert done.returncode == 130
    assert done.stderr.startswith("error: interrupted.")
    assert "Traceback" not in done.stderr


def test_a_signal_from_the_keyboard_ends_with_130(plugin: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.cli", "odd", "wait"],
        env={**os.environ, **plugin},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"waiting\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in error


def test_a_reader_that_has_seen_enough_is_no_error_on_the_screen(plugin: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.cli", "odd", "print", "--rows", "100000"],
        env={**os.environ, **plugin},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 128 + signal.SIGPIPE


def test_another_pipe_that_breaks_is_not_taken_for_it(plugin: dict[str, str]) -> None:
    done = goodviews("odd", "pipe", **plugin)
    assert done.returncode == 1
    assert "a connection broke" in done.stderr
    assert "this is a bug" in done.stderr
