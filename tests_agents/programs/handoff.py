"""openai-agents: a clerk with a tool hands the question to a specialist with another.

Arguments: the API ("chat" or "responses"), and whether it streams ("streamed" or "whole").
"""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("chat_completions" if sys.argv[1] == "chat" else "responses")


@function_tool
def look_up(item: str) -> str:
    """Look up where an item is kept.

    Args:
        item: its name.
    """
    return f"{item} is on shelf 7"


@function_tool
def count(shelf: int) -> int:
    """Count what is on a shelf."""
    return shelf * 6


specialist = Agent(name="Counter", instructions="You count.", tools=[count], model="gpt-4o")
clerk = Agent(
    name="Clerk",
    instructions="You look things up.",
    tools=[look_up],
    handoffs=[specialist],
    model="gpt-4o",
)


async def main() -> None:
    """Ask, and print what came of it."""
    question = "How many bolts are there?"
    if sys.argv[2] == "streamed":
        result = Runner.run_streamed(clerk, question)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(clerk, question)
    print(json.dumps({"answer": result.final_output, "agent": result.last_agent.name}))


asyncio.run(main())
