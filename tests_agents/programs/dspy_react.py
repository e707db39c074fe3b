"""dspy: a ReAct module with a tool."""

import json
import os

import dspy


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = dspy.LM("openai/gpt-4o", api_base=os.environ["OPENAI_BASE_URL"], cache=False)
dspy.configure(lm=model)
found = dspy.ReAct("question -> answer", tools=[add], max_iters=3)(question="What is 17 + 25?")
print(json.dumps({"answer": found.answer}))
