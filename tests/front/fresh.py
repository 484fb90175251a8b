"""Everything that README.md shows, in a fresh virtual environment outside the checkout.

`python tests/front/fresh.py FOLDER` clones the last commit into FOLDER, installs the clone as the README says, and
runs from empty folders the Python of README.md, each example of goodviews.py, docs/tour.ipynb in a Jupyter kernel, and
the demo. It takes about ten minutes, ends with 1 when a step fails, and is run by hand before a release.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NO_DOWNLOADS = {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
LINES = 12
"Of the end of what a step prints."


class Fresh:
    """A folder with a clone, a virtual environment, and an empty folder for each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clone = folder / "clone"
        self.failed: list[str] = []

    def program(self, name: str) -> str:
        """A program of the virtual environment."""
        return str(self.folder / "venv" / "bin" / name)

    def install(self, *what: str) -> None:
        """`pip install`, held to the pins of the clone."""
        pinned = ["-qq", "--disable-pip-version-check", "-c", str(self.clone / "constraints.txt")]
        self.step(f"pip install {' '.join(what)}", [self.program("python"), "-m", "pip", "install", *pinned, *what])

    def step(self, title: str, command: Sequence[str], lines: int = LINES) -> None:
        """Run a command in an empty folder, and print how it went with the end of its output."""
        place = self.folder / f"step-{len(list(self.folder.glob('step-*'))) + 1}"
        place.mkdir()
        # A path into the checkout would hide what the wheel lacks.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=place,
            env={**kept, **NO_DOWNLOADS},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        ending = "ok" if done.returncode == 0 else f"FAILED with {done.returncode}"
        print(f"== {title}: {ending}, {time.monotonic() - began:.0f} s", flush=True)
        print("\n".join(done.stdout.splitlines()[-lines:]), flush=True)
        if done.returncode != 0:
            self.failed.append(title)


def readme_python(readme: Path) -> str:
    """The block of Python in README.md."""
    (block,) = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    return str(block)


def main(folder: Path) -> int:
    """Run every step; returns the exit code."""
    if folder.resolve().is_relative_to(REPOSITORY):
        print(f"{folder} lies in the checkout, whose packages would be found there. Name a folder outside.")
        return 2
    folder.mkdir(parents=True)
    fresh = Fresh(folder.resolve())
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(fresh.clone)], check=True)
    venv.create(fresh.folder / "venv", with_pip=True)
    python = fresh.program("python")

    fresh.install(f"{fresh.clone}[cpu]")
    fresh.step("where goodviews is", [python, "-c", "import goodviews; print(goodviews.__file__)"])
    fresh.step("goodviews --help", [fresh.program("goodviews"), "--help"])
    fresh.step("goodviews doctor", [fresh.program("goodviews"), "doctor"])
    fresh.step("the Python of README.md", [python, "-c", readme_python(fresh.clone / "README.md")])
    # Not as a file of the clone: its folder would stand in front of the installed package.
    examples = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    fresh.step("examples of goodviews.py", [python, "-P", "-c", examples, str(fresh.clone / "tests/front/examples.py")])
    fresh.install("nbconvert", "ipykernel")
    tour = [str(fresh.clone / "docs/tour.ipynb"), "--output-dir", ".", "--to", "markdown", "--execute"]
    fresh.step("docs/tour.ipynb", [python, "-m", "nbconvert", *tour])
    fresh.install(f"{fresh.clone}[cpu,demo]")
    fresh.step("goodviews demo", [fresh.program("goodviews"), "demo"], lines=40)

    print(f"failed: {', '.join(fresh.failed)}" if fresh.failed else "every step ended with 0")
    return int(bool(fresh.failed))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/front/fresh.py FOLDER")
    sys.exit(main(Path(sys.argv[1])))
