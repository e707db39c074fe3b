"""autogen: an assistant with a tool and one without, in turns, until somebody says DONE."""

import asyncio
import json

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    """Ask, and print who said what."""
    client = OpenAIChatCompletionClient(model="gpt-4o")
    clerk = AssistantAgent(
        "clerk",
        client,
        tools=[add],
        system_message="You add.",
        reflect_on_tool_use=True,
    )
    auditor = AssistantAgent("auditor", client, system_message="You check, and say DONE.")
    team = RoundRobinGroupChat(
        [clerk, auditor], termination_condition=TextMentionTermination("DONE"), max_turns=4
    )
    result = await team.run(task="What is 17 + 25?")
    said = [[each.source, each.content] for each in result.messages if each.type == "TextMessage"]
    print(json.dumps({"said": said}))
    await client.close()


asyncio.run(main())
