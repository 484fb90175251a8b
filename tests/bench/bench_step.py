"""Training steps fed by the stream against the same steps fed from memory: what share of the time the data costs.

Usage: bench_step.py [--steps N] [--rounds R] [--texts short|long]. `tiny-cpu` at its own batch on synthetic captions, one
thread for the model, one process. Three feeds of the very same batches take turns, N steps each: a list made beforehand (the ideal
loader), the stream without workers (made when asked for), the stream with one worker. Shards are cached before anything
is timed, as in every epoch but the first. A share is the median over the rounds, against the list in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

FEEDS = {"memory": "batches in memory", "inline": "stream, no worker", "worker": "stream, one worker"}


def main() -> None:
    """Run the rounds and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scenes", type=int, default=20_000)
    parser.add_argument("--texts", choices=("short", "long"), default="short")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="goodviews-bench-") as name:
        seconds = rounds(Path(name), args)
    print_table(seconds, args)


def rounds(folder: Path, args: Any) -> dict[str, list[float]]:
    """Seconds a step of each feed, round by round."""
    import torch

    from infra.home import Home
    from tests.bench import stream_data
    from trainer.run import recipe
    from trainer.run.assembly import assemble, build_model

    torch.set_num_threads(1)
    home = Home(url=str(folder), catalog=str(folder / "catalog.sqlite"))
    stream_data.publish(home, args.texts, args.scenes)
    epochs = -(-args.steps * (args.rounds + 1) * 256 // args.scenes) + 1
    chosen = recipe.load("tiny-cpu", sets=[f"data.dataset={args.texts}", "data.version=bench", f"plan.epochs={epochs}"])
    materials = assemble(chosen, home)
    trainer = _Trainer(materials.recipe, build_model(materials.recipe))
    streams = {"inline": _stream(materials, 0), "worker": _stream(materials, 1)}
    seconds: dict[str, list[float]] = {name: [] for name in FEEDS}
    for turn in range(args.rounds + 1):
        span = turn * args.steps, (turn + 1) * args.steps
        kept = list(streams["inline"].batches(*span))
        for name in FEEDS:
            with _feed(name, kept, streams, span) as batches:
                found = trainer.run(batches)
            if turn:
                seconds[name].append(found / args.steps)
    return seconds


class _Trainer:
    def __init__(self, recipe: Any, model: Any) -> None:
        from trainer.model.optimizer import build_optimizer

        self._recipe, self._model, self._step = recipe, model, 0
        self._optimizer = build_optimizer(recipe.optimizer, model)

    def run(self, batches: Iterable[Any]) -> float:
        """Seconds of a forward, backward and optimizer step on each batch."""
        import torch

        from trainer.model.optimizer import take_step

        began = time.perf_counter()
        for batch in batches:
            terms = self._model(self._model.encoder.batch(batch.views), batch.step)
            torch.autograd.backward(terms.loss)
            take_step(self._optimizer, self._recipe.optimizer, self._step, 10**6)
            self._step += 1
        return time.perf_counter() - began


def _stream(materials: Any, workers: int) -> Any:
    from trainer.data.stream import Stream

    return Stream(materials.plan, materials.cache, materials.recipe.views, workers=workers)


@contextlib.contextmanager
def _feed(name: str, kept: list[Any], streams: dict[str, Any], span: tuple[int, int]) -> Iterator[Iterable[Any]]:
    if name == "memory":
        yield kept
        return
    with contextlib.closing(streams[name].batches(*span)) as batches:
        yield batches


def print_table(seconds: dict[str, list[float]], args: Any) -> None:
    """Milliseconds a step, and what each feed adds to the ideal one."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"tiny-cpu, batch 256, {args.steps} steps a turn, {args.rounds} rounds, one thread")
    for heading in ("feed", "ms a step, median (range)", "lost to data, median (range)"):
        table.add_column(heading, justify="left" if heading == "feed" else "right")
    for name, label in FEEDS.items():
        values = [1000 * value for value in seconds[name]]
        lost = [100 * (a / b - 1) for a, b in zip(seconds[name], seconds["memory"], strict=True)]
        shown = f"{statistics.median(lost):+.1f} % ({min(lost):+.1f} to {max(lost):+.1f})" if name != "memory" else ""
        table.add_row(label, f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})", shown)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
