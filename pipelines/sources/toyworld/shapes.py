"""The looks of each kind of thing: simple shapes in a unit square, in colours relative to the thing's own.

Invariant: every kind fills its square from top to base, so that sizes mean the same for all; a shape in the thing's
colour has an outline, so that white is seen on snow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from PIL import ImageDraw

RGB: TypeAlias = tuple[int, int, int]

COLOURS: Final[Mapping[str, RGB]] = {
    "red": (216, 36, 40),
    "orange": (246, 132, 28),
    "yellow": (250, 214, 44),
    "green": (36, 148, 66),
    "blue": (40, 92, 206),
    "purple": (142, 62, 176),
    "white": (248, 248, 248),
    "black": (40, 40, 46),
}
FIXED: Final[Mapping[str, RGB]] = {
    "dark": (28, 28, 32),
    "pale": (252, 250, 240),
    "glass": (188, 222, 240),
    "metal": (168, 172, 180),
    "wood": (140, 98, 58),
    "beak": (240, 150, 40),
    "pink": (240, 160, 170),
    "lamp": (255, 240, 160),
}

Shape: TypeAlias = tuple[str, tuple[float, ...], str]
"""(ellipse | box | polygon | line | dome, coordinates x0 y0 x1 y1 .. in the unit square with y down, paint).

Paint: `main` and `deep` (darker) are the thing's colour, outlined; the others are FIXED, not outlined.
"""

SHAPES: Final[Mapping[str, Sequence[Shape]]] = {
    "dog": (
        ("line", (0.16, 0.58, 0.02, 0.30), "deep"),
        ("box", (0.16, 0.66, 0.28, 1.00), "deep"),
        ("box", (0.56, 0.66, 0.68, 1.00), "deep"),
        ("ellipse", (0.10, 0.44, 0.74, 0.84), "main"),
        ("box", (0.24, 0.70, 0.36, 1.00), "main"),
        ("box", (0.48, 0.70, 0.60, 1.00), "main"),
        ("ellipse", (0.74, 0.26, 1.02, 0.46), "main"),
        ("ellipse", (0.52, 0.08, 0.88, 0.52), "main"),
        ("ellipse", (0.50, 0.10, 0.64, 0.48), "deep"),
        ("ellipse", (0.94, 0.27, 1.03, 0.36), "dark"),
        ("ellipse", (0.71, 0.20, 0.79, 0.28), "dark"),
    ),
    "cat": (
        ("line", (0.68, 0.92, 0.92, 0.86, 0.96, 0.56, 0.86, 0.46), "deep"),
        ("ellipse", (0.24, 0.44, 0.76, 1.00), "main"),
        ("polygon", (0.24, 0.30, 0.26, 0.00, 0.46, 0.14), "main"),
        ("polygon", (0.76, 0.30, 0.74, 0.00, 0.54, 0.14), "main"),
        ("ellipse", (0.20, 0.10, 0.80, 0.56), "main"),
        ("ellipse", (0.32, 0.24, 0.43, 0.36), "lamp"),
        ("ellipse", (0.57, 0.24, 0.68, 0.36), "lamp"),
        ("ellipse", (0.36, 0.25, 0.40, 0.36), "dark"),
        ("ellipse", (0.61, 0.25, 0.65, 0.36), "dark"),
        ("polygon", (0.45, 0.39, 0.55, 0.39, 0.50, 0.45), "pink"),
        ("line", (0.30, 0.43, 0.04, 0.38), "metal"),
        ("line", (0.70, 0.43, 0.96, 0.38), "metal"),
        ("line", (0.50, 0.72, 0.50, 0.98), "deep"),
    ),
    "duck": (
        ("polygon", (0.02, 0.46, 0.24, 0.62, 0.18, 0.84), "deep"),
        ("ellipse", (0.06, 0.46, 0.80, 0.98), "main"),
        ("polygon", (0.84, 0.20, 1.06, 0.32, 0.84, 0.42), "beak"),
        ("ellipse", (0.50, 0.04, 0.90, 0.50), "main"),
        ("ellipse", (0.18, 0.56, 0.58, 0.86), "deep"),
        ("ellipse", (0.72, 0.17, 0.80, 0.26), "dark"),
    ),
    "rabbit": (
        ("ellipse", (0.30, 0.00, 0.45, 0.48), "main"),
        ("ellipse", (0.55, 0.00, 0.70, 0.48), "main"),
        ("ellipse", (0.35, 0.06, 0.41, 0.40), "pink"),
        ("ellipse", (0.59, 0.06, 0.65, 0.40), "pink"),
        ("ellipse", (0.22, 0.56, 0.78, 1.00), "main"),
        ("ellipse", (0.24, 0.30, 0.76, 0.70), "main"),
        ("ellipse", (0.35, 0.42, 0.43, 0.52), "dark"),
        ("ellipse", (0.57, 0.42, 0.65, 0.52), "dark"),
        ("ellipse", (0.46, 0.53, 0.54, 0.59), "pink"),
        ("ellipse", (0.38, 0.72, 0.62, 0.96), "pale"),
    ),
    "car": (
        ("polygon", (0.12, 0.58, 0.28, 0.26, 0.68, 0.26, 0.86, 0.58), "main"),
        ("polygon", (0.22, 0.55, 0.32, 0.33, 0.46, 0.33, 0.46, 0.55), "glass"),
        ("polygon", (0.52, 0.55, 0.52, 0.33, 0.65, 0.33, 0.76, 0.55), "glass"),
        ("box", (-0.06, 0.55, 1.06, 0.86), "main"),
        ("ellipse", (0.06, 0.70, 0.36, 1.00), "dark"),
        ("ellipse", (0.64, 0.70, 0.94, 1.00), "dark"),
        ("ellipse", (0.15, 0.79, 0.27, 0.91), "metal"),
        ("ellipse", (0.73, 0.79, 0.85, 0.91), "metal"),
        ("box", (0.99, 0.60, 1.07, 0.70), "lamp"),
    ),
    "bus": (
        ("box", (-0.16, 0.12, 1.16, 0.88), "main"),
        ("box", (-0.09, 0.22, 0.15, 0.48), "glass"),
        ("box", (0.21, 0.22, 0.45, 0.48), "glass"),
        ("box", (0.51, 0.22, 0.75, 0.48), "glass"),
        ("box", (0.82, 0.22, 1.08, 0.80), "glass"),
        ("line", (-0.14, 0.60, 0.78, 0.60), "deep"),
        ("ellipse", (0.00, 0.74, 0.26, 1.00), "dark"),
        ("ellipse", (0.66, 0.74, 0.92, 1.00), "dark"),
        ("ellipse", (0.08, 0.82, 0.18, 0.92), "metal"),
        ("ellipse", (0.74, 0.82, 0.84, 0.92), "metal"),
    ),
    "boat": (
        ("box", (0.46, 0.02, 0.52, 0.72), "wood"),
        ("polygon", (0.54, 0.04, 0.54, 0.62, 0.98, 0.62), "pale"),
        ("polygon", (0.44, 0.14, 0.44, 0.62, 0.10, 0.62), "main"),
        ("polygon", (-0.04, 0.68, 1.04, 0.68, 0.84, 1.00, 0.16, 1.00), "main"),
        ("line", (0.02, 0.77, 0.98, 0.77), "pale"),
    ),
    "ball": (
        ("ellipse", (0.06, 0.10, 0.96, 1.00), "main"),
        ("line", (0.10, 0.46, 0.36, 0.58, 0.66, 0.58, 0.92, 0.46), "pale"),
        ("line", (0.10, 0.60, 0.36, 0.72, 0.66, 0.72, 0.92, 0.60), "pale"),
        ("ellipse", (0.26, 0.20, 0.44, 0.36), "pale"),
    ),
    "balloon": (
        ("line", (0.50, 0.66, 0.42, 0.80, 0.56, 0.90, 0.50, 1.00), "metal"),
        ("polygon", (0.50, 0.60, 0.40, 0.70, 0.60, 0.70), "deep"),
        ("ellipse", (0.20, 0.00, 0.80, 0.64), "main"),
        ("ellipse", (0.32, 0.10, 0.44, 0.26), "pale"),
    ),
    "tent": (
        ("polygon", (0.50, 0.08, -0.10, 1.00, 1.10, 1.00), "main"),
        ("polygon", (0.50, 0.08, 0.22, 1.00, 0.78, 1.00), "deep"),
        ("polygon", (0.50, 0.34, 0.34, 1.00, 0.66, 1.00), "dark"),
        ("line", (0.50, 0.08, 0.50, -0.04), "wood"),
    ),
    "umbrella": (
        ("line", (0.50, 0.10, 0.50, 0.92, 0.56, 0.98, 0.64, 0.98, 0.68, 0.90), "wood"),
        ("dome", (-0.08, 0.06, 1.08, 1.06), "main"),
        ("polygon", (0.34, 0.555, 0.42, 0.10, 0.58, 0.10, 0.66, 0.555), "deep"),
        ("line", (0.50, 0.08, 0.50, -0.02), "wood"),
    ),
    "robot": (
        ("line", (0.50, 0.14, 0.50, 0.02), "metal"),
        ("ellipse", (0.44, -0.02, 0.56, 0.08), "lamp"),
        ("box", (0.06, 0.48, 0.18, 0.78), "metal"),
        ("box", (0.82, 0.48, 0.94, 0.78), "metal"),
        ("box", (0.30, 0.80, 0.44, 1.00), "metal"),
        ("box", (0.56, 0.80, 0.70, 1.00), "metal"),
        ("box", (0.20, 0.44, 0.80, 0.84), "main"),
        ("box", (0.26, 0.10, 0.74, 0.42), "main"),
        ("box", (0.34, 0.18, 0.45, 0.27), "lamp"),
        ("box", (0.55, 0.18, 0.66, 0.27), "lamp"),
        ("box", (0.38, 0.33, 0.62, 0.37), "dark"),
        ("box", (0.34, 0.54, 0.66, 0.72), "pale"),
    ),
}

_LINE: Final = 0.055
_OUTLINE: Final = 0.03


def shade(colour: RGB, gains: Sequence[float]) -> RGB:
    """The colour with each channel times its gain, held within 0 to 255."""
    red, green, blue = (min(255, max(0, int(channel * gain))) for channel, gain in zip(colour, gains, strict=True))
    return red, green, blue


class Pen:
    """Draws shapes of the unit square into a square of `unit` pixels that stands on `base` around `x`."""

    def __init__(
        self, draw: ImageDraw.ImageDraw, *, x: float, base: float, unit: float, light: Sequence[float], is_flipped: bool
    ) -> None:
        self._draw = draw
        self._x, self._base, self._unit = x, base, unit
        self._light = light
        self._sign = -1.0 if is_flipped else 1.0

    def shape(self, shape: Shape, main: RGB) -> None:
        """Draw one shape in the light of the scene."""
        form, coordinates, paint = shape
        # A darker shade of black would not be seen, so its deep parts are grey.
        deep = shade(main, (0.68,) * 3) if sum(main) > 200 else (96, 96, 104)
        fill = shade({"main": main, "deep": deep}.get(paint) or FIXED[paint], self._light)
        outline = shade(deep, self._light) if paint == "main" else None
        width = max(1, int(self._unit * _OUTLINE)) if outline else 0
        points = [
            (self._x + self._sign * (x - 0.5) * self._unit, self._base + (y - 1.0) * self._unit)
            for x, y in zip(coordinates[::2], coordinates[1::2], strict=True)
        ]
        if form == "line":
            self._draw.line(points, fill=fill, width=max(1, int(self._unit * _LINE)), joint="curve")
        elif form == "polygon":
            self._draw.polygon(points, fill=fill, outline=outline, width=width)
        else:
            (x0, y0), (x1, y1) = points
            corners = (min(x0, x1), y0, max(x0, x1), y1)
            if form == "ellipse":
                self._draw.ellipse(corners, fill=fill, outline=outline, width=width)
            elif form == "dome":
                self._draw.pieslice(corners, 180, 360, fill=fill, outline=outline, width=width)
            else:
                self._draw.rectangle(corners, fill=fill, outline=outline, width=width)


def draw_thing(pen: Pen, kind: str, colour: str) -> None:
    """Draw one thing of the kind in the colour."""
    for shape in SHAPES[kind]:
        pen.shape(shape, COLOURS[colour])
