"""Known secrets, however they are spelled and wherever they hide."""

import enum
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolltree._helpers.redact import REDACTED, cut_secrets, cut_text, known_secrets, redact
from rolltree.store import Run, StoredRollout, dumps, loads

ODD = [
    'pa"ss"word',
    "back\\slash\\es",
    "naïve-geheim-ß",
    "line\nbreak\tkey",
    "密码密码密码密码",
    "🙂" * 8,
]


def files(folder):
    return b"".join(path.read_bytes() for path in folder.iterdir())


@pytest.mark.parametrize("secret", ODD)
def test_no_spelling_of_a_secret_is_kept(tmp_path, secret):
    """JSON writes quotes, backslashes and letters beyond ASCII in other bytes than they have."""
    record = {"said": f"<{secret}>", "list": [secret], secret: 1}
    with Run.create(tmp_path, config={"note": secret, "deep": [{"x": secret}]}) as run:
        run.protect(secret)
        run.add_rollouts(
            [
                StoredRollout(
                    request_id="a",
                    stop_condition=f"said {secret}",
                    metrics={"m": secret},
                    input={secret: [secret]},
                    errors=({"message": secret},),
                    record=dumps(record).encode(),
                )
            ]
        )
        run.set_meta("note", {"k": (secret,)})
        run.add_event("e", {"s": {secret}, secret: 1})
        run.add_step(1, {"note": secret})
        found = next(run.rollouts())
        assert loads(found.record) == {"said": f"<{REDACTED}>", "list": [REDACTED], REDACTED: 1}
        assert found.input == {REDACTED: [REDACTED]}
        assert (found.stop_condition, found.metrics) == (f"said {REDACTED}", {"m": REDACTED})
        assert run.events("e")[0].data == {"s": {REDACTED}, REDACTED: 1}
        assert run.meta["note"] == {"k": (REDACTED,)}
        assert run.steps()[0].metrics == {"note": REDACTED}


@pytest.mark.parametrize("secret", ODD)
def test_a_config_named_its_secrets(tmp_path, secret):
    config = {"note": f"a {secret} b", "deep": [{"x": secret}]}
    with Run.create(tmp_path, config=config, secrets=[secret]) as run:
        assert run.config == {"note": f"a {REDACTED} b", "deep": [{"x": REDACTED}]}
    for spelling in (secret.encode(), json.dumps(secret)[1:-1].encode()):
        assert spelling not in files(tmp_path)


@pytest.mark.parametrize("secrets", [[""], ["a"], ["hello"], ["", "1234567"]])
def test_short_secrets_tear_nothing(tmp_path, secrets):
    with Run.create(tmp_path / "a", config={"say": "hello 1234567"}, secrets=secrets) as run:
        run.add_event("e", {"say": "hello 1234567"})
        assert run.config == run.events("e")[0].data == {"say": "hello 1234567"}


def test_digits_are_cut_from_texts_and_not_from_numbers(tmp_path):
    with Run.create(tmp_path, secrets=["12345678"]) as run:
        record = {"text": "pin 12345678", "number": 1234567890, "float": 0.123456789}
        run.add_rollouts([StoredRollout(request_id="a", record=dumps(record).encode())])
        run.add_rollouts(
            [StoredRollout(request_id="b", metrics={"n": 12345678.0, "t": "12345678"})]
        )
        one, two = run.rollouts()
        assert loads(one.record) == {**record, "text": f"pin {REDACTED}"}
        assert two.metrics == {"n": 12345678.0, "t": REDACTED}


def test_records_that_are_no_json_are_cut_too(tmp_path):
    with Run.create(tmp_path, secrets=["a plain secret"]) as run:
        run.add_rollouts([StoredRollout(request_id="a", record=b"\xff a plain secret \x00")])
        run.add_rollouts([StoredRollout(request_id="b", record=b"\xff untouched \x00")])
        assert [row.record for row in run.rollouts()] == [
            b"\xff [redacted] \x00", b"\xff untouched \x00",
        ]  # fmt: skip


def test_a_secret_inside_another_goes_with_it():
    secrets = ("abcdefgh", "abcdefgh-and-more")
    assert cut_text("x abcdefgh-and-more y abcdefgh", secrets) == f"x {REDACTED} y {REDACTED}"
    assert known_secrets([*secrets, "short", "abcdefgh"]) == (secrets[1], secrets[0])


def test_identities_stay_so_that_a_run_goes_on(tmp_path):
    with Run.create(tmp_path, secrets=["example-one"]) as run:
        run.add_rollouts(
            [
                StoredRollout(
                    request_id="r/example-one", group_id="g/example-one", task="example-one"
                )
            ]
        )
        row = next(run.rollouts())
        assert (row.request_id, row.group_id) == ("r/example-one", "g/example-one")
        assert row.task == REDACTED
        assert run.finished_ids() == {"r/example-one"}


class Settings:
    """What a pydantic model looks like to the codec."""

    def model_dump(self):
        return {"api_key": "abc", "url": "http://u:pw123456@h/"}


class Level(enum.StrEnum):
    HIGH = "high"


def test_models_sets_and_keys_are_searched():
    assert redact({"s": Settings(), "set": {"sk-" + "a" * 20}, "api_key": {"x"}}) == {
        "s": {"api_key": REDACTED, "url": f"http://{REDACTED}@h/"},
        "set": {REDACTED},
        "api_key": REDACTED,
    }
    assert redact(frozenset({"a"})) == frozenset({"a"})
    assert redact({1: {"level": Level.HIGH}, None: (1, [2.5])}) == {
        1: {"level": "high"}, None: (1, [2.5]),
    }  # fmt: skip


values = st.recursive(
    st.none() | st.integers() | st.text('ab"\\é ', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text('ab"\\é ', max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(values, st.lists(st.text('ab"\\é ', min_size=1, max_size=4), max_size=3))
def test_nothing_but_secrets_is_changed(value, secrets):
    cut = cut_secrets(value, tuple(secrets))
    if not any(json.dumps(secret)[1:-1] in json.dumps(value) for secret in secrets):
        assert cut == value
    assert type(cut) is type(value)
    if isinstance(value, (list, tuple)):
        assert len(cut) == len(value)
