"""`infra.errors`: an error that crosses to another process keeps its type and its message."""

from __future__ import annotations

import pytest

from infra import errors
from infra.errors import GoodviewsError, decode, encode

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GoodviewsError)]


def test_every_error_comes_back_as_it_was() -> None:
    assert len(KINDS) > 8
    for kind in KINDS:
        found = decode(*encode(kind("What happened.")))
        assert (type(found), str(found), found.exit_code) == (kind, "What happened.", kind.exit_code)


@pytest.mark.parametrize("name", ["NoSuchError", "ValueError", "EXIT_DONE", "decode", "annotations", ""])
def test_an_unknown_name_comes_back_in_the_message_of_a_plain_error(name: str) -> None:
    found = decode(name, "What happened.")
    assert (type(found), str(found)) == (GoodviewsError, f"{name}: What happened.")


def test_a_subclass_of_another_module_comes_back_as_the_error_that_it_is() -> None:
    class OtherError(errors.ConflictError): ...

    assert encode(OtherError("What happened.")) == ("ConflictError", "What happened.")
