from dataclasses import replace

import msgspec
import pytest

from kvferry.geometry import GroupKind
from kvferry.planning.strategy import Costs
from kvferry.tools.doctor import pairs
from kvferry.tools.doctor.finding import State
from kvferry.tools.doctor.http_engine import ExaminedEngine
from kvferry.tools.doctor.identity import EngineIdentity
from kvferry.tools.serving.role import Role
from kvferry.transport.messages import Facts
from support.engine_arguments import DECIDES
from support.engines import EngineSpec, GroupSpec, Interior, ranks
from transport.cards import ATTENTION, cards, facts

NEAR = "127.0.0.1", 5600


def identity(engine: str = "P", of=None, address=NEAR, **agree) -> EngineIdentity:
    return EngineIdentity(address, facts(engine, ord(engine), **agree), of or cards(), 1e-3)


def windowed(tokens: int = 16):
    """Cards of an engine whose two layers have a window of 32 tokens."""
    group = GroupSpec(GroupKind.SLIDING, 32, (0, 1), tokens)
    spec = EngineSpec(1, (2,), (group,), "LBNHC", Interior(), 8, 1 << 40)
    family = replace(ATTENTION, kind=GroupKind.SLIDING, attention_span=32)
    (card,) = cards()
    return tuple(msgspec.structs.replace(card, geometry=rank) for rank in ranks(spec, [family] * 2))


def checked(one: EngineIdentity, other: EngineIdentity, roles=(Role.BOTH, Role.BOTH), local=""):
    seen = [
        ExaminedEngine(name, role, [], engine)
        for name, role, engine in zip("AB", roles, (one, other), strict=True)
    ]
    return pairs.check(seen, Costs(), local)


def found(section, subject):
    return [one.found for one in section.findings if one.subject == subject]


def test_engines_that_fit_are_one_line_for_both_directions():
    (section,) = checked(identity(), identity("D"))
    assert section.title == "A (there) <-> B (here)"
    assert {one.state for one in section.findings} == {State.OK}
    assert "1 rank there, 1 here; strategy " in found(section, "compatible")[0]


def test_each_difference_is_named_once():
    (section,) = checked(identity(weights="abc"), identity("D", weights="xyz", **{"model dtype": "bfloat16"}))
    assert found(section, "difference") == [
        "weights: abc there, xyz here",
        "model dtype: float32 there, bfloat16 here",
    ]
    assert section.title == "A (there) <-> B (here)"


def test_each_fact_that_engines_must_agree_on_has_advice_of_its_own():
    assert set(pairs._ADVICE) == DECIDES.keys() - {"geometry", "request"}
    (section,) = checked(identity(weights="abc"), identity("D", weights="xyz"))
    assert section.findings[0].advice == "give both the same checkpoint"


def test_settings_that_differ_are_named_with_both_values_and_have_advice():
    one = identity(**{"model configuration": {"rope.theta": "10000", "layers": "4"}})
    other = identity(
        "D", **{"model configuration": {"rope.theta": "500", "layers": "4"}, "built model, A.b": "1"}
    )
    (section,) = checked(one, other)
    (text,) = found(section, "difference")
    assert text == "model configuration: rope.theta is 10000 there, 500 here"
    assert "--hf-overrides" in section.findings[0].advice


def test_a_difference_of_the_built_model_has_advice():
    (section,) = checked(identity(**{"built model, A.b": "1"}), identity("D", **{"built model, A.b": "2"}))
    assert found(section, "difference") == ["built model, A.b: 1 there, 2 here"]
    assert "--max-model-len" in section.findings[0].advice


def test_differences_of_memory_are_named_beside_those_of_facts():
    other = replace(ATTENTION, fields=tuple(replace(one, item_bytes=4) for one in ATTENTION.fields))
    (section,) = checked(identity(weights="abc"), identity("D", cards(family=other), weights="xyz"))
    texts = found(section, "difference")
    assert texts[0] == "weights: abc there, xyz here"
    assert any("elements of 2 bytes there, 4 here" in text for text in texts[1:])


def test_tensor_parallel_sizes_may_differ():
    sections = checked(identity(), identity("D", cards(2)))
    assert {one.state for section in sections for one in section.findings} == {State.OK}


def test_a_pair_goes_from_prefill_to_decode():
    (section,) = checked(identity(), identity("D"), (Role.PREFILL, Role.DECODE))
    assert section.title == "A (there) -> B (here)"
    (section,) = checked(identity(), identity("D"), (Role.DECODE, Role.PREFILL))
    assert section.title == "B (there) -> A (here)"
    for role in (Role.PREFILL, Role.DECODE):
        assert checked(identity(), identity("D"), (role, role)) == []


def test_one_engine_given_twice_is_no_pair():
    assert checked(identity(), identity()) == []


def test_windows_here_and_full_attention_there_go_one_way():
    full, windows = identity(), identity("D", windowed())
    sections = {section.title: section for section in checked(windows, full)}
    assert set(sections) == {"A (there) -> B (here)", "B (there) -> A (here)"}
    (text,) = found(sections["A (there) -> B (here)"], "difference")
    assert "sliding_window(32) there, full_attention here" in text
    assert not found(sections["B (there) -> A (here)"], "difference")


def test_larger_blocks_of_windows_are_noted():
    small, large = identity(of=windowed(tokens=8)), identity("D", windowed(tokens=16))
    sections = {section.title: section for section in checked(small, large)}
    assert "blocks of 8 tokens there, 16 here" in found(sections["A (there) -> B (here)"], "windows")[0]
    assert not found(sections["B (there) -> A (here)"], "windows")


def test_loopback_is_of_no_use_to_another_machine():
    far = identity("D", address=("10.0.0.2", 5600))
    (section,) = checked(identity(), far, (Role.PREFILL, Role.DECODE))
    assert "the first advertises 127.0.0.1" in found(section, "address")[0]
    (section,) = checked(far, identity(), (Role.PREFILL, Role.DECODE))
    assert not found(section, "address")


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        ((NEAR, NEAR), "two processes on the doctor's machine read by cma"),
        ((("10.0.0.1", 1), ("10.0.0.2", 1)), "neither the speed between them nor"),
    ],
)
def test_a_link_is_described_only_by_measurements(addresses, said):
    one, other = (identity(name, address=address) for name, address in zip("PD", addresses, strict=True))
    (section,) = checked(one, other, local="by cma")
    assert said in found(section, "link")[0]


def test_unverified_weights_and_other_software_are_noted():
    one = identity(weights="unverified m at main")
    other = replace(one, facts=Facts("D", 9, "another version", one.facts.must_agree))
    (section,) = checked(one, other)
    assert {one.subject for one in section.findings if one.state is State.NOTE} == {"weights", "software"}


def test_layers_of_a_draft_model_that_only_one_keeps_are_noted():
    def drafting(draft: str):
        (card,) = cards()
        (group,) = card.geometry.groups
        first, last = group.layers
        group = replace(group, layers=(first, replace(last, draft=draft)))
        return (msgspec.structs.replace(card, geometry=replace(card.geometry, groups=(group,))),)

    sections = checked(identity(of=drafting("3fa9")), identity("D", drafting("other")))
    assert [found(section, "draft model")[0].split(":")[0] for section in sections] == [
        "the engine there lacks 1 layer of the draft model here, such as layers.1"
    ]
    assert not found(
        checked(identity(of=drafting("3fa9")), identity("D", drafting("3fa9")))[0], "draft model"
    )
