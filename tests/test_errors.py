"""The exception tree is what its docstring draws, and failures become data with a traceback."""

import pytest

from rolltree import errors
from rolltree.errors import ConfigError, RolloutTimeout, ServerError, did_you_mean, record_error


def test_every_exception_of_the_module_is_in_the_drawing_and_under_the_root():
    assert errors.__doc__ is not None
    own = [v for v in vars(errors).values() if getattr(v, "__module__", "") == errors.__name__]
    classes = [value for value in own if isinstance(value, type)]
    assert len(classes) > 10
    for value in classes:
        assert issubclass(value, errors.RolltreeError)
        assert value.__name__ in errors.__doc__


def test_rolltree_errors_are_the_builtin_kind_a_caller_expects():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(errors.TokenError, ValueError)
    assert issubclass(errors.UnknownName, LookupError)
    assert issubclass(RolloutTimeout, TimeoutError)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("tempreature", ["temperature", "top_p"], " Did you mean 'temperature'?"),
        ("zzz", ["b", "a"], " Known: a, b."),
        ("zzz", [], " None are known."),
    ],
)
def test_did_you_mean(name, known, expected):
    assert did_you_mean(name, known) == expected


def test_record_error_keeps_type_message_traceback_and_phase():
    with pytest.raises(ServerError) as caught:
        raise ServerError("the server answered 503", status=503, retryable=True)
    assert caught.value.status == 503
    assert caught.value.retryable
    record = record_error(caught.value, "model")
    assert record.type == "ServerError"
    assert record.message == "the server answered 503"
    assert "test_record_error_keeps" in record.traceback
    assert record.as_dict() == {
        "type": "ServerError",
        "message": "the server answered 503",
        "traceback": record.traceback,
        "phase": "model",
    }
