"""Embed shards on Ray Data: a pool of actors, each with the model loaded once.

Invariant: one of our own errors comes back as a row, because Ray Data would wrap it in an error of its own.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from infra.errors import GoodviewsError, encode
from pipelines.embed.plan import EmbedPlan, Shard
from pipelines.embed.worker import ShardEmbedder


class _Actor:
    """Called by Ray Data with tables of one row, a shard."""

    def __init__(self, plan: EmbedPlan, device: str) -> None:
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._shards = {shard.name: shard for shard in plan.shards}
        self._error: GoodviewsError | None = None
        try:
            self._embedder = ShardEmbedder(plan, device=device)
        except GoodviewsError as error:
            # Ray would restart an actor whose constructor raises, without end; so each row reports the error.
            self._error = error

    def __call__(self, rows: pa.Table) -> pa.Table:
        (name,) = rows["shard"].to_pylist()
        done, error = b"", self._error
        if error is None:
            try:
                done = self._embedder.embed(self._shards[name]).to_json()
            except GoodviewsError as raised:
                error = raised
        row = {"shard": name, "done": done, "worker": self._name}
        kind, message = encode(error) if error else ("", "")
        row |= {"error": kind, "message": message}
        return pa.Table.from_pylist([row])


def run_on_ray(plan: EmbedPlan, shards: Sequence[Shard], slots: int) -> Iterator[dict[str, Any]]:
    """Rows (shard, done, worker, error, message) as shards finish. slots: actors where there is no GPU."""
    import ray
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    pool = max(1, min(gpus or slots, len(shards)))
    # One block for each shard: actors take whole blocks, so a block of many shards would leave the other actors idle.
    rows = ray.data.from_items([{"shard": shard.name} for shard in shards], override_num_blocks=len(shards))
    done = rows.map_batches(
        _Actor,
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=pool),
        fn_constructor_args=(plan, "cuda" if gpus else "cpu"),
        num_cpus=1,
        num_gpus=1 if gpus else None,
    )
    yield from done.iter_rows()
