"""Skies and places of the toy world: the background behind the things.

Invariant: places and skies differ in colour and in form; the positions of trees, clouds and stars are nuisance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image, ImageDraw

from pipelines.sources.toyworld.draws import Dice
from pipelines.sources.toyworld.shapes import RGB, shade

GROUND: Final[Mapping[str, RGB]] = {
    "meadow": (139, 190, 96),
    "beach": (238, 219, 168),
    "desert": (226, 183, 118),
    "snow": (236, 241, 247),
    "street": (150, 150, 156),
    "forest": (96, 132, 84),
    "mountains": (146, 168, 120),
    "farm": (214, 186, 104),
}
SKY: Final[Mapping[str, tuple[RGB, RGB]]] = {
    "sunny": ((112, 178, 232), (196, 226, 246)),
    "night": ((14, 18, 52), (44, 52, 104)),
    "rainy": ((116, 126, 140), (172, 180, 190)),
    "sunset": ((110, 78, 140), (252, 158, 92)),
}
"""Colour at the top and at the horizon."""

LIGHT: Final[Mapping[str, tuple[float, float, float]]] = {
    "sunny": (1.0, 1.0, 1.0),
    "night": (0.60, 0.63, 0.82),
    "rainy": (0.80, 0.83, 0.88),
    "sunset": (1.0, 0.90, 0.82),
}
"""Gain of red, green and blue on what is not the sky."""


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """A picture under construction; coordinates are shares of its side, y down."""

    draw: ImageDraw.ImageDraw
    side: int
    horizon: float
    light: Sequence[float]
    dice: Dice

    def polygon(self, points: Sequence[float], fill: RGB) -> None:
        """A polygon of x0 y0 x1 y1 .. in the light of the scene."""
        pixels = [(x * self.side, y * self.side) for x, y in zip(points[::2], points[1::2], strict=True)]
        self.draw.polygon(pixels, fill=shade(fill, self.light))

    def box(self, x: float, y: float, wide: float, high: float, fill: RGB) -> None:
        """A box by its upper left corner, in the light of the scene."""
        self.polygon((x, y, x + wide, y, x + wide, y + high, x, y + high), fill)

    def glow(self, x: float, y: float, wide: float, high: float, fill: RGB) -> None:
        """A box in its own light, as a lit window is."""
        side = self.side
        self.draw.rectangle((x * side, y * side, (x + wide) * side, (y + high) * side), fill=fill)

    def disc(self, x: float, y: float, r: float, fill: RGB) -> None:
        """A disc in its own light, as sun and stars are."""
        side = self.side
        self.draw.ellipse(((x - r) * side, (y - r) * side, (x + r) * side, (y + r) * side), fill=fill)

    def pine(self, x: float, base: float, high: float, leaves: RGB, trunk: RGB) -> None:
        """A conifer that stands on `base`."""
        self.box(x - 0.015, base - 0.25 * high, 0.03, 0.25 * high, trunk)
        for low, top, wide in ((0.2, 0.7, 0.26), (0.5, 1.0, 0.19)):
            self.polygon(
                (x - wide * high, base - low * high, x, base - top * high, x + wide * high, base - low * high), leaves
            )


def sky_image(sky: str, side: int, horizon: float) -> Image.Image:
    """The gradient from the top to the horizon, and its last colour below."""
    top, low = (np.array(colour, np.float32) for colour in SKY[sky])
    share = np.clip(np.arange(side, dtype=np.float32) / np.float32(horizon * side), 0.0, 1.0)[:, None]
    rows = (top + (low - top) * share).astype(np.uint8)
    return Image.fromarray(np.repeat(rows[:, None, :], side, axis=1))


def draw_sky(canvas: Canvas, sky: str) -> None:
    """Sun, moon and stars, or clouds."""
    dice = canvas.dice
    x, y, r = 0.15 + 0.7 * dice.roll(), 0.13 + dice.spread(0.04), 0.09 + dice.spread(0.015)
    if sky == "sunny":
        canvas.disc(x, y, r, (255, 236, 120))
        for _ in range(2):
            _cloud(canvas, (250, 252, 255))
    elif sky == "night":
        for _ in range(22):
            canvas.disc(dice.roll(), dice.roll() * canvas.horizon, 0.006 + 0.004 * dice.roll(), (250, 246, 214))
        canvas.disc(x, y, r, (248, 244, 210))
        canvas.disc(x + 0.45 * r, y - 0.2 * r, 0.85 * r, SKY["night"][0])
    elif sky == "sunset":
        canvas.disc(x, canvas.horizon - 0.02, 1.35 * r, (255, 226, 130))
    else:
        for _ in range(4):
            _cloud(canvas, (88, 96, 110))


def _cloud(canvas: Canvas, fill: RGB) -> None:
    dice = canvas.dice
    x, y, r = dice.roll(), 0.06 + 0.2 * dice.roll(), 0.05 + 0.025 * dice.roll()
    for dx, dy, scale in ((-1.2, 0.25, 0.8), (0.0, 0.0, 1.1), (1.2, 0.25, 0.85)):
        canvas.disc(x + dx * r, y + dy * r, scale * r, fill)


def draw_rain(canvas: Canvas) -> None:
    """Slanted drops in front of everything."""
    side, slant = canvas.side, canvas.dice.spread(0.03)
    for _ in range(34):
        x, y = canvas.dice.roll(), canvas.dice.roll()
        ends = (x * side, y * side, (x + slant) * side, (y + 0.07) * side)
        canvas.draw.line(ends, fill=(206, 216, 232), width=max(1, side // 128))


def draw_place(canvas: Canvas, place: str) -> RGB:
    """The ground and what stands at the horizon; returns the colour of the ground before light."""
    ground = shade(GROUND[place], [1.0 + canvas.dice.spread(0.03) for _ in range(3)])
    canvas.box(0.0, canvas.horizon, 1.0, 1.0 - canvas.horizon, ground)
    SCENERY[place](canvas, canvas.horizon, canvas.dice)
    return ground


def _meadow(c: Canvas, h: float, dice: Dice) -> None:
    for _ in range(18):
        x, y = dice.roll(), h + 0.03 + (0.97 - h) * dice.roll()
        c.polygon((x - 0.012, y, x - 0.018, y - 0.045, x, y - 0.01, x + 0.018, y - 0.045, x + 0.012, y), (98, 152, 64))
    for _ in range(12):
        x, y = dice.roll(), h + 0.04 + (0.94 - h) * dice.roll()
        flower = dice.pick(((250, 250, 240), (250, 220, 90), (240, 150, 180)))
        c.disc(x, y, 0.013, shade(flower, c.light))


def _beach(c: Canvas, h: float, dice: Dice) -> None:
    c.box(0.0, h - 0.02, 1.0, 0.15, (58, 142, 190))
    for _ in range(7):
        c.box(dice.roll(), h + 0.11 * dice.roll(), 0.12, 0.012, (236, 246, 250))
    c.polygon((0.0, h + 0.14, 0.5 + dice.spread(0.3), h + 0.11, 1.0, h + 0.14), GROUND["beach"])


def _desert(c: Canvas, h: float, dice: Dice) -> None:
    for _ in range(2):
        x = dice.roll()
        c.polygon((x - 0.5, h + 0.02, x, h - 0.09, x + 0.4, h + 0.02), (208, 158, 94))
    for _ in range(3):
        x, y = dice.roll(), h + 0.03 + 0.05 * dice.roll()
        for dx, dy, wide, high in ((0.0, -0.2, 0.04, 0.2), (-0.06, -0.16, 0.03, 0.08), (-0.06, -0.1, 0.07, 0.03)):
            c.box(x + dx, y + dy, wide, high, (58, 122, 72))


def _snow(c: Canvas, h: float, dice: Dice) -> None:
    x = 0.4 + dice.spread(0.3)
    c.polygon((x - 0.7, h + 0.02, x, h - 0.09, x + 0.7, h + 0.02), (204, 218, 236))
    for _ in range(5):
        c.pine(dice.roll(), h + 0.05, 0.2, (120, 164, 156), (120, 92, 70))
    for _ in range(14):
        c.disc(dice.roll(), dice.roll(), 0.01, shade((252, 253, 255), c.light))


def _street(c: Canvas, h: float, dice: Dice) -> None:
    for number in range(6):
        x, high = number / 6 + dice.spread(0.02), 0.14 + 0.2 * dice.roll()
        c.box(x, h - high, 0.15, high + 0.02, dice.pick(((150, 110, 100), (120, 128, 146), (176, 160, 136))))
        for dx in (0.03, 0.09):
            for dy in (0.03, 0.09):
                c.glow(x + dx, h - high + dy, 0.03, 0.035, (250, 236, 170))
    c.box(0.0, h + 0.02, 1.0, 0.06, (196, 192, 186))
    shift = 0.2 * dice.roll()
    for number in range(5):
        c.box(number * 0.24 - shift, h + 0.27, 0.12, 0.03, (246, 240, 210))


def _forest(c: Canvas, h: float, dice: Dice) -> None:
    for number in range(12):
        x, base = dice.roll(), h + 0.02 + 0.005 * number
        c.pine(x, base, 0.3 + 0.08 * dice.roll(), (34, 86 + 2 * number, 52), (92, 66, 46))


def _mountains(c: Canvas, h: float, dice: Dice) -> None:
    for middle, tall in ((0.2, 0.3), (0.78, 0.34), (0.48, 0.25)):
        x, top = middle + dice.spread(0.1), h - tall * (1.0 + dice.spread(0.15))
        c.polygon((x - 0.34, h + 0.01, x, top, x + 0.34, h + 0.01), (108, 112, 132))
        low = top + 0.1
        c.polygon((x - 0.11, low, x, top, x + 0.11, low, x + 0.04, low - 0.03, x - 0.03, low + 0.01), (246, 248, 252))


def _farm(c: Canvas, h: float, dice: Dice) -> None:
    x = 0.08 + 0.6 * dice.roll()
    c.box(x, h - 0.17, 0.26, 0.19, (158, 62, 52))
    c.polygon((x - 0.03, h - 0.17, x + 0.13, h - 0.29, x + 0.29, h - 0.17), (98, 72, 66))
    c.box(x + 0.09, h - 0.09, 0.08, 0.11, (240, 232, 220))
    for row in range(5):
        c.box(0.0, h + 0.16 + 0.1 * row, 1.0, 0.018, (186, 156, 80))
    for number in range(9):
        c.box(number * 0.125, h, 0.025, 0.11, (244, 240, 228))
    for dy in (0.03, 0.07):
        c.box(0.0, h + dy, 1.0, 0.015, (244, 240, 228))


SCENERY: Final[Mapping[str, Callable[[Canvas, float, Dice], None]]] = {
    "meadow": _meadow,
    "beach": _beach,
    "desert": _desert,
    "snow": _snow,
    "street": _street,
    "forest": _forest,
    "mountains": _mountains,
    "farm": _farm,
}
