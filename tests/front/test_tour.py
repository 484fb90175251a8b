"""docs/tour.ipynb runs from its first cell to its plot, outside the checkout; here with a smaller world and shorter trainings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TOUR = Path(__file__).parents[2] / "docs" / "tour.ipynb"
SIZES = "SCENES, EPOCHS = 1500, 24"
SMALL = "SCENES, EPOCHS = 400, 1"


def cells() -> list[dict[str, Any]]:
    """All cells of the notebook."""
    found: list[dict[str, Any]] = json.loads(TOUR.read_text())["cells"]
    return found


def test_the_tour_has_fifteen_cells_and_small_outputs() -> None:
    assert len(cells()) == 15
    assert TOUR.stat().st_size < 100_000
    outputs = [output for cell in cells() for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} <= {"stdout"}


def test_the_tour_runs(tmp_path: Path) -> None:
    code = "\n\n".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code")
    assert code.count(SIZES) == 1
    program = code.replace(SIZES, SMALL) + "\n\nassert len(plt.get_fignums()) == 1\n"
    environment = {**os.environ, "MPLBACKEND": "agg", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for words in ("400 scenes", "good: 1 steps", "good views  place", "mutual k-NN with the pixels"):
        assert words in done.stdout
