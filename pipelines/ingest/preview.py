"""`goodviews ingest --dry-run`: the plan of a job, and what a sample of its records becomes.

Invariant: nothing is written and no Ray is started; the sample has the first records of pieces all over the input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from catalog import schema
from infra import config as configuration
from infra import storage
from infra.errors import InputError
from infra.output import print_json
from pipelines.arrays import column, is_none
from pipelines.ingest import tables
from pipelines.ingest.group import group, merge
from pipelines.ingest.plan import plan_shards
from pipelines.ingest.request import Request
from pipelines.records import Batch, Piece, Source
from pipelines.sources import SOURCES, source_class
from pipelines.sources.formats.discovery import find_inputs

SAMPLE_RECORDS = 4096
SAMPLE_PIECES = 8
FIRST_SCENES = 3
GENERAL: Final = frozenset({"table", "webdataset"})
"Sources of any table or tar: a source made for the set, if one reads the files, knows more of it."


def preview(request: Request, *, as_json: bool, recognised: Mapping[str, str] | None = None) -> None:
    """Print the plan of a request and what a sample of its records becomes.

    recognised: source -> format, of every source that reads the files, when the user named none.
    """
    facts = examine(request)
    if recognised is not None:
        facts["recognised"] = dict(recognised)
    if as_json:
        print_json(facts)
        return
    console = Console(soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, form in (recognised or {}).items():
        table.add_row("[bold]source[/bold]", escape(f"{name}: {form}"))
    for name in ("dataset", "format", "files", "bytes", "rows", "scenes_at_most", "shards", "splits"):
        value = facts[name]
        table.add_row(f"[bold]{name}[/bold]", f"{value:,}" if isinstance(value, int) else escape(str(value)))
    for name, meaning in facts["columns"].items():
        table.add_row("[bold]column[/bold]", escape(f"{name} -> {meaning}"))
    for note in facts["notes"]:
        table.add_row("[bold]note[/bold]", escape(note))
    table.add_row("[bold]sample[/bold]", _sampled(facts))
    console.print(table)
    for scene in facts["first_scenes"]:
        console.print(f"[bold]{scene['scene_key']}[/bold] ({scene['split']})")
        for caption in scene["captions"]:
            console.print(f"  {caption['role']:>16}  {caption['text']}", markup=False)
    console.print("Nothing was written.")


def _sampled(facts: Mapping[str, Any]) -> str:
    words = f"{facts['sample_texts']:,} texts of {facts['sample_records']:,} rows, rejected: "
    words += ", ".join(f"{k} {v:,}" for k, v in facts["sample_rejects"].items()) or "none"
    if facts["sample_records"] < facts["rows"] and facts["sample_rejects"]:
        expected = ", ".join(f"{k} {v:,}" for k, v in facts["expected_rejects"].items())
        words += f"; at that rate, of about {facts['expected_texts']:,} texts: {expected}"
    return words


def recognise(paths: Sequence[str], limit: int | None) -> dict[str, str]:
    """Source -> format, for every source that reads these paths: sources that a path names first, general ones last.

    Raises InputError with the reason of each source when none does.
    """
    found: dict[str, str] = {}
    reasons: list[str] = []
    named = " ".join(paths).lower()
    for name in sorted(SOURCES, key=lambda name: (name in GENERAL, name not in named, name)):
        source: Source = configuration.load(source_class(name))
        if not source.needs_input:
            continue
        try:
            inputs = find_inputs(paths, source.reads)[1]
            found[name] = source.survey(inputs, limit).format
        except InputError as error:
            reasons.append(f"{name}: {error}")
    if not found:
        raise InputError("No source reads these files. " + " ".join(reasons))
    return found


def examine(request: Request) -> dict[str, Any]:
    """The same facts as a dictionary. Raises what `survey` and `read` raise."""
    survey = request.source.survey(request.inputs, request.config.limit)
    plan = plan_shards(request, survey)
    splits: Counter[str] = Counter()
    for piece in survey.pieces:
        splits.update(piece.scenes_by_split)
    sample = _sample(request.source, survey.pieces)
    clean = request.config.clean
    scenes = group(sample, config=clean, repair=clean.repairs(request.source))
    kept = tables.keep(scenes)
    ids, names = (column(sample.records, name).to_pylist() for name in ("source_id", "split"))
    split_of = dict(zip(ids, names, strict=True))
    origin = tables.Origin(dataset=request.dataset, version="dry-run", split="any", shard=0)
    rows = tables.scenes_table(scenes, kept, origin)
    shown = rows.take(np.argsort(kept.first_record, kind="stable")[:FIRST_SCENES]).to_pylist()
    rejects: Counter[str] = Counter(scenes.reason[~is_none(scenes.reason)].tolist())
    total = sum(p.stop - p.start for p in survey.pieces)
    factor = total / max(1, sample.records.num_rows)
    return {
        "dataset": request.dataset,
        "source": request.source.name,
        "format": survey.format,
        "files": len(request.inputs),
        "bytes": sum(storage.size(i.url) for i in request.inputs),
        "rows": total,
        "scenes_at_most": sum(splits.values()),
        "shards": len(plan.shards),
        "splits": dict(sorted(splits.items())),
        "columns": dict(survey.columns),
        "notes": list(survey.notes),
        "sample_records": sample.records.num_rows,
        "sample_texts": sample.texts.num_rows,
        "sample_rejects": {r: rejects[r] for r in schema.REJECT_REASONS if r in rejects},
        "expected_texts": round(sample.texts.num_rows * factor),
        "expected_rejects": {r: round(rejects[r] * factor) for r in schema.REJECT_REASONS if r in rejects},
        "first_scenes": [
            {"scene_key": s["scene_key"], "split": split_of[s["source_id"]], "captions": s["captions"]} for s in shown
        ],
    }


def _sample(source: Source, pieces: Sequence[Piece]) -> Batch:
    """At most SAMPLE_RECORDS records: the first ones of up to SAMPLE_PIECES pieces, evenly spaced in the input."""
    # Files are often sorted, by split or by crawl, so the first piece alone would not stand for the input.
    step = max(1, len(pieces) / SAMPLE_PIECES)
    chosen = [pieces[int(i * step)] for i in range(min(len(pieces), SAMPLE_PIECES))]
    each = SAMPLE_RECORDS // max(1, len(chosen))
    parts = []
    for piece in chosen:
        left = each
        for batch in source.read(piece):
            taken = min(left, batch.records.num_rows)
            texts = batch.texts.filter(np.asarray(column(batch.texts, "record")) < taken)
            parts.append(Batch(batch.records.slice(0, taken), texts))
            left -= taken
            if left == 0:
                break
    return merge(parts)
