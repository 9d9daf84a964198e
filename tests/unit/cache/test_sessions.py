"""The chunks of sessions."""

from __future__ import annotations

from kvferry.cache.sessions import Sessions

A, B = ("salt", "a"), ("salt", "b")


def test_a_session_ends_with_the_chunks_that_only_it_has_used():
    sessions = Sessions()
    sessions.use(A, [b"system", b"1"], "first")
    sessions.use(B, [b"system", b"2"], "other")
    sessions.use(A, [b"system", b"1", b"3"], "second")
    assert (sessions.last(A), sessions.last(B), sessions.last(None)) == ("second", "other", None)
    assert sessions.end(A) == [b"1", b"3"]
    assert (sessions.last(A), sessions.end(A), sessions.end(None)) == (None, [], [])
    assert sessions.end(B) == [b"system", b"2"]


def test_chunks_that_a_request_without_a_session_has_used_are_not_the_sessions_own():
    sessions = Sessions()
    sessions.use(None, [b"0"], None)
    sessions.use(A, [b"0", b"1", b"2"], "first")
    sessions.use(None, [b"1", b"9"], None)
    assert sessions.end(A) == [b"0", b"2"]
    sessions.use(A, [b"1"], "anew")
    assert sessions.end(A) == [b"1"]


def test_a_session_of_another_tenant_is_another_one():
    sessions = Sessions()
    sessions.use(("x", "a"), [b"x1"], "of x")
    sessions.use(("y", "a"), [b"y1"], "of y")
    assert sessions.end(("z", "a")) == []
    assert sessions.end(("x", "a")) == [b"x1"]
    assert sessions.last(("y", "a")) == "of y"
    sessions.forget_tenant("y")
    assert sessions.last(("y", "a")) is None


def test_the_oldest_sessions_are_forgotten_when_they_have_too_many_chunks():
    sessions = Sessions(most_keys=4)
    sessions.use(A, [b"1", b"2"], "a")
    sessions.use(B, [b"2", b"3"], "b")
    sessions.use(A, [b"1"], "a again")
    sessions.use(("salt", "c"), [b"4", b"5"], "c")
    assert (sessions.last(B), sessions.last(A)) == (None, "a again")
    assert sessions.end(A) == [b"1", b"2"]
    sessions.clear()
    assert len(sessions) == len(sessions._users) == sessions._count == 0
