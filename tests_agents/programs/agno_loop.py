"""An agent of agno with a tool, over one of three protocols."""

import json
import sys

from agno.agent import Agent
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat, OpenAIResponses


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


api, how = sys.argv[1:]
model = {"chat": OpenAIChat, "responses": OpenAIResponses, "messages": Claude}[api](id="any")
agent = Agent(model=model, tools=[add], instructions="You add.", telemetry=False)
if how == "whole":
    said = agent.run("17 + 25 = ?").content
else:
    parts = agent.run("17 + 25 = ?", stream=True)
    said = "".join(part.content for part in parts if part.content)
print(json.dumps({"answer": said}))
