"""Module paths, names and helpers of verifiers 0.1.8."""

import importlib
import inspect
import logging
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock

import pytest

import rolltree
from rolltree.values.errors import ConfigError
from rolltree.verifiers import install, uninstall
from rolltree.verifiers import verifiers as vf
from rolltree.verifiers.datasets import extract_hash_answer, load_example_dataset, strip_non_numeric
from rolltree.verifiers.helpers import (
    concat_messages,
    maybe_await,
    maybe_semaphore,
    message_to_printable,
    messages_to_printable,
    parse_response_messages,
    parse_response_tokens,
    print_prompt_completions_sample,
    sanitize_tool_calls,
    setup_logging,
    strip_nones_from_content,
)
from rolltree.verifiers.names import MODULES, REMOVED, SOURCE_OF

# It needs a C compiler if there is no wheel, so it may be missing beside everything else.
OF_REASONING_GYM = {"envs.reasoninggym_env", "DEFAULT_SYSTEM_PROMPT", "ReasoningGymEnv"}


@pytest.mark.parametrize("path", MODULES)
def test_every_module_has_its_names(path):
    if path in OF_REASONING_GYM:
        pytest.importorskip("reasoning_gym")
    module = importlib.import_module(f"rolltree.verifiers.verifiers.{path}")
    for name in MODULES[path]:
        assert getattr(module, name) is getattr(vf, name)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = module.nothing_such


def test_names_are_listed_as_by_dir_of_the_real_modules():
    tools = importlib.import_module("rolltree.verifiers.verifiers.utils.tools")
    found = dict(inspect.getmembers(tools, inspect.isfunction))  # a common way to collect tools
    assert {"ask", "calculator", "python", "search"} <= set(found)
    assert {"Rubric", "State", "ToolEnv", "TextArenaEnv", "load_environment"} <= set(dir(vf))


@pytest.mark.parametrize("name", SOURCE_OF)
def test_every_name_can_be_fetched(name):
    if name in OF_REASONING_GYM:
        pytest.importorskip("reasoning_gym")
    if not SOURCE_OF[name].startswith("rolltree"):
        pytest.importorskip(SOURCE_OF[name], exc_type=ImportError)
    assert getattr(vf, name) is getattr(vf, name)


def test_classes_are_rolltrees():
    from rolltree.verifiers.verifiers.envs.tool_env import ToolEnv

    assert issubclass(ToolEnv, rolltree.ToolEnv)
    assert issubclass(ToolEnv, vf.MultiTurnEnv)
    assert vf.State is rolltree.State
    assert issubclass(vf.JudgeRubric, rolltree.JudgeRubric)


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_the_trainer_is_not_here_and_it_says_so(name):
    with pytest.raises(AttributeError, match="rolltree train"):
        getattr(vf, name)


def test_unknown_names_and_modules():
    with pytest.raises(AttributeError, match="no public name 'Nothing'"):
        _ = vf.Nothing
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rolltree.verifiers.verifiers.envs.nothing")


def test_install_and_uninstall():
    install()
    install()
    try:
        import verifiers
        from verifiers.envs.multiturn_env import MultiTurnEnv
        from verifiers.utils.data_utils import extract_boxed_answer

        assert verifiers is vf
        assert issubclass(MultiTurnEnv, rolltree.MultiTurnEnv)
        assert extract_boxed_answer("\\boxed{2}") == "2"
    finally:
        uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "verifiers"]


def test_install_refuses_beside_the_real_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace())
    with pytest.raises(ConfigError, match="already"):
        install()


def test_importing_compat_is_light():
    code = "import sys, rolltree.verifiers.verifiers; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"openai", "datasets", "torch", "aiohttp", "httpx"} & set(loaded)


def test_hash_answers():
    assert extract_hash_answer("so\n#### 12 ") == "12"
    assert extract_hash_answer("12") == "12"
    assert strip_non_numeric("$1.50 a") == "1.50"


def test_an_unknown_example_dataset_names_the_nearest():
    with pytest.raises(ConfigError, match="gsm8k"):
        load_example_dataset("gsm8")


async def test_maybe_await_and_semaphore():
    async def later(value):
        return value

    assert await maybe_await(later, 3) == 3
    assert await maybe_await(lambda: 4) == 4
    async with await maybe_semaphore(-1), await maybe_semaphore(None):
        pass
    semaphore = await maybe_semaphore(1)
    async with semaphore:
        assert semaphore.locked()


def test_messages():
    hello = {"role": "user", "content": "hello"}
    assert concat_messages(["a", "b"]) == "ab"
    assert concat_messages([[hello], hello]) == [hello, hello]
    parts = [{"type": "text", "text": "see", "image_url": None}, {"type": "image_url"}]
    picture = {"role": "user", "content": parts}
    assert strip_nones_from_content([picture, hello]) == [
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}]},
        hello,
    ]
    assert message_to_printable(picture)["content"] == "see\n\n[image]"
    assert messages_to_printable("text") == "text"
    assert messages_to_printable([hello]) == [hello]
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    assert sanitize_tool_calls(None) is None
    assert sanitize_tool_calls([called, hello]) == [
        {**called, "tool_calls": ['{"id": "1"}']},
        hello,
    ]


RESPONSE = {
    "choices": [
        {
            "message": {"role": "assistant", "content": "ok"},
            "token_ids": [4, 5],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
        }
    ],
    "prompt_token_ids": [1, 2, 3],
}


@pytest.mark.parametrize(
    ("limit", "prompt", "completion", "overlong", "truncated"),
    [
        (None, [1, 2, 3], [4, 5], False, False),
        (4, [1, 2, 3], [4], False, True),
        (2, [1, 2], [], True, True),
        (5, [1, 2, 3], [4, 5], False, False),
    ],
)
async def test_response_tokens(limit, prompt, completion, overlong, truncated):
    tokens = await parse_response_tokens(RESPONSE, "chat", limit)
    assert tokens["prompt_ids"] == prompt
    assert tokens["prompt_mask"] == [0] * len(prompt)
    assert tokens["completion_ids"] == completion
    assert tokens["completion_mask"] == [1] * len(completion)
    assert tokens["completion_logprobs"] == [-0.5, -0.25][: len(completion)]
    assert (tokens["overlong_prompt"], tokens["is_truncated"]) == (overlong, truncated)


async def test_response_messages_of_a_mock():
    response = MagicMock()
    response.choices[0].message.content = "hi"
    response.choices = [MagicMock(message=SimpleNamespace(content="hi", tool_calls=None))]
    assert await parse_response_messages(response, "chat") == [
        {"role": "assistant", "content": "hi"}
    ]
    assert await parse_response_tokens(response, "chat") is None


@pytest.mark.parametrize("as_dict", [True, False])
async def test_rollouts_with_a_mock_client(as_dict):
    client = MagicMock()
    message = SimpleNamespace(content="hi", tool_calls=None, role="assistant")
    choice = SimpleNamespace(message=message, finish_reason="stop", logprobs=None)
    given = RESPONSE if as_dict else SimpleNamespace(choices=[choice], id="1")
    client.chat.completions.create = AsyncMock(return_value=given)
    env = vf.SingleTurnEnv(dataset=[{"question": "say hi", "answer": "hi"}])
    state = await env.rollout(env.dataset[0], client, "m")
    assert state["error"] is None
    assert state["completion"][0]["content"] == ("ok" if as_dict else "hi")
    assert state["client"] is client


def test_setup_logging_writes_from_the_level_on(capsys):
    logger = logging.getLogger("rolltree")
    before = (logger.handlers[:], logger.level, logger.propagate)
    try:
        setup_logging("WARNING", "%(message)s")
        logger.info("quiet")
        logger.warning("loud")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    assert capsys.readouterr().err == "loud\n"


def test_a_sample_is_printed(capsys):
    say = [{"role": "user", "content": "7 + 5 ="}]
    print_prompt_completions_sample([say, say], ["12", "13"], [1.0], step=3)
    shown = capsys.readouterr().out
    assert "7 + 5 =" in shown
    assert "12" in shown
    assert "13" not in shown
