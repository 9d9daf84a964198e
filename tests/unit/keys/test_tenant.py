"""Tenants in keys: what their requests have in common, and nothing of it that can be read."""

from hypothesis import assume, given, strategies as st

from kvferry.keys.tenant import NOBODY, TENANT_BYTES, key_of_chunk, tenant_of, tenant_of_key
from support.examples import examples

TEXTS = st.text(max_size=6)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
@examples(200)
def test_requests_have_one_tenant_if_they_have_one_salt_or_no_salt_and_one_adapter(
    salt, adapter, other, name
):
    same = salt == other if salt or other else adapter == name
    assert (tenant_of(salt, adapter) == tenant_of(other, name)) == same


@given(TEXTS)
@examples(100)
def test_a_salt_and_an_adapter_of_one_text_are_two_tenants(text):
    assume(text)
    assert len({tenant_of(text, None), tenant_of(None, text), NOBODY}) == 3


def test_a_lone_surrogate_of_a_json_salt_has_a_tenant():
    assert len(tenant_of("a\ud800", None)) == TENANT_BYTES


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=6, max_size=6), st.integers(0, 255))
@examples(100)
def test_a_key_has_its_tenant_and_group_and_the_rest_of_its_digest(digest, tenant, group):
    key = key_of_chunk(digest, tenant, group)
    assert (len(key), tenant_of_key(key), key[-1]) == (32, tenant, group)
    assert key[:16] + key[22:-1] == digest[:16] + digest[22:-1]


def test_the_digest_of_a_salt_is_the_same_in_every_release():
    """Operators write it into settings, and files have it in their names."""
    assert tenant_of("salt", None).hex() == "d3d6ff808284"
    assert tenant_of(None, "sql").hex() == "703d37e1763b"
