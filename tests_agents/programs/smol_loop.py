"""smolagents' loop of tool calls over chat/completions."""

import json
import os
import sys

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


model = OpenAIModel(
    model_id="gpt-4o",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
streamed = sys.argv[1] == "streamed"
agent = ToolCallingAgent(
    tools=[add], model=model, verbosity_level=LogLevel.OFF, stream_outputs=streamed
)
answer = agent.run("What is 17 + 25?")
print()  # what it shows of a stream ends without a line break
print(json.dumps({"answer": answer}))
