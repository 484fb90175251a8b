"""`catalog.overlap.identity`: which ids name one thing, in Python and in SQL."""

from __future__ import annotations

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.overlap.identity import (
    NAMESPACES,
    NO_BYTES,
    caption_set,
    identity,
    key,
    sql_caption_set,
    sql_identity,
    sql_key,
)

HEX = "0123456789abcdef" * 4


def name(source: str | None, source_id: str, image_uri: str | None = None) -> str | None:
    return identity(source, source_id, address="in.csv#3", image_uri=image_uri)


def test_one_photo_of_flickr_has_one_name_in_all_its_spellings() -> None:
    spellings = [
        ("flickr8k", "1000268201_693b08cb0e.jpg"),
        ("flickr8k", "1000268201_693b08cb0e"),
        ("flickr30k", "1000268201.jpg"),
        ("multi30k", "1000268201"),
    ]
    assert {name(*spelling) for spelling in spellings} == {"flickr:1000268201"}
    # Karpathy's file of Flickr30k, read by the source of COCO.
    assert name("coco", "1000268201", "flickr30k-images/1000268201.jpg") == "flickr:1000268201"
    assert name("coco", "1000268201_693b08cb0e", "1000268201_693b08cb0e.jpg") == "flickr:1000268201"


def test_ids_of_different_namespaces_that_look_alike_are_different_things() -> None:
    # 36979.jpg is a photo of Flickr30k and 36979 a picture of COCO.
    flickr, coco = name("multi30k", "36979"), name("coco", "36979", "COCO_val2014_000000036979.jpg")
    assert (flickr, coco) == ("flickr:36979", "coco:36979")
    assert name("coco", "36979", "train2017/000000036979.jpg") == "coco:36979"
    # Other people's files in the layout of COCO number their pictures from 0.
    assert name("coco", "36979") is name("coco", "12", "0012.jpg") is name("coco", "12", "nocaps/12.jpg") is None
    assert name("coco", "12", "000000000013.jpg") is None
    assert name("shop", "36979") == "shop:36979" != name("other", "36979")


def test_ids_of_ones_own_table_name_nothing_outside_it_but_hashes_and_addresses_do() -> None:
    assert name("table", "36979") is None
    assert name("table", HEX) == f"sha256:{HEX}"
    assert name("table", "http://a.example/x.jpg") == "url:http://a.example/x.jpg"
    assert name("img2dataset", NO_BYTES) is name("table", NO_BYTES) is None


def test_an_id_that_is_a_place_names_nothing() -> None:
    assert name("shop", "in.csv#3") is None
    assert name("shop", "in.csv#4") == "shop:in.csv#4"
    assert name("toyworld", "toy-0000001") is None
    assert name("img2dataset", "000010005") is None
    assert name(None, "1000268201") is None


def test_crawled_pictures_are_named_by_their_bytes_or_their_address() -> None:
    assert name("recap-datacomp", HEX) == name("img2dataset", HEX) == f"sha256:{HEX}"
    assert name("recap-datacomp", "http://a.example/x.jpg") == "url:http://a.example/x.jpg"
    assert name("datacomp", HEX[:32]) == name("webdataset", HEX[:32]) == f"uid:{HEX[:32]}"


PIECES = [
    "36979",
    "1000268201",
    "_693b08cb0e",
    ".jpg",
    ".JPG",
    ".jpg.1",
    "http://",
    "a/",
    "#3",
    "in.csv",
    "000000036979",
    "COCO_val2014_",
    "\n",
    "'",
    "é",
    HEX,
]
IDS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)


@given(
    st.sampled_from([*NAMESPACES, "table", "o'ther", None]),
    st.lists(st.tuples(IDS, st.one_of(st.none(), IDS)), min_size=1, max_size=20),
)
def test_the_identity_in_sql_is_that_of_python(source: str | None, rows: list[tuple[str, str | None]]) -> None:
    with duckdb.connect() as connection:
        connection.execute(
            "CREATE TABLE s (place INT, source_id VARCHAR, source_uri VARCHAR, source_row BIGINT, images STRUCT(uri VARCHAR)[])"
        )
        for place, (id_, uri) in enumerate(rows):
            images = [] if uri is None else [{"uri": uri}]
            connection.execute("INSERT INTO s VALUES (?, ?, 'in.csv', 3, ?)", [place, id_, images])
        found = connection.execute(f"SELECT {sql_identity(source, 's')} FROM s ORDER BY place").fetchall()
    assert [row[0] for row in found] == [name(source, id_, uri) for id_, uri in rows]


@given(
    st.sampled_from(["id", "captions"]), st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
)
def test_a_key_in_sql_is_that_of_python(kind: str, value: str) -> None:
    with duckdb.connect() as connection:
        assert connection.execute(f"SELECT {sql_key(kind, '?')}", [value]).fetchone() == (key(kind, value),)


@given(st.lists(st.sampled_from(["a dog", "a cat", "b", "", "ä"]), max_size=6))
def test_a_caption_set_in_sql_is_that_of_python(forms: list[str]) -> None:
    with duckdb.connect() as connection:
        query = f"SELECT {sql_caption_set('f')} FROM (SELECT DISTINCT unnest(?::VARCHAR[]) AS f) WHERE f <> ''"
        assert connection.execute(query, [forms]).fetchone() == (caption_set(forms),)


@pytest.mark.parametrize("forms", [[], ["a dog"], ["a dog", "a dog"], ["", "a dog"]])
def test_one_caption_or_none_names_no_scene(forms: list[str]) -> None:
    assert caption_set(forms) is None


def test_the_order_of_captions_does_not_matter_and_their_words_do() -> None:
    assert caption_set(["a", "b"]) == caption_set(["b", "a", "b"]) != caption_set(["a", "c"])
