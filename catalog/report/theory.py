"""Section of the report on the theorems: exact encoders of finite worlds, and trained ones.

Invariant: every mark is a number of the catalog; the newest check of each kind is shown completely.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from catalog.report import canvas as drawing
from catalog.report.canvas import INK, QUIET, Figure
from catalog.report.sections import Piece, Section, Table, table
from catalog.rows.theory import Check

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOOD, BAD, SPECIAL = drawing.ARM_COLOURS["good"], drawing.ARM_COLOURS["bad"], "#332288"
REGIMES: Final[Mapping[str, Mapping[str, Any]]] = {
    "below": {"label": "bad views, below the threshold", "color": "#56b4e9", "marker": "o", "s": 13},
    "above": {"label": "bad views, above it", "color": BAD, "marker": "o", "s": 13},
    "special": {"label": "bad views, all nuisance kept", "color": SPECIAL, "marker": "D", "s": 17},
}
FLOOR: Final = 1e-17
"Where an error of exactly 0 is drawn on a logarithmic axis."


def theory(checks: Mapping[str, Check]) -> Section:
    """Both checks, as far as there are any."""
    pieces: list[Piece] = []
    if (grid := checks.get("grid")) is not None:
        pieces += [threshold_figure(grid), _regimes(grid), _mismatches(grid)]
    if (bridge := checks.get("bridge")) is not None:
        pieces += [bridge_figure(bridge), _trained(bridge)]
    return Section(
        anchor="theory",
        title="When must two encoders agree?",
        lead=(
            "On a finite world the best whitening encoder is known exactly: it consists of the eigenfunctions of "
            "the pairing. Two modalities whose views share nothing but the state have the same eigenfunctions, "
            "up to a rotation. Views that also share a nuisance spend a direction on it as soon as the nuisance "
            "is preserved more strongly (beta) than the last direction of the world (alpha). A network trained "
            "with LeJEPA on such a world shows how close training comes."
        ),
        pieces=pieces,
        query=(
            "SELECT series, point, name, value FROM theory_values WHERE series IN ('below', 'above', 'special') "
            "ORDER BY ALL"
        ),
        absent="No check of the theorems is in the catalog yet. `goodviews theory verify` makes one.",
    )


# --- the grid -----------------------------------------------------------------------------------------------------


def threshold_figure(check: Check) -> Figure:
    """Error against beta_1 / alpha_k, and how far it is from the prediction."""
    result, dims = check.result, int(check.config["dims"])
    with drawing.style():
        canvas = drawing.canvas(5.4)
        upper, lower = canvas.subplots(2, 1, sharex=True, height_ratios=[1.35, 1])
        every = [point for name in REGIMES for point in check.points.get(name, [])]
        upper.scatter(
            _ratios(every), [p["good_error"] for p in every], s=13, marker="_", color=GOOD, label="good views"
        )
        for name, look in REGIMES.items():
            found = check.points.get(name, [])
            upper.scatter(_ratios(found), [p["error"] for p in found], linewidths=0, **look)
            apart = [max(FLOOR, abs(p["error"] - 2 * p["predicted_lost"])) for p in found]
            lower.scatter(_ratios(found), apart, linewidths=0, **look)
        _mark_threshold(upper, lower)
        upper.set_yticks(range(0, 2 * dims + 1, 2))
        upper.set_ylabel("alignment error")
        upper.set_title("How far apart are two encoders, after the best rotation?")
        lower.set_yscale("log")
        lower.set_ylim(FLOOR / 3, 1e-11)
        lower.axhline(1e-12, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
        lower.set_ylabel("|error - 2 r|")
        lower.set_title("And how far is that from twice the number of lost directions?")
        lower.yaxis.set_major_formatter(lambda y, _: f"{y:.0e}")
        lower.set_xlabel("beta / alpha: strength of the nuisance by that of the world's last direction")
        _legend(canvas, upper, columns=2)
        return drawing.finished(
            canvas,
            name="theory-threshold",
            alt=(
                f"Alignment error against beta / alpha for {len(every):,} cases: 0 below 1, and 2, 4 ... {2 * dims} "
                "above."
            ),
            caption=(
                f"Below the threshold all errors are 0, at most {_rounding(result['max_below_error'])}. Above it the "
                f"error is twice the number of lost directions, up to {_rounding(result['max_above_deviation'])}. "
                f"Good views stay at 0 for every beta, at most {_rounding(result['max_good_error'])}. The dashed line "
                "is 1e-12; an error of exactly 0 is drawn at the bottom."
            ),
        )


def _legend(canvas: Any, axes: Axes, *, columns: int) -> None:
    handles, _ = axes.get_legend_handles_labels()
    canvas.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=9.5)


def _ratios(points: Sequence[Mapping[str, float]]) -> list[float]:
    return [p["beta"] / p["alpha"] for p in points]


def _mark_threshold(upper: Axes, lower: Axes) -> None:
    for axes in (upper, lower):
        axes.axvline(1.0, color=QUIET, linewidth=1.0)
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    upper.annotate("threshold", (1.0, 1.0), xytext=(-4, -10), ha="right", fontsize=9, color=QUIET, **place)


def _regimes(check: Check) -> Table:
    result, config = check.result, check.config
    total = result["rows_below"] + result["rows_above"] + config["worlds"]
    lost = ", ".join(f"{r} in {n}" for r, n in result["above_r"].items())
    above = _rounding(result["max_above_deviation"])
    rows = [
        ("good views", total, "error 0", _rounding(result["max_good_error"]), "0"),
        ("bad views below the threshold", result["rows_below"], "error 0", _rounding(result["max_below_error"]), "0"),
        ("bad views above it", result["rows_above"], "error 2r", above, lost or "–"),
        (
            "bad views, all nuisance kept",
            config["worlds"],
            f"error {2 * config['dims']}",
            _rounding(abs(result["special_error"] - 2 * config["dims"])),
            f"{result['special_r']}; {result['special_naive_r']} if the constant is looked for by sorting",
        ),
    ]
    return table(
        (
            f"{config['worlds']} worlds of {config['states']} states, encoders of {config['dims']} dimensions, seed "
            f"{check.seed}: worst deviation from the claim"
        ),
        [
            ("regime", lambda row: row[0]),
            ("cases", lambda row: f"{row[1]:,}"),
            ("claim", lambda row: row[2]),
            ("worst deviation", lambda row: row[3]),
            ("directions lost, r", lambda row: row[4]),
        ],
        rows,
    )


def _mismatches(check: Check) -> Table:
    result = check.result
    rows = [
        ("gap between both worlds", result["mismatch_checks"], "mismatch_tightness"),
        ("gap of the first world", result["mismatch_checks_one"], "mismatch_tightness_one"),
    ]
    return table(
        f"Worlds that pair their states otherwise: {result['mismatch_violations']} errors beyond their bound",
        [
            ("bound by", lambda row: row[0]),
            ("checks", lambda row: f"{row[1]:,}"),
            ("error / bound, median", lambda row: _rounding(result[f"{row[2]}_median"])),
            ("most", lambda row: _rounding(result[f"{row[2]}_max"])),
        ],
        rows,
    )


# --- trained encoders ---------------------------------------------------------------------------------------------


def bridge_figure(check: Check) -> Figure:
    """Principal angles to the closed form, and what the learned spans are made of, an arm a column."""
    kinds = check.result["kinds"]
    colours = dict(zip(dict.fromkeys(kind["weight"] for kind in kinds), KIND_COLOURS, strict=False))
    with drawing.style():
        canvas = drawing.canvas(5.8)
        grid = canvas.subplots(2, 2, sharey="row", squeeze=False)
        for column, arm in enumerate(("good", "bad")):
            for kind in kinds:
                if kind["arm"] == arm and (found := check.points.get(kind["name"])):
                    label, colour = _kind_name(kind["weight"]), colours.get(kind["weight"], INK)
                    _kind_lines(grid[0, column], found, "angle_", label, colour)
                    _kind_lines(grid[1, column], found, "share_", label, colour)
            grid[0, column].set_title(f"{arm} views")
            grid[0, column].set_xlabel("principal angle to the closed form")
            grid[1, column].set_xlabel("eigenfunction of the pairs, strongest first")
            grid[1, column].axvline(check.config["dims"] + 0.5, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
        grid[0, 0].set_ylabel("degrees")
        grid[0, 0].set_ylim(0, 90)
        grid[1, 0].set_ylabel("share in the span")
        grid[1, 0].set_ylim(-0.03, 1.05)
        _legend(canvas, grid[0, 0], columns=4)
        return drawing.finished(
            canvas,
            name="theory-bridge",
            alt=(
                "Principal angles between trained and closed-form encoders, for "
                f"{', '.join(kind['name'] for kind in kinds)}; and the shares of eigenfunctions in what they learned."
            ),
            caption=(
                "With a whitening penalty the network learns the span of the closed form: angles near 0, shares of 1 "
                "left of the dashed line and 0 right of it. SIGReg departs from it, more so the larger its weight: "
                "it accepts weaker eigenfunctions and nuisance in exchange for Gaussian directions. A line is the "
                "mean over seeds, a dot one seed (mean of two modalities). Functions of equal strength share their "
                "mean."
            ),
        )


KIND_COLOURS: Final = ("#7f7f7f", "#56b4e9", "#0072b2", "#332288", "#aa4499", "#d55e00")
"Of the control, and of SIGReg's weights in their order."


def _kind_name(weight: float | None) -> str:
    return "whitening" if weight is None else f"SIGReg, w {weight:g}"


def _kind_lines(axes: Axes, found: Sequence[Mapping[str, float]], prefix: str, label: str, colour: str) -> None:
    places = range(1, 1 + sum(name.startswith(prefix) for name in found[0]))
    means = [statistics.fmean(point[f"{prefix}{i}"] for point in found) for i in places]
    axes.plot(list(places), means, color=colour, linewidth=1.4, label=label)
    for point in found:
        axes.scatter(list(places), [point[f"{prefix}{i}"] for i in places], s=14, color=colour, linewidths=0)
    axes.set_xticks(list(places))


def _trained(check: Check) -> Table:
    dims = check.config["dims"]

    def spread(name: str, digits: int) -> Callable[[Any], str]:
        def cell(item: tuple[str, Sequence[Mapping[str, float]]]) -> str:
            values = [point[name] for point in item[1]]
            off = f" ±{statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            return f"{statistics.fmean(values):.{digits}f}{off}"

        return cell

    return table(
        (
            f"Trained on one world, {check.config['seeds']} seeds, mean and standard deviation over seeds; beta "
            f"{check.result['beta']:.3f}"
        ),
        [
            ("arm and loss", lambda item: item[0]),
            ("largest angle, degrees", spread(f"angle_{dims}", 1)),
            ("second largest", spread(f"angle_{dims - 1}", 1)),
            ("JEPA loss over the least", spread("excess", 3)),
            ("directions lost", spread("lost", 3)),
            ("alignment error", spread("error", 3)),
            ("of the closed forms", lambda item: f"{item[1][0]['exact_error']:.3f}"),
            ("least variance as trained", spread("least_variance", 2)),
        ],
        [(kind["name"], check.points[kind["name"]]) for kind in check.result["kinds"] if kind["name"] in check.points],
    )


def _rounding(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"
