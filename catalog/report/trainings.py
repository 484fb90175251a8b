"""Sections of the report on trainings (loss curves) and on data (counts, rejects, leakage).

Invariant: counts are those of the shards; a curve connects recorded points only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from catalog.report import charts
from catalog.report.canvas import Figure, Palette
from catalog.report.contents import Contents, SplitCounts
from catalog.report.encoders import Run
from catalog.report.scores import Score
from catalog.report.sections import Note, Piece, Section, Table, count, number, table, versions_text

MOST_RUNS: Final = 24
MOST_PARTS: Final = 6
LOSS_TITLES: Final = {
    "lejepa": "LeJEPA: loss = distance of views + w x SIGReg",
    "ntp": "next tokens: cross-entropy",
}


# --- trainings ----------------------------------------------------------------------------------------------------


def trainings(contents: Contents, palette: Palette) -> Section:
    """Runs: what they consumed, how their losses fell."""
    runs = list(contents.runs.values())[-MOST_RUNS:]
    pieces: list[Piece] = []
    left_out = len(contents.runs) - len(runs)
    if left_out:
        pieces.append(Note(text=f"The {len(runs)} newest runs are shown; {left_out} older ones are left out."))
    pieces += _curve_figures(contents, runs, palette)
    if runs:
        pieces.append(_run_table(contents, runs))
    return Section(
        anchor="trainings",
        title="How were the encoders trained?",
        lead=(
            "Good views draw from all captions of a scene, bad views from a single one. Next-token prediction "
            "reads one caption, token by token. Losses of different objectives have no common scale."
        ),
        pieces=pieces,
        query="SELECT run_id, objective, seed, steps, samples, tokens, status FROM runs ORDER BY started_at",
        absent="No run is in the catalog yet. `goodviews train --recipe tiny-cpu` makes one.",
    )


def _curve_figures(contents: Contents, runs: Sequence[Run], palette: Palette) -> list[Piece]:
    losses = []
    for objective in sorted({run.objective for run in runs}):
        members = [run for run in runs if run.objective == objective]
        lines = _lines(contents, members, "loss", palette)
        if lines:
            title = LOSS_TITLES.get(objective, objective)
            losses.append(charts.CurvePanel(title=title, x_axis="steps", y_axis="loss", curves=lines))
    found: list[Piece] = []
    if losses:
        found.append(
            charts.curves(
                "loss",
                f"Training loss against steps for {_names(runs)}.",
                (
                    "Shows whether the loss kept falling, levelled off or diverged. Runs of one name differ in their "
                    "seed. Long curves are thinned to 400 of their points."
                ),
                losses,
            )
        )
    ranks = _lines(contents, runs, "effective_rank", palette)
    if ranks:
        panel = charts.CurvePanel(
            title="Effective rank of the vectors of a batch",
            x_axis="steps",
            y_axis="dimensions in use",
            curves=ranks,
        )
        found.append(_rank_figure(panel, runs))
    return found


def _rank_figure(panel: charts.CurvePanel, runs: Sequence[Run]) -> Figure:
    return charts.curves(
        "effective-rank",
        f"Effective rank against steps for {_names(runs)}.",
        ("A curve that falls towards 1 shows an encoder that has collapsed: it gives every text the same vector."),
        [panel],
    )


def _names(runs: Iterable[Run]) -> str:
    return ", ".join(dict.fromkeys(run.label for run in runs))


def _lines(contents: Contents, runs: Iterable[Run], metric: str, palette: Palette) -> list[charts.Curve]:
    return [
        charts.Curve(name=run.label, colour=palette(run.label, run.arm), points=points)
        for run in runs
        if (points := contents.curves.get((run.run_id, metric)))
    ]


def _run_table(contents: Contents, runs: Sequence[Run]) -> Table:
    def last(metric: str, run: Run) -> float | None:
        points = contents.curves.get((run.run_id, metric))
        return points[-1][1] if points else None

    return table(
        "Runs: what they consumed and where they ended",
        [
            ("run", lambda r: r.run_id),
            ("arm", lambda r: r.arm or ""),
            ("recipe", lambda r: r.recipe),
            ("objective", lambda r: r.objective),
            ("seed", lambda r: count(r.seed)),
            ("status", lambda r: r.row["status"]),
            ("steps", lambda r: count(r.row["steps"])),
            ("samples", lambda r: count(r.row["samples"])),
            ("caption tokens", lambda r: count(r.row["tokens"])),
            ("last loss", lambda r: number(last("loss", r))),
            ("last validation loss", lambda r: number(last("validation_loss", r))),
            ("effective rank", lambda r: number(last("effective_rank", r), 1)),
            ("ranks", lambda r: count(r.row["ranks"])),
            ("snapshot", lambda r: count(r.row["snapshot_id"])),
            ("trained on", lambda r: versions_text(r.row["dataset_versions"])),
        ],
        runs,
    )


# --- data ---------------------------------------------------------------------------------------------------------


def data(contents: Contents) -> Section:
    """Scenes, captions and rejects of the current versions."""
    parts = contents.parts
    pieces: list[Piece] = []
    captions = [
        charts.Bars(title=f"{p.dataset}/{p.split}", axis="scenes", counts=_by_captions(p)) for p in parts[:MOST_PARTS]
    ]
    if captions:
        pieces.append(
            charts.bars(
                "captions-per-scene",
                f"Scenes by number of captions, in {', '.join(bar.title for bar in captions)}.",
                ("A scene with one caption has no good pair; it can only give bad views."),
                captions,
            )
        )
    reasons = _by_reason(parts)
    if reasons:
        bars = [charts.Bars(title=f"{name}, all splits", axis="texts", counts=counts) for name, counts in reasons]
        pieces.append(
            charts.bars(
                "rejects",
                f"Texts that were not kept, by reason, in {', '.join(name for name, _ in reasons)}.",
                ("Shows why texts were rejected. Each one is a row of `rejects` with its address in the source."),
                bars,
            )
        )
    pieces += _data_tables(contents)
    return Section(
        anchor="data",
        title="What are the data?",
        lead=(
            "A scene is one state of the world; its captions and pictures are observations of it. Every text "
            "that was read is either kept or a reject with a reason."
        ),
        pieces=pieces,
        query=(
            "SELECT dataset, split, sum(scenes), sum(captions), sum(texts_read), sum(rejects) FROM shards GROUP BY ALL"
        ),
        absent="No data set is in the catalog yet. `goodviews ingest` brings one in.",
    )


def _by_captions(part: SplitCounts) -> list[tuple[str, int]]:
    """At most ten bars; what comes after the ninth number is one bar."""
    counts = sorted(part.captions_per_scene.items())
    shown = [(f"{n} caption{'s' if n != 1 else ''}", scenes) for n, scenes in counts]
    if len(shown) > 10:
        rest = sum(scenes for _, scenes in counts[9:])
        shown = [*shown[:9], (f"{counts[9][0]} or more", rest)]
    return shown


def _by_reason(parts: Sequence[SplitCounts]) -> list[tuple[str, list[tuple[str, int]]]]:
    found: dict[str, dict[str, int]] = {}
    for part in parts:
        reasons = found.setdefault(part.dataset, {})
        for reason, texts in part.rejects_by_reason.items():
            reasons[reason] = reasons.get(reason, 0) + texts
    ordered = {name: sorted(reasons.items(), key=lambda item: (-item[1], item[0])) for name, reasons in found.items()}
    return [
        (name, [(reason.replace("_", " "), texts) for reason, texts in counts])
        for name, counts in list(ordered.items())[:MOST_PARTS]
        if counts
    ]


def _data_tables(contents: Contents) -> list[Piece]:
    if not contents.parts:
        return []
    counted = table(
        "Current versions: texts read = texts kept + rejects, in each split",
        [
            ("data set", lambda p: p.dataset),
            ("version", lambda p: p.version),
            ("split", lambda p: p.split),
            ("scenes", lambda p: count(p.scenes)),
            ("captions", lambda p: count(p.captions)),
            ("captions a scene", lambda p: number(p.captions / p.scenes if p.scenes else None, 2)),
            ("texts read", lambda p: count(p.texts_read)),
            ("texts kept", lambda p: count(p.texts_kept)),
            ("rejects", lambda p: count(p.rejects)),
            ("shards", lambda p: count(p.shards)),
            ("bytes", lambda p: count(p.bytes)),
        ],
        contents.parts,
    )
    overlap = _overlap_table(contents.scores)
    return [counted, overlap] if overlap is not None else [counted]


def _overlap_table(scores: Iterable[Score]) -> Table | None:
    """What the scored scenes share with training sets, a row a pair of both."""
    found: dict[tuple[str, str, str], Mapping[str, int]] = {}
    for score in scores:
        row, said = score.row, score.row["details"].get("leaked")
        # A sentence stands there where nobody knows what a model was trained on.
        for training, counts in said.items() if isinstance(said, Mapping) else ():
            if isinstance(counts, Mapping):
                scored = f"{row['dataset']}/{row['split']}" if row["dataset"] else str(row["left_name"])
                found[training, scored, count(row["n"])] = counts
    if not found:
        return None

    def seen(kind: str) -> Callable[[Any], str]:
        return lambda item: count(item[1].get(kind))

    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("trained on", lambda item: item[0][0]),
        ("scored on", lambda item: item[0][1]),
        ("items", lambda item: item[0][2]),
        ("same caption", seen("exact")),
        ("same words", seen("normalised")),
        ("same scene", seen("scene")),
        ("same source id", seen("source_id")),
        ("any of these", seen("any")),
    ]
    return table(("Overlap: scored scenes that a training set holds, by kind of match"), columns, found.items())
