from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sources.formats.documents import NotJson, encode, parse

# All code points, lone surrogates included, as JSON escapes can write them.
ANY_TEXT = st.text(st.characters(codec=None), max_size=6) | st.lists(st.integers(0xD800, 0xDFFF), max_size=4).map(
    lambda codes: "".join(map(chr, codes))
)


@given(ANY_TEXT)
def test_a10_a_text_is_utf8_of_itself_or_is_no_utf8_at_all(text: str) -> None:
    parsed = parse(json.dumps(text).encode())
    raw = encode(parsed)
    # A pair of escapes is one character; what is left unpaired is no text.
    meant = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if "\ufffd" not in meant or "\ufffd" in text and meant == text:
        assert raw.decode() == meant
    else:
        with pytest.raises(UnicodeDecodeError):
            raw.decode()


@given(st.binary(max_size=8).filter(lambda raw: not set(raw) & set(b'"\\') and all(byte >= 32 for byte in raw)))
def test_a10_bytes_in_json_come_out_as_they_are(raw: bytes) -> None:
    assert encode(parse(b'"' + raw + b'"')) == raw


@pytest.mark.parametrize("data", [b"", b"{", b"NaN", b"[Infinity]", b"{'a': 1}", b"[1,]", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(NotJson):
        parse(data)
