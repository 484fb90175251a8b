"""The normal form of a text, by which repeated and leaked captions are found.

Invariant: `sql_normal_form` equals `normal_form` text by text: ASCII in SQL, at the speed of a scan, the rest in
Python.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

PYTHON_FUNCTION: Final = "goodviews_normal_form"
"Name under which a connection must know `normal_form` for `sql_normal_form` to run."

_NOT_WORD = re.compile(r"[^a-z0-9]+")
_SIGN = re.compile(r"[^\w\s]")
_SIGNS = re.compile(r"[\W_]+")  # of a text without combining marks, which `\w` does not match


def normal_form(text: str) -> str:
    """The words of a text: case folded; letters, digits and combining marks only; single spaces between words."""
    folded = text.casefold()
    if folded.isascii():
        return _NOT_WORD.sub(" ", folded).strip()
    if any(unicodedata.category(c)[0] == "M" for c in set(_SIGN.findall(folded))):
        folded = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in folded)
        return " ".join(folded.split())
    return _SIGNS.sub(" ", folded).strip()


def sql_normal_form(column: str) -> str:
    """A DuckDB expression for the normal form of a text column. The connection must know `PYTHON_FUNCTION`."""
    ascii_form = f"trim(regexp_replace(lower({column}), '[^a-z0-9]+', ' ', 'g'))"
    # As many bytes as characters means only ASCII.
    return f"CASE WHEN strlen({column}) = length({column}) THEN {ascii_form} ELSE {PYTHON_FUNCTION}({column}) END"
