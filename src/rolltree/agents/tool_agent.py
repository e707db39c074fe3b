"""`ToolAgent` and `ReActAgent`: agents that use tools before they act.

Tools have one of two scopes. The agent runs its internal `tools` and continues with their
results. The protocol answers `external_tools`: the turn pauses, `waiting` lists the calls, `answer`
takes the results, and the next `act` continues the turn. Mistakes of the model (a call that cannot
be read, an unknown tool, wrong arguments) and exceptions of tools become answers to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from rolltree.agents.agent import Agent
from rolltree.agents.tool_calls import NativeCalls, ReActCalls, ToolCallFormat
from rolltree.environments.tools import (
    Tool,
    Toolset,
    answer_of,
    call_function,
    unreadable,
)
from rolltree.inference.formats.reader import ToolCall
from rolltree.values.errors import ConfigError
from rolltree.values.steps import (
    AgentStep,
    ParseResult,
    ToolAnswer,
    ToolRequest,
)
from rolltree.values.types import ChatMessage, ModelResponse, ToolSchema, TrajectoryStep

ToolLike: TypeAlias = "Callable[..., Any] | Tool"

LAST_CALL = "You cannot use any more tools now. Give your final answer."
"""The message to a model whose next answer must be the final one."""
_NOT_MADE = "This call was not made."


class ToolAgent(Agent):
    """An agent that may call tools, up to a limit, before it acts.

    Args:
        client: the model.
        tools: internal tools: functions with type hints and docstrings, plain or asynchronous.
        external_tools: tools that the protocol answers: functions, used only for their
            signature and docstring, or OpenAI schemas.
        max_tool_rounds: how many of a turn's answers may call tools. After that the
            model is told to give its final answer; a further call counts as no action.
        last_call: the message to the model then.
        tool_limit_s: how long one call of an internal tool may take; None: no limit.
        bad_call_penalty: the reward of a call that could not be read or made, or came too late.
        error_formatter: from an exception of a tool to the text that the model gets.
        tool_call_format: how the model writes calls.
        settings: those of `Agent`.

    Raises:
        ConfigError: two tools have the same name, or a tool cannot be described.
    """

    def __init__(
        self,
        client: Any = None,
        *,
        tools: Sequence[ToolLike] = (),
        external_tools: Sequence[ToolLike | ToolSchema] = (),
        max_tool_rounds: int = 8,
        last_call: str = LAST_CALL,
        tool_limit_s: float | None = 60.0,
        bad_call_penalty: float = 0.0,
        error_formatter: Callable[[Exception], str] = str,
        tool_call_format: ToolCallFormat | None = None,
        **settings: Any,
    ) -> None:
        if max_tool_rounds < 0:
            raise ConfigError(f"max_tool_rounds is {max_tool_rounds}; use 0 for no tool calls.")
        self.tools = _described(tools)
        self.external_tools = _described(external_tools)
        # A call has only the tool's name, which must identify the tool.
        both = [name for name in self.tools if name in self.external_tools]
        if both:
            raise ConfigError(
                f"tool {both[0]!r} is both internal and external, so it is unclear what answers "
                "it. Pass it in one of the two lists."
            )
        self.max_tool_rounds = max_tool_rounds
        self.last_call = last_call
        self.tool_limit_s = tool_limit_s
        self.bad_call_penalty = bad_call_penalty
        self.error_formatter = error_formatter
        self.tool_call_format: ToolCallFormat = tool_call_format or NativeCalls()
        super().__init__(client, **settings)

    def _begin(self, *args: Any) -> None:
        super()._begin(*args)
        self._waiting: tuple[ToolRequest, ...] = ()
        self._num_rounds = 0
        schemas = [tool.schema for tool in (*self.tools.values(), *self.external_tools.values())]
        self.tool_schemas = self.tool_call_format.schemas(schemas)
        # Without the format's stop string, a model would write the observation itself.
        missing = [stop for stop in self.tool_call_format.stop if stop not in self.sampling.stop]
        if missing:
            self.sampling = replace(self.sampling, stop=(*self.sampling.stop, *missing))
        instructions = self.tool_call_format.instructions(schemas)
        if instructions and self.history and self.history[0]["role"] == "system":
            text = f"{self.history[0]['content']}\n\n{instructions}"
            self.history[0] = {**self.history[0], "content": text}
        elif instructions:
            self.history.insert(0, {"role": "system", "content": instructions})

    @property
    def waiting(self) -> tuple[ToolRequest, ...]:
        """The external tool calls that `answer` must answer before the next `act`."""
        return self._waiting

    def answer(self, answers: Sequence[ToolAnswer]) -> AgentStep:
        """Pass the results of the calls in `waiting`; `act` then continues the turn.

        Returns the step that made the calls, now with all its answers; it replaces the old one in
        `steps`.

        Raises:
            ValueError: the answers do not match the calls in `waiting`.
        """
        asked = [request.call_id for request in self._waiting]
        given = [answer.call_id for answer in answers]
        if not asked or sorted(given) != sorted(asked):
            raise ValueError(
                f"agent {self.name!r} waits for answers to the calls {asked}, but got {given}, so "
                "its history would be inconsistent. Answer each call in `waiting` once."
            )
        step = self.steps[-1]
        left = [*step.tool_answers, *answers]
        ordered = []
        # Not by a dict, since some servers give two calls the same id.
        for request in step.tool_calls:
            at = next(n for n, answer in enumerate(left) if answer.call_id == request.call_id)
            ordered.append(left.pop(at))
        step = replace(step, tool_answers=tuple(ordered))
        self.steps[-1] = step
        self._waiting = ()
        self._say_answers(step.tool_answers)
        return step

    def observe(self, obs: str | Sequence[ChatMessage]) -> None:
        """Add an observation to the history.

        Raises:
            ValueError: external calls are not answered yet; their answers come first.
        """
        self._check_answered()
        super().observe(obs)

    def _check_answered(self) -> None:
        if self._waiting:
            raise ValueError(
                f"agent {self.name!r} still waits for {[call.name for call in self._waiting]}; it "
                "cannot continue without them. Call answer() first."
            )

    async def act(self) -> list[AgentStep]:
        """Take one turn, or the part of it up to an external call; return its model calls.

        Raises:
            ValueError: external calls are not answered yet.
            ModelError, ToolUnavailable: as in `Agent.act`.
        """
        self._check_answered()
        first = len(self.steps)
        while await self._round():
            pass
        return self.steps[first:]

    async def _round(self) -> bool:
        """Make one model call and run its tools; return whether the turn continues here."""
        response, record = await self._call()
        parsed_calls = self.tool_call_format.read(response.message)
        requests = tuple(self._request(call, n) for n, call in enumerate(parsed_calls.calls))
        # Checked first, since half a call may parse as a whole one with different arguments.
        if self._is_rejected(response):
            self._refuse(requests)
            self._end_turn(response, record, requests)
            return False
        if not requests and not parsed_calls.problems:
            self._end_turn(response, record, requests)
            return False
        # The last answer said that no calls are left. A further call ends the turn, since the loop
        # could go on forever.
        if self._num_rounds >= self.max_tool_rounds:
            self._refuse(requests)
            parsed = ParseResult(None, self.bad_call_penalty, self.last_call)
            self._end_turn(response, record, requests, parsed)
            return False
        self._num_rounds += 1
        if not requests:
            return self._complain(response, record, parsed_calls.problems)
        return await self._run(response, record, requests, parsed_calls.problems)

    def _complain(
        self, response: ModelResponse, record: TrajectoryStep, problems: Sequence[str]
    ) -> bool:
        text = unreadable(problems)
        parsed = ParseResult(response.text, self.bad_call_penalty, text)
        self._add_step(response, record, "internal", parsed, info={"tool_problems": list(problems)})
        self.history.extend(self.tool_call_format.complain(self._with_last_call(text)))
        return True

    async def _run(
        self,
        response: ModelResponse,
        record: TrajectoryStep,
        requests: tuple[ToolRequest, ...],
        problems: Sequence[str],
    ) -> bool:
        external = tuple(request for request in requests if _is_external(request))
        # Internal calls are answered now, even if external ones of the message wait: `answer` puts
        # all answers into the order of the calls.
        own = [request for request in requests if not _is_external(request)]
        answers: tuple[ToolAnswer, ...] = ()
        try:
            answers = tuple(await self.tools.answer_all(own, self._answer_own))
        finally:
            # The model call was made, even if the tools failed.
            num_bad = len(problems) + sum(request.problem is not None for request in requests)
            reward = self.bad_call_penalty * num_bad
            self._add_step(
                response,
                record,
                "external" if external else "internal",
                None if external else ParseResult(response.text, reward),
                requests,
                answers,
                info={
                    **_errors(answers),
                    **({"tool_problems": list(problems)} if problems else {}),
                },
                reward=reward,
            )
        self._waiting = external
        if not external:
            self._say_answers(answers)
        return not external

    def _request(self, call: ToolCall, number: int) -> ToolRequest:
        # Text formats have no ids, by which answers are matched.
        call = replace(call, id=call.id or f"call_{len(self.steps)}_{number}")
        if call.name in self.external_tools:
            return self.external_tools.read(call, scope="external")
        return self.tools.read(call, others=self.external_tools)

    async def _answer_own(self, request: ToolRequest) -> ToolAnswer:
        if request.problem is not None:
            return ToolAnswer(request.call_id, request.name, request.problem)
        tool, arguments = self.tools[request.name], request.arguments or {}
        result = call_function(tool, arguments, limit_s=self.tool_limit_s)
        return await answer_of(request, result, self.error_formatter)

    def _say_answers(self, answers: Sequence[ToolAnswer]) -> None:
        answers = list(answers)
        problems = self.steps[-1].info.get("tool_problems")
        notes = [answers[-1].text, *([unreadable(problems)] if problems else [])]
        answers[-1] = replace(answers[-1], text=self._with_last_call("\n\n".join(notes)))
        self.history.extend(self.tool_call_format.write(answers))

    def _with_last_call(self, text: str) -> str:
        is_last = self._num_rounds == self.max_tool_rounds
        return f"{text}\n\n{self.last_call}" if is_last else text

    def _refuse(self, requests: Sequence[ToolRequest]) -> None:
        """Answer calls that are not made, if the format needs an answer to each."""
        if requests and self.tool_call_format.needs_answers:
            answers = [ToolAnswer(each.call_id, each.name, _NOT_MADE) for each in requests]
            self.history.extend(self.tool_call_format.write(answers))

    def _end_turn(self, *args: Any) -> None:
        self._finish_turn(*args)
        self._num_rounds = 0

    def _final_text(self, message: ChatMessage) -> str:
        return self.tool_call_format.final(message)


class ReActAgent(ToolAgent):
    """A `ToolAgent` that writes its calls as text: Thought, Action, Observation.

    It suits models whose chat template has no tools. Each answer has one call, and ends where the
    model would invent the observation.
    """

    def __init__(self, client: Any = None, **settings: Any) -> None:
        settings.setdefault("tool_call_format", ReActCalls())
        super().__init__(client, **settings)


def _described(tools: Sequence[Any]) -> Toolset:
    return Toolset(
        Tool.of_schema(dict(given), _answered_elsewhere) if isinstance(given, Mapping) else given
        for given in tools
    )


async def _answered_elsewhere(**arguments: Any) -> None:
    raise AssertionError("an external tool is answered by the protocol")


def _is_external(request: ToolRequest) -> bool:
    return request.scope == "external" and request.problem is None


def _errors(answers: Sequence[ToolAnswer]) -> dict[str, Any]:
    failed = [{**answer.error.as_dict(), "tool": answer.name} for answer in answers if answer.error]
    return {"tool_errors": failed} if failed else {}
