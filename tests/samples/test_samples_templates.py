"""Real chat templates: where the exact prefix holds, where it breaks and why, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
from chat_kit import ByteTokenizer, Recorder, template
from samples_kit import SCOPES, check_structure, state

from rolltree.samples import build_samples
from rolltree.tokens import BreakCause

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

SPEC_3 = [
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "<think>R1</think>A1"},
    {"role": "user", "content": "U2"},
]


def build(recorder: Recorder, scope: Any, decode: bool = True) -> Any:
    decoder = recorder.tokenizer.decode if decode else None
    return build_samples([state(recorder.steps)], scope, decode=decoder)


def causes(recorder: Recorder, decode: bool = True) -> list[str]:
    return [str(item.cause) for item in build(recorder, "interleave", decode).breaks]


def test_spec_3_example_as_written() -> None:
    render = template("qwen3")
    assert render(SPEC_3[:1]) == "<|im_start|>user\nU1<|im_end|>\n"
    assert render(SPEC_3) == (
        "<|im_start|>user\nU1<|im_end|>\n"
        "<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n"
    )


def test_spec_3_example_as_samples() -> None:
    recorder = Recorder("qwen3")
    recorder.say("user", "U1")
    recorder.sample("<think>R1</think>A1", "<|im_end|>")
    recorder.say("user", "U2")
    recorder.sample("<think>R2</think>A2", "<|im_end|>")
    batch = build(recorder, "interleave")
    decode = recorder.tokenizer.decode
    assert [decode(sample.ids.tolist()) for sample in batch.samples] == [
        "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\n<think>R1</think>A1<|im_end|>",
        "<|im_start|>user\nU1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nU2<|im_end|>\n<|im_start|>assistant\n<think>R2</think>A2<|im_end|>",
    ]
    (found,) = batch.breaks
    assert found.cause is BreakCause.REASONING_STRIPPED
    assert found.previous_text.endswith("assistant\n<think>R1</think>A1<|im_end|>")
    assert "assistant\nA1<|im_end|>\n<|im_start|>user\nU2" in found.current_text


def reasoning_turns(recorder: Recorder, turns: int, end: str, opening: str = "") -> None:
    for turn in range(turns):
        recorder.say("user", f"question {turn}")
        thought = f"{opening}<think>\nlet me think about {turn}\n</think>\n\n"
        recorder.sample(f"{thought}answer {turn}", end)


def tool_turns(recorder: Recorder, turns: int, end: str, think: bool, call: str = CALL) -> None:
    for turn in range(turns):
        recorder.say("user", f"question {turn}")
        thought = "<think>\nI should call add\n</think>\n\n" if think else ""
        recorder.sample(thought + call, end)
        recorder.say("tool", "3")
        recorder.sample(thought + f"answer {turn}", end)


def test_qwen3_keeps_reasoning_inside_a_turn_and_strips_it_between_turns() -> None:
    recorder = Recorder("qwen3", tools=TOOLS)
    tool_turns(recorder, 4, "<|im_end|>", think=True)
    interleaved = build(recorder, "interleave")
    assert [o.calls for s in interleaved.samples for o in s.origins] == [
        (0, 1), (2, 3), (4, 5), (6, 7),
    ]  # fmt: skip
    assert causes(recorder) == ["reasoning_stripped"] * 3
    assert causes(recorder, decode=False) == ["reasoning_stripped"] * 3
    turns = build(recorder, "turn")
    assert [o.calls for s in turns.samples for o in s.origins] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert turns.breaks == ()


def test_glm_leaves_an_empty_thinking_block_behind() -> None:
    recorder = Recorder("glm")
    for turn in range(4):
        recorder.say("user", f"question {turn}")
        recorder.sample(f"\n<think>let me think about {turn}</think>\nanswer {turn}", "<|user|>")
    assert causes(recorder) == ["reasoning_stripped"] * 3
    assert causes(recorder, decode=False) == ["reasoning_stripped"] * 3


def test_glm_ends_a_message_with_the_next_roles_token() -> None:
    """The sampled <|observation|> is the token that the template writes next: the prefix holds."""
    recorder = Recorder("glm")
    recorder.say("user", "question")
    recorder.sample("\n<think>first</think>\n" + CALL, "<|observation|>")
    recorder.say("tool", "3")
    recorder.sample("\n<think>second</think>\nanswer", "<|user|>")
    (sample,) = build(recorder, "interleave").samples
    assert len(sample.origins[0].calls) == 2


@pytest.mark.parametrize(("name", "end"), [("hermes", "<|im_end|>"), ("llama3", "<|eot_id|>")])
def test_templates_without_reasoning_keep_the_prefix(name: str, end: str) -> None:
    recorder = Recorder(name)
    tool_turns(recorder, 6, end, think=False)
    (sample,) = build(recorder, "interleave").samples
    assert sample.origins[0].calls == tuple(range(12))
    assert build(recorder, "tree").samples[0].ids.tolist() == sample.ids.tolist()


def test_structured_tool_calls_hold_only_when_rendered_as_sampled() -> None:
    arguments = {"name": "add", "arguments": {"a": 1, "b": 2}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": arguments}]}
    for sampled, expected in ((CALL, []), (CALL.replace(": ", ":"), ["history_rewritten"])):
        recorder = Recorder("hermes", tools=TOOLS)
        recorder.say("user", "1 + 2?")
        recorder.sample(sampled, "<|im_end|>", message=message)
        recorder.say("tool", "3")
        recorder.sample("three", "<|im_end|>")
        assert causes(recorder) == expected


def test_a_tool_call_put_back_twice_breaks_the_prefix() -> None:
    arguments = {"name": "add", "arguments": {"a": 1, "b": 2}}
    both = {"role": "assistant", "content": CALL, "tool_calls": [{"function": arguments}]}
    recorder = Recorder("hermes", tools=TOOLS)
    recorder.say("user", "1 + 2?")
    recorder.sample(CALL, "<|im_end|>", message=both)
    recorder.say("tool", "3")
    recorder.sample("three", "<|im_end|>")
    (found,) = build(recorder, "interleave").breaks
    assert found.cause is BreakCause.HISTORY_REWRITTEN
    assert "</tool_call>\n<tool_call>" in found.current_text


def test_llama3_date_and_trimming() -> None:
    recorder = Recorder("llama3")
    recorder.say("user", "hi")
    recorder.sample("hello", "<|eot_id|>")
    recorder.options["date_string"] = "27 Jul 2024"
    recorder.say("user", "again")
    recorder.sample("hello again", "<|eot_id|>")
    assert causes(recorder) == ["system_or_tools_changed"]
    padded = Recorder("llama3")
    padded.say("user", "hi")
    padded.sample("hello \n", "<|eot_id|>")
    padded.say("user", "again")
    padded.sample("hello again", "<|eot_id|>")
    assert causes(padded) == ["history_rewritten"]


def test_a_changed_tool_list_is_a_changed_system_text() -> None:
    recorder = Recorder("hermes", tools=TOOLS)
    tool_turns(recorder, 2, "<|im_end|>", think=False)
    recorder.options["tools"] = [*TOOLS, {"type": "function", "function": {"name": "mul"}}]
    recorder.say("user", "more")
    recorder.sample("fine", "<|im_end|>")
    assert causes(recorder) == ["system_or_tools_changed"]


def test_bytes_of_a_merged_word_are_retokenized() -> None:
    recorder = Recorder("hermes", tokenizer=ByteTokenizer("answer"))
    recorder.say("user", "question")
    recorder.sample("the answer is 3", "<|im_end|>", merged=False)
    recorder.say("user", "sure?")
    recorder.sample("yes", "<|im_end|>")
    (found,) = build(recorder, "interleave").breaks
    assert found.cause is BreakCause.RETOKENIZED
    assert found.previous_text[:16] == found.current_text[:16]
    batch = build(recorder, "interleave")
    assert len(batch.samples) == 2
    assert batch.report["break_rate/retokenized"] == 1.0


def test_history_summarized_to_save_context() -> None:
    recorder = Recorder("hermes")
    for turn in range(4):
        recorder.say("user", f"question {turn}, with a good deal of text around it")
        recorder.sample(f"answer {turn}, also at some length", "<|im_end|>")
    recorder.messages = [{"role": "user", "content": "Summary: four answers. Go on."}]
    recorder.sample("on we go", "<|im_end|>")
    assert causes(recorder) == ["compaction"]


def costs(name: str, turns: int) -> dict[str, int]:
    recorder = Recorder(name)
    end = {"glm": "<|user|>", "llama3": "<|eot_id|>"}.get(name, "<|im_end|>")
    opening = "\n" if name == "glm" else ""
    reasoning_turns(recorder, turns, end, opening)
    found = {}
    for scope in SCOPES:
        batch = build(recorder, scope, decode=False)
        for sample in batch.samples:
            check_structure(sample)
        assert batch.report["num_trained_tokens"] == batch.report["num_sampled_tokens"]
        found[scope] = int(batch.report["num_tokens"])
    return found


@pytest.mark.parametrize("name", ["qwen3", "glm"])
def test_stripped_reasoning_is_quadratic_everywhere_but_in_the_tree(name: str) -> None:
    short, long = costs(name, 8), costs(name, 32)
    assert long["step"] == long["turn"] == long["interleave"]
    for scope in ("step", "turn", "interleave"):
        assert long[scope] > 10 * short[scope]
    assert long["tree"] < 4.3 * short["tree"]
    assert long["tree"] * 5 < long["interleave"]


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_where_the_prefix_holds_interleave_costs_what_the_tree_costs(name: str) -> None:
    short, long = costs(name, 8), costs(name, 32)
    assert long["interleave"] == long["tree"] < 4.3 * short["tree"]
    assert long["step"] == long["turn"] > 10 * short["step"]
