"""The camera of the toy world: a state becomes a small picture.

Exact positions, light, texture and exposure are the nuisance: they depend on the draws, never on the captions.
Invariant: everything in the state can be seen; the bytes are a function of state, draws and the version of Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from infra.seeds import mix
from pipelines.sources.toyworld.draws import Dice
from pipelines.sources.toyworld.places import LIGHT, Canvas, draw_place, draw_rain, draw_sky, sky_image
from pipelines.sources.toyworld.shapes import RGB, Pen, draw_thing, shade
from pipelines.sources.toyworld.states import State, Thing

DRAWS: Final = 256
"""Draws that one picture may take; rain over a meadow with three groups takes the most, about 190."""

OVERSAMPLING: Final = 4
"""A picture is drawn this many times larger and reduced, since Pillow draws without smoothing."""

JPEG_QUALITY: Final = 90

UNIT: Final[Mapping[str, float]] = {"large": 0.36, "small": 0.2}
"""Height of a thing, as a share of the picture."""

CROWDED: Final = (0.0, 1.2, 1.0, 0.86)
COUNTED: Final = (0.0, 1.0, 0.85, 0.74)
"""Factors by number of groups, and by number of things in a group, so that all fit."""


@dataclass(frozen=True, kw_only=True)
class _Spot:
    """Where one thing stands: middle of its base, and its height, as shares of the picture."""

    thing: Thing
    x: float
    base: float
    unit: float
    floats: bool


def picture(state: State, dice: Dice, *, px: int, grain: int) -> bytes:
    """JPEG of the state, px pixels a side. grain: 64 random bits for the noise."""
    side, horizon = px * OVERSAMPLING, 0.46 + dice.spread(0.05)
    image = sky_image(state.sky, side, horizon)
    draw = ImageDraw.Draw(image)
    brightness = 1.0 + dice.spread(0.08)
    light = [gain * brightness * (1.0 + dice.spread(0.03)) for gain in LIGHT[state.sky]]
    canvas = Canvas(draw=draw, side=side, horizon=horizon, light=light, dice=dice)
    draw_sky(canvas, state.sky)
    ground = shade(draw_place(canvas, state.place), light)
    # From back to front: what stands lower in the picture is nearer.
    for spot in sorted(_spots(state, dice), key=lambda s: s.base):
        if not spot.floats:
            _shadow(canvas, spot, ground)
        x, base, unit = spot.x * side, spot.base * side, spot.unit * side
        pen = Pen(draw, x=x, base=base, unit=unit, light=light, is_flipped=dice.chance(0.5))
        draw_thing(pen, spot.thing.kind, spot.thing.colour)
    if state.sky == "rainy":
        draw_rain(canvas)
    small = np.asarray(image.resize((px, px), Image.Resampling.BOX))
    return _jpeg(_exposed(small, gain=1.0 + dice.spread(0.07), noise=4.0 + dice.spread(2.0), grain=grain))


def _spots(state: State, dice: Dice) -> list[_Spot]:
    """Places of all things: the first group in the middle, the others where their relations say."""
    crowd, sides = CROWDED[len(state.things)], set(state.relations)
    first = state.things[0]
    x = 0.5 + 0.2 * (("left" in sides) - ("right" in sides)) + dice.spread(0.03 if sides else 0.14)
    base = (0.95 if "above" in sides else 0.9) + dice.spread(0.02)
    unit = _unit(first, crowd, dice)
    spots = _group(first, x, base, unit, dice)
    for thing, relation in zip(state.things[1:], state.relations, strict=True):
        other = _unit(thing, crowd, dice)
        if relation == "above":
            low = base - unit * (1.6 if first.count == 3 else 1.0) - 0.03
            spots += _group(thing, x + dice.spread(0.05), low, other, dice, floats=True)
        else:
            away = 0.46 if len(sides) == 1 or "above" in sides else 0.35
            aside = x + (away if relation == "right" else -away) + dice.spread(0.03)
            spots += _group(thing, aside, base - 0.03 + dice.spread(0.04), other, dice)
    return spots


def _unit(thing: Thing, crowd: float, dice: Dice) -> float:
    return UNIT[thing.size] * crowd * COUNTED[thing.count] * (1.0 + dice.spread(0.08))


def _group(thing: Thing, x: float, base: float, unit: float, dice: Dice, *, floats: bool = False) -> list[_Spot]:
    """One thing, two side by side, or three as a triangle; moved inwards so that none is cut by the border."""
    offsets: Mapping[int, Sequence[tuple[float, float]]] = {
        1: ((0.0, 0.0),),
        2: ((-0.56, 0.0), (0.56, 0.0)),
        3: ((0.0, -0.62), (-0.6, 0.0), (0.6, 0.0)),
    }
    spots = []
    half = unit * (0.62 if thing.count == 1 else 1.15)
    x = min(max(x, half), 1.0 - half) if half < 0.5 else 0.5
    for dx, dy in offsets[thing.count]:
        there = x + (dx + dice.spread(0.05)) * unit
        spots.append(_Spot(thing=thing, x=there, base=base + (dy + dice.spread(0.04)) * unit, unit=unit, floats=floats))
    return spots


def _shadow(canvas: Canvas, spot: _Spot, ground: RGB) -> None:
    side = canvas.side
    x, base, half, thick = spot.x * side, spot.base * side, 0.5 * spot.unit * side, 0.07 * spot.unit * side
    canvas.draw.ellipse((x - half, base - thick, x + half, base + thick), fill=shade(ground, (0.78,) * 3))


def _exposed(pixels_HWC: NDArray[np.uint8], *, gain: float, noise: float, grain: int) -> NDArray[np.uint8]:
    """The picture with another exposure and, in each value, noise within +-noise of 255."""
    # Eight bytes of noise from one mixed counter; little-endian, so that every machine has the same bytes.
    words = mix(np.arange(-(-pixels_HWC.size // 8), dtype=np.uint64) ^ np.uint64(grain))
    bytes_HWC = words.astype("<u8").view(np.uint8)[: pixels_HWC.size].reshape(pixels_HWC.shape)
    shaken = pixels_HWC * np.float32(gain) + (bytes_HWC - np.float32(127.5)) * np.float32(noise / 127.5)
    return np.clip(shaken, 0, 255).astype(np.uint8)


def _jpeg(pixels_HWC: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels_HWC).save(file, "JPEG", quality=JPEG_QUALITY, subsampling=0)
    return file.getvalue()
