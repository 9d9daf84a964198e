"""URLs and options of object storage."""

from __future__ import annotations

import ast
from datetime import timedelta
from pathlib import Path

import obstore
import pytest

from kvferry.common.errors import ConfigError
from kvferry.tiers.objects.client import BucketClient
from kvferry.tiers.objects.settings import AZURE, CLIENT, GCS, S3, store_settings


def declared(module: str, name: str) -> set[str]:
    """The options that the installed obstore declares."""
    tree = ast.parse((Path(obstore.__file__).parent / "_store" / f"{module}.pyi").read_text())
    [found] = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    return {one.target.id for one in found.body if isinstance(one, ast.AnnAssign)}


@pytest.mark.parametrize(
    ("module", "name", "known", "left_out"),
    [
        ("_aws", "S3Config", S3, {"bucket"}),
        ("_gcs", "GCSConfig", GCS, {"bucket"}),
        ("_azure", "AzureConfig", AZURE, {"container_name"}),
        (
            "_client",
            "ClientConfig",
            CLIENT,
            {"timeout", "connect_timeout", "read_timeout", "default_headers"},
        ),
    ],
)
def test_the_known_options_are_those_of_the_installed_client(module, name, known, left_out):
    assert known | left_out == declared(module, name)
    assert not known & left_out


def test_options_of_the_store_and_of_its_connections_are_told_apart():
    found = store_settings("s3://bucket/path/", {"region": "eu-west-1", "allow_http": "true"})
    assert found.url == "s3://bucket/path"
    assert (found.store, found.client) == ({"region": "eu-west-1"}, {"allow_http": "true"})


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("ftp://host/path", {}, "the URL begins with 'ftp://ho'; it must be one of s3://bucket/path, gs://"),
        ("memory:///", {}, "it must be one of s3://bucket/path, gs://"),
        ("http://host/path", {}, "it must be one of s3://bucket/path, gs://"),
        ("s3:///path", {}, "s3:///path names no bucket"),
        ("file://host/path", {}, "file://host/path names no bucket"),
        ("s3://bucket/mine/../yours", {}, "has a folder called . or ..; write the path out"),
        ("s3://bucket/mine/%2e%2E", {}, "has a folder called . or ..; write the path out"),
        ("file:///tmp/./x", {}, "has a folder called . or ..; write the path out"),
        ("s3://b", {"endpont": "x"}, r"s3:// has no option 'endpont'; did you mean 'endpoint'\?"),
        ("gs://b", {"zzz": "x"}, "gs:// has no option 'zzz'; known are allow_http, allow_invalid_cert"),
        ("s3://b", {"timeout": "3s"}, "s3:// has no option 'timeout'"),
        ("file:///tmp", {"region": "x"}, "file:// has no option 'region'; known are none"),
        ("s3://b", {"allow_http": "maybe"}, 's3://b: .*failed to parse "<allow_http>" as boolean'),
        ("az://container/path", {}, "az://container/path: .*Account must be specified"),
        ("file:///no/such/folder", {}, "file:///no/such/folder: Generic LocalFileSystem error"),
    ],
)
def test_unusable_url_or_option_is_refused(url, options, said):
    with pytest.raises(ConfigError, match=f"object tier: .*{said}"):
        BucketClient(url, options, 1.0)


@pytest.mark.parametrize("url", ["s3://key:hidden@bucket/p", "az://c/p?sig=hidden", "gs://b/p#hidden"])
def test_a_url_with_more_than_a_place_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigError, match="more than a bucket and a path") as refused:
        BucketClient(url, {}, 1.0)
    assert "hidden" not in str(refused.value)


def test_a_secret_that_cannot_be_used_is_not_repeated():
    with pytest.raises(ConfigError, match="service account file from <service_account>") as refused:
        BucketClient("gs://bucket/path", {"service_account": '{"private_key": "hidden"}'}, 1.0)
    assert "hidden" not in str(refused.value)


def test_requests_have_timeouts_and_few_repetitions():
    store = BucketClient("s3://bucket/path", {"region": "eu-west-1", "user_agent": "tests"}, 8.0).store
    assert store.client_options == {"user_agent": "tests", "connect_timeout": "2s", "timeout": "4s"}
    assert store.retry_config["max_retries"] == 2
    assert store.retry_config["retry_timeout"] + store.retry_config["backoff"]["max_backoff"] == timedelta(
        seconds=4
    )


def test_a_directory_of_the_file_tier_is_refused(tmp_path):
    (tmp_path / "kvferry.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a directory of the file tier"):
        BucketClient(f"file://{tmp_path}", {}, 1.0)
