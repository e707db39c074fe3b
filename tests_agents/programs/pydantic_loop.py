"""pydantic-ai over Anthropic's protocol: a tool, an answer of a type, a second question."""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent


class Weather(BaseModel):
    """What the weather is."""

    city: str
    degrees: int


agent = Agent(
    "anthropic:claude-sonnet-4-5", output_type=Weather, system_prompt="You know the weather."
)


@agent.tool_plain
def measure(city: str) -> int:
    """Measure the temperature in a city."""
    return len(city) * 3


async def main() -> None:
    """Ask two questions in one conversation, and print the answers."""
    found, history = [], []
    for city in ("Bern", "Geneva"):
        question = f"How warm is it in {city}?"
        if sys.argv[1] == "streamed":
            async with agent.run_stream(question, message_history=history) as result:
                found.append((await result.get_output()).model_dump())
                history = result.all_messages()
        else:
            result = await agent.run(question, message_history=history)
            found.append(result.output.model_dump())
            history = result.all_messages()
    print(json.dumps({"answers": found}))


asyncio.run(main())
