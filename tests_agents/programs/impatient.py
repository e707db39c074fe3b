"""openai-agents with a client that gives up on an answer and asks again (the package's retries)."""

import asyncio
import json
import sys

from openai import AsyncOpenAI

from agents import (
    Agent,
    Runner,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)

set_tracing_disabled(True)
set_default_openai_api("chat_completions")
set_default_openai_client(AsyncOpenAI(timeout=float(sys.argv[1]), max_retries=5))
agent = Agent(name="Poet", instructions="You rhyme.", model="gpt-4o")
result = asyncio.run(Runner.run(agent, "A line, please."))
print(json.dumps({"answer": result.final_output}))
