"""Check of FAISS: which build is installed, whether two of them hide each other, and whether it sees a GPU.

Invariant: packages are counted before FAISS is imported, since a mixed installation may not import at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distributions

from infra.doctor.findings import Circumstances, Finding, advise, broken, ok


def installed_builds() -> dict[str, str]:
    """Version by name of every installed package that brings FAISS, the conda one (`faiss`) too."""
    named = {
        str(d.metadata["Name"]).lower().replace("_", "-"): d.version for d in distributions() if d.metadata["Name"]
    }
    return {name: number for name, number in sorted(named.items()) if name == "faiss" or name.startswith("faiss-")}


def faiss(_: Circumstances) -> Iterator[Finding]:
    """Which FAISS there is, and whether it can use a GPU (failure F18: cpu and gpu builds installed together)."""
    builds = installed_builds()
    shown = " and ".join(f"{name} {number}" for name, number in builds.items())
    if len(builds) > 1:
        found = f"{shown} are both installed; they share one folder, and the last one installed hides the other"
        install = "then install one: `pip install faiss-cpu` or `pip install faiss-gpu`."
        yield broken("faiss", found, f"Run `pip uninstall {' '.join(builds)}`, {install}")
        return
    if not builds:
        advice = "Run `pip install faiss-cpu`, on a GPU machine `pip install faiss-gpu`."
        yield broken("faiss", "FAISS is not installed", advice)
        return
    import faiss as library

    is_gpu_build = hasattr(library, "StandardGpuResources")
    seen = library.get_num_gpus() if is_gpu_build else 0
    what = f"{shown}, {library.omp_get_max_threads()} threads"
    if is_gpu_build and seen == 0:
        advice = (
            "Neighbours are found on the CPU. If there is a GPU, look at the line `cuda`; else faiss-cpu is enough."
        )
        yield advise("faiss", f"{what}, built for GPUs but it sees none", advice)
    elif is_gpu_build:
        yield ok("faiss", f"{what}, {seen} GPUs")
    elif "gpu" in shown:
        advice = f"Run `pip install --force-reinstall {next(iter(builds))}`."
        yield broken("faiss", f"{what}, but what is imported was built without GPUs", advice)
    else:
        yield ok("faiss", f"{what}, a build for CPUs")
