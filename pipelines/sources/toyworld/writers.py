"""The writers of the toy world: a state becomes a caption.

Preferred words, omissions and typing errors are the nuisance: they depend on writer and draws, never on the state.
Invariant: every statement of a caption is true of its scene, before `source` damages some captions on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from pipelines.sources.toyworld.draws import Dice
from pipelines.sources.toyworld.states import State, Thing

T = TypeVar("T")

DRAWS: Final = 64
"""Draws that one caption may take; the longest takes about 45."""

NOUNS: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "dog": (("dog", "dogs"), ("puppy", "puppies"), ("hound", "hounds")),
    "cat": (("cat", "cats"), ("kitty", "kitties"), ("kitten", "kittens")),
    "duck": (("duck", "ducks"), ("toy duck", "toy ducks")),
    "rabbit": (("rabbit", "rabbits"), ("bunny", "bunnies"), ("hare", "hares")),
    "car": (("car", "cars"), ("automobile", "automobiles")),
    "bus": (("bus", "buses"), ("coach", "coaches")),
    "boat": (("boat", "boats"), ("sailboat", "sailboats"), ("ship", "ships")),
    "ball": (("ball", "balls"), ("play ball", "play balls")),
    "balloon": (("balloon", "balloons"), ("party balloon", "party balloons")),
    "tent": (("tent", "tents"), ("camping tent", "camping tents")),
    "umbrella": (("umbrella", "umbrellas"), ("parasol", "parasols")),
    "robot": (("robot", "robots"), ("android", "androids"), ("toy robot", "toy robots")),
}
COLOUR_WORDS: Final[Mapping[str, Sequence[str]]] = {
    "red": ("red", "scarlet"),
    "orange": ("orange", "bright orange"),
    "yellow": ("yellow", "golden"),
    "green": ("green", "emerald"),
    "blue": ("blue", "azure"),
    "purple": ("purple", "violet"),
    "white": ("white", "pure white"),
    "black": ("black", "jet-black"),
}
SIZE_WORDS: Final[Mapping[str, Sequence[str]]] = {
    "large": ("big", "large", "huge"),
    "small": ("small", "little", "tiny"),
}
PLACE_WORDS: Final[Mapping[str, Sequence[str]]] = {
    "meadow": ("in a meadow", "on the grass", "in a grassy field"),
    "beach": ("on a beach", "at the seaside", "on the sand by the sea"),
    "desert": ("in a desert", "among sand dunes", "in the dry desert"),
    "snow": ("in the snow", "on snowy ground", "in a snowy field"),
    "street": ("on a street", "on a city road", "in the city"),
    "forest": ("in a forest", "in the woods", "among the trees"),
    "mountains": ("in the mountains", "near high mountains", "below snowy peaks"),
    "farm": ("on a farm", "by a farm fence", "in a farmyard"),
}
SKY_WORDS: Final[Mapping[str, Sequence[str]]] = {
    "sunny": ("on a sunny day", "in bright sunshine", "under a clear blue sky"),
    "night": ("at night", "under the moon", "in the dark"),
    "rainy": ("in the rain", "on a rainy day", "under rain clouds"),
    "sunset": ("at sunset", "as the sun goes down", "under an evening sky"),
}
SKY_SENTENCES: Final[Mapping[str, Sequence[str]]] = {
    "sunny": ("the sun is shining", "it is a sunny day"),
    "night": ("it is night", "the moon is out"),
    "rainy": ("it is raining", "rain is falling"),
    "sunset": ("the sun is setting", "it is getting dark"),
}
RELATION_WORDS: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "left": (("to the left of", "to the right of"), ("left of", "right of"), ("at the left of", "at the right of")),
    "right": (("to the right of", "to the left of"), ("right of", "left of"), ("at the right of", "at the left of")),
    "above": (("above", "below"), ("over", "under"), ("higher than", "lower than")),
}
"""(where the second is from the first, where the first is from the second)."""

BESIDE: Final[Mapping[str, Sequence[str]]] = {
    "left": ("on the left", "to the left"),
    "right": ("on the right", "to the right"),
    "above": ("above", "overhead"),
}
VERBS: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "dog": (("sits", "sit"), ("is standing", "are standing"), ("waits", "wait")),
    "cat": (("sits", "sit"), ("is sitting", "are sitting"), ("rests", "rest")),
    "duck": (("stands", "stand"), ("is resting", "are resting"), ("waits", "wait")),
    "rabbit": (("sits", "sit"), ("is sitting", "are sitting"), ("hides", "hide")),
    "car": (("is parked", "are parked"), ("stands", "stand"), ("stops", "stop")),
    "bus": (("is parked", "are parked"), ("stands", "stand"), ("stops", "stop")),
    "boat": (("rests", "rest"), ("lies", "lie"), ("is stranded", "are stranded")),
    "ball": (("lies", "lie"), ("rests", "rest"), ("is lying", "are lying")),
    "balloon": (("floats", "float"), ("hovers", "hover"), ("is hanging", "are hanging")),
    "tent": (("stands", "stand"), ("is pitched", "are pitched")),
    "umbrella": (("stands", "stand"), ("is open", "are open")),
    "robot": (("stands", "stand"), ("is waiting", "are waiting"), ("poses", "pose")),
}
SPELLED: Final = ("", "", "two", "three")
DIGITS: Final = ("", "", "2", "3")
PAIRS: Final = ("", "", "a pair of", "a trio of")


@dataclass(frozen=True, kw_only=True)
class Writer:
    """Habits of one writer. Probabilities of mentioning an attribute when there is one."""

    name: str
    frames: tuple[str, ...]
    "Sentence patterns he uses, keys of `FRAMES`."
    taste: int = 0
    "Which of several equal words he prefers; he takes it four times of five."
    colour: float = 0.95
    size: float = 0.4
    second: float = 0.9
    third: float = 0.7
    relation: float = 0.8
    place: float = 0.9
    sky: float = 0.5
    numbers: tuple[str, ...] = SPELLED
    openings: tuple[str, ...] = ("",)
    ending: str = "."
    is_lower: bool = False
    slips: float = 0.0
    "Probability that two letters of a word are swapped."


WRITERS: Final = (
    Writer(name="plain", frames=("there_is", "fragment")),
    Writer(name="reporter", frames=("clause", "clause_with"), taste=1, size=0.6, sky=0.7),
    Writer(name="tagger", frames=("tags",), size=0.3, relation=0.0, sky=0.9, ending="", is_lower=True),
    Writer(
        name="guide",
        frames=("two_sentences",),
        taste=2,
        size=0.7,
        relation=0.95,
        sky=0.9,
        openings=("we can see ", "the image shows ", "this is "),
    ),
    Writer(
        name="chatter",
        frames=("fragment", "clause_with"),
        taste=1,
        size=0.6,
        openings=("looks like ", "oh nice, ", "just ", "hey, "),
        ending="!",
        is_lower=True,
        slips=0.08,
    ),
    Writer(name="poet", frames=("place_first", "sky_first"), taste=1, colour=0.85, sky=0.9, relation=0.6),
    Writer(name="counter", frames=("there_is", "fragment"), numbers=DIGITS, sky=0.3, relation=0.5, ending=""),
    Writer(name="colour_blind", frames=("clause", "there_is"), taste=2, colour=0.05, size=0.95, sky=0.8),
    Writer(
        name="hurried",
        frames=("fragment",),
        size=0.3,
        second=0.7,
        third=0.4,
        sky=0.4,
        ending="",
        is_lower=True,
        slips=0.15,
    ),
    Writer(name="surveyor", frames=("survey",), taste=1, size=0.4, relation=1.0, sky=0.4),
    Writer(name="weather_watcher", frames=("sky_sentence",), sky=1.0, size=0.4, third=0.6),
    Writer(
        name="collector",
        frames=("fragment",),
        taste=2,
        numbers=PAIRS,
        size=0.7,
        openings=("a photo of ", "a picture of ", ""),
    ),
)


@dataclass(frozen=True, kw_only=True)
class _Phrases:
    """The phrases of one caption; absent ones are empty."""

    opening: str
    groups: Sequence[str]
    nouns: Sequence[str]
    are_many: Sequence[bool]
    verb: str
    relations: Sequence[tuple[str, str] | None]
    besides: Sequence[str]
    place: str
    sky: str
    sky_sentence: str
    turns: bool
    "Whether he tells a relation from the other end."

    @property
    def things(self) -> str:
        """All groups in one phrase, with their relations where those are mentioned."""
        first, *others = self.groups
        if not others:
            return first
        if not any(self.relations):
            return _listed(self.groups)
        relation, *later = self.relations
        if relation is None:
            phrase = f"{first} and {others[0]}"
        elif self.turns:
            phrase = f"{first} {relation[1]} {others[0]}"
        else:
            phrase = f"{others[0]} {relation[0]} {first}"
        for group, how in zip(others[1:], later, strict=True):
            phrase += f", and {group}" + (f" {how[0]} the {self.nouns[0]}" if how else "")
        return phrase

    def company(self, known: int) -> str:
        """`, with a ball on the left`: the groups after the first, without those already mentioned."""
        others = [f"{g} {b}" for g, b in zip(self.groups[1:], self.besides, strict=True)][known:]
        return f", with {_listed(others)}" if others else ""

    @property
    def leads_with_many(self) -> bool:
        """Whether the first group of `things` is a plural."""
        swapped = len(self.groups) > 1 and self.relations[0] is not None and not self.turns
        return self.are_many[1 if swapped else 0]


def write(writer: Writer, state: State, dice: Dice) -> str:
    """A caption of the state by the writer."""
    text = FRAMES[dice.pick(writer.frames)](_phrases(writer, state, dice))
    text = " ".join(text.split()).replace(" ,", ",").replace(" .", ".").rstrip(",.")
    if dice.chance(writer.slips):
        text = _slip(text, dice)
    return (text.lower() if writer.is_lower else _capitalised(text)) + writer.ending


def _phrases(writer: Writer, state: State, dice: Dice) -> _Phrases:
    mentioned = [True, dice.chance(writer.second), dice.chance(writer.third)]
    places = [place for place in range(len(state.things)) if mentioned[place]]
    groups, nouns = zip(*(_group(writer, state.things[place], dice) for place in places), strict=True)
    first = state.things[0]
    related = [state.relations[place - 1] for place in places[1:]]
    has_place, has_sky = dice.chance(writer.place), dice.chance(writer.sky)
    return _Phrases(
        opening=dice.pick(writer.openings),
        groups=groups,
        nouns=nouns,
        are_many=[state.things[place].count > 1 for place in places],
        verb=_liked(writer, VERBS[first.kind], dice)[first.count > 1],
        relations=[_liked(writer, RELATION_WORDS[r], dice) if dice.chance(writer.relation) else None for r in related],
        besides=[_liked(writer, BESIDE[r], dice) if dice.chance(writer.relation) else "nearby" for r in related],
        # A caption of a single thing without its place would say too little.
        place=_liked(writer, PLACE_WORDS[state.place], dice) if has_place or len(places) == 1 else "",
        sky=_liked(writer, SKY_WORDS[state.sky], dice) if has_sky else "",
        sky_sentence=_liked(writer, SKY_SENTENCES[state.sky], dice) if has_sky else "",
        turns=dice.chance(0.5),
    )


def _group(writer: Writer, thing: Thing, dice: Dice) -> tuple[str, str]:
    """(`two big red dogs`, `dogs`)."""
    noun = _liked(writer, NOUNS[thing.kind], dice)[thing.count > 1]
    words = []
    if dice.chance(writer.size):
        words.append(_liked(writer, SIZE_WORDS[thing.size], dice))
    if dice.chance(writer.colour):
        words.append(_liked(writer, COLOUR_WORDS[thing.colour], dice))
    phrase = " ".join([*words, noun])
    number = writer.numbers[thing.count] if thing.count > 1 else ("an" if phrase[0] in "aeiou" else "a")
    return f"{number} {phrase}", noun


def _liked(writer: Writer, words: Sequence[T], dice: Dice) -> T:
    return words[writer.taste % len(words)] if dice.chance(0.8) else dice.pick(words)


def _there_is(t: _Phrases) -> str:
    return f"there {'are' if t.leads_with_many else 'is'} {t.things} {t.place} {t.sky}"


def _fragment(t: _Phrases) -> str:
    return f"{t.opening}{t.things} {t.place} {t.sky}"


def _clause(t: _Phrases) -> str:
    if len(t.groups) == 1 or t.relations[0] is None:
        return _clause_with(t)
    return f"{t.groups[0]} {t.verb} {t.relations[0][1]} {t.groups[1]} {t.place} {t.sky}{t.company(1)}"


def _clause_with(t: _Phrases) -> str:
    return f"{t.groups[0]} {t.verb} {t.place} {t.sky}{t.company(0)}"


def _place_first(t: _Phrases) -> str:
    if not t.place:
        return _sky_first(t)
    return f"{t.place} {t.verb} {t.groups[0]} {t.sky}{t.company(0)}"


def _sky_first(t: _Phrases) -> str:
    return f"{t.sky}, {t.groups[0]} {t.verb} {t.place}{t.company(0)}" if t.sky else _clause_with(t)


def _sky_sentence(t: _Phrases) -> str:
    return f"{t.sky_sentence} and {_clause_with(replace(t, sky=''))}"


def _tags(t: _Phrases) -> str:
    return ", ".join([*(group.removeprefix("a ").removeprefix("an ") for group in t.groups), t.place, t.sky])


def _two_sentences(t: _Phrases) -> str:
    return f"{t.opening}{t.things}." + (f" it is {t.place} {t.sky}" if t.place or t.sky else "")


def _survey(t: _Phrases) -> str:
    text = f"there {'are' if t.are_many[0] else 'is'} {_listed(t.groups)} {t.place} {t.sky}"
    for noun, is_many, relation in zip(t.nouns[1:], t.are_many[1:], t.relations, strict=True):
        if relation:
            text += f". the {noun} {'are' if is_many else 'is'} {relation[0]} the {t.nouns[0]}"
    return text


FRAMES: Final[Mapping[str, Callable[[_Phrases], str]]] = {
    "there_is": _there_is,
    "fragment": _fragment,
    "clause": _clause,
    "clause_with": _clause_with,
    "place_first": _place_first,
    "sky_first": _sky_first,
    "sky_sentence": _sky_sentence,
    "tags": _tags,
    "two_sentences": _two_sentences,
    "survey": _survey,
}


def _listed(phrases: Sequence[str]) -> str:
    *most, last = phrases
    return f"{', '.join(most)} and {last}" if most else last


def _capitalised(text: str) -> str:
    return ". ".join(sentence[:1].upper() + sentence[1:] for sentence in text.split(". "))


def _slip(text: str, dice: Dice) -> str:
    """The text with two inner letters of one long word swapped."""
    words = text.split(" ")
    long = [place for place, word in enumerate(words) if len(word) >= 5 and word.isalpha()]
    if long:
        place = dice.pick(long)
        word = words[place]
        at = 1 + int(dice.roll() * (len(word) - 3))
        words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)
