"""What `kvferry doctor` tries in processes of its own: NIXL, and READs the way they are told to go."""

import pytest

from kvferry.engines.vllm.version import nixl_version
from kvferry.tools.doctor import nixl, reads
from kvferry.tools.doctor.finding import State

pytestmark = pytest.mark.transport


def test_nixl_starts_ucx_and_the_process_ends_well():
    first, *rest = nixl.check(nixl_version())
    assert first.state is State.OK
    assert "UCX" in first.found
    assert {one.state for one in rest} == {State.OK}


def test_reads_are_timed_and_their_way_is_named():
    found = reads.parse_timings(reads.start_reads("tcp,self"))
    assert isinstance(found, reads.ReadTimings)
    assert found.transports
    assert all(transports.startswith("tcp/") for transports in found.transports)
    _, moved, seconds = found.timed[-1]
    assert 0.01e9 < moved / seconds < 1000e9
    assert found.machine["cores"]
    assert (found.strategy, found.not_shared) == ("shared", "")


@pytest.mark.long
def test_reads_that_ucx_cannot_do_are_said():
    why = reads.parse_timings(reads.start_reads("shm"))
    assert isinstance(why, str)
    assert "producer process" in why
