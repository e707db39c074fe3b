"""`JudgeRubric` of verifiers 0.1.8: functions may ask for `judge`, which asks a model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rolltree import rubrics as rooms
from rolltree.compat.clients import answer_of, async_client
from rolltree.compat.rubrics import Rubric
from rolltree.errors import ConfigError
from rolltree.types import Messages, SamplingArgs, State

# What a judge is sent is behaviour, so these are verifiers 0.1.8's words, to the letter.
DEFAULT_JUDGE_PROMPT = """Given a ground truth answer \
and a response, determine if the response is correct.

Question:
```
{question}
```

Ground truth answer:
```
{answer}
```

Response:
```
{response}
```

Respond either "yes" or "no" only."""


class JudgeRubric(Rubric, rooms.JudgeRubric):
    """A rubric whose functions may ask for `judge`, and call it.

    `await judge(prompt, completion, answer, state)` returns the judge's reply; replies are kept in
    `state["judge_response"]` by the prompt that was sent. It reads `judge_client`, `judge_model`,
    `judge_prompt` and `judge_sampling_args` when it is called, so they can be replaced; what
    functions get by these names are those of the constructor.

    Args:
        parser: finds the response that the judge sees.
        parallelize_scoring: not used, as it was.
        judge_client: an `openai.AsyncOpenAI` (made when left out), a blocking `OpenAI`, which is
            asked in threads, or a model client of rolltree's.
        judge_model: asked by this name.
        judge_sampling_args: OpenAI fields of the judge's requests.
        judge_prompt: a template with the fields `{question}`, `{answer}` and `{response}`, or one
            that only the rubric's functions fill in.

    Raises:
        ConfigError: there is no client, and the openai package is missing.
    """

    def __init__(
        self,
        parser: Any = None,
        parallelize_scoring: bool = False,
        judge_client: Any = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: SamplingArgs | None = None,
        judge_prompt: str = DEFAULT_JUDGE_PROMPT,
    ) -> None:
        Rubric.__init__(self, parser=parser)
        self.judge_client = judge_client if judge_client is not None else _default_client()
        self.judge_model = judge_model
        self.judge_prompt = judge_prompt
        self.judge_sampling_args = judge_sampling_args or {}
        self.class_objects = {
            "parser": self.parser,
            "judge": self.judge,
            "judge_client": self.judge_client,
            "judge_model": self.judge_model,
            "judge_prompt": self.judge_prompt,
            "judge_sampling_args": self.judge_sampling_args,
        }

    async def judge(self, prompt: Messages, completion: Messages, answer: str, state: State) -> str:
        """Return the judge's reply about one completion.

        Raises:
            KeyError: the template has a field of its own.
            RuntimeError: the judge gave no answer; its cause is what the client raised.
        """
        said = self.judge_prompt.format(
            question=_question(prompt),
            answer=answer,
            response=self.parser.parse_answer(completion),
        )
        replies = state.get("judge_response")
        if isinstance(replies, dict) and said in replies:
            return str(replies[said])
        reply = await self._ask(said)
        state["judge_response"] = (
            {**replies, said: reply} if isinstance(replies, dict) else {said: reply}
        )
        return reply

    async def _ask(self, said: str) -> str:
        fields = {k: v for k, v in (self.judge_sampling_args or {}).items() if v is not None}
        if "max_tokens" in fields:
            fields["max_completion_tokens"] = fields.pop("max_tokens")
        try:
            response = await answer_of(
                async_client(self.judge_client).chat.completions.create(
                    model=self.judge_model,
                    messages=[{"role": "user", "content": said}],
                    **fields,
                )
            )
            return str(response.choices[0].message.content)
        except Exception as error:
            problem = next(
                (text for kind, text in _PROBLEMS.items() if kind in _kinds(error)),
                f"Unexpected error when calling judge model '{self.judge_model}'",
            )
            text = f"{problem}. Model: {self.judge_model}, Error: {error}"
            self.logger.warning(text)
            raise RuntimeError(text) from error


_PROBLEMS = {
    "RateLimitError": "Judge model rate limit exceeded: ask it less often, or later",
    "APITimeoutError": "Judge model timeout: give its client more time, or look at its server",
    "APIError": "Judge model API error: is there such a model, and is the API key right?",
}
"""What an exception of the openai package says, the more particular ones first."""


def _kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _question(prompt: Messages) -> str:
    """Return the content of the last message, as text."""
    if not isinstance(prompt, list):
        return str(prompt)
    last = prompt[-1]
    return str(last["content"]) if isinstance(last, dict) and "content" in last else ""


def _default_client() -> Any:
    try:
        return import_module("openai").AsyncOpenAI()
    except ImportError as error:
        raise ConfigError(
            "a JudgeRubric without a judge_client asks through the openai package, which is "
            "missing. Install it with `pip install 'rolltree[compat]'`, or pass judge_client."
        ) from error
