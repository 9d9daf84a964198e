"""The total time that a request has waited."""

from kvferry.connector.speeds import Waiting


def test_the_time_between_two_waits_does_not_count():
    waiting = Waiting()
    assert waiting.until(10.0) == 0.0
    waiting.begin(10.0)
    assert waiting.until(13.0) == 3.0
    assert waiting.until(99.0) == 3.0, "it was not told to wait: the engine had no blocks for it"
    waiting.begin(99.0)
    waiting.begin(100.0)
    assert waiting.until(101.0) == 4.0
