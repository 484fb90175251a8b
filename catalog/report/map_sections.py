"""Sections of the report on fitted maps: retrieval, and how many pairs a map needs.

Invariant: a result of a map is shown with its two controls whenever the catalog holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from catalog.report import charts
from catalog.report.canvas import Figure, Palette
from catalog.report.contents import Contents
from catalog.report.score_sections import (
    MOST_FIGURE_GROUPS,
    PROTOCOLS,
    conditions,
    map_words,
    paired,
    panel,
    subject_name,
    system_pieces,
    title,
)
from catalog.report.scores import CONTROLS, Group, Score, group
from catalog.report.sections import Piece, Section, count, interval, number, table


def retrieval(contents: Contents, palette: Palette) -> Section:
    """What is found after a map that was fitted on other scenes."""
    scores = [s for s in contents.scores if s.row["map"] not in (None, "none", *CONTROLS) and s.row["direction"]]
    groups = group(_full(scores))
    groups.sort(key=lambda g: (str(g.first.direction), str(g.first.row["protocol"]), g.first.row["k"] or 999))
    first = [g for g in groups if g.first.metric == "recall@1"]
    pieces: list[Piece] = []
    if first:
        pieces.append(_retrieval_figure(first[:MOST_FIGURE_GROUPS], contents.scores, palette))
    pieces += system_pieces("Retrieval", first)
    pieces += paired("Retrieval", [s for s in contents.differences if s.row["map"] not in (None, "none")])
    controls = [s for s in contents.scores if s.row["map"] in CONTROLS]
    ordered = [score for found in groups for score in found.scores]
    pieces += [_recall_table(ordered)] if ordered else []
    pieces += [conditions("Retrieval", [s for s in ordered if s.metric == "recall@1"])] if first else []
    pieces += [_control_table(controls)] if controls else []
    return Section(
        anchor="retrieval",
        title="Does a rotation find the right one?",
        lead=(
            "A rotation is fitted on pairs of one set of scenes. On other scenes each query searches for its "
            "partner among all candidates. R@1 is the share of queries whose partner comes first; ties count as "
            "misses. A random rotation and a rotation fitted on shuffled pairs are the controls, which should "
            "stay at chance."
        ),
        pieces=pieces,
        query=(
            "SELECT left_name, right_name, metric, map, direction, protocol, pairs, value, low, high, chance, n FROM "
            "alignments WHERE map <> 'none' ORDER BY metric, value DESC"
        ),
        absent="No map is in the catalog yet. `goodviews rotate LEFT RIGHT --fit-share 0.5` fits and scores one.",
    )


def _full(scores: Sequence[Score]) -> list[Score]:
    """Of a curve over numbers of pairs, the row with the most pairs of its kind."""
    best: dict[tuple[Any, ...], int] = {}
    keys = [_curve_key(score) for score in scores]
    for key, score in zip(keys, scores, strict=True):
        best[key] = max(best.get(key, 0), score.row["pairs"] or 0)
    return [score for key, score in zip(keys, scores, strict=True) if (score.row["pairs"] or 0) == best[key]]


def _curve_key(score: Score) -> tuple[Any, ...]:
    names = ("left_id", "right_id", "metric", "map", "protocol", "direction", "selection", "seed", "n")
    return tuple(score.row[name] for name in names)


def _retrieval_figure(groups: Sequence[Group], scores: Iterable[Score], palette: Palette) -> Figure:
    controls: dict[tuple[Any, ...], dict[str, dict[str, float]]] = {}
    words = {"random": "random rotation", "shuffled": "shuffled pairs"}
    for score in scores:
        if score.row["map"] in words and score.metric == "recall@1":
            marks = controls.setdefault(_control_key(score), {})
            marks.setdefault(score.subject.name, {})[words[score.row["map"]]] = score.value
    panels = [
        panel(found, palette, f"{title(found)}{map_words(found.first)}", controls.get(_control_key(found.first)))
        for found in groups
    ]
    top = groups[0].scores[0]
    alt = (
        f"R@1 by encoder. Highest where {top.direction}: {top.subject.label}, {number(top.value)}; chance "
        f"{number(groups[0].chance)}."
    )
    return charts.dots(
        "retrieval",
        alt,
        (
            "Shows how often the first answer is the right one, against chance and the two controls. If the "
            "controls of an encoder are not at chance, its score does not measure alignment."
        ),
        panels,
    )


def _recall_table(scores: Sequence[Score]) -> Piece:
    """A row an encoder and way of asking, the measures side by side."""
    found: dict[tuple[Any, ...], dict[str, Score]] = {}
    for score in scores:
        names = ("left_id", "right_id", "map", "protocol", "selection", "pairs", "seed", "n")
        key = (*(score.row[name] for name in names), score.direction)
        found.setdefault(key, {})[score.metric] = score
    rows = list(found.values())

    def any_of(row: Mapping[str, Score]) -> Score:
        return next(iter(row.values()))

    def value(metric: str, digits: int = 3) -> Callable[[Mapping[str, Score]], str]:
        return lambda row: number(row[metric].value, digits) if metric in row else "–"

    return table(
        "Retrieval: all encoders, by what was asked",
        [
            ("asked", lambda row: any_of(row).direction or ""),
            ("vectors", lambda row: PROTOCOLS.get(str(any_of(row).row["protocol"]), str(any_of(row).row["protocol"]))),
            ("encoder", lambda row: subject_name(any_of(row))),
            ("against", lambda row: any_of(row).against),
            ("map", lambda row: f"{any_of(row).row['map']}, {count(any_of(row).row['pairs'])} pairs"),
            ("R@1", value("recall@1")),
            ("95 % interval", lambda row: interval(row["recall@1"].row) if "recall@1" in row else "–"),
            ("chance", lambda row: number(row["recall@1"].row["chance"]) if "recall@1" in row else "–"),
            ("R@5", value("recall@5")),
            ("R@10", value("recall@10")),
            ("median rank", value("median_rank", 1)),
            ("among", lambda row: count(any_of(row).row["n"])),
            ("ties", lambda row: "–" if any_of(row).row["ties"] is None else f"{any_of(row).row['ties']:.1%}"),
        ],
        rows,
    )


def _control_key(score: Score) -> tuple[Any, ...]:
    anchor = score.anchor.name if score.anchor is not None else ""
    return (
        *(score.row[name] for name in ("dataset", "version", "split", "protocol", "n", "pairs")),
        anchor,
        score.direction,
    )


def _control_table(controls: Sequence[Score]) -> Piece:
    return table(
        "Controls of every map: R@1 of a random rotation and of one fitted on shuffled pairs",
        [
            (
                "control",
                lambda s: f"{s.row['map']} pairs" if s.row["map"] == "shuffled" else f"{s.row['map']} rotation",
            ),
            ("encoder", subject_name),
            ("asked", lambda s: s.direction or ""),
            ("protocol", lambda s: s.row["protocol"] or ""),
            ("pairs", lambda s: count(s.row["pairs"])),
            ("R@1", lambda s: number(s.value)),
            ("95 % interval", lambda s: interval(s.row)),
            ("chance", lambda s: number(s.row["chance"])),
            ("n", lambda s: count(s.row["n"])),
        ],
        [s for s in controls if s.metric == "recall@1"],
    )


def pairs_curve(contents: Contents, palette: Palette) -> Section:
    """R@1 against the number of pairs a map was fitted on."""
    scores = [
        s
        for s in contents.scores
        if s.metric == "recall@1" and s.row["map"] not in (None, "none", *CONTROLS) and s.row["pairs"]
    ]
    lines: dict[tuple[Any, ...], list[Score]] = {}
    for score in scores:
        lines.setdefault(_curve_key(score), []).append(score)
    panels: dict[tuple[str, ...], list[Sequence[Score]]] = {}
    for members in lines.values():
        if len({m.row["pairs"] for m in members}) > 1:
            one = members[0]
            place = (
                f"{one.row['map']}, {one.direction}, {one.row['protocol']}, with {one.against}, "
                f"{count(one.row['n'])} items"
            )
            panels.setdefault((place,), []).append(sorted(members, key=lambda s: int(s.row["pairs"])))
    drawn = [_pairs_panel(key[0], found, palette) for key, found in list(panels.items())[:MOST_FIGURE_GROUPS]]
    pieces: list[Piece] = []
    if drawn:
        names = dict.fromkeys(curve.name for panel in drawn for curve in panel.curves)
        pieces.append(
            charts.curves(
                "pairs",
                f"R@1 against the number of pairs for {', '.join(names)}.",
                (
                    "Shows how many pairs are needed to map one space to the other, and where more pairs stop helping. "
                    "Vertical lines are 95 % intervals over items."
                ),
                drawn,
            )
        )
    return Section(
        anchor="pairs",
        title="How many pairs does it need?",
        lead=(
            "If two encoders agree up to a rotation, a few well-placed pairs determine it. The same kind of map "
            "is fitted here on growing subsets of the pairs."
        ),
        pieces=pieces,
        query=(
            "SELECT left_name, direction, protocol, pairs, value, low, high FROM alignments WHERE metric = "
            "'recall@1' ORDER BY left_name, direction, protocol, pairs"
        ),
        absent=(
            "No map was fitted on several numbers of pairs. `goodviews rotate LEFT RIGHT --fit-share 0.5 --curve "
            "10,30,100` does it."
        ),
    )


def _pairs_panel(title: str, found: Sequence[Sequence[Score]], palette: Palette) -> charts.CurvePanel:
    lines = []
    for members in found:
        subject = members[0].subject
        ends = [(s.row["low"], s.row["high"]) if s.row["low"] is not None else None for s in members]
        points = [(float(s.row["pairs"]), s.value) for s in members]
        lines.append(
            charts.Curve(name=subject.label, colour=palette(subject.label, subject.arm), points=points, intervals=ends)
        )
    chance = {s.row["chance"] for members in found for s in members}
    return charts.CurvePanel(
        title=title,
        x_axis="pairs that the map was fitted on (logarithmic)",
        y_axis="R@1",
        curves=lines,
        chance=chance.pop() if len(chance) == 1 else None,
        is_log=True,
    )
