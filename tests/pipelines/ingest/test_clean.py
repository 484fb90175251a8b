"""Cleaning keeps what a human wrote and rejects what is no caption."""

import unicodedata

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.wording import normal_form
from pipelines.ingest.clean import BROKEN_PICTURES, clean_text, clean_texts, letter_sums

PIECES = ["a dog", " ", "  ", "\t", "\n", "\x00", "\x1b", "&amp;", "&nbsp;", "&", "AT&T", "\\xc2\\xae", "\\xff", "\\"]
PIECES += [
    "é",
    "e\u0301",
    "nan",
    "None",
    "",
    "ß",
    "İ",
    "中文",
    "\u200d",
    "\ufeff",
    "\u3000",
    "\x85",
    "ﬁ",
    "न\u093f",
    "!!",
    "A",
]
RAW = st.one_of(
    st.none(),
    st.binary(max_size=12),
    st.lists(st.sampled_from(PIECES), max_size=6).map(lambda p: "".join(p).encode()),
)


def kept(raw: bytes, *, repair: bool = False) -> str | None:
    return clean_text(raw, repair=repair)[0]


@given(st.lists(RAW, max_size=20), st.booleans(), st.booleans())
def test_the_vectorised_form_equals_the_rule_for_one_text(
    raw: list[bytes | None], repair: bool, entities: bool
) -> None:
    cleaned = clean_texts(pa.array(raw, pa.large_binary()), repair=repair, entities=entities)
    for row, value in enumerate(raw):
        text, reason, detail, repaired = clean_text(value, repair=repair, entities=entities)
        if text is not None and normal_form(text) in BROKEN_PICTURES:
            assert cleaned.reason[row] == "broken_picture"
            continue
        assert cleaned.text[row].as_py() == text
        assert cleaned.reason[row] == reason
        assert cleaned.detail.get(row) == detail
        assert bool(cleaned.repaired[row]) == repaired


@given(st.lists(RAW, min_size=3, max_size=20), st.integers(1, 2))
def test_a_slice_of_an_array_is_cleaned_like_the_array(raw: list[bytes | None], start: int) -> None:
    array = pa.array(raw, pa.large_binary())
    whole, part = clean_texts(array, repair=True), clean_texts(array[start:], repair=True)
    assert part.text.to_pylist() == whole.text.to_pylist()[start:]
    assert part.sums.tolist() == whole.sums.tolist()[start:]


@given(st.text(max_size=30), st.text(max_size=30))
def test_texts_of_equal_normal_form_have_equal_letter_sums(one: str, other: str) -> None:
    texts = [one, other, one.upper(), f" {one}!", normal_form(one)]
    sums = letter_sums(texts)
    for text, total in zip(texts, sums, strict=True):
        if normal_form(text) == normal_form(one):
            assert total == sums[0]


@given(st.text(max_size=40))
def test_a_kept_text_has_no_control_character_and_no_run_of_white_space(text: str) -> None:
    result = kept(text.encode("utf-8", "replace"))
    if result is not None:
        assert result == " ".join(result.split())
        assert not any(unicodedata.category(c) == "Cc" for c in result)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"  Two  dogs\trun .\n", "Two dogs run ."),
        (b"salt &amp; pepper &lt;3", "salt & pepper <3"),
        (b"one&nbsp;space", "one space"),
        (b"AT&T and R&D &copy=1", "AT&T and R&D &copy=1"),
        (b"&amp;amp; once", "&amp; once"),
        ("cafe\u0301".encode(), "café"),
        (b"nul\x00byte", "nulbyte"),
        (b"None of them", "None of them"),
        ("\ufeffbom".encode(), "bom"),
        (b"We cannot see the face of the girl.", "We cannot see the face of the girl."),
    ],
)
def test_cleaning_gives(raw: bytes, expected: str) -> None:
    assert kept(raw) == expected


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b"  ",
        b"nan",
        b"NaN",
        b"None",
        b"null",
        b"&nbsp;",
        b"\x00",
        "\u200b".encode(),
        "\u2060\u00ad".encode(),
    ],
)
def test_a8_nothing_is_missing_text(raw: bytes | None) -> None:
    assert clean_text(raw, repair=True)[:2] == (None, "missing_text")


def test_a10_a_windows_1252_byte_is_rejected_with_its_offset() -> None:
    assert clean_text(b"it\x92s", repair=True) == (None, "invalid_utf8", "byte 0x92 at offset 2", False)


def test_a10_a_lone_surrogate_is_rejected() -> None:
    raw = "a\udc8f".encode("utf-8", "surrogatepass")
    assert clean_text(raw, repair=True)[1] == "invalid_utf8"


def test_a1_byte_escapes_are_repaired_and_marked() -> None:
    assert clean_text(rb"CLR\xc2\xae Mold", repair=True) == ("CLR® Mold", None, None, True)


def test_a1_byte_escapes_stay_without_repair_and_when_they_are_not_utf8() -> None:
    assert clean_text(rb"CLR\xc2\xae Mold", repair=False) == (r"CLR\xc2\xae Mold", None, None, False)
    assert clean_text(rb"bad \xff\xfe run", repair=True) == (r"bad \xff\xfe run", None, None, False)


def test_a1_a_path_is_not_taken_for_a_byte_escape() -> None:
    assert clean_text(rb"C:\new\table", repair=True) == (r"C:\new\table", None, None, False)


def test_captions_of_broken_pictures_are_rejected_whole_only() -> None:
    texts = [b"Images are missing images are missing", b"Broken image.", b"A broken image frame on a wall"]
    cleaned = clean_texts(pa.array(texts, pa.large_binary()), repair=False)
    assert cleaned.reason.tolist() == ["broken_picture", "broken_picture", None]


def test_signs_keep_their_marks_in_the_normal_form() -> None:
    # Dropping vowel signs would make different Hindi words equal.
    assert normal_form("कि") != normal_form("का")
    assert normal_form("Straße, 1") == "strasse 1"
    assert normal_form("Don’t") == normal_form("don't") == "don t"
