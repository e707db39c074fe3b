"""The codec: what goes in comes out, and the text is JSON that others can read."""

import gc
import json
import math
import sqlite3
import sys
import threading
from enum import StrEnum
from types import MappingProxyType
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltree.store import Opaque, dumps, loads, to_plain

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())  # lone surrogates too
    | st.binary(max_size=20)
)
keys = st.text(max_size=5) | st.integers() | st.sampled_from(["$t", "v"])
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(a, b) -> bool:
    """Equality that also tells 1 from True and from 1.0, and 0.0 from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*a] == [*b] and all(
            same(x, y) and type(k) is type(m)
            for (k, x), (m, y) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    return a == b


@given(values)
def test_roundtrip_is_exact(value):
    assert same(loads(dumps(value)), value)


@given(values)
def test_text_is_ascii_json_for_any_reader(value):
    text = dumps(value)
    assert text.isascii()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert sqlite3.connect(":memory:").execute("SELECT json_valid(?)", (text,)).fetchone()[0]


def test_plain_data_is_plain_json():
    assert dumps({"role": "user", "content": "7 + 5 ="}) == '{"role":"user","content":"7 + 5 ="}'


def test_non_finite_floats():
    back = loads(dumps([math.nan, math.inf, -math.inf]))
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf]


def test_arrays_keep_type_and_shape():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2]
    back = loads(dumps({"a": array}))["a"]
    assert back.dtype == np.int16
    assert back.tolist() == [[0, 2], [3, 5]]
    back[0, 0] = 9  # a copy that may be written


def test_numpy_scalars_become_python():
    back = loads(dumps([np.float32(0.5), np.int64(3), np.bool_(True)]))
    assert [type(item) for item in back] == [float, int, bool]


def test_sets_mappings_and_enums():
    class Color(StrEnum):
        RED = "red"

    assert loads(dumps({1, 2})) == {1, 2}
    assert loads(dumps(frozenset({"a"}))) == frozenset({"a"})
    assert loads(dumps(MappingProxyType({"a": 1}))) == {"a": 1}
    assert loads(dumps(Color.RED)) == "red"


def test_a_dict_that_looks_like_a_tag_is_not_one():
    value = {"$t": "opaque", "v": "no"}
    assert loads(dumps(value)) == value


def test_objects_leave_their_type_and_nothing_else():
    class Client:
        def __repr__(self):
            return "Client(api_key='sk-secret')"

    text = dumps({"client": Client()})
    assert "sk-secret" not in text
    back = loads(text)["client"]
    assert isinstance(back, Opaque)
    assert back.type.endswith("Client")
    assert loads(dumps(back)) == back


def test_pydantic_models_become_their_dict():
    pydantic = pytest.importorskip("pydantic")

    class Call(pydantic.BaseModel):
        name: str

    assert loads(dumps([Call(name="add")])) == [{"name": "add"}]


def test_what_would_break_json_becomes_opaque():
    loop: list = []
    loop.append(loop)
    assert "nested deeper" in dumps(loop)
    assert isinstance(loads(dumps(10**5000)), Opaque)


def test_arrays_without_numbers_become_lists():
    assert loads(dumps(np.array([["a"], ["b"]]))) == [["a"], ["b"]]
    assert loads(dumps(np.array([{"a": 1}, None], dtype=object))) == [{"a": 1}, None]
    loop = np.array([None], dtype=object)
    loop[0] = loop
    assert "nested deeper" in dumps(loop)


def test_to_plain_ends_where_a_value_contains_itself():
    """An agent may return what a model wrote, parsed."""
    endless = []
    endless.append(endless)
    found = to_plain({"a": endless})
    assert loads(dumps(found)) == found
    assert "<list>" in str(found)


def test_to_plain_says_null_where_json_has_no_word():
    value = {1: (math.nan, np.float32(0.5)), "a": np.arange(2), "o": Opaque("x.Y"), "s": {3}}
    assert to_plain(value) == {"1": [None, 0.5], "a": [0, 1], "o": "<x.Y>", "s": [3]}
    assert to_plain(object).startswith("<class")


@pytest.mark.parametrize(
    "text", [" 1 ", "[1] ", '{"a": [1, NaN]}', b'"\xc3\xa9"', '"\\ud800"', "1" * 400, "[]"]
)
def test_it_reads_all_that_json_reads(text):
    expected = json.loads(text)
    assert loads(text) == expected or expected["a"][1] != expected["a"][1]


@pytest.mark.parametrize("text", ["", "[1", "1 2", "no", b"\xff"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError):
        loads(text)


class Cyclic:
    """Garbage that runs Python code when it is collected."""

    def __init__(self):
        self.own = self

    def __del__(self):
        sum(range(20))


def test_a_dict_that_another_thread_changes_can_be_stored():
    changing, numbers, is_over = {}, set(), threading.Event()

    def change():
        number = 0
        while not is_over.is_set():
            number += 1
            changing[f"k{number}"] = [number]
            numbers.add(number)
            Cyclic()
            if number % 2000 == 0:
                changing.clear()
                numbers.clear()

    thresholds, pause_s = gc.get_threshold(), sys.getswitchinterval()
    writing = threading.Thread(target=change)
    try:
        gc.set_threshold(50, 1, 1)
        sys.setswitchinterval(1e-6)
        writing.start()
        for _ in range(300):
            dumps({"dict": changing, "set": numbers})
            to_plain(changing)
    finally:
        is_over.set()
        writing.join()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(pause_s)


class Raising(dict):
    def items(self):
        raise OSError("away")


class RaisingNumber(float):
    def __float__(self):
        raise OSError("away")


def test_what_raises_when_it_is_read_costs_itself_only():
    back = loads(dumps({"a": [1, Raising(b=1)], "c": RaisingNumber(0.5)}))
    name = f"{__name__}.Raising (unreadable: OSError)"
    assert back == {"a": [1, Opaque(name)], "c": 0.5}


def test_values_that_know_each_other_have_an_end():
    cells = [{"number": number} for number in range(30)]
    for cell in cells:
        cell["neighbours"] = cells
    assert loads(dumps(cells)) == [
        {"number": number, "neighbours": Opaque("list that was written before")}
        for number in range(30)
    ]


def test_a_value_that_occurs_often_is_written_each_time():
    shared = {"a": [1]}
    assert loads(dumps([shared] * 5_000)) == [shared] * 5_000


def test_many_short_lived_values_are_not_taken_for_one():
    rows = [MappingProxyType({"number": number}) for number in range(30_000)]
    assert loads(dumps(rows))[-1] == {"number": 29_999}


def test_a_mock_and_a_class_of_models_are_opaque():
    class Model:
        def model_dump(self):
            return {"a": 1}

    assert loads(dumps([Mock(), Model, Model()])) == [
        Opaque("unittest.mock.Mock"),
        Opaque("builtins.type"),
        {"a": 1},
    ]


def test_numbers_of_more_than_64_bits_become_doubles():
    third = np.longdouble(1) / 3
    back = loads(dumps([third, np.full(2, third)]))
    assert back[0] == float(third)
    assert back[1].dtype == np.float64
    assert to_plain(np.full(2, third)) == [float(third)] * 2


def test_masked_numbers_are_none():
    assert loads(dumps(np.ma.array([1, 2], mask=[True, False]))) == [None, 2]
