"""`pipelines.sources.options`: options of several sources are refused alike, before a file is opened."""

from __future__ import annotations

from typing import Any

import pytest

from infra.errors import ConfigError
from pipelines.sources import source_class


@pytest.mark.parametrize("name", ["coco", "flickr8k", "flickr30k", "img2dataset", "webdataset"])
@pytest.mark.parametrize("split", ["Train", "a b", "../x"])
def test_what_is_no_split_name_is_refused(name: str, split: str) -> None:
    with pytest.raises(ConfigError, match="is no split name"):
        source_class(name)(split=split)
    assert source_class(name)(split="").split == ""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("coco", {"restval": "no"}),
        ("msrvtt", {"splits": "no"}),
        ("msrvtt", {"test_captions": "no"}),
        ("msrvtt", {"scene": "no"}),
        ("img2dataset", {"failed": "no"}),
    ],
)
def test_what_is_none_of_the_choices_is_refused_with_them(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"='no' is not one of \w+, \w+"):
        source_class(name)(**options)
