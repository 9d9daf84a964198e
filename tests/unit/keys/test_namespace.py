"""A namespace: equal when nothing that counts differs, and able to say what does."""

import enum
import hashlib
import json
import os
import subprocess
import sys
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvferry.common.errors import Unnameable
from kvferry.geometry import GroupKind
from kvferry.geometry.canonical import CanonicalForm, CanonicalGroup, FormSection, SectionField
from kvferry.keys import Namespace, differences
from support.examples import examples

QUICK = examples(100)
FACTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
PART = SectionField("layers.0", "kv", 2, (("content", 128),))


def form(part=PART, kind=GroupKind.FULL, attention_span=0, axis=("head", 4), chunk_tokens=256) -> list[str]:
    """What chunks of a model with one group of one field are."""
    section = FormSection(*axis, 0 if kind is GroupKind.STATE else chunk_tokens, (part,))
    return list(CanonicalForm(chunk_tokens, (CanonicalGroup(kind, attention_span, (section,)),)).describe())


def made(**changes) -> Namespace:
    facts = {
        "weights": "0123abcd",
        "model": {
            "rope_theta": 10000.0,
            "layers": 2,
            "tied": True,
            "scaling": None,
            "types": ["full", "slide"],
        },
        "dtype": "bfloat16",
        "kv_dtype": "auto",
        "scales": {"layers.0.k": 0.1},
        "form": form(),
        "name": "tests/small",
    }
    return Namespace.of(**(facts | changes))


def of_model(value) -> Namespace:
    return made(model={"x": value})


def test_the_digest_is_fixed_for_ever():
    assert made().digest.hex() == "c33262faddd024aa28250edf0053ac51cf239697bf9a14c61337b487fa337e21"


def test_the_text_is_one_that_people_can_read_and_b2sum_can_check():
    text = made().text
    assert text.startswith(
        '{\n "dtype": "bfloat16",\n "form": [\n  "kvferry canonical form 2, chunks of 256 tokens",\n'
    )
    assert text.endswith(' "scales": {\n  "layers.0.k": 0.1\n },\n "weights": "0123abcd"\n}\n')
    summed = subprocess.run(["b2sum", "-l", "256"], input=text.encode(), capture_output=True, check=True)
    assert summed.stdout.split()[0].decode() == made().digest.hex()


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_namespace_does_not_depend_on_the_hash_seed(seed):
    program = (
        "from kvferry.keys import Namespace;"
        "model = dict.fromkeys(sorted({'b','a','c'}, key=hash), 0.1);"
        "print(Namespace.of(weights='w', model=model, dtype='d', kv_dtype='k', scales={}, form=['f'],"
        "name=str(hash('w'))).digest.hex())"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    facts = {
        "weights": "w", "model": {"a": 0.1, "b": 0.1, "c": 0.1}, "dtype": "d", "kv_dtype": "k", "scales": {},
        "form": ["f"],
    }  # fmt: skip
    text = json.dumps(facts, sort_keys=True, indent=1) + "\n"
    assert output.strip() == hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "0123abce"},
        {"model": {}},
        {"dtype": "float16"},
        {"kv_dtype": "fp8"},
        {"scales": {"layers.0.k": 0.1 + 2**-56}},
        {"scales": {}},
        {"form": form()[::-1]},
        {"form": form()[:-1]},
        {"form": form(chunk_tokens=128)},
        {"form": form(kind=GroupKind.MLA)},
        {"form": form(kind=GroupKind.SLIDING, attention_span=65)},
        {"form": form(kind=GroupKind.STATE)},
        {"form": form(axis=("head", 8))},
        {"form": form(axis=("", 1))},
        {"form": form(SectionField("layers.9", "kv", 2, (("content", 128),)))},
        {"form": form(SectionField("layers.0", "kx", 2, (("content", 128),)))},
        {"form": form(SectionField("layers.0", "kv", 1, (("content", 128),)))},
        {"form": form(SectionField("layers.0", "kv", 2, (("content", 64),)))},
        {"form": form(SectionField("layers.0", "kv", 2, (("other", 128),)))},
        {"form": form(SectionField("layers.0", "kv", 2, ()))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_counts_and_is_named(change):
    one, other = made(), made(**change)
    assert one.digest != other.digest
    assert one != other
    said = differences(one, other)
    assert said
    assert all(sentence.startswith(next(iter(change))) for sentence in said), said


def test_differences_are_all_named_with_both_sides():
    other = made(model={"rope_theta": 10000, "layers": 3, "new": None, "types": ["full"]}, dtype="float16")
    assert differences(made(), other) == (
        'dtype: the first has "bfloat16", the second has "float16"',
        "model.layers: the first has 2, the second has 3",
        "model.new: the first has none, the second has null",
        "model.rope_theta: the first has 10000.0, the second has 10000",
        "model.scaling: the first has null, the second has none",
        "model.tied: the first has true, the second has none",
        'model.types: the first has ["full", "slide"], the second has ["full"]',
    )
    assert differences(made(), made()) == ()


def test_a_difference_that_is_too_long_to_say_is_said_by_its_extent():
    one, other = of_model(["x" * 9] * 100), of_model({"layers": ["x" * 9] * 100})
    assert differences(one, other) == ("model.x: the first has a list of 100, the second has 1 facts",)
    (said,) = differences(of_model("x" * 1000), of_model("y"))
    assert len(said) < 200


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (0, False), (0, None), (1, 1.0), (0.0, -0.0), ("1", 1), ("", None), ([], None), ([], {}),
     (["a", "b"], ["ab"]), ([["a"], "b"], ["a", ["b"]]), ({"a": {}}, {"a": None}), ({"a": 1}, [["a", 1]]),
     (0.1, 0.10000000000000002), ("\u00e9", "e\u0301"), ("null", None),
     ("\\u00e9", "\u00e9")],
)  # fmt: skip
def test_similar_facts_have_different_namespaces(one, other):
    assert of_model(one).digest != of_model(other).digest
    assert differences(of_model(one), of_model(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [({"a": 1, "b": 2}, {"b": 2, "a": 1}), ([1, 2], (1, 2)), ({"a": 1}, OrderedDict(a=1)),
     ({"a": 1}, MappingProxyType({"a": 1}))],
)  # fmt: skip
def test_namespace_does_not_depend_on_the_types_of_its_facts(one, other):
    assert of_model(one) == of_model(other)


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    ONE = "one"


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


CIRCULAR: list = []
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "namespace: model.x is nan"),
        (float("inf"), "namespace: model.x is inf"),
        (np.float32(0.5), r"namespace: model.x is a numpy.float32, which has no exact text"),
        (np.float64(0.5), "numpy.float64"),
        (np.int64(5), "numpy.int64"),
        (np.bool_(1), "numpy"),
        (np.zeros(2), "numpy.ndarray"),
        (Number.ONE, "Number"),
        (Word.ONE, "Word"),
        ({1, 2}, "builtins.set"),
        (b"bytes", "builtins.bytes"),
        (1j, "builtins.complex"),
        (object(), "builtins.object"),
        ({1: "a"}, r"model.x has the key 1, which is no text"),
        ({None: "a"}, "the key None"),
        ({"a": [0, {"b": {3}}]}, r"model.x.a\[1\].b is a builtins.set"),
        ("\ud83d\ude00", "model.x has half a character"),
        ({"\ud800": 1}, "half a character"),
        (2**64, "model.x is a number of more than 64 bits"),
        (-(2**63) - 1, "more than 64 bits"),
        (10**5000, "more than 64 bits"),
        (deep(40), "nested deeper than 32"),
        (CIRCULAR, "nested deeper than 32"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_fact_without_exact_text_is_refused_in_one_sentence(value, said):
    with pytest.raises(Unnameable, match=said) as error:
        of_model(value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("name", ["weights", "dtype", "kv_dtype", "form"])
def test_a_namespace_that_leaves_out_what_everything_depends_on_is_refused(name):
    with pytest.raises(Unnameable, match=f"namespace: {name} is empty"):
        made(**{name: ""})


@QUICK
@given(FACTS)
def test_facts_come_back_exactly_from_what_is_written(value):
    namespace = of_model(value)
    read = Namespace(namespace.text)
    assert read == namespace
    assert read.digest == namespace.digest
    assert repr(read.facts["model"]["x"]) == repr(json.loads(json.dumps(value, sort_keys=True)))


@QUICK
@given(FACTS, FACTS)
def test_namespaces_differ_exactly_when_they_can_say_how(one, other):
    a, b = of_model(one), of_model(other)
    assert (a == b) == (a.digest == b.digest) == (not differences(a, b))


def test_returned_facts_are_a_copy():
    namespace = made()
    namespace.facts["model"]["layers"] = 3
    assert namespace.facts["model"]["layers"] == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "\n",
        lambda text: text.replace("10000.0", "10000.00"),
        lambda text: text.replace('"layers": 2', '"layers": 1,\n  "layers": 2'),
        lambda text: text.replace(" ", ""),
        lambda text: text.replace("10000.0", "NaN"),
        lambda text: text.replace("10000.0", "1e999"),
        lambda text: text.replace("10000.0", "9" * 5000),
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: "null\n",
        lambda text: json.dumps("text") + "\n",
    ],
)
def test_text_in_another_form_is_not_read(spoil):
    with pytest.raises(Unnameable, match="namespace: "):
        Namespace(spoil(made().text))


def test_the_name_is_for_people_alone():
    one, other = made(), made(name="tests/renamed")
    assert one == other
    assert one.digest == other.digest
    assert not differences(one, other)
    assert (one.name, other.name) == ("tests/small", "tests/renamed")


def test_a_note_holds_facts_and_name_and_is_read_again():
    note = made().note
    assert json.loads(note) == {"name": "tests/small", "facts": made().facts}
    # Every line of the text, one deeper.
    inside = note.removeprefix('{\n "facts": ').removesuffix(',\n "name": "tests/small"\n}\n')
    assert inside.replace("\n ", "\n") + "\n" == made().text
    read = Namespace.read(note)
    assert (read, read.digest, read.name) == (made(), made().digest, "tests/small")


@pytest.mark.parametrize("note", ["", "{}", "7", '{"facts": {}}', '{"facts": [], "name": "x"}',
                                  '{"facts": {}, "name": 1}', "\0", "[" * 100_000])  # fmt: skip
def test_text_that_is_no_note_is_refused(note):
    with pytest.raises(Unnameable, match="namespace: what was read is no"):
        Namespace.read(note)
