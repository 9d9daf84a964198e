"""Faults that API clients cause: odd and stolen offers, requests that are left, ids that are used twice."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Callable
from itertools import permutations
from typing import Any

from faults.kinds import kind
from faults.stage import LEASE, UNANSWERED, UNKNOWN_TICKET, Stage
from faults.storage import stored
from faults.values import Area, Trial
from kvferry.tools.serving.router.bodies import ASK_FOR_KV
from support.vllm_engine.process import EngineError

CLIENT = Area.CLIENT


@kind(
    "offer of another prompt", CLIENT, "A client sends the offer of one prompt with another one.",
    share=16, protections=("digest",),
)  # fmt: skip
async def other_prompt(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw, 256), stage.salt(draw)
    other = draw.choice([one for one in stage.references.texts if one != text and len(one) >= 200])
    params = await stage.prefilled(other, salt)
    trial.injected = (
        f"the offer of a prompt of {params['remote_num_tokens'] + 1} tokens came with one of {len(text)}"
    )
    name = await stage.decoded(trial, text, params, salt)
    trial.detected = await stage.failed(name, "tokens offered for|hold other tokens")
    again = await stage.decoded(trial, text, None, salt)  # what the first one left in the caches is right
    trial.detected += "" if again else "?"


@kind(
    "sealed grant of another prompt", CLIENT,
    "A client sends the offer of one prompt with another one, and the producer does not hear of it.",
    share=1, together=1, protections=("sealed digest",),
)  # fmt: skip
async def other_sealed_prompt(stage: Stage, trial: Trial, draw: random.Random) -> None:
    salt, theirs, text = stage.salt(draw), stage.name(), max(stage.references.texts, key=len)
    other = draw.choice([one for one in stage.references.texts if one != text and len(one) >= 200])
    await stage.through(trial, text, stage.salt(draw))  # they know each other
    params = await stage.prefilled(other, salt, theirs)
    before = await stage.decode.do("disarm", "lose Redeem")
    await stage.decode.do("arm", "lose Redeem", "", 1 << 20)
    name = await stage.decoded(trial, text, params, salt)
    count = await stage.decode.do("disarm", "lose Redeem") - before
    trial.injected = f"a sealed grant of another prompt, and {count} redemption(s) lost" if count else ""
    await stage.prefill.do("expire", theirs)
    if await stage.decode.do("seal_of", params["remote_request_id"]) not in ("", "opened"):
        trial.detected = await stage.failed(name, UNANSWERED)


_SEALS: dict[str, Callable[[str, str, random.Random], str]] = {
    "with a bit flipped": lambda seal, other, draw: _with_bit_flipped(seal, draw),
    "cut short": lambda seal, other, draw: seal[: draw.randrange(1, len(seal) - 1)],
    "of another ticket": lambda seal, other, draw: other,
    "made up": lambda seal, other, draw: base64.urlsafe_b64encode(draw.randbytes(90)).decode(),
    "of a megabyte": lambda seal, other, draw: seal * (1 + (1 << 20) // len(seal)),
}


def _with_bit_flipped(seal: str, draw: random.Random) -> str:
    data = bytearray(base64.urlsafe_b64decode(seal))
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return base64.urlsafe_b64encode(data).decode()


@kind(
    "changed sealed grant", CLIENT,
    "A client changes the sealed grant of its offer, or takes that of another ticket for the same prompt.",
    share=12,
)  # fmt: skip
async def changed_seal(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salts = stage.text(draw, 129), [stage.salt(draw) for _ in range(2)]
    other = await stage.prefilled(text, salts[0])
    await stage.decoded(trial, text, other, salts[0])  # they know each other
    params = await stage.prefilled(text, salts[1])
    trial.injected = what = draw.choice(sorted(_SEALS))
    seal = _SEALS[what](params["remote_sealed_grant"], other["remote_sealed_grant"], draw)
    name = await stage.decoded(trial, text, {**params, "remote_sealed_grant": seal}, salts[1])
    why = await stage.decode.do("seal_of", params["remote_request_id"])
    loads = await stage.from_peer(name, "LoadEnded")
    if why not in ("", "opened") and any(one["outcome"] == "ready" for one in loads):
        trial.detected = f"{why}; redeemed instead"


_ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no request id": lambda p: {k: v for k, v in p.items() if k != "remote_request_id"},
    "a ticket of other letters": lambda p: {**p, "remote_request_id": "Z" * 32},
    "a ticket cut short": lambda p: {**p, "remote_request_id": p["remote_request_id"][:-1]},
    "a port that is text": lambda p: {**p, "remote_port": "http"},
    "a port beyond all": lambda p: {**p, "remote_port": 10**9},
    "a negative number of tokens": lambda p: {**p, "remote_num_tokens": -1},
    "more tokens than the prompt has": lambda p: {**p, "remote_num_tokens": 10**6},
    "another engine's name": lambda p: {**p, "remote_engine_id": "someone else"},
    "a host that is a path": lambda p: {**p, "remote_host": "../../etc/passwd"},
    "half a surrogate pair": lambda p: {**p, "remote_request_id": "\ud800"},
    "lists in place of texts": lambda p: {**p, "remote_engine_id": [[]]},
    "nobody at the address": lambda p: {**p, "remote_port": 9},
}


_DECLINED = (
    "kv_transfer_params: |tokens offered for|answers at the address|cannot be asked|"
    f"{UNANSWERED}|{UNKNOWN_TICKET}"
)


@kind("odd offer", CLIENT, "A client sends an offer that it has changed or made up.", share=24)
async def odd_offer(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw), stage.salt(draw)
    what = draw.choice(sorted(_ODD))
    params = _ODD[what](await stage.prefilled(text, salt))
    trial.injected = what
    name = await stage.decoded(trial, text, params, salt)
    trial.detected = await stage.failed(name, _DECLINED)


@kind(
    "made-up ticket",
    CLIENT,
    "A client that knows the prompt guesses a ticket for it.",
    share=6,
    protections=("ticket",),
)
async def guessed(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw, 129), stage.salt(draw)
    params = await stage.prefilled(text, salt)
    guess = f"{draw.getrandbits(128):032x}"
    trial.injected = f"ticket {guess} in place of {params['remote_request_id']}"
    name = await stage.decoded(trial, text, {**params, "remote_request_id": guess}, salt)
    trial.detected = await stage.failed(name, UNKNOWN_TICKET)
    if await stage.from_peer(name, "LoadBegan"):
        trial.forbidden.append(f"request {name} loaded KV for a ticket that was never given out")


@kind("stolen offer", CLIENT, "A client sends an offer again that another request has used up.", share=12)
async def used_up(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw, 200), stage.salt(draw)
    mine = stage.name()
    params = await stage.prefilled(text, salt, mine)
    await stage.decoded(trial, text, params, salt)
    if not await stage.prefill.until("lease_is_over", mine):
        return
    count = await stage.prefill.do("overwrite", mine)
    trial.injected = f"the lease was over and {count} of its blocks overwritten"
    name = await stage.decoded(trial, text, params, stage.salt(draw))
    trial.detected = await stage.failed(name, UNKNOWN_TICKET)


@kind("offer used twice at once", CLIENT, "Two requests come with one offer at the same time.")
async def twice(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw, 129), stage.salt(draw)
    mine = stage.name()
    params = await stage.prefilled(text, salt, mine)
    names = await asyncio.gather(*(stage.decoded(trial, text, params, salt) for _ in range(2)))
    began = sum([len(await stage.told(name, "LoadBegan")) for name in names])
    trial.injected = f"{len(names)} requests with lease {params['remote_request_id']}"
    if began and await stage.prefill.until("lease_is_over", mine):
        trial.detected = f"one lease ended once, after {began} loads"


@kind("client leaves between engines", CLIENT, "A client leaves after prefill: nobody ever claims the lease.")
async def unclaimed(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw), stage.salt(draw)
    mine = stage.name()
    await stage.prefilled(text, salt, mine)
    trial.injected = "the offer was thrown away"
    if await stage.prefill.until("lease_is_over", mine, seconds=LEASE + 20):
        ends = await stage.told(mine, "LeaseEnded", stage.prefill)
        trial.detected = "the lease ran out" if ends and ends[0]["expired"] else ""
    await stage.decoded(trial, text, None, salt)


@kind("abort in prefill", CLIENT, "A client leaves while its prompt is computed.")
async def abort_prefill(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 300), stage.salt(draw), stage.name()
    await stage.prefill.ask(mine, text, ASK_FOR_KV, 1, salt)
    state = await stage.prefill.do("known", mine)
    await stage.prefill.leave(mine)
    trial.injected = f"aborted while {state}" if state else ""
    if await stage.prefill.until("known", mine, is_=""):
        pass
    trial.detected = "the engine forgot it" if not await stage.prefill.do("known", mine) else ""
    await stage.through(trial, text, salt)


@kind("abort while loading", CLIENT, "A client leaves while its KV is read from the peer.", share=12)
async def abort_loading(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw, 129), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt)
    await stage.decode.do("arm", "hold", mine)
    await stage.decode.ask(mine, text, params, 6, salt)
    if await stage.decode.until("holds", mine):
        state = await stage.decode.do("known", mine)
        trial.injected = f"aborted while {state}, its read not posted yet"
    await stage.decode.leave(mine)
    await asyncio.sleep(draw.random() * 0.2)
    await stage.decode.do("let_go", mine)
    await stage.decode.do("disarm", "hold", mine)
    for _ in range(100):
        if ends := await stage.told(mine, "LoadEnded"):
            trial.detected = f"load {ends[0]['outcome']}"
            break
        await asyncio.sleep(0.05)
    await stage.through(trial, text, stage.salt(draw))


@kind("abort while decoding", CLIENT, "A client leaves in the middle of its answer.")
async def abort_decoding(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt, mine = stage.text(draw), stage.salt(draw), stage.name()
    params = await stage.prefilled(text, salt)
    await stage.decode.ask(mine, text, params, 400, salt)
    state = await stage.decode.until("known", mine, is_="RUNNING")
    await asyncio.sleep(draw.random() * 0.1)
    await stage.decode.leave(mine)
    trial.injected = f"aborted while {state}" if state else ""
    await stage.decode.until("known", mine, is_="")
    trial.detected = "the engine forgot it" if await stage.told(mine, "Finished") else ""
    await stage.through(trial, text, salt)


@kind("one id for two requests", CLIENT, "A client gives two requests at the same time one id.")
async def same_id(stage: Stage, trial: Trial, draw: random.Random) -> None:
    texts, salts = [[of(draw) for _ in range(2)] for of in (stage.text, stage.salt)]
    mine, params = stage.name(), await stage.prefilled(texts[0], salts[0])
    *asked, count = await asyncio.gather(  # the engine takes all three before its next step
        stage.decode.ask(mine, texts[0], params, 6, salts[0]),
        stage.decode.ask(mine, texts[1], None, 6, salts[1]),
        stage.decode.do("named", mine),
        return_exceptions=True,
    )
    taken = [(text, one) for text, one in zip(texts, asked, strict=True) if isinstance(one, asyncio.Future)]
    if count == len(texts):
        trial.injected = f"{count} requests {mine} in the scheduler at once"
        trial.detected = "both were taken, under names of their own"
    for one in asked:
        if isinstance(one, EngineError):
            trial.injected = f"a second request {mine}"
            trial.detected = f"it was refused: {str(one).splitlines()[0]}"
    try:
        answers = [await stage.decode.answer(mine, one) for _, one in taken]
    except Exception as error:  # noqa: BLE001 - whatever it is, the request did not end
        trial.stuck.append(f"request {mine}: {error}")
        return
    # Either may have ended first, and answers carry nothing but the name.
    ways = [
        [stage.references.why_wrong(text, answer) for text, answer in zip(order, answers, strict=True)]
        for order in permutations(text for text, _ in taken)
    ]
    why = min(ways, key=lambda each: sum(map(bool, each)))
    trial.wrong += [f"request {mine}: {one}" for one in why if one]
    trial.answers += why.count("")


@kind(
    "another tenant's prompt", CLIENT, "A tenant asks for a prompt that another tenant's salt has cached.",
    protections=("salt",),
)  # fmt: skip
async def other_salt(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salts = stage.text(draw, 200), [stage.salt(draw) for _ in range(2)]
    async with stage.storage:
        files = await stored(stage, trial, text, salts[0])
    trial.injected = f"{len(files)} chunks of another tenant's in the tiers" if files else ""
    name = await stage.decoded(trial, text, None, salts[1])
    if await stage.told(name, "LoadBegan"):
        trial.forbidden.append(f"request {name} loaded what another tenant's salt has cached")
    else:
        trial.detected = "nothing was loaded for the second tenant"


@kind(
    "another adapter's prompt", CLIENT,
    "A client comes with a prompt, and its ticket, under another LoRA adapter than it was computed with.",
    families=("qwen3",), protections=("adapter",),
)  # fmt: skip
async def other_adapter(stage: Stage, trial: Trial, draw: random.Random) -> None:
    text, salt = stage.text(draw, 200), stage.salt(draw)
    async with stage.storage:
        files = await stored(stage, trial, text, salt)
    params = await stage.prefilled(text, salt)
    trial.injected = f"a ticket and {len(files)} chunks of another adapter" if files else ""
    other = stage.references.other_adapter(text)
    name = await stage.decoded(trial, text, params, salt, adapter=other)
    trial.detected = await stage.failed(name, "hold other tokens|adapter")
    if await stage.told(name, "LoadBegan"):
        trial.forbidden.append(f"request {name} loaded what another adapter has computed")
