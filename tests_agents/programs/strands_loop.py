"""An agent of Strands with a tool, over one of OpenAI's protocols."""

import json
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


kind = {"chat": OpenAIModel, "responses": OpenAIResponsesModel}[sys.argv[1]]
agent = Agent(kind(model_id="any"), tools=[add], system_prompt="You add.", callback_handler=None)
print(json.dumps({"answer": str(agent("17 + 25 = ?")).strip()}))
