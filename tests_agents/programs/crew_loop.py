"""crewai: one agent with a tool answers one task."""

import json

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


clerk = Agent(
    role="Clerk",
    goal="Add numbers.",
    backstory="You add with your tool.",
    tools=[add],
    llm=LLM(model="openai/gpt-4o"),
)
task = Task(description="What is 17 + 25?", expected_output="The sum.", agent=clerk)
done = Crew(agents=[clerk], tasks=[task]).kickoff()
print(json.dumps({"answer": done.raw}))
