"""Collections that fail a test when they are used without the lock that guards them."""

from __future__ import annotations

from threading import Lock
from typing import Any

_METHODS = ("__contains__", "__getitem__", "__setitem__", "append", "get", "pop", "popleft")


def locked(kind: type, lock: Lock) -> Any:
    """Return an empty collection of a kind, whose methods check that the lock is held."""

    def method(name: str) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            assert lock.locked(), f"{name} without the lock"
            return getattr(kind, name)(self, *arguments)

        return call

    methods = {name: method(name) for name in _METHODS if hasattr(kind, name)}
    return type(f"Locked{kind.__name__}", (kind,), methods)()
