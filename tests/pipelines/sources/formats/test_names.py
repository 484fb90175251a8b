"""`pipelines.sources.formats.names`: the form in which two spellings of one URL are equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sources.formats.names import normalise_url


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("HTTPS://Host.COM:443/A?b=C#d", "https://host.com/A?b=C"),
        ("https://host.com:80/a", "https://host.com:80/a"),
        ("http://host.com:/a", "http://host.com/a"),
        ("http://host.com?q", "http://host.com?q"),
        ("http://[2001:DB8::1]:80/a", "http://[2001:db8::1]/a"),
        ("http://[2001:DB8::1]/a", "http://[2001:db8::1]/a"),
        ("http://Me:Pass@Host/a", "http://Me:Pass@host/a"),
        ("http://h/a%2Fb?x=%7E", "http://h/a%2Fb?x=%7E"),
        ("  http://h/a b.jpg ", "http://h/a b.jpg"),
        ("UNLIKELY not a url", "UNLIKELY not a url"),
        ("//h/a", "//h/a"),
    ],
)
def test_urls_lose_only_what_names_no_other_picture(url: str, normal: str) -> None:
    assert normalise_url(url) == normal


@given(st.text() | st.from_regex(r"\A *[A-Za-z]{1,5}://[A-Za-z0-9:@.]{0,12}(:80|:443|:)?[/?# ].*\Z"))
def test_a_normal_url_is_normal_again(url: str) -> None:
    assert normalise_url(normalise_url(url)) == normalise_url(url)
