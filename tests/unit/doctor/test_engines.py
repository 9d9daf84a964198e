"""HTTP addresses that answer like engines, and control servers without an engine, on real sockets."""

import json
import os
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat

import pytest
from msgspec import structs

from kvferry.common.errors import ConfigError
from kvferry.engines.vllm.version import TESTED
from kvferry.keys import prompt_digest
from kvferry.tools.doctor import http_engine
from kvferry.tools.doctor.engines import Target, examine_engines, parse_target
from kvferry.tools.doctor.finding import State
from kvferry.tools.serving.role import Role
from kvferry.transport.control_server import ControlServer, LeaseClaims
from kvferry.transport.lease import LeaseWord
from kvferry.transport.messages import Outgoing, PeerInfo
from kvferry.transport.redeem import Grant, PromptContent
from support.keys import KEYS
from support.waiting import wait_for
from transport.cards import cards, facts, ticket

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"
NIXLS = {"remote_block_ids": [[1]], "remote_host": HOST, "remote_port": 5, "remote_request_id": "r"}
KVFERRY_METRICS = "# HELP kvferry_loads_total Loads\nvllm:num_requests_running 0\n"
TIER_METRICS = KVFERRY_METRICS + 'kvferry_tier_capacity_bytes{tier="host",engine="0"} 1e9\n'


@contextmanager
def http(answers: dict[str, object], asked: list | None = None):
    """A server that answers by path: text as it is, else as JSON, a number as a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if asked is not None:
                asked.append((self.path, self.headers.get("authorization"), body))
            answer = answers.get(self.path, 404)
            answer = answer(self.headers) if callable(answer) else answer
            self.send_response(answer if isinstance(answer, int) else 200)
            data = (
                b""
                if isinstance(answer, int)
                else (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            )
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815 - the same

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def control():
    server = keeps_blocks()
    yield server
    server.close()


def keeps_blocks(of=None) -> ControlServer:
    """A control channel that knows the ticket which `engine` hands out."""
    server = ControlServer(HOST, 0, PeerInfo(of or facts(), cards()), KEYS)
    server.tickets.publish(
        ticket("cmpl-7"),
        "cmpl-7",
        3,
        PromptContent(prompt_digest([11, 12, 13])),
        Grant.of(LeaseWord(1, 2, 1), 3, [[1]]),
    )
    return server


def has_its_blocks_back(server: ControlServer) -> None:
    """Wait until the lease was claimed and released, as by any consumer."""
    wait_for(lambda: len(server.events) >= 2)
    assert list(server.events) == [LeaseClaims(["cmpl-7"]), LeaseClaims(["cmpl-7"], released=True)]


def engine(port: int | None, **changes) -> dict[str, object]:
    params = port and {
        "do_remote_prefill": True,
        "remote_host": HOST,
        "remote_port": port,
        "remote_request_id": ticket("cmpl-7").hex(),
        "remote_engine_id": "P",
        "remote_num_tokens": 3,
    }
    answers: dict[str, object] = {
        "/health": "",
        "/version": {"version": f"{TESTED}.0"},
        "/metrics": KVFERRY_METRICS,
        "/v1/models": {"data": [{"id": "m"}]},
        "/v1/completions": {"kv_transfer_params": params},
    }
    return answers | changes


def said(section):
    return {one.subject: one for one in section.findings}


def test_an_engine_is_met_through_its_http_address_and_has_its_blocks_back(control):
    with http(engine(control.port), asked := []) as url:
        (section,), (seen,) = examine_engines([parse_target(url)], KEYS)
    assert {one.state for one in section.findings} == {State.OK}
    assert seen.identity is not None
    assert seen.identity.facts == facts()
    (body,) = [json.loads(body) for path, _, body in asked if path == "/v1/completions"]
    assert (body["max_tokens"], body["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    has_its_blocks_back(control)


@contextmanager
def ranks(*engines: tuple[str, dict], header: bool = True):
    """A data-parallel engine: (id, what its facts say otherwise) of each rank, and a control server each."""
    servers = [keeps_blocks(facts(name, **more)) for name, more in engines]
    metrics = "".join(
        f'vllm:num_requests_running{{engine="{n}",model_name="m"}} 0\n' for n, _ in enumerate(engines)
    )

    def completion(headers):
        chosen = int(headers["X-data-parallel-rank"]) if header else 0
        whole = engine(servers[chosen].port)["/v1/completions"]
        whole["kv_transfer_params"]["remote_engine_id"] = engines[chosen][0]
        return whole

    answers = engine(None) | {"/metrics": KVFERRY_METRICS + metrics, "/v1/completions": completion}
    try:
        with http(answers) as url:
            yield url, servers
    finally:
        for server in servers:
            server.close()


def test_all_ranks_of_a_data_parallel_engine_are_met_and_have_their_blocks_back():
    with ranks(("P_dp0", {}), ("P_dp1", {}), ("P_dp2", {})) as (url, servers):
        (section,), (seen,) = examine_engines([parse_target(url)], KEYS)
        for server in servers:
            has_its_blocks_back(server)
    assert {one.state for one in section.findings} == {State.OK}
    assert said(section)["data-parallel"].found == "3 ranks; all answer and have the same settings"
    assert seen.identity.facts.engine_id == "P_dp0"


def test_a_rank_that_is_another_or_cannot_be_met_is_named():
    with ranks(("P_dp0", {}), ("P_dp1", {"weights": "others"}), ("P_dp2", {})) as (url, servers):
        servers[2].close()
        (section,), _ = examine_engines([parse_target(url)], KEYS)
    found = said(section)
    assert found["data-parallel rank 1"].state is State.BAD
    assert "weights" in found["data-parallel rank 1"].found
    assert f"{HOST}:" in found["data-parallel rank 2"].found
    assert "data-parallel" not in found


def test_settings_are_not_called_equal_where_the_first_rank_does_not_answer():
    with ranks(("P_dp0", {}), ("P_dp1", {})) as (url, servers):
        servers[0].close()
        (section,), _ = examine_engines([parse_target(url)], KEYS)
    found = said(section)
    assert found["control channel"].state is State.BAD
    assert found["data-parallel"].state is State.NOTE
    assert "settings were not compared" in found["data-parallel"].found


def test_ranks_that_cannot_be_chosen_are_said_not_to_have_been_looked_at():
    with ranks(("P_dp0", {}), ("P_dp1", {}), header=False) as (url, _):
        (section,), _ = examine_engines([parse_target(url)], KEYS)
    one = said(section)["data-parallel rank 1"]
    assert (one.state, "was not checked" in one.found) == (State.NOTE, True)


def test_another_engine_at_the_address_that_peers_are_told_is_not_taken_for_it():
    server = ControlServer(HOST, 0, PeerInfo(facts("somebody"), cards()), KEYS)
    try:
        with http(engine(server.port)) as url:
            (section,), (seen,) = examine_engines([parse_target(url)], KEYS)
        assert not server.events
    finally:
        server.close()
    assert seen.identity is None
    assert (
        "engine P advertises this address, but engine somebody answers there"
        in said(section)["control channel"].found
    )


def test_host_and_port_alone_may_be_those_of_an_http_server_or_of_a_control_channel(control):
    with http(engine(control.port)) as url:
        addresses = [url.removeprefix("http://"), f"{HOST}:{control.port}"]
        sections, seen = examine_engines([parse_target(one) for one in addresses], KEYS)
    assert ["model" in said(section) for section in sections] == [True, False]
    assert [one.identity is not None for one in seen] == [True, True]


def test_credentials_are_used_and_not_shown():
    one = parse_target("http://user:secret@127.0.0.1:8000/v1")
    assert (one.name, one.url) == ("http://127.0.0.1:8000/v1", "http://user:secret@127.0.0.1:8000")


@pytest.mark.parametrize(
    "health",
    [
        {"prefill": [{"url": "http://["}], "decode": []},
        {"prefill": [{"url": 5}], "decode": []},
        {"prefill": 5, "decode": []},
        {"prefill": [], "decode": [{"up": True}]},
    ],
)
def test_a_strange_router_is_a_finding_and_ends_nothing(health):
    with http({"/health": health}) as router:
        sections, seen = examine_engines([parse_target(router)], KEYS)
    assert not [each for each in seen if each.name != router]
    assert State.BAD in {one.state for section in sections for one in section.findings}


def test_a_router_leads_to_its_engines(control):
    with http(engine(control.port)) as one, http(engine(control.port)) as other:
        health = {
            "status": "degraded",
            "prefill": [{"url": one, "up": True, "reason": ""}],
            "decode": [{"url": other, "up": False, "reason": "it is tired"}],
        }
        with http({"/health": health}) as router:
            sections, seen = examine_engines([parse_target(f"{router}/v1")], KEYS)
    assert [section.title for section in sections] == [
        f"engine {router}/v1",
        f"prefill engine {one}",
        f"decode engine {other}",
    ]
    assert [(each.name, each.role) for each in seen] == [(one, Role.PREFILL), (other, Role.DECODE)]
    (down,) = [each for each in sections[0].findings if each.state is State.BAD]
    assert "it is tired" in down.found


@pytest.mark.parametrize(
    ("role", "state", "words"),
    [
        (Role.BOTH, State.OK, "keeps KV in tiers, and exchanges none"),
        (Role.PREFILL, State.BAD, "exchanges none (transfer is off), so it is no prefill engine"),
        (Role.DECODE, State.BAD, "exchanges none (transfer is off), so it is no decode engine"),
    ],
)
def test_an_engine_that_has_tiers_only_is_well_unless_it_is_one_of_a_pair(role, state, words):
    pages = chain([KVFERRY_METRICS] * 2, repeat(TIER_METRICS))  # a tier is shown after a step
    with http(engine(None) | {"/metrics": lambda _: next(pages)}) as url:
        (section,), _ = examine_engines([parse_target(url, role)], KEYS)
    found = said(section)["connector"]
    assert (found.state, words in found.found) == (state, True)


@pytest.mark.parametrize(("first", "state"), [(0, State.NOTE), (1088, State.OK)])
def test_an_engine_with_recurrent_state_is_asked_which_snapshots_it_keeps(first, state):
    gauges = (
        f'kvferry_first_snapshot_tokens{{engine="0"}} {first}\nkvferry_snapshot_bytes{{engine="0"}} 4096\n'
    )
    with http(engine(None) | {"/metrics": TIER_METRICS + gauges}) as url:
        (section,), _ = examine_engines([parse_target(url)], KEYS)
    assert said(section)["shared prefixes"].state is state


def test_an_engine_whose_tier_has_no_space_is_bad():
    full = 'kvferry_tier_dropped_chunks_total{engine="0",tier="file",reason="no space on the device"} 7.0\n'
    with http(engine(None) | {"/metrics": TIER_METRICS + full}) as url:
        (section,), _ = examine_engines([parse_target(url)], KEYS)
    assert said(section)["tier file"].state is State.BAD


def test_an_engine_that_does_both_for_its_router_is_met_once(control):
    with http(engine(control.port)) as one, http(engine(control.port)) as other:
        both, decode = ({"url": url, "up": True, "reason": None} for url in (one, other))
        with http({"/health": {"prefill": [both], "decode": [decode, both]}}) as router:
            _, seen = examine_engines([parse_target(router)], KEYS)
    assert [(each.name, each.role) for each in seen] == [(one, Role.BOTH), (other, Role.DECODE)]


def test_engines_of_a_router_without_prefill_engines_serve_alone():
    with http(engine(None) | {"/metrics": TIER_METRICS}) as one:
        health = {"prefill": [], "decode": [{"url": one, "up": True, "reason": None}]}
        with http({"/health": health}) as router:
            (_, section), _ = examine_engines([parse_target(router)], KEYS)
    assert said(section)["connector"].state is State.OK


@pytest.mark.parametrize(
    ("changes", "subject", "state", "words"),
    [
        ({"/version": {"version": "0.30.0"}}, "vLLM", State.BAD, "0.30.0; kvferry works with"),
        ({"/version": 404}, "HTTP", State.BAD, "is not vLLM"),
        ({"/metrics": "vllm:nixl_xfer 1"}, "metrics", State.NOTE, "but has those of NixlConnector"),
        ({"/metrics": 403}, "metrics", State.NOTE, "answers 403"),
        ({"/v1/models": 401}, "HTTP", State.BAD, "/v1/models answers 401"),
        ({"/v1/models": {"data": []}}, "HTTP", State.BAD, "names no model"),
        ({"/v1/completions": 500}, "completion", State.BAD, "gets status 500"),
        ({"/v1/completions": {}}, "connector", State.BAD, "offers no KV"),
        (
            {"/v1/completions": {"kv_transfer_params": NIXLS}},
            "connector",
            State.BAD,
            "not as kvferry does",
        ),
    ],
)
def test_a_faulty_answer_of_an_engine_is_a_finding(changes, subject, state, words):
    with http(engine(None, **changes)) as url:
        (section,), _ = examine_engines([parse_target(url)], KEYS)
    found = said(section)[subject]
    assert found.state is state
    assert words in found.found


def test_a_key_is_sent_where_vllms_variable_is_set():
    with http(engine(None), asked := []) as url:
        seen = http_engine.ExaminedEngine(url, Role.BOTH)
        http_engine.examine_url(url, 5.0, seen, {"VLLM_API_KEY": "k"})
    assert {key for _, key, _ in asked} == {"Bearer k"}


def test_an_engine_that_does_not_answer_costs_only_itself(control):
    gone = "http://127.0.0.1:1"
    (first, second), seen = examine_engines(
        [parse_target(gone), parse_target(f"kvferry://{HOST}:{control.port}")], KEYS
    )
    assert said(first)["HTTP"].state is State.BAD
    assert "who" in said(second)
    assert [each.identity is None for each in seen] == [True, False]


def test_every_open_port_of_an_engine_is_listed_with_who_may_use_it():
    (card,) = cards()
    with (
        socket.create_server((HOST, 0)) as gathers,
        socket.create_server(("0.0.0.0", 0)) as ucx,
    ):
        port, anybodys = (one.getsockname()[1] for one in (gathers, ucx))
        card = structs.replace(card, outgoing=Outgoing(HOST, port, 1 << 40, 4096, 1))
        server = ControlServer(HOST, 0, PeerInfo(facts(), (card,)), KEYS)
        try:
            (section,), _ = examine_engines([parse_target(f"kvferry://{HOST}:{server.port}")], KEYS)
        finally:
            server.close()
    found = said(section)
    for of, purpose in ((server.port, "control channel"), (port, "gather channel")):
        assert found[f"port {HOST}:{of}"].found.startswith(f"{purpose} (process {os.getpid()}, ")
        assert found[f"port {HOST}:{of}"].found.endswith("only clients with the key are let in")
    assert found[f"port 0.0.0.0:{anybodys}"].state is State.NOTE
    assert "open to everyone who can reach it" in found[f"port 0.0.0.0:{anybodys}"].found


def test_loopback_told_by_an_engine_that_serves_others_is_noted(control):
    from kvferry.tools.doctor.engines import _check_advertised

    assert _check_advertised("http://10.0.0.1:8000", (HOST, control.port))[0].state is State.NOTE
    assert _check_advertised("http://127.0.0.1:8000", (HOST, control.port)) == []
    assert _check_advertised("http://10.0.0.1:8000", ("10.0.0.1", control.port)) == []


@pytest.mark.parametrize(
    "text",
    ["", "x", "ftp://a:1", "kvferry://a", "host:port", "kvferry://a:1/x", "http://", "a:99999", "[::1"],
)
def test_an_invalid_address_is_refused_in_one_sentence(text):
    with pytest.raises(ConfigError, match="is not an engine's address; give"):
        parse_target(text)


def test_addresses_of_engines():
    assert parse_target("https://a.b/v1") == Target("https://a.b/v1", url="https://a.b")
    assert parse_target("10.0.0.1:5600", Role.DECODE).control == ("10.0.0.1", 5600)
