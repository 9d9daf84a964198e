"""What protections cost: figures of a round, and the sockets that encryption is measured over."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import zmq
from rich.console import Console

from benchmarks.safety import checksum as checksum_cost, curve, encryption, report as safety_report
from benchmarks.safety.cost import ProtectionCost, SafetyJob
from benchmarks.safety.measure import MeasuredSafety
from benchmarks.safety.prompt_loads import prompt_in_files
from kvferry.common.errors import ConfigError, TransferError
from kvferry.tools.measuring.rounds import machine_facts
from kvferry.tools.measuring.simulated import read_geometry
from kvferry.transport.messages import decode_numbered, decode_request
from support.keys import KEYS


def test_a_share_is_taken_within_a_round_and_compared_with_its_target():
    cost = ProtectionCost(
        part="curve",
        work="talk",
        on=(3.0, 4.0, 9.0),
        off=(2.0, 2.0, 2.0),
        whole=(100.0, 100.0, 100.0),
        target=0.02,
    )
    assert (cost.extra.median, cost.share.median, cost.share.high) == (2.0, 0.02, 0.07)
    assert cost.reached
    assert not ProtectionCost(
        part="curve", work="talk", on=(3.0,), off=(2.0,), whole=(10.0,), target=0.02
    ).reached
    assert ProtectionCost(part="curve", work="talk", on=(3.0,), off=(2.0,)).share.median == 0.5


@pytest.mark.parametrize("keys", [KEYS, None])
def test_socket_pair_answers_every_message_before_it_returns(keys):
    with curve.connected_pair(keys) as pair:
        assert pair.say([(b"claim", b""), (b"ask", b"answer"), (b"done", b"")]) > 0
        assert pair.client.getsockopt(zmq.MECHANISM) == (zmq.CURVE if keys else zmq.NULL)
        assert not pair.client.poll(50), "nothing is left"


def test_a_transfer_that_asks_for_no_gathering_redeems_a_ticket_and_gives_it_back():
    (redeem, redeemed), (release, nothing) = curve.messages_of([], [[5, 6], [7]], 512)
    asked, given_back = decode_request(redeem), decode_request(release)
    assert (asked.tokens, given_back.tickets, nothing) == (512, [asked.ticket], b"")
    assert [ids.tolist() for ids in decode_numbered(redeemed).grant.block_ids] == [[5, 6], [7]]


def test_report_fits_80_columns():
    costs = (
        ProtectionCost(
            part="curve",
            work="18 messages of a staged transfer",
            on=(3e-3,) * 7,
            off=(2e-3,) * 7,
            whole=(1.0,) * 7,
            target=0.02,
        ),
        ProtectionCost(
            part="curve", work="a connection and its first answer", on=(3e-3,) * 7, off=(2e-3,) * 7
        ),
    )
    job = SafetyJob(parts=("curve",), reading=read_geometry("Qwen3-0.6B"), tokens=4096, repeats=7)
    console = Console(width=80, record=True, highlight=False)
    measured = MeasuredSafety(job, machine_facts(), costs)
    safety_report.show(measured, console)
    text = console.export_text()
    assert "0.10%" in text
    assert max(map(len, text.splitlines())) <= 80
    assert safety_report.as_json(measured)["costs"][0]["share"]["median"] == pytest.approx(1e-3)


ONE_LAYER = read_geometry("Llama-3.1-8B", {"num_hidden_layers": 1})


@pytest.mark.parametrize(
    ("checksums", "noticed"),
    [(nullcontext, "a prompt did not come"), (checksum_cost.unchecked, "bytes are not what they must be")],
    ids=["with", "without"],
)
def test_damaged_file_is_noticed_by_its_checksum_or_only_in_the_blocks(tmp_path, checksums, noticed):
    with prompt_in_files(ONE_LAYER, 512, tmp_path) as loads, checksums():
        loads.check()
        file = max(tmp_path.rglob("*.kv"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(TransferError, match=noticed):
            loads.check()


def test_encryption_is_measured_in_loads_of_a_prompt_and_in_writes_and_reads_of_its_files(tmp_path):
    job = SafetyJob(parts=("encrypt",), reading=ONE_LAYER, tokens=512, repeats=7)
    sizes = checksum_cost.LoadSizes(memory=tmp_path, least_bytes=1, prompts=2, files=2)
    costs = encryption.measure(job, lambda _: None, sizes)
    assert [cost.part for cost in costs] == ["encrypt"] * 4
    assert costs[0].work == "load of 512 tokens into blocks, on the clock"
    assert all(len(cost.on) == len(cost.off) == 7 and min(cost.on + cost.off) > 0 for cost in costs)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="measuring takes"):
        encryption.measure(job, lambda _: None, replace(sizes, least_bytes=1 << 50))


def test_checksums_are_measured_in_loads_of_a_prompt_and_in_reads_of_its_files(tmp_path):
    job = SafetyJob(parts=("checksum",), reading=ONE_LAYER, tokens=512, repeats=7)
    sizes = checksum_cost.LoadSizes(memory=tmp_path, least_bytes=1, prompts=2, files=2)
    costs = checksum_cost.measure(job, lambda _: None, sizes)
    assert [cost.target for cost in costs] == [0.15, 0.15, None]
    assert costs[0].work == "load of 512 tokens into blocks, on the clock"
    assert all(len(cost.on) == len(cost.off) == 7 and min(cost.on + cost.off) > 0 for cost in costs)
    with pytest.raises(ConfigError, match="measuring takes"):
        checksum_cost.measure(job, lambda _: None, replace(sizes, least_bytes=1 << 50))
