"""What messages of the client mean; those that no server of the other tests provokes."""

from __future__ import annotations

import pytest

from kvferry.tiers.objects.faults import Fault, unavailable


def error(said: str, debug: str = "") -> Exception:
    return Exception(f"{said}\n\nDebug source:\n{debug}")


@pytest.mark.parametrize(
    ("said", "debug", "fault", "told"),
    [
        (
            "Generic S3 error: Error performing PUT http://169.254.169.254/latest in 1ms - HTTP error",
            "kind: Timeout",
            Fault.DENIED,
            "access is denied (no credentials were found)",
        ),
        (
            "Generic S3 error: Error performing GET https://b/p in 1ms - HTTP error: error sending request",
            "kind: Connect,\n source: Custom {\n error: InvalidCertificate(\n UnknownIssuer,\n ),",
            Fault.UNREACHABLE,
            "it cannot be reached (TLS: UnknownIssuer)",
        ),
        (
            "Generic S3 error: HTTP error: request or response body error",
            "source: hyper::Error(Body, hyper::Error(IncompleteMessage))",
            Fault.UNREACHABLE,
            "it cannot be reached (the connection broke off)",
        ),
        (
            "Generic MicrosoftAzure error: Error performing GET https://a/c?sig=hidden in 1ms - Oops https://a?sig=hidden",
            "",
            Fault.UNEXPECTED,
            "an answer that cannot be used (Oops https://a)",
        ),
    ],
)
def test_a_message_is_told_by_what_an_operator_can_do(said, debug, fault, told):
    found = unavailable(error(said, debug))
    assert found.fault is fault
    assert str(found) == told


def test_every_fault_has_its_advice():
    assert all(fault.advice for fault in Fault)
