"""Measure a GPU machine: agreement with the CPU, exact neighbours, speed, a training.

    .venv/bin/python -m infra.gpu.measure --home HOME --minutes 30 --out DIR

Invariant: what is printed was measured in this run; DIR/measurements.json holds all of it.

`--rehearse` runs the same steps on a CPU with tiny sizes, to see that they work before a GPU is paid for. Without a
dataset of that name in HOME, the toy world is ingested: speeds do not depend on what the captions say.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).parents[2]
SCENES: Final = 29_000
"Of the toy world, as many as Flickr30k trains on."
KEPT_METRICS: Final = ("samples_per_s", "tokens_per_s", "mfu", "data_stall", "padding_share", "loss", "effective_rank")
REHEARSAL: Final = (
    "encoder.layers=2",
    "encoder.width=32",
    "encoder.heads=2",
    "encoder.ffn=64",
    "plan.batch_global=64",
    "plan.lanes=4",
    "lejepa.n_directions=64",
    "encoder.projector.entry=32",
    "encoder.projector.hidden=64",
    "encoder.projector.output=32",
    "run.log_every_steps=2",
)
"""What makes `flickr-33m` small enough for a CPU."""


@dataclass
class Measurements:
    """What was asked and what has been found so far."""

    home: Path
    dataset: str
    tokenizer: str
    minutes: float
    is_rehearsal: bool
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device of the scripts that take one."""
        return "cpu" if self.is_rehearsal else "cuda"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one thing after another; exit code 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path("goodviews-gpu"))
    parser.add_argument(
        "--dataset", default="toyworld", help="as ingested into HOME; default: the toy world, made if absent"
    )
    parser.add_argument("--tokenizer", default="corpus", help="a Hugging Face name, a folder, or corpus")
    parser.add_argument("--minutes", type=float, default=20.0, help="for the training; 0 leaves it out")
    parser.add_argument("--out", type=Path, default=Path("gpu-measurements"))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes")
    parser.add_argument("--only", nargs="*", choices=sorted(STEPS), help="of the measurements; default: all")
    args = parser.parse_args(arguments)
    work = Measurements(args.home.absolute(), args.dataset, args.tokenizer, args.minutes, args.rehearse)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only or STEPS:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            result = STEPS[name](work)
        except (subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
            result = {"failed": f"{type(error).__name__}: {error}"[-2000:]}
        work.found[name] = result | {"seconds": round(time.monotonic() - began, 1)}
        print(json.dumps(work.found[name], indent=2), flush=True)
        (args.out / "measurements.json").write_text(json.dumps(work.found, indent=2) + "\n")
    failed = [name for name, result in work.found.items() if "failed" in result]
    print(f"Wrote {args.out / 'measurements.json'}." + (f" Failed: {', '.join(failed)}." if failed else ""))
    return 1 if failed else 0


# --- the measurements ---------------------------------------------------------------------------------------------


def machine(work: Measurements) -> dict[str, Any]:
    """What this ran on."""
    code = (
        "import json,torch; print(json.dumps({'torch': torch.__version__, 'cuda': torch.version.cuda, 'gpus':"
        " [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}))"
    )
    found = json.loads(_run([sys.executable, "-c", code]).splitlines()[-1])
    if not found["gpus"] and not work.is_rehearsal:
        raise ValueError("torch sees no GPU here. Install a CUDA build of torch, or rehearse with --rehearse.")
    return {**found, "cpus": os.cpu_count(), "python": platform.python_version()}


def agreement(work: Measurements) -> dict[str, Any]:
    """Losses and gradients of the CPU and the GPU; a broken bound fails."""
    script = REPOSITORY / "tests/bench/gpu_agreement.py"
    command = [sys.executable, str(script), "--device", work.device]
    if work.is_rehearsal:
        command += ["--width", "32", "--layers", "1"]
    found: dict[str, Any] = json.loads(_run(command, may_fail=True))
    return found | ({"failed": f"bounds broken: {found['broken']}"} if found["broken"] else {})


def neighbours(work: Measurements) -> dict[str, Any]:
    """Exact k-NN: equal on CPU and GPU, its time for a million rows, and its share of the bare matrix product."""
    command = [sys.executable, str(REPOSITORY / "tests/bench/gpu_knn.py"), "--device", work.device]
    if work.is_rehearsal:
        command += ["--rows", "2000", "--timed-rows", "5000", "--product-seconds", "0.1"]
    found: dict[str, Any] = json.loads(_run(command, may_fail=True))
    return found | ({} if found["equality"]["equal"] else {"failed": "CPU and GPU give other neighbours"})


def speed(work: Measurements) -> dict[str, Any]:
    """Two epochs of flickr-33m; the first fills the token cache, so what is told is the last log point."""
    _ingest(work)
    return _train(work, "good", epochs=2)


def compiled(work: Measurements) -> dict[str, Any]:
    """The same with torch.compile."""
    _ingest(work)
    return _train(work, "good", epochs=2, sets=["compile=true"])


def training(work: Measurements) -> dict[str, Any]:
    """The good, bad and next-token arms, a third of the minutes each, in epochs by the speed just measured."""
    if work.minutes <= 0:
        return {"left_out": "--minutes 0"}
    pace = work.found.get("speed", {})
    if "seconds_an_epoch" not in pace:
        pace = speed(work)
    epochs = max(1, int(work.minutes * 60 / 3 / pace["seconds_an_epoch"]))
    arms = ("good", "bad", "next-token")
    return {"epochs": epochs, **{arm: _train(work, arm, epochs=epochs) for arm in arms}}


STEPS: Final[dict[str, Callable[[Measurements], dict[str, Any]]]] = {
    "machine": machine,
    "agreement": agreement,
    "neighbours": neighbours,
    "speed": speed,
    "compiled": compiled,
    "training": training,
}


def _ingest(work: Measurements) -> None:
    if (work.home / "datasets" / work.dataset / "current.json").exists():
        return
    if work.dataset != "toyworld":
        raise ValueError(f"{work.home} holds no dataset {work.dataset}. Ingest it first: goodviews ingest --help.")
    scenes = 300 if work.is_rehearsal else SCENES
    options = ["--set", f"source.scenes={scenes}", "--set", "images=false", "--num-cpus", "0"]
    _goodviews(["ingest", "toyworld", "--home", str(work.home), *options])


def _train(work: Measurements, arm: str, *, epochs: int, sets: Sequence[str] = ()) -> dict[str, Any]:
    run_id = f"gpu-{arm}-{epochs}-{time.time_ns() // 10**6}"
    wanted = [f"plan.epochs={epochs}", f"tokenizer.source={work.tokenizer}", "run.log_every_steps=20", *sets]
    wanted += REHEARSAL if work.is_rehearsal else ()
    if arm == "next-token":
        wanted = [text for text in wanted if not text.startswith(("encoder.projector", "lejepa."))]
    words = ["train", "--recipe", "flickr-33m", "--arm", arm, "--dataset", work.dataset, "--run-id", run_id]
    words += ["--home", str(work.home), "--json", *([] if work.is_rehearsal else ["--use-gpu"])]
    done = json.loads(_goodviews(words + [word for text in wanted for word in ("--set", text)]))
    metrics = {name: done["metrics"][name] for name in KEPT_METRICS if name in done["metrics"]}
    epoch_s = done["samples"] / epochs / done["metrics"]["samples_per_s"]
    return {"run_id": run_id, "steps": done["steps"], "seconds_an_epoch": epoch_s, **metrics}


def _goodviews(words: Sequence[str]) -> str:
    return _run([sys.executable, "-m", "infra.cli", *words])


def _run(command: Sequence[str], *, may_fail: bool = False) -> str:
    """Standard output; the log goes to ours as it comes. Raises ValueError with the command when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=REPOSITORY)
    if done.returncode and not may_fail:
        raise ValueError(f"`{' '.join(command)}` ended with exit code {done.returncode}; its last words are above.")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
