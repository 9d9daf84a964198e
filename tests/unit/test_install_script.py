"""`scripts/install.py`: uv is set up as pip is."""

from scripts.install import uv_environment


def test_settings_of_pip_are_those_of_uv() -> None:
    settings = """:env:.find-links='/wheels'
global.find-links='/other'
global.index-url='https://mirror.example/simple'
global.extra-index-url='file:///gone/simple https://torch.example/cpu'
global.constraint='/constraints.txt'
"""
    assert uv_environment(settings, {"HOME": "/root"}) == {
        "HOME": "/root",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_FIND_LINKS": "/wheels",
        "UV_INDEX": "https://torch.example/cpu",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_variables_of_uv_in_the_environment_win() -> None:
    assert uv_environment("global.cert='/a'", {"SSL_CERT_FILE": "/b"})["SSL_CERT_FILE"] == "/b"
