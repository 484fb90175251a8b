"""What an ingestion would do: format, files, rows, shards, mapped columns, first scenes, rejects in a sample.

Owns: `goodviews ingest --dry-run`. Invariant: nothing is written, no Ray is started.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from catalog import schema
from infra import storage
from pipelines import tables
from pipelines.columns import column, is_none
from pipelines.group import group, merge
from pipelines.plan import plan_shards
from pipelines.request import Request

SAMPLE_RECORDS = 4096
FIRST_SCENES = 3


def preview(request: Request, *, as_json: bool) -> None:
    """Print the plan of a request and what a sample of its first records becomes."""
    facts = examine(request)
    if as_json:
        sys.stdout.write(orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
        return
    console = Console(soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name in ("dataset", "format", "files", "bytes", "rows", "scenes_at_most", "shards", "splits"):
        value = facts[name]
        table.add_row(f"[bold]{name}[/bold]", f"{value:,}" if isinstance(value, int) else escape(str(value)))
    for name, meaning in facts["columns"].items():
        table.add_row("[bold]column[/bold]", escape(f"{name} -> {meaning}"))
    for note in facts["notes"]:
        table.add_row("[bold]note[/bold]", escape(note))
    rejects = ", ".join(f"{k} {v:,}" for k, v in facts["sample_rejects"].items()) or "none"
    table.add_row("[bold]sample[/bold]", f"{facts['sample_texts']:,} texts, rejected: {rejects}")
    console.print(table)
    for scene in facts["first_scenes"]:
        console.print(f"[bold]{scene['scene_key']}[/bold] ({scene['split']})")
        for caption in scene["captions"]:
            console.print(f"  {caption['role']:>16}  {caption['text']}", markup=False)
    console.print("Nothing was written.")


def examine(request: Request) -> dict[str, Any]:
    """The same facts as a dictionary. Raises what `survey` and `read` raise."""
    survey = request.source.survey(request.inputs, request.config.limit)
    plan = plan_shards(request, survey)
    splits: Counter[str] = Counter()
    for piece in survey.pieces:
        splits.update(piece.scenes_by_split)
    first = next(itertools.chain.from_iterable(map(request.source.read, survey.pieces)))
    size = min(SAMPLE_RECORDS, first.records.num_rows)
    texts = first.texts.filter(np.asarray(column(first.texts, "record")) < size)
    repair = request.config.clean.repair_byte_escapes
    scenes = group(
        merge([type(first)(first.records.slice(0, size), texts)]),
        config=request.config.clean,
        repair=request.source.repairs_byte_escapes if repair is None else repair,
    )
    kept = tables.keep(scenes)
    ids, names = (column(first.records, name).to_pylist() for name in ("source_id", "split"))
    split_of = dict(zip(ids, names, strict=True))
    origin = tables.Origin(dataset=request.dataset, version="dry-run", split="any", shard=0)
    rows = tables.scenes_table(scenes, kept, origin)
    shown = rows.take(np.argsort(kept.first_record, kind="stable")[:FIRST_SCENES]).to_pylist()
    rejects: Counter[str] = Counter(scenes.reason[~is_none(scenes.reason)].tolist())
    return {
        "dataset": request.dataset,
        "source": request.source.name,
        "format": survey.format,
        "files": len(request.inputs),
        "bytes": sum(storage.size(i.url) for i in request.inputs),
        "rows": sum(p.stop - p.start for p in survey.pieces),
        "scenes_at_most": sum(splits.values()),
        "shards": len(plan.shards),
        "splits": dict(sorted(splits.items())),
        "columns": dict(survey.columns),
        "notes": list(survey.notes),
        "sample_texts": texts.num_rows,
        "sample_rejects": {r: rejects[r] for r in schema.REJECT_REASONS if r in rejects},
        "first_scenes": [
            {"scene_key": s["scene_key"], "split": split_of[s["source_id"]], "captions": s["captions"]} for s in shown
        ],
    }
