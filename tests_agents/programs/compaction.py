"""LangGraph with a history that is replaced by its summary after three calls of the model."""

import json
import warnings

from langchain_core.messages import HumanMessage, RemoveMessage
from langchain_openai import ChatOpenAI
from langgraph.graph.message import REMOVE_ALL_MESSAGES

warnings.simplefilter("ignore")

from langgraph.prebuilt import create_react_agent  # noqa: E402  (it warns when it is imported)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def compacted(state: dict) -> dict:
    """Replace a history of more than six messages by its first and what the tools said."""
    messages = state["messages"]
    if len(messages) <= 6:
        return {}
    facts = "; ".join(str(each.content) for each in messages if each.type == "tool")
    summary = HumanMessage(f"{messages[0].content} So far the sums were {facts}.")
    return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), summary]}


graph = create_react_agent(
    ChatOpenAI(model="gpt-4o"), [add], prompt="You add.", pre_model_hook=compacted
)
found = graph.invoke({"messages": [("user", "Add 1, 2, 3, 4 and 5.")]})
print(json.dumps({"answer": found["messages"][-1].content}))
