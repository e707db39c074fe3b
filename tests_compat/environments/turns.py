"""Environments of several turns: every hook and override of 0.1.8's text."""

import verifiers as vf
from datasets import Dataset
from verifiers.types import Messages, State, TrajectoryStep
from verifiers.utils.message_utils import concat_messages
from verifiers.utils.response_utils import parse_response_messages, parse_response_tokens


def sums(num=6, **columns):
    rows = [
        {"question": f"What is {n} plus {n + 3}?", "answer": str(2 * n + 3)} for n in range(num)
    ]
    for name, value in columns.items():
        for n, row in enumerate(rows):
            row[name] = value(n) if callable(value) else value
    return Dataset.from_list(rows)


def correct(completion, answer, **kwargs):
    return float(answer in completion[-1]["content"])


def num_turns(state):
    return len(state["trajectory"])


class Hooked(vf.MultiTurnEnv):
    """Notes what is called, in order."""

    def __init__(self, hints=2, **kwargs):
        super().__init__(**kwargs)
        self.hints = hints

    async def setup_state(self, state, **kwargs):
        state["notes"] = ["setup"]
        state["left"] = self.hints
        state["tags"] = {"a": 1, "b": [1, 2]}
        return await super().setup_state(state)

    @vf.stop(priority=2)
    async def no_hints_left(self, state: State) -> bool:
        state["notes"].append("no_hints_left")
        return state["left"] <= 0

    @vf.stop
    async def z_never(self, state: State) -> bool:
        state["notes"].append("z_never")
        return False

    @vf.stop
    async def a_never(self, state: State) -> bool:
        state["notes"].append("a_never")
        return False

    @vf.stop(priority=-1)
    async def last(self, state: State) -> bool:
        state["notes"].append("last")
        return len(state["trajectory"]) > 5

    @vf.cleanup
    async def b_clean(self, state: State):
        state["notes"].append(f"b_clean {state['is_completed']} {len(state['completion'])}")

    @vf.cleanup(priority=3)
    async def first_clean(self, state: State):
        state["notes"].append("first_clean")

    @vf.cleanup
    async def a_clean(self, state: State):
        state["notes"].append("a_clean")
        state.pop("tags")

    async def env_response(self, messages: Messages, state: State, **kwargs) -> Messages:
        state["left"] -= 1
        state["notes"].append(f"env {len(messages)} {messages[-1]['role']} {sorted(kwargs)}")
        return [{"role": "user", "content": f"Wrong, {state['left']} left."}]


def hooked(**kwargs):
    rubric = vf.Rubric(funcs=[correct, num_turns], weights=[1.0, 0.1])
    return Hooked(dataset=sums(), rubric=rubric, **{"max_turns": 4, **kwargs})


class OwnRollout(vf.MultiTurnEnv):
    """Writes the loop itself."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "unused"}]

    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model, sampling_args)
        state = await self.setup_state(state)
        prompt = state["prompt"]
        for turn in range(3):
            response = await self.get_model_response(
                client, model, prompt, oai_tools=None, sampling_args=sampling_args
            )
            await self.add_model_response(state, prompt, response)
            text = response.choices[0].message.content or ""
            state["finish"] = response.choices[0].finish_reason
            prompt = concat_messages([prompt, state["trajectory"][-1]["completion"]])
            prompt = [*prompt, {"role": "user", "content": f"Again {turn} {len(text)}"}]
        assert await self.is_completed(state)
        return state


def own_rollout():
    return OwnRollout(dataset=sums(), rubric=vf.Rubric(funcs=[correct, num_turns]), max_turns=3)


class OwnCompleted(vf.MultiTurnEnv):
    """The old is_completed, as the migration text says to write it."""

    async def is_completed(self, state, **kwargs):
        if await super().is_completed(state, **kwargs):
            return True
        return len(state["trajectory"]) == 2

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Sure?"}]


def own_completed(max_turns=2):
    return OwnCompleted(
        dataset=sums(), rubric=vf.Rubric(funcs=[num_turns, correct]), max_turns=max_turns
    )


class OwnSteps(vf.MultiTurnEnv):
    """Overrides init_state, get_prompt_messages, get_model_response and add_model_response."""

    async def init_state(self, input, client, model, sampling_args=None):
        state = await super().init_state(input, client, model, sampling_args)
        state["seen"] = sorted(input)
        state["model_name"] = model
        state["oai_tools"] = []
        return state

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[:2] + messages[-3:] if len(messages) > 5 else messages

    async def get_model_response(self, client, model, prompt, **kwargs):
        response = await super().get_model_response(client, model, prompt, **kwargs)
        response.choices[0].message.content = (response.choices[0].message.content or "") + "!"
        return response

    async def add_model_response(self, state, prompt_messages, response):
        completion = await parse_response_messages(response, self.message_type)
        tokens = await parse_response_tokens(response, self.message_type, self.max_seq_len)
        step = TrajectoryStep(
            prompt=prompt_messages,
            completion=completion,
            response=response,
            tokens=tokens,
            reward=float(len(state["trajectory"])),
            advantage=None,
            extras={"turn": len(state["trajectory"])},
        )
        state["trajectory"].append(step)

    async def env_response(self, messages, state, **kwargs):
        return [
            {"role": "system", "content": "note"},
            {"role": "user", "content": f"Turn {len(state['trajectory'])}."},
        ]


def own_steps():
    return OwnSteps(
        dataset=sums(), system_prompt="Be brief.", rubric=vf.Rubric(funcs=[num_turns]), max_turns=4
    )


class SpecText(vf.MultiTurnEnv):
    """init_state and add_model_response with the signatures of the trajectory text."""

    async def init_state(self, input, *args, **kwargs):
        state = vf.State(input={**input})
        state["is_completed"] = False
        state["oai_tools"] = self.oai_tools
        state["trajectory"] = []
        state["reward"] = None
        state["metrics"] = None
        state["timing"] = {
            "generation_ms": 0.0,
            "scoring_ms": 0.0,
            "total_ms": 0.0,
            "start_time": 0.0,
        }
        state["own"] = True
        return state

    async def add_model_response(self, state, prompt_messages, response):
        if response is not None and response.id == "overlong-prompt":
            state["prompt_too_long"] = True
            return
        completion_messages = await parse_response_messages(response, self.message_type)
        tokens = await parse_response_tokens(response, self.message_type)
        state["trajectory"].append(
            {
                "prompt": prompt_messages,
                "completion": completion_messages,
                "response": response,
                "tokens": tokens,
                "reward": None,
                "advantage": None,
                "extras": {},
            }
        )

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Go on."}]


def spec_text():
    return SpecText(dataset=sums(), rubric=vf.Rubric(funcs=[num_turns, correct]), max_turns=3)


class Game(vf.MultiTurnEnv):
    """Ends in env_response: the condition is seen before the next call of the model."""

    async def setup_state(self, state):
        state["points"] = 0
        return state

    @vf.stop
    async def game_over(self, state):
        return state.get("over", False)

    async def env_response(self, messages, state, **kwargs):
        state["points"] += len(messages[-1]["content"])
        if state["points"] > 40:
            state["over"] = True
            return [{"role": "user", "content": "Game over."}]
        return [{"role": "user", "content": f"{state['points']} points."}]


def game():
    def points(state):
        return state["points"] / 10

    return Game(dataset=sums(), rubric=vf.Rubric(funcs=[points]), max_turns=6)


class Stopped(Game):
    """A condition that holds before the first turn."""

    @vf.stop
    async def at_once(self, state):
        return True


def stopped():
    return Stopped(dataset=sums(), rubric=vf.Rubric(funcs=[num_turns]), max_turns=2)


class Empty(vf.MultiTurnEnv):
    """Adds nothing, then a tool-less assistant message, then two messages."""

    async def env_response(self, messages, state, **kwargs):
        turn = len(state["trajectory"])
        if turn == 1:
            return []
        if turn == 2:
            return {"role": "user", "content": "one dict"}
        return [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


def empty():
    return Empty(dataset=sums(), rubric=vf.Rubric(funcs=[num_turns]), max_turns=5)


class SecondModel(vf.MultiTurnEnv):
    """Asks a second model through the state's client."""

    async def env_response(self, messages, state, **kwargs):
        reply = await state["client"].chat.completions.create(
            model="judge", messages=[{"role": "user", "content": "Is it? " + state["answer"]}]
        )
        state["asked"] = state.get("asked", 0) + 1
        return [{"role": "user", "content": f"Another says {reply.choices[0].message.content}"}]


def second_model():
    def asked(state):
        return state["asked"]

    return SecondModel(dataset=sums(), rubric=vf.Rubric(funcs=[asked]), max_turns=3)


class Raises(vf.MultiTurnEnv):
    """Raises in the second turn, of every row or of one."""

    def __init__(self, row, **kwargs):
        super().__init__(**kwargs)
        self.row = row

    async def env_response(self, messages, state, **kwargs):
        if self.row in (None, state["example_id"]):
            raise ZeroDivisionError("env_response failed")
        return [{"role": "user", "content": "Again."}]


def raises(row=None):
    return Raises(row, dataset=sums(2), rubric=vf.Rubric(funcs=[num_turns]), max_turns=3)


class Returns(vf.MultiTurnEnv):
    """Returns something else than messages, as environments of older versions did."""

    def __init__(self, answer, **kwargs):
        super().__init__(**kwargs)
        self.returned = {
            "pair": lambda state: ([{"role": "user", "content": "Again."}], state),
            "nothing": lambda state: None,
            "text": lambda state: "Again.",
            "message": lambda state: {"role": "user", "content": "Again."},
        }[answer]

    async def env_response(self, messages, state, **kwargs):
        return self.returned(state)


def returns(answer):
    return Returns(answer, dataset=sums(2), rubric=vf.Rubric(funcs=[num_turns]), max_turns=3)


class ReturnsUnsent(Returns):
    """The same, and only the question is sent: nothing fails."""

    async def get_model_response(self, client, model, prompt, *args, **kwargs):
        return await super().get_model_response(client, model, prompt[:1], *args, **kwargs)


def returns_unsent(answer):
    return ReturnsUnsent(answer, dataset=sums(2), rubric=vf.Rubric(funcs=[num_turns]), max_turns=3)


class ReadsState(vf.MultiTurnEnv):
    """Reads and writes the state in every way that a dict allows."""

    async def setup_state(self, state):
        state["report"] = {
            "prompt in": "prompt" in state,
            "input in": "input" in state,
            "answer": state["answer"],
            "get": [state.get("prompt") is not None, state.get("nothing", 3)],
            "keys": sorted(state),
            "input": sorted(state["input"]),
            "info": state.get("info", "no info"),
            "task": state["task"],
            "sampling": state["sampling_args"],
            "completed": state["is_completed"],
            "stop": state.get("stop_condition"),
            "completion": state.get("completion", "none yet"),
            "reward": state["reward"],
            "metrics": state["metrics"],
            "advantage": state.get("advantage", "none"),
            "timing": sorted(state["timing"]),
            "model": state["model"],
            "is dict": isinstance(state, dict),
        }
        state["answer"] = state["answer"] + "0"
        state["prompt"] = [*state["prompt"], {"role": "user", "content": "added"}]
        state["report"]["forwarded"] = state["input"]["answer"] == state["answer"]
        try:
            state["missing"]
        except KeyError as error:
            state["report"]["missing"] = str(error)
        return state

    async def env_response(self, messages, state, **kwargs):
        step = state["trajectory"][-1]
        response = step["response"]
        state["read"] = {
            "finish": response.choices[0].finish_reason,
            "content": response.choices[0].message.content,
            "usage": response.usage.completion_tokens,
            "dump": sorted(response.model_dump()),
            "tokens": step["tokens"],
            "logprobs": response.choices[0].logprobs,
            "tool_calls": response.choices[0].message.tool_calls,
            "id": response.id,
        }
        return [{"role": "user", "content": "next"}]


def reads_state(info=None):
    columns = {"info": lambda n: {"n": n}} if info else {}
    return ReadsState(
        dataset=sums(**columns), rubric=vf.Rubric(funcs=[correct, num_turns]), max_turns=2
    )


class Forgets(vf.MultiTurnEnv):
    """Sends less than the row's prompt from the second turn on."""

    async def get_prompt_messages(self, state):
        turn = len(state["trajectory"])
        if turn == 0:
            return state["prompt"]
        return [{"role": "user", "content": f"{state['example_id']} turn {turn}"}]

    async def env_response(self, messages, state, **kwargs):
        return []


def forgets():
    data = sums()
    return Forgets(
        dataset=data, system_prompt="Be brief.", rubric=vf.Rubric(funcs=[correct]), max_turns=2
    )


class Completes(vf.MultiTurnEnv):
    """Text completions over several turns."""

    async def env_response(self, messages, state, **kwargs):
        return f"\nNext after {len(messages)}:"


def completes():
    rows = [
        {"prompt": f"Once {n}", "answer": str(n), "example_id": n, "task": "t"} for n in range(4)
    ]

    def length(completion, prompt):
        return len(completion) + len(prompt) / 100

    return Completes(
        dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[length]),
        message_type="completion",
        max_turns=3,
    )


def load_environment(kind, **kwargs):
    return globals()[kind](**kwargs)


class Edits(Hooked):
    """Edits lists of the last step in place, and its messages."""

    async def add_model_response(self, state, prompt_messages, response):
        await super().add_model_response(state, prompt_messages, response)
        step = state["trajectory"][-1]
        step["completion"].append({"role": "user", "content": "noted"})
        tokens = step["tokens"]
        if tokens is not None:
            tokens["completion_mask"][0] = 0
            tokens["prompt_mask"][:] = [1] * len(tokens["prompt_mask"])
            mask = tokens["completion_logprobs"]
            mask[-1] = -7.0
            tokens["completion_ids"] += [5]
            tokens["completion_ids"].pop()


def edits():
    return Edits(dataset=sums(), rubric=vf.Rubric(funcs=[correct, num_turns]), max_turns=3)


class PlainLists(Hooked):
    """Puts lists of its own in the place of the trajectory."""

    async def setup_state(self, state, **kwargs):
        state = await super().setup_state(state)
        state["trajectory"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        answer = await super().env_response(messages, state, **kwargs)
        if len(state["trajectory"]) > 1:
            state["trajectory"] = [s for n, s in enumerate(state["trajectory"]) if n != 0]
        return answer


def plain_lists():
    return PlainLists(dataset=sums(), rubric=vf.Rubric(funcs=[correct, num_turns]), max_turns=4)


class AsksThrice(Hooked):
    """Asks the model twice more in each turn, and keeps what it said."""

    async def env_response(self, messages, state, **kwargs):
        for _ in range(2):
            response = await self.get_model_response(
                state["client"], state["model"], messages, sampling_args=state["sampling_args"]
            )
            state["notes"].append(response.choices[0].message.content)
        return await super().env_response(messages, state, **kwargs)


def asks_thrice():
    return AsksThrice(dataset=sums(), rubric=vf.Rubric(funcs=[correct, num_turns]), max_turns=3)
