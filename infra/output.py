"""The result of a command on stdout, for programs.

Owns: the one form of JSON that every `--json` prints. Does not own: tables for people, which each command draws as it needs.
Invariant: stdout gets one JSON document that ends in a line end, and nothing else.
"""

from __future__ import annotations

import sys
from typing import Any


def print_json(value: Any) -> None:
    """Print dataclasses, mappings, sequences and plain values, indented by two blanks; numbers may be keys, NaN becomes null."""
    import orjson

    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    sys.stdout.write(orjson.dumps(value, option=options).decode())
