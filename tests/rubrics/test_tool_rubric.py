from rubric_states import a_state

from rolltree.environments.rubrics import ToolRubric, run_inline


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def calls(*names):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": name, "arguments": "{}"}} for name in names],
    }


@run_inline
def half():
    return 0.5


async def test_calls_are_counted_and_not_rewarded():
    rubric = ToolRubric([add, "search"], [half])
    state = a_state(
        completion=[
            calls("add", "add", "unknown"),
            {"role": "tool", "tool_call_id": "x", "content": "1"},
            calls("add"),
            {"role": "assistant", "content": "done", "parse_problems": ["one", "two"]},
        ]
    )
    state["tool_errors"] = [{"tool": "add"}]
    await rubric.score_rollout(state)
    assert state["reward"] == 0.5
    assert state["metrics"] == {
        "half": 0.5,
        "total_tool_calls": 4.0,
        "failed_tool_calls": 1.0,
        "unreadable_tool_calls": 2.0,
        "add_calls": 3.0,
        "search_calls": 0.0,
    }


async def test_completions_without_calls():
    for completion in ("text", [], [{"role": "assistant", "content": "x", "tool_calls": None}]):
        state = a_state(completion=completion)
        await ToolRubric(tools=[add]).score_rollout(state)
        assert state["metrics"]["total_tool_calls"] == 0.0
        assert state["metrics"]["failed_tool_calls"] == 0.0
