"""Config: every wrong key or value is named in one sentence, and nothing is read as something else."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra import config
from infra.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    max_group_records: int = 64
    rate: float = 0.5
    repair: bool = True
    roles: tuple[str, ...] = ("human",)

    def __post_init__(self) -> None:
        if self.rate > 1:
            raise ValueError(f"rate is {self.rate}, a share is at most 1. Lower `clean.rate`.")


@dataclass(frozen=True, kw_only=True)
class Rule:
    pattern: str


@dataclass(frozen=True, kw_only=True)
class Job:
    scenes_per_shard: int = 10_000
    name: str = "toy"
    note: str | None = None
    limit: int | None = None
    year: Literal["2014", "2017"] = "2017"
    colour: Colour = Colour.RED
    folder: Path = Path("here")
    clean: Cleaning = Cleaning()
    rules: tuple[Rule, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Needy:
    size: int


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return str(path)


def test_defaults_stand_when_nothing_is_said() -> None:
    assert config.load(Job) == Job()


def test_a_set_wins_over_the_file_and_a_later_set_over_an_earlier(tmp_path: Path) -> None:
    file = written(tmp_path, "scenes_per_shard = 5\n[clean]\nrate = 0.25\nmax_group_records = 7\n")
    job = config.load(Job, file=file, sets=["clean.rate=0.75", "clean.rate=1", "name=coco"])
    assert job == Job(scenes_per_shard=5, name="coco", clean=Cleaning(rate=1.0, max_group_records=7))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name=2014", Job(name="2014")),
        ("name=true", Job(name="true")),
        ("name=2026-11-30", Job(name="2026-11-30")),
        ("name=00123", Job(name="00123")),
        ("name=a=b#c", Job(name="a=b#c")),
        ("name=5#3", Job(name="5#3")),
        ('name="quoted"', Job(name="quoted")),
        ("name=", Job(name="")),
        ("note=1", Job(note="1")),
        ("limit=1_000", Job(limit=1000)),
        ("year=2014", Job(year="2014")),
        ("colour=red", Job()),
        ("folder=/data", Job(folder=Path("/data"))),
        ("clean.rate=1", Job(clean=Cleaning(rate=1.0))),
        ('clean.roles=["alt", "recap"]', Job(clean=Cleaning(roles=("alt", "recap")))),
        ("weights.a=2", Job(weights={"a": 2.0})),
        ("weights={a = 2, b = 3}", Job(weights={"a": 2.0, "b": 3.0})),
    ],
)
def test_a_set_value_is_read_for_the_type_of_its_field(text: str, expected: Job) -> None:
    assert config.load(Job, sets=[text]) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("limit=5#3", ["limit", "'5#3'", "an integer"]),
        ("limit=true", ["limit", "True", "an integer"]),
        ("limit=5.0", ["limit", "5.0", "an integer"]),
        ('limit="5"', ["limit", "'5'", "an integer"]),
        ("clean.repair=1", ["clean.repair", "1", "true or false"]),
        ("clean.repair=True", ["clean.repair", "'True'", "true or false"]),
        ("clean.rate=true", ["clean.rate", "True", "a number"]),
        ("clean.rate=fast", ["clean.rate", "'fast'", "a number"]),
        ("clean.roles=alt", ["clean.roles", "'alt'", "a list"]),
        ("year=2015", ["year", "'2015'", "'2014' or '2017'"]),
        ("colour=blue", ["colour", "'blue'", "red"]),
        ("weights.a=heavy", ["weights.a", "'heavy'", "a number"]),
        ("clean.rate=2", ["clean", "rate is 2.0, a share is at most 1"]),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_it_must_be(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(Job, sets=[text])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scenes_per_shards=5", ["'scenes_per_shards'", "Did you mean 'scenes_per_shard'?"]),
        ("scenes-per-shard=5", ["Did you mean 'scenes_per_shard'?"]),
        ("clean.rat=0.5", ["section 'clean'", "'clean.rat'", "Did you mean 'clean.rate'?"]),
        ("clean.zzzz=1", ["Known keys: max_group_records, rate, repair, roles"]),
        ("name.first=1", ["'name.first'", "'name' is a value, not a section"]),
        ("clean=1", ["'clean' is a section", "max_group_records"]),
        ("clean={rate = 1}", ["'clean' is a section"]),
        ("limit", ["`--set limit`", "KEY=VALUE"]),
        ("=3", ["KEY=VALUE"]),
        ("clean..rate=3", ["KEY=VALUE"]),
    ],
)
def test_a_wrong_key_is_named_with_its_path_and_the_nearest(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(Job, sets=[text])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clean]\nrat = 1\n", ["'clean.rat'", "job.toml", "'clean.rate'"]),
        ("[[rules]]\npattern = 'x'\npatern = 'y'\n", ["'rules.0.patern'", "'rules.0.pattern'"]),
        ("[[rules]]\npattern = 3\n", ["'rules.0.pattern'", "3", "a string"]),
        ("clean = 5\n", ["'clean'", "5", "a table"]),
        ("limit = 5\nlimit = 6\n", ["not TOML", "job.toml", "line 2"]),
        ("limit = 5.5\n", ["'limit'", "5.5", "job.toml"]),
    ],
)
def test_a_wrong_file_is_named_with_the_key(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(Job, file=written(tmp_path, text))
    for word in words:
        assert word in str(caught.value)


def test_a_set_below_a_value_that_the_file_gives_as_a_scalar_still_ends_in_a_sentence(tmp_path: Path) -> None:
    job = config.load(Job, file=written(tmp_path, "clean = 5\n"), sets=["clean.rate=0.25"])
    assert job.clean == Cleaning(rate=0.25)


def test_a_missing_file_and_a_file_of_other_bytes_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        config.load(Job, file=str(tmp_path / "absent.toml"))
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="utf-8"):
        config.load(Job, file=str(tmp_path / "latin.toml"))


def test_a_needed_key_that_is_absent_is_named() -> None:
    with pytest.raises(ConfigError, match="needs the key 'size'"):
        config.load(Needy)
    assert config.load(Needy, sets=["size=3"]) == Needy(size=3)


def test_to_dict_is_sorted_plain_json() -> None:
    plain = config.to_dict(Job(rules=(Rule(pattern="x"),), weights={"b": 1.0, "a": 2.0}))
    assert json.loads(json.dumps(plain)) == plain
    assert list(plain) == sorted(plain)
    assert list(plain["weights"]) == ["a", "b"]
    assert plain["colour"] == "red"
    assert plain["folder"] == "here"
    assert plain["rules"] == [{"pattern": "x"}]
    assert set(plain) == {f.name for f in dataclasses.fields(Job)}


def test_to_dict_refuses_what_json_would_lose() -> None:
    with pytest.raises(ConfigError, match=r"'weights\.a' is inf"):
        config.to_dict(Job(weights={"a": float("inf")}))


@given(
    st.builds(
        Job,
        scenes_per_shard=st.integers(-(2**53), 2**53),
        name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])),
        limit=st.none() | st.integers(0, 10),
        year=st.sampled_from(["2014", "2017"]),
        clean=st.builds(Cleaning, rate=st.floats(0, 1), repair=st.booleans(), roles=st.lists(st.text("ab")).map(tuple)),
        weights=st.dictionaries(st.text("abc", min_size=1), st.floats(allow_nan=False, allow_infinity=False)),
    )
)
def test_what_to_dict_writes_load_reads_back(job: Job) -> None:
    plain = {name: value for name, value in config.to_dict(job).items() if value is not None}
    weights = plain.pop("weights")
    clean = plain.pop("clean")
    sets = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in plain.items()]
    sets += [f"clean.{name}={json.dumps(value)}" for name, value in clean.items()]
    sets += [f"weights.{name}={value!r}" for name, value in weights.items()]
    assert config.load(Job, sets=sets) == job
