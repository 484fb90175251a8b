"""The examples in the docstrings of goodviews.py, and the small HOME that they run on.

Run as a program, it makes that HOME in the working directory and runs every example with the installed package. It
needs no test tools, so that it also runs after `pip install '.[cpu]'`.
"""

from __future__ import annotations

import doctest
import os
import sys
from typing import Any, Final

import goodviews
from infra import cli

SCENES: Final = 60

TINY: Final[dict[str, Any]] = {
    "plan.epochs": 1,
    "plan.batch_global": 16,
    "plan.lanes": 4,
    "encoder.width": 32,
    "encoder.heads": 2,
    "encoder.ffn": 64,
    "encoder.layers": 1,
    "lejepa.n_directions": 32,
    "tokenizer.vocab_size": 512,
}
"""On top of the recipe tiny-cpu: two steps an epoch."""


def ingest(home: str) -> None:
    """Make `toyworld` in five shards, without Ray: 39 scenes to train on, 13 in val, 8 in test."""
    world = _sets(f"source.scenes={SCENES}", "source.val=0.1", "source.test=0.2", "source.image_px=16")
    _run("ingest", "toyworld", *world, "--scenes-per-shard", "14", "--num-cpus", "0", "--home", home)


def train(home: str) -> None:
    """Train the run `first`, and embed the scenes of `train` with it."""
    tiny = _sets(*(f"{key}={value}" for key, value in TINY.items()))
    _run("train", "--recipe", "tiny-cpu", "--dataset", "toyworld", "--run-id", "first", *tiny, "--home", home)
    what = ["--model", "run:first", "--dataset", "toyworld", "--split", "train", "--of", "scenes"]
    _run("embed", *what, "--num-cpus", "0", "--home", home)


def examples() -> list[doctest.DocTest]:
    """Every docstring with an example, of the public names and of the methods of public classes."""
    finder = doctest.DocTestFinder()
    found = [test for name in goodviews.__all__ for test in finder.find(getattr(goodviews, name), name, globs={})]
    return [test for test in found if test.examples]


def failure(example: doctest.DocTest, home: str, other_home: str) -> str:
    """What an example printed in the place of what it shows; empty when it holds."""
    example.globs = {"home": home, "other_home": other_home}
    lines: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=lines.append)
    return "".join(lines)


def _sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _run(*words: str) -> None:
    code = cli.run(words)
    if code != 0:
        raise RuntimeError(f"`goodviews {' '.join(words)}` ended with {code}.")


def main() -> int:
    """Run every example; returns the exit code."""
    ingest("examples")
    train("examples")
    failures = {test.name: failure(test, "examples", os.path.join("others", test.name)) for test in examples()}
    print("".join(failures.values()), end="")
    print(f"{sum(not text for text in failures.values())} of {len(failures)} examples of goodviews.py hold")
    return int(any(failures.values()))


if __name__ == "__main__":
    sys.exit(main())
