"""An agent that knows nothing about rolltree: it calls the URL that the openai package is given.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python agent.py "7 + 5 ="

It asks the model for a sum, has a tool check the answer, tells the model what the tool said, and
lets it try again. It prints the last answer.
"""

from __future__ import annotations

import asyncio
import re
import sys

import openai

SYSTEM = "Answer with the number only."
# Two games, each won on the second try: a small model needs to see what is wanted.
GAMES = ((8, 3, 9), (5, 4, 12))


def check(a: int, b: int, answer: str) -> str:
    """Return what is wrong with an answer, or an empty string: the agent's one tool."""
    if not re.fullmatch(r"\s*\d{1,9}\s*", answer):
        return SYSTEM
    off = int(answer) - (a + b)
    return f"No, {abs(off)} too {'high' if off > 0 else 'low'}." if off else ""


def opening() -> list[dict]:
    """Return the messages in front of the question."""
    messages = [{"role": "system", "content": SYSTEM}]
    for a, b, wrong in GAMES:
        asked = f"{a} + {b} ="
        for question, answer in ((asked, wrong), (f"{check(a, b, str(wrong))} {asked}", a + b)):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": str(answer)})
    return messages


async def solve(question: str, client: openai.AsyncOpenAI, num_tries: int = 2) -> str:
    """Return the last answer to a question such as "7 + 5 ="."""
    a, b = map(int, re.findall(r"\d+", question))
    messages = [*opening(), {"role": "user", "content": question}]
    answer = ""
    for _ in range(num_tries):
        reply = await client.chat.completions.create(model="default", messages=messages)
        answer = reply.choices[0].message.content or ""
        wrong = check(a, b, answer)
        if not wrong:
            break
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": f"{wrong} {question}"})
    return answer


async def main() -> None:
    """Solve the sum on the command line."""
    async with openai.AsyncOpenAI() as client:
        print(await solve(sys.argv[1], client))


if __name__ == "__main__":
    asyncio.run(main())
