"""The same task for an agent of pydantic-ai, whose loop is pydantic-ai's own.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python pydantic_agent.py "7 + 5 ="

pydantic-ai asks the model, has the output validator check the answer, and sends
its objection back to the model. Needs `pip install 'pydantic-ai-slim[openai]'`.
"""

from __future__ import annotations

import asyncio
import re
import sys

import openai
from agent import GAMES, SYSTEM, check
from pydantic_ai import Agent, ModelRetry, RunContext, UnexpectedModelBehavior
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    SystemPromptPart,
    TextPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(deps_type=str)


@agent.output_validator
def checked(context: RunContext[str], answer: str) -> str:
    """Have the model try again after a wrong answer."""
    wrong = check(*map(int, re.findall(r"\d+", context.deps)), answer)
    if wrong:
        raise ModelRetry(f"{wrong} {context.deps}")
    return answer


def opening() -> list[ModelMessage]:
    """Return solved sums: a small model needs to see what is wanted."""
    history: list[ModelMessage] = []
    for a, b, _ in GAMES:
        history.append(ModelRequest(parts=[UserPromptPart(content=f"{a} + {b} =")]))
        history.append(ModelResponse(parts=[TextPart(content=str(a + b))]))
    return [ModelRequest(parts=[SystemPromptPart(content=SYSTEM)]), *history]


async def solve(question: str, client: openai.AsyncOpenAI, num_tries: int = 2) -> str:
    """Return the right answer to a question such as "7 + 5 =", or an empty string."""
    model = OpenAIChatModel("default", provider=OpenAIProvider(openai_client=client))
    try:
        result = await agent.run(
            question,
            deps=question,
            model=model,
            message_history=opening(),
            retries={"output": num_tries - 1},
        )
    except UnexpectedModelBehavior:  # the last try was wrong, too
        return ""
    return result.output


async def main() -> None:
    """Solve the sum on the command line."""
    async with openai.AsyncOpenAI() as client:
        print(await solve(sys.argv[1], client))


if __name__ == "__main__":
    asyncio.run(main())
