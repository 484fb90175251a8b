"""Which FAISS is installed, told from packages that are made here; FAISS itself is a stub in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from indexing import checks
from infra.doctor.findings import Circumstances

CPU = "__version__ = '1.11.0'\ndef omp_get_max_threads(): return 4\n"
GPU = CPU + "class StandardGpuResources: ...\ndef get_num_gpus(): return {gpus}\n"
RUN = """
import json, dataclasses
from indexing import checks
from infra.doctor.findings import Circumstances
# This environment has a FAISS of its own.
checks.distributions = lambda: __import__("importlib.metadata").metadata.distributions(path=[{site!r}])
print(json.dumps([dataclasses.asdict(f) for f in checks.faiss(Circumstances(home=None))]))
"""


def verdict(site: Path, stub: str, *packages: str) -> tuple[str, str, str | None]:
    """State, finding and advice where these packages are installed and `stub` is what `import faiss` gives."""
    site.mkdir()
    (site / "faiss.py").write_text(stub)
    for name in packages:
        folder = site / f"{name.replace('-', '_')}-1.11.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.11.0\n")
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(site=str(site))],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=Path(checks.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    (finding,) = json.loads(done.stdout)
    return finding["state"], finding["found"], finding["advice"]


@pytest.mark.parametrize(
    "stub", [CPU, GPU.format(gpus=1), "raise ImportError('swigfaiss')"], ids=["cpu", "gpu", "import"]
)
def test_f18_faiss_cpu_and_faiss_gpu_together_are_named(tmp_path: Path, stub: str) -> None:
    state, found, advice = verdict(tmp_path / "site", stub, "faiss-cpu", "faiss-gpu-cu12")
    assert state == "broken"
    assert "faiss-cpu 1.11.0 and faiss-gpu-cu12 1.11.0 are both installed" in found
    assert advice is not None and "pip uninstall faiss-cpu faiss-gpu-cu12" in advice


@pytest.mark.parametrize(
    ("stub", "packages", "state", "words"),
    [
        (CPU, ["faiss-cpu"], "ok", "a build for CPUs"),
        (GPU.format(gpus=2), ["faiss-gpu"], "ok", "2 GPUs"),
        (GPU.format(gpus=0), ["faiss-gpu"], "advice", "it sees none"),
        (CPU, ["faiss-gpu"], "broken", "was built without GPUs"),
        (CPU, [], "broken", "FAISS is not installed"),
    ],
)
def test_the_build_is_told_from_what_it_can_do(
    tmp_path: Path, stub: str, packages: list[str], state: str, words: str
) -> None:
    found = verdict(tmp_path / "site", stub, *packages)
    assert found[0] == state and words in found[1]


def test_this_environment_has_one_build() -> None:
    found = list(checks.faiss(Circumstances(home=None)))
    assert [f.state for f in found] == ["ok"] and len(checks.installed_builds()) == 1
