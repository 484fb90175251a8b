"""States of the toy world: one to three groups of things, their relations, a place and a sky.

Invariant: a state holds everything that captions and pictures of a scene have in common, and nothing else.
There are 12 x 8 x 2 x 3 x 32 = 18,432 states of one group and some 10^7 of two, so scenes rarely repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import orjson
from numpy.typing import NDArray

from pipelines.sources.toyworld.draws import Dice, uniforms

KINDS: Final = ("dog", "cat", "duck", "rabbit", "car", "bus", "boat", "ball", "balloon", "tent", "umbrella", "robot")
COLOURS: Final = ("red", "orange", "yellow", "green", "blue", "purple", "white", "black")
SIZES: Final = ("large", "small")
PLACES: Final = ("meadow", "beach", "desert", "snow", "street", "forest", "mountains", "farm")
SKIES: Final = ("sunny", "night", "rainy", "sunset")
RELATIONS: Final = ("left", "right", "above")

_DRAWS: Final = 24


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A group of equal things."""

    colour: str
    count: int
    kind: str
    size: str


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a scene; `relations[i]` is where `things[i + 1]` is, as seen from `things[0]`."""

    place: str
    relations: tuple[str, ...]
    sky: str
    things: tuple[Thing, ...]

    def to_json(self) -> str:
        """JSON with sorted keys: orjson does not sort those of a dataclass, so the fields are declared in order."""
        return orjson.dumps(self).decode()


def draw_states(seed: int, numbers_N: NDArray[np.int64]) -> list[State]:
    """The states of the scenes with these numbers."""
    return [_draw(Dice(draws)) for draws in uniforms(seed, "toyworld.state", numbers_N, _DRAWS).tolist()]


def _draw(dice: Dice) -> State:
    groups = dice.pick((1, 1, 2, 2, 2, 3))
    place, sky = dice.pick(PLACES), dice.pick(SKIES)
    kinds, things = list(KINDS), []
    for group in range(groups):
        kind = dice.pick(kinds)
        kinds.remove(kind)
        # The first group is the subject of the scene; the others have at most two things, so that all can be seen.
        count = dice.pick((1, 1, 1, 2, 2, 3) if group == 0 else (1, 1, 1, 2))
        things.append(Thing(kind=kind, colour=dice.pick(COLOURS), size=dice.pick(SIZES), count=count))
    free, relations = list(RELATIONS), []
    for _ in range(groups - 1):
        relation = dice.pick(free)
        free.remove(relation)
        relations.append(relation)
    return State(things=tuple(things), relations=tuple(relations), place=place, sky=sky)
