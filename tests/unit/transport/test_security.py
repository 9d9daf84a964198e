"""Key pairs that derive from secrets."""

from kvferry.transport import security

SECRET = b"0123456789abcdef"


def test_the_same_secret_gives_the_same_keys_and_another_gives_others():
    keys, others = security.derive_keys(SECRET), security.derive_keys(SECRET[::-1])
    assert keys == security.derive_keys(SECRET)
    assert keys.public != others.public
    assert keys.fingerprint != others.fingerprint
    assert SECRET not in keys.secret
    assert security.random_keys() != security.random_keys()


def test_keys_derive_as_they_always_have():
    """Engines of two versions of kvferry that share a secret have the same keys."""
    keys = security.derive_keys(SECRET)
    assert (keys.public, keys.fingerprint) == (b"O+YGy]fxe@?d1I8m:}^X3m6)Y^a7fZY^*rs71WNO", "8cbee87b")
