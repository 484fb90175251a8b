"""Sections of the report on scores without a map: alignment and probes.

Invariant: each number is in the catalog, or is a mean, a spread or a count of such numbers; omissions are stated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from catalog.report import charts
from catalog.report.canvas import Figure, Palette
from catalog.report.contents import Contents
from catalog.report.scores import Group, Score, Spread, checkpoint_points, group, is_lower_better, spreads
from catalog.report.sections import Piece, Section, count, interval, metric_name, number, table, versions_text
from catalog.rows.alignments import CHECKPOINT_COLUMNS, DIFFERENCE
from infra.models import checkpoints

MOST_FIGURE_GROUPS: Final = 6
MAIN_METRIC: Final = "mutual_knn"
PROTOCOLS: Final = {"single": "one vector a scene", "multi": "each caption by itself"}


def alignment(contents: Contents, palette: Palette) -> Section:
    """Scores that no map was fitted for."""
    scores = [s for s in contents.scores if s.row["map"] in (None, "none") and s.anchor is not None]
    groups = sorted(group(scores), key=lambda g: (g.first.metric != MAIN_METRIC, -len(g.scores)))
    pieces: list[Piece] = []
    drawn = groups[:MOST_FIGURE_GROUPS]
    if drawn:
        pieces.append(_alignment_figure(drawn, palette))
    by_samples = _samples_figure(groups, contents, palette)
    pieces += [by_samples] if by_samples is not None else []
    pieces += system_pieces("Alignment", groups)
    pieces += paired("Alignment", [s for s in contents.differences if s.row["map"] in (None, "none")])
    pieces += _score_tables("Alignment", [score for found in groups for score in found.scores])
    return Section(
        anchor="alignment",
        title="How alike are the spaces?",
        lead=(
            "Mutual k-NN takes the k nearest neighbours of an item in each of two spaces and reports the share "
            "that both contain. Unrelated spaces share as many as chance does, which is the dashed line. Dots "
            "are scores with the 95 % interval over items."
        ),
        pieces=pieces,
        query=(
            "SELECT left_name, right_name, metric, value, low, high, chance, calibrated, p_value, k, n FROM "
            "alignments WHERE map = 'none' ORDER BY value DESC"
        ),
        absent="No alignment is in the catalog yet. `goodviews align LEFT RIGHT` scores two embedding sets.",
    )


def _alignment_figure(groups: Sequence[Group], palette: Palette) -> Figure:
    panels = [panel(found, palette, heading) for found, heading in zip(groups, titles(groups), strict=True)]
    top = groups[0].scores[0]
    alt = (
        f"Alignment by encoder. Highest {metric_name(top.row)} with {top.against}: {top.subject.label}, "
        f"{number(top.value)}; chance {number(groups[0].chance)}."
    )
    return charts.dots(
        "alignment",
        alt,
        (
            "Shows which encoder has neighbourhoods most similar to those of the other side, whether intervals "
            "of two encoders overlap, and how far training has moved a score from the untrained one. Printed "
            "numbers are means over the dots of a line, one dot a seed."
        ),
        panels,
    )


def title(found: Group) -> str:
    """What a group measures, against what, on what."""
    row, probed = found.first.row, found.first.anchor is None
    parts = [f"{metric_name(row)} {'of' if probed else 'with'} {found.first.against}"]
    if row["dataset"]:
        parts.append(f"{row['dataset']}/{row['split']}" if row["split"] else str(row["dataset"]))
    return ", ".join([*parts, f"{count(row['n'])} items"])


def titles(groups: Sequence[Group]) -> list[str]:
    """The title of each; where several would read the same, with what only some of their selections say."""
    alike: dict[str, list[set[str]]] = {}
    said = [set(str(found.first.row["selection"] or "").split("; ")) for found in groups]
    for found, clauses in zip(groups, said, strict=True):
        alike.setdefault(title(found), []).append(clauses)
    out = []
    for found, clauses in zip(groups, said, strict=True):
        common = set.intersection(*alike[title(found)])
        out.append("; ".join([title(found), *sorted(clauses - common)]))
    return out


def panel(found: Group, palette: Palette, heading: str, extra: Mapping[str, Mapping[str, float]] | None = None) -> Any:
    """The dots of a group. extra: further marks by the name of the embedding set."""
    dots = []
    for score in found.scores:
        if not math.isfinite(score.value):
            continue
        subject, marks = score.subject, {}
        columns = {checkpoints.label(checkpoint): name for name, checkpoint in CHECKPOINT_COLUMNS.items()}
        marks = {what: float(v) for what, name in columns.items() if (v := score.row[name]) is not None}
        marks |= (extra or {}).get(subject.name, {})
        colour = palette(subject.label, subject.arm)
        dots.append(
            charts.Dot(
                row=subject.label,
                colour=colour,
                value=score.value,
                low=score.row["low"],
                high=score.row["high"],
                marks=marks,
            )
        )
    return charts.Panel(title=heading, axis=_axis(found.first.row), dots=dots, chance=found.chance)


def _axis(row: Mapping[str, Any]) -> str:
    name = metric_name(row)
    units = {"mutual_knn": "share of neighbours in common", "lcs_knn": "length in common"}
    unit = units.get(str(row["metric"]))
    if str(row["metric"]).startswith("recall@"):
        place = "comes first" if row["k"] == 1 else f"is among the first {row['k']}"
        unit = f"share of queries whose right answer {place}"
    if str(row["metric"]).startswith("probe_"):
        unit = "share of items labelled right"
    return f"{name} ({unit or 'no unit'})"


def _samples_figure(groups: Sequence[Group], contents: Contents, palette: Palette) -> Figure | None:
    main = next((g for g in groups if any(s.subject.is_trained_here for s in g.scores)), None)
    found = {} if main is None else checkpoint_points(main.scores, contents.encoders.values())
    if main is None or not found:
        return None
    arms = {s.subject.label: s.subject.arm for s in main.scores}
    lines = [
        charts.Curve(name=label, colour=palette(label, arms[label]), points=points)
        for (label, _), points in sorted(found.items())
    ]
    panel = charts.CurvePanel(
        title=title(main),
        x_axis="samples seen in training",
        y_axis=metric_name(main.first.row),
        curves=lines,
        chance=main.chance,
    )
    alt = f"{metric_name(main.first.row)} against samples seen, for {', '.join(dict.fromkeys(c.name for c in lines))}."
    return charts.curves(
        "alignment-by-samples",
        alt,
        (
            "Shows whether alignment grows with training and whether the arms separate. Each line is a run, "
            "measured untrained, after one epoch and at its end; nothing was measured in between."
        ),
        [panel],
    )


def system_pieces(name: str, groups: Sequence[Group]) -> list[Piece]:
    """A line a system and group, and whether the intervals of neighbouring systems touch."""
    lines = [(found, line, below) for found in groups for line, below in _with_next(_ordered(found))]
    if not lines:
        return []
    made = table(
        f"{name}: encoders trained here, mean over seeds",
        [
            ("measure", lambda item: f"{title(item[0])}{map_words(item[0].first)}"),
            ("encoder", lambda item: item[1].label),
            ("seeds", lambda item: count(item[1].seeds)),
            ("mean", lambda item: number(item[1].mean)),
            ("standard deviation over seeds", lambda item: number(item[1].deviation)),
            ("intervals reach", lambda item: _reach(item[1])),
            ("touch the next row's", lambda item: _touch(item[1], item[2])),
            (checkpoints.label(checkpoints.UNTRAINED), lambda item: number(item[1].untrained)),
            (checkpoints.label(checkpoints.FIRST_EPOCH), lambda item: number(item[1].first_epoch)),
            ("chance", lambda item: number(item[0].chance)),
        ],
        lines,
    )
    return [made]


def _with_next(lines: Sequence[Spread]) -> list[tuple[Spread, Spread | None]]:
    return list(zip(lines, [*lines[1:], None], strict=True)) if lines else []


def _touch(line: Spread, below: Spread | None) -> str:
    if below is None or line.lowest is None or below.highest is None:
        return "–"
    return "yes" if line.lowest <= below.highest else "no"


def _ordered(found: Group) -> list[Spread]:
    return sorted(spreads(found), key=lambda s: s.mean, reverse=not is_lower_better(found.first.metric))


def _reach(line: Spread) -> str:
    return "–" if line.lowest is None or line.highest is None else f"{line.lowest:.3f} to {line.highest:.3f}"


def map_words(score: Score) -> str:
    """How the map of a score was made and what was asked through it; empty without a map."""
    row = score.row
    if row["map"] in (None, "none"):
        return ""
    vectors = PROTOCOLS.get(str(row["protocol"]), str(row["protocol"]))
    return f", {row['map']} from {count(row['pairs'])} pairs, {score.direction}, {vectors}"


def _score_tables(name: str, scores: Sequence[Score]) -> list[Piece]:
    """The numbers, and what they must not be read without."""
    if not scores:
        return []
    numbers = table(
        f"{name}: all scores, best first within what may be compared",
        [
            ("encoder", subject_name),
            ("against", lambda s: s.against),
            ("metric", lambda s: metric_name(s.row)),
            ("value", lambda s: number(s.value)),
            ("95 % interval", lambda s: interval(s.row)),
            ("chance", lambda s: number(s.row["chance"])),
            ("calibrated", lambda s: number(s.row["calibrated"])),
            ("p", lambda s: number(s.row["p_value"])),
            (checkpoints.label(checkpoints.UNTRAINED), lambda s: number(s.row["untrained_value"])),
            (checkpoints.label(checkpoints.FIRST_EPOCH), lambda s: number(s.row["first_epoch_value"])),
            ("n", lambda s: count(s.row["n"])),
            ("ties", lambda s: "–" if s.row["ties"] is None else f"{s.row['ties']:.1%}"),
        ],
        scores,
    )
    return [numbers, conditions(name, scores)]


def conditions(name: str, scores: Sequence[Score]) -> Piece:
    """What the scores must not be read without."""
    return table(
        f"{name}: under which conditions",
        [
            ("score", lambda s: str(s.row["alignment_id"])),
            ("encoder", subject_name),
            ("metric", lambda s: metric_name(s.row)),
            ("on", lambda s: f"{s.row['dataset']}/{s.row['split']}" if s.row["dataset"] else ""),
            ("protocol", lambda s: s.row["protocol"] or ""),
            (
                "layers",
                lambda s: ", ".join(str(n) for n in (s.row["left_layer"], s.row["right_layer"]) if n is not None),
            ),
            ("selection", lambda s: s.row["selection"] or ""),
            ("leaked", lambda s: "unknown" if s.row["leakage"] is None else f"{s.row['leakage']:.1%}"),
            ("without leaked", lambda s: number(s.row["details"].get("without_leaked"))),
            ("trained on samples", lambda s: count(s.row["samples"])),
            ("tokens", lambda s: count(s.row["tokens"])),
            ("snapshot", lambda s: count(s.row["snapshot_id"])),
            ("dataset versions", lambda s: versions_text(s.row["dataset_versions"])),
            ("alarms", lambda s: "; ".join(s.row["details"].get("alarms") or [])),
        ],
        scores,
    )


def paired(name: str, differences: Sequence[Score]) -> list[Piece]:
    """Two systems scored on the same items: one table, largest difference first; none without a difference."""
    if not differences:
        return []
    columns = [
        ("metric", lambda s: metric_name({**s.row, "metric": s.metric.removesuffix(DIFFERENCE)})),
        ("of", lambda s: str(s.row["left_name"])),
        ("minus", lambda s: str(s.row["details"]["rival_name"])),
        ("against", lambda s: str(s.row["right_name"])),
        ("difference", lambda s: f"{s.value:+.3f}"),
        ("95 % interval", lambda s: interval(s.row, sign="+")),
        ("scores", lambda s: " and ".join(number(value) for value in s.row["details"]["values"])),
        ("n", lambda s: count(s.row["n"])),
        ("selection", lambda s: str(s.row["selection"] or "")),
    ]
    ordered = sorted(differences, key=lambda s: (s.metric, -s.value))
    return [table(f"{name}: paired differences, both systems on the same items", columns, ordered)]


def subject_name(score: Score) -> str:
    """The encoder with its seed."""
    subject = score.subject
    return subject.label if subject.seed is None else f"{subject.label}, seed {subject.seed}"


# --- probes -------------------------------------------------------------------------------------------------------


def probes(contents: Contents, palette: Palette) -> Section:
    """What can be read from an embedding set."""
    groups = _one_label_each(group(s for s in contents.scores if s.anchor is None and s.metric.startswith("probe_")))
    groups.sort(key=lambda g: (g.first.metric != "probe_linear", str(g.first.against)))
    linear = [g for g in groups if g.first.metric == "probe_linear"] or groups
    pieces: list[Piece] = []
    if linear:
        top = linear[0].scores[0]
        pieces.append(
            charts.dots(
                "probes",
                (
                    f"Probe accuracy by encoder. Highest for {top.against}: {top.subject.label}, "
                    f"{number(top.value)}; chance {number(linear[0].chance)}."
                ),
                (
                    "Shows which properties of the world an encoder distinguishes. Chance is the share of the most "
                    "frequent label."
                ),
                [panel(g, palette, title(g)) for g in linear[:MOST_FIGURE_GROUPS]],
            )
        )
    pieces += _score_tables("Probes", [score for found in groups for score in found.scores])
    return Section(
        anchor="probes",
        title="What can be read from an embedding?",
        lead=(
            "A linear classifier and a nearest-neighbour vote learn a label from the vectors and are scored by "
            "cross-validation on scenes they have not seen. An alignment score says that two spaces agree; a "
            "probe says on what."
        ),
        pieces=pieces,
        query=(
            "SELECT left_name, right_name AS label, metric, value, low, high, chance, n FROM alignments WHERE metric "
            "LIKE 'probe_%' ORDER BY label, metric, value DESC"
        ),
        absent="No probe is in the catalog yet. `goodviews probe SET --labels FILE` makes one.",
    )


def _one_label_each(groups: Sequence[Group]) -> list[Group]:
    """Probes of captions and of pictures side by side: how captions were chosen is no matter for a set without any.

    Groups that differ in the selection alone become one, unless an encoder stands in two of them.
    """
    together: dict[tuple[Any, ...], list[Group]] = {}
    for found in groups:
        names = ("metric", "k", "n", "dataset", "version", "split", "protocol", "right_name")
        together.setdefault(tuple(found.first.row[name] for name in names), []).append(found)
    merged = []
    for members in together.values():
        scores = [score for found in members for score in found.scores]
        encoders = [{score.subject.name for score in found.scores} for found in members]
        apart = sum(map(len, encoders)) > len(set().union(*encoders))
        merged += members if apart else [Group(scores=tuple(sorted(scores, key=lambda score: -score.value)))]
    return merged
