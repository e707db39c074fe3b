"""LangGraph's ready-made loop of tool calls, with LangChain's client of OpenAI's API."""

import json
import sys
import warnings

from langchain_openai import ChatOpenAI

warnings.simplefilter("ignore")

from langgraph.prebuilt import create_react_agent  # noqa: E402  (it warns when it is imported)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model="gpt-4o", streaming=sys.argv[1] == "streamed")
graph = create_react_agent(model, [add], prompt="You add.")
found = graph.invoke({"messages": [("user", "What is 17 + 25?")]})
print(json.dumps({"answer": found["messages"][-1].content}))
