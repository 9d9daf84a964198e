"""For all tests."""

from __future__ import annotations

import signal

# A shell starts what runs in the background with SIGINT ignored, and children inherit that: what is sent an
# interrupt here must be able to hear it. A handler becomes the default again when a child is executed.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
