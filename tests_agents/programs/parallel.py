"""openai-agents: a lead asks two sub-agents at once, each a tool with a loop of its own."""

import asyncio
import json

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("chat_completions")


@function_tool
def measure(place: str) -> int:
    """Measure the depth of a place."""
    return len(place)


def diver(name: str) -> Agent:
    """Return a sub-agent."""
    return Agent(name=name, instructions=f"You are {name}.", tools=[measure], model="gpt-4o")


lead = Agent(
    name="Lead",
    instructions="You lead.",
    tools=[
        diver(name).as_tool(tool_name=f"ask_{name}", tool_description=f"Ask {name}.")
        for name in ("ann", "bob")
    ],
    model="gpt-4o",
)
result = asyncio.run(Runner.run(lead, "Which is deeper, the lake or the harbour?"))
print(json.dumps({"answer": result.final_output}))
