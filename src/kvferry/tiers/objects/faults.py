"""Faults of object storage: the reasons why requests fail, with messages and advice.

obstore distinguishes kinds of errors only by text. Only this module parses its messages and their debug part.
It repeats only the text that an operator needs. It never repeats the query of a URL, which may have a
signature.
"""

from __future__ import annotations

import re
from enum import StrEnum

from kvferry.common.text import printable
from kvferry.tiers.objects.settings import BLACKHOLE_PROXY


class Fault(StrEnum):
    """The reason why a request to object storage failed. The value is a text for log messages."""

    UNREACHABLE = "it cannot be reached"
    TIMEOUT = "no answer in time"
    DENIED = "access is denied"
    SKEWED = "it finds this machine's time wrong"
    NO_BUCKET = "there is no such bucket"
    THROTTLED = "it asks for fewer requests"
    SERVER = "it reports an error of its own"
    REDIRECTED = "it redirects requests"
    ODD_NAME = "an object there has a name that cannot be read"
    UNEXPECTED = "an answer that cannot be used"
    ENCRYPTED = "its chunks are encrypted, and the tier has no key_file"
    NOT_ENCRYPTED = "its chunks are not encrypted, and the tier has a key_file"
    FORKED = "this process was forked from one that used it"
    PAUSED = "it is left alone after failures"

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    Fault.UNREACHABLE: "see to its endpoint, the network and allow_http",
    Fault.TIMEOUT: "see whether it and the network are healthy, or raise the timeout",
    Fault.DENIED: "give credentials that may list, read, write and delete there",
    Fault.SKEWED: "set the clock of this machine",
    Fault.NO_BUCKET: "make it, or mend the URL",
    Fault.THROTTLED: "see to its limits, or let fewer engines share it",
    Fault.SERVER: "see to its own logs",
    Fault.REDIRECTED: "give the server that it names as endpoint, if it is trusted, or the bucket's region",
    Fault.ODD_NAME: "remove it, and see who else writes there",
    Fault.UNEXPECTED: "see whether endpoint, region and URL are those of an object store",
    Fault.ENCRYPTED: "set key_file, or use another URL",
    Fault.NOT_ENCRYPTED: "use another URL, or remove the chunks with kvferry cache clear",
    Fault.FORKED: "start processes by spawn",
    Fault.PAUSED: "see what was reported before",
}


# obstore asks these metadata servers for credentials if it finds none.
_NO_CREDENTIALS = r"169\.254\.169\.254|metadata\.google\.internal|MissingCredential"
_SKEWED = r"RequestTimeTooSkewed"
_BROKEN = r"IncompleteMessage|ConnectionReset|ConnectionAborted|BrokenPipe"
# A redirect to another server ends at the proxy that does not exist.
_AWAY = rf"\b{re.escape(BLACKHOLE_PROXY)},"
_BARE = r"inner: BareRedirect"

_KINDS = (
    (_AWAY, Fault.REDIRECTED),
    (_BARE, Fault.REDIRECTED),
    (r"\bInvalidPath \{", Fault.ODD_NAME),
    (r"kind: Timeout|TimedOut", Fault.TIMEOUT),
    (r"kind: Connect", Fault.UNREACHABLE),
    (_BROKEN, Fault.UNREACHABLE),
)

_DETAILS = (
    (_NO_CREDENTIALS, "no credentials were found"),
    (r"status code: (\d{3}).{0,200}?<Code>(\w{1,60})</Code>", r"\1 \2"),
    (r"status code: (\d{3})", r"\1"),
    (_AWAY, "to another server"),
    (_BARE, "without saying where"),
    (r'\bInvalidPath \{.*?path: ("(?:[^"\\]|\\.){1,200}"?)', r"\1"),
    (r"dns error", "its name is not known"),
    (_BROKEN, "the connection broke off"),
    (r"InvalidCertificate\(\s*(\w{1,60})", r"TLS: \1"),
    (r'code: \d+, kind: \w+, message: "([^"]{1,80})"', r"\1"),
)


class Unavailable(OSError):
    """Raised if a request to object storage fails, except if an object is missing."""

    def __init__(self, fault: Fault, detail: str = "") -> None:
        super().__init__(f"{fault} ({detail})" if detail else str(fault))
        self.fault = fault


def unavailable(error: Exception) -> Unavailable:
    """Convert an error of obstore to an `Unavailable` with reason and short detail.

    A FileNotFoundError is that of a missing bucket.
    """
    said, _, debug = str(error).partition("\n\nDebug source")
    debug = " ".join(debug.split())
    fault = Fault.NO_BUCKET if isinstance(error, FileNotFoundError) else _fault(said, debug)
    detail = _detail(said, debug)
    if fault is Fault.UNEXPECTED and not detail:
        # The cause that obstore gives, without queries of URLs.
        detail = printable(re.sub(r"\?\S*", "", " ".join(said.rpartition(" - ")[2].split()))[:200])
    return Unavailable(fault, detail)


def is_of_the_bucket(missing: FileNotFoundError) -> bool:
    """Return whether the whole bucket is missing, not just one object."""
    return re.search(r"NoSuchBucket|ContainerNotFound|bucket does not exist", str(missing)) is not None


def _fault(said: str, debug: str) -> Fault:
    # Before the status, which says less: a wrong clock is a 403, too.
    if re.search(_NO_CREDENTIALS, said + debug):
        return Fault.DENIED
    if re.search(_SKEWED, said + debug):
        return Fault.SKEWED
    if status := re.search(r"status code: (\d{3})", said):
        return _fault_of_status(int(status[1]))
    return next((fault for pattern, fault in _KINDS if re.search(pattern, debug)), Fault.UNEXPECTED)


def _fault_of_status(status: int) -> Fault:
    if status in (401, 403):
        return Fault.DENIED
    if 300 <= status < 400:
        return Fault.REDIRECTED
    if status == 404:
        return Fault.NO_BUCKET
    if status in (429, 503):
        return Fault.THROTTLED
    return Fault.SERVER if status >= 500 else Fault.UNEXPECTED


def _detail(said: str, debug: str) -> str:
    for pattern, detail in _DETAILS:
        if found := re.search(pattern, f"{said} {debug}", re.DOTALL):
            return " ".join(found.expand(detail).split())
    return ""
