"""Checks of what this machine brings: versions of libraries, processors, disks, CUDA and Ray.

Invariant: torch is asked in a process of its own, as nothing here may import it; nothing is written but by `--ray`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from infra import storage
from infra.doctor.findings import Circumstances, Finding, advise, broken, ok
from infra.errors import StorageError
from infra.units import size

SHOWN: Final = (
    "goodviews",
    "torch",
    "ray",
    "pyarrow",
    "duckdb",
    "numpy",
    "transformers",
    "tokenizers",
    "webdataset",
    "s3fs",
)
LEAST_PYTHON: Final = (3, 11)
FULL_BYTES: Final = 256 << 20
"With less than this a shard of 10,000 scenes with pictures may not fit."
LITTLE_BYTES: Final = 5 << 30
FEW_FILES: Final = 10_000
LEAST_MEMORY_BYTES: Final = 2 << 30
"A worker on a shard of Recap rows peaks at 0.4 to 0.8 GB, and Ray itself takes 0.5 GB."


def versions(_: Circumstances) -> Iterator[Finding]:
    """Python and every package that goodviews asks for, against the versions that it asks for."""
    shown = [f"python {platform.python_version()}"]
    for name in SHOWN:
        try:
            shown.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    yield ok("versions", ", ".join(shown))
    if sys.version_info < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        yield broken(
            "versions", f"Python is older than {least}", f"Make the environment anew with Python {least} or newer."
        )
    for line in requires("goodviews") or []:
        wanted = Requirement(line)
        # Those of extras are looked at when they are installed: nobody must have them.
        is_optional = wanted.marker is not None and "extra" in str(wanted.marker)
        try:
            have = version(wanted.name)
        except PackageNotFoundError:
            if not is_optional:
                yield broken(
                    "versions",
                    f"{wanted.name} is not installed",
                    f"Run `pip install '{wanted.name}{wanted.specifier}'`.",
                )
            continue
        if not wanted.specifier.contains(have, prereleases=True):
            found = f"{wanted.name} is {have}, but goodviews asks for {wanted.specifier}"
            yield broken("versions", found, f"Run `pip install '{wanted.name}{wanted.specifier}'`.")


# --- processors and memory ----------------------------------------------------------------------------------------


def machine(_: Circumstances) -> Iterator[Finding]:
    """Processors and memory, as the system, the scheduler and the container see them."""
    cores = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    quota, memory = cpu_quota(), memory_bytes()
    usable = max(1, int(min(allowed, quota or allowed)))
    limits = [f"{allowed} of them usable"] if allowed < cores else []
    limits += [f"{quota:g} allowed by the container"] if quota is not None and quota < allowed else []
    threads = os.environ.get("OMP_NUM_THREADS")
    shown = ", ".join([f"{cores} CPUs", *limits, f"{size(memory)} memory", f"OMP_NUM_THREADS={threads or 'unset'}"])
    if quota is not None and quota < allowed and threads is None:
        advice = f"Set OMP_NUM_THREADS={usable}; else each library starts {allowed} threads that share {quota:g} CPUs."
        yield advise("machine", shown, advice)
    elif threads is not None and threads.isdigit() and int(threads) > usable:
        yield advise("machine", shown, f"Set OMP_NUM_THREADS={usable}: more threads than CPUs wait for each other.")
    elif memory < LEAST_MEMORY_BYTES:
        yield advise(
            "machine", shown, "Use smaller shards (`--scenes-per-shard`) and `--num-cpus 0`, which does without Ray."
        )
    else:
        yield ok("machine", shown)


def cpu_quota(root: str = "/sys/fs/cgroup") -> float | None:
    """CPUs that the container may use at once; None without a limit."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        words = _words(f"{root}/{name}")
        if name == "cpu.max" and len(words) == 2 and words[0] != "max":
            return int(words[0]) / int(words[1])
        period = _words(f"{root}/cpu/cpu.cfs_period_us")
        if name != "cpu.max" and words and period and int(words[0]) > 0:
            return int(words[0]) / int(period[0])
    return None


def memory_bytes(root: str = "/sys/fs/cgroup") -> int:
    """Memory of the machine, or of the container where that is less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_words(f"{root}/{name}") for name in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([whole, *(int(words[0]) for words in limits if words and words[0].isdigit())])


def _words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


# --- disks --------------------------------------------------------------------------------------------------------


def disk(circumstances: Circumstances) -> Iterator[Finding]:
    """Free room and files where HOME and temporary files lie."""
    folders = {"temporary files": tempfile.gettempdir()}
    home = circumstances.home
    if home is not None and not storage.is_remote(home.url):
        folders = {"HOME": existing_parent(home.url), **folders}
    for what, folder in folders.items():
        facts = os.statvfs(folder)
        free = facts.f_bavail * facts.f_frsize
        shown = f"{size(free)} free for {what} ({folder})"
        if free < FULL_BYTES:
            yield broken("disk", shown, _more_room(what))
        elif free < LITTLE_BYTES:
            yield advise("disk", shown, _more_room(what))
        elif facts.f_files and facts.f_favail < FEW_FILES:
            yield advise("disk", f"{facts.f_favail:,} more files fit for {what} ({folder})", _more_room(what))
        else:
            yield ok("disk", shown)


def _more_room(what: str) -> str:
    if what == "HOME":
        return "Free space or name another with --home; `goodviews catalog gc` lists what nothing needs."
    return "Free space, or name another folder with TMPDIR; joins and sorts spill there."


def existing_parent(path: str) -> str:
    """The folder itself, or the nearest above it that is there. Raises StorageError when a file stands in the way."""
    while not os.path.isdir(path):
        if os.path.lexists(path):
            raise StorageError(
                f"{path} is no folder, so nothing can be made below it. Remove it, or name another place."
            )
        path = os.path.dirname(path)
    return path


# --- CUDA ---------------------------------------------------------------------------------------------------------

_ASK_TORCH: Final = """
import torch
print(torch.__version__, torch.version.cuda or "none", torch.cuda.device_count() if torch.cuda.is_available() else 0)
"""


def cuda(_: Circumstances) -> Iterator[Finding]:
    """Whether torch was built for GPUs, whether the driver shows any, and whether the two agree."""
    asked = subprocess.run([sys.executable, "-P", "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        said = (asked.stderr.strip().splitlines() or ["no word"])[-1]
        yield broken(
            "cuda", f"torch cannot be imported: {said}", "Install torch anew with the version of constraints.txt."
        )
        return
    build, runtime, count = asked.stdout.split()[-3:]
    yield from judge_cuda(build, runtime, int(count), gpus())


def gpus() -> list[str]:
    """Name and driver of each GPU that NVIDIA's driver shows; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()] if asked.returncode == 0 else []


def judge_cuda(build: str, runtime: str, count: int, seen: list[str]) -> Iterator[Finding]:
    """build: of torch; runtime: its CUDA version or `none`; count: devices that it can use; seen: by the driver."""
    if not seen and count == 0:
        what = "without CUDA" if runtime == "none" else f"for CUDA {runtime}"
        yield ok("cuda", f"no GPU: CPU only (torch {build}, built {what})")
    elif runtime == "none":
        advice = "Install a build of torch for CUDA; see https://pytorch.org/get-started/locally."
        yield advise("cuda", f"{len(seen)} GPUs ({seen[0]}), but torch {build} was built without CUDA", advice)
    elif count == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            found = f"CUDA_VISIBLE_DEVICES={hidden!r} hides {len(seen)} GPUs from torch"
            yield advise("cuda", found, "Unset it to use them.")
            return
        advice = "Most often the driver is older than the build. Update it, or install a torch for an older CUDA."
        yield broken("cuda", f"{len(seen)} GPUs ({seen[0]}), but torch {build} (CUDA {runtime}) can use none", advice)
    else:
        yield ok(
            "cuda",
            f"{count} GPUs usable by torch {build} (CUDA {runtime}): {'; '.join(seen) or 'not shown by nvidia-smi'}",
        )


# --- Ray ----------------------------------------------------------------------------------------------------------


def ray(circumstances: Circumstances) -> Iterator[Finding]:
    """Which Ray would run the tasks, whether its token is private, and, when asked, whether it starts."""
    from infra import session

    address = os.environ.get("RAY_ADDRESS")
    place = f"tasks go to the cluster at {address} (RAY_ADDRESS)" if address else "tasks run on a Ray of this machine"
    token = session.token_path()
    if (os.environ.get("RAY_AUTH_MODE") or "token") != "token":
        advice = "Unset RAY_AUTH_MODE: whoever reaches the port of an open Ray runs code as you."
        yield broken("ray", f"authentication is off (RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']})", advice)
    elif token.is_file() and token.stat().st_mode & 0o077:
        yield advise("ray", f"the token {token} can be read by others", f"Run `chmod 600 {token}`.")
    elif address and not session.has_token():
        advice = "Put the cluster's token into RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token."
        yield advise("ray", f"{place}, and there is no token to show to it", advice)
    if not circumstances.with_ray:
        yield ok("ray", f"ray {version('ray')}, {place}; not started (`goodviews doctor --ray` does)")
        return
    with session.open_workers(address=None, num_cpus=None if address else 1) as workers:
        ((_, answer),) = workers.map(_where, [0])
        yield ok("ray", f"ray {version('ray')} started, and a task answered from {answer}; {place}")


def _where(_: int) -> str:
    return re.sub(r"[^\w.-]", "", platform.node()) or "this machine"
