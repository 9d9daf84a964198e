"""Addresses of engines, as users write them."""

from __future__ import annotations

import pytest

from kvferry.common.errors import ConfigError
from kvferry.tools.fetch import http_address, server_url
from kvferry.tools.serving.router.fleet import read_engines
from kvferry.tools.serving.router.settings import RouterSettings
from kvferry.tools.top.poller import parse_address


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("http://a:8000/", "http://a:8000"),
        ("http://u:p@[::1]:8000/v1", "http://u:p@[::1]:8000"),
        ("http://a/metrics?x=1#y", "http://a"),
        ("http://a:0", None),
        ("http://a:99999", None),
        ("http://[", None),
        ("ftp://a", None),
        ("kvferry://a:1", None),
        ("", None),
    ],
)
def test_an_address_is_known_without_what_is_asked_there(text: str, found: str | None) -> None:
    assert http_address(text) == found


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("a:8000", "http://a:8000"),
        ("127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("[::1]:8000/", "http://[::1]:8000"),
        ("https://a.b/one/v1/", "https://a.b/one"),
    ],
)
def test_router_top_and_file_of_engines_take_the_same_addresses(tmp_path, text: str, url: str) -> None:
    settings = RouterSettings(prefill=(text,), decode=(text,))
    assert (settings.prefill, settings.decode) == ((url,), (url,))
    (file := tmp_path / "engines").write_text(f"prefill {text}\ndecode {text}\n")
    assert read_engines(file)["prefill"] == (url,)
    assert parse_address(text) == url


@pytest.mark.parametrize("text", ["a", "a:0", "a:x", ":8000", "[::1:8000", "kvferry://a:1", "http://u:p@a:1"])
def test_router_refuses_what_is_no_address(text: str) -> None:
    assert server_url(text) is None or "@" in text
    with pytest.raises(ConfigError, match="is no address; give http://host:port or host:port"):
        RouterSettings(prefill=(), decode=(text,))
