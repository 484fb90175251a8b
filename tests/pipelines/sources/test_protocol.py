"""What every source keeps, whichever it is; new sources are tested by being in the table."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

import pytest

from catalog.schema import DATASET_PATTERN
from infra.config import load, to_dict
from infra.errors import UsageError
from pipelines.records import Input, Source
from pipelines.sources import SOURCES, source_class


@pytest.fixture(params=sorted(SOURCES))
def source(request: pytest.FixtureRequest) -> Source:
    """Each source with its defaults."""
    made: Source = load(source_class(request.param))
    return made


def test_the_table_names_sources_that_know_their_name(source: Source) -> None:
    assert SOURCES[source.name].endswith(type(source).__name__)
    assert DATASET_PATTERN.fullmatch(source.name)


def test_all_members_have_their_types(source: Source) -> None:
    for name, kind in (("bad_passes", int), ("grouped", bool), ("needs_input", bool), ("repairs_byte_escapes", bool)):
        assert type(getattr(source, name)) is kind, name
    assert source.bad_passes >= 1
    assert isinstance(source.writers, Mapping)
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in source.writers.items())


def test_a_source_is_its_options_and_travels(source: Source) -> None:
    assert dataclasses.is_dataclass(source)
    # By the protocol of pickle, without a pickle.
    again = copy.deepcopy(source)
    assert again == source and again.grouped == source.grouped and again.writers == source.writers
    assert set(to_dict(source)) == {field.name for field in dataclasses.fields(source)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataclasses.replace(source).any_option = 1


def test_every_option_says_what_it_means(source: Source) -> None:
    import inspect

    lines = inspect.getsource(type(source)).splitlines()
    for field in dataclasses.fields(type(source)):  # type: ignore[arg-type]
        place = next(i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: "))
        assert lines[place + 1].startswith('    "'), field.name


def test_surveying_takes_inputs_or_says_that_it_does_not(source: Source) -> None:
    from infra.errors import InputError

    with pytest.raises(InputError):
        source.survey([Input(uri="no.such", url="/no/such/no.such")], None)


def test_an_unknown_source_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'multi30k'"):
        source_class("mulit30k")
