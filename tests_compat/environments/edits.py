"""Environments that edit steps in place, ask several times, or spoil arguments of tools."""

import verifiers as vf
from turns import correct, num_turns, sums
from verifiers.utils.response_utils import parse_response_messages, parse_response_tokens


class Edited(vf.MultiTurnEnv):
    """Masks and appends tokens, and rewrites messages, in the lists of the last step."""

    async def env_response(self, messages, state, **kwargs):
        step = state["trajectory"][-1]
        if step["tokens"] is not None:
            step["tokens"]["completion_mask"][0] = 0
            step["tokens"]["completion_ids"].append(7)
            step["tokens"]["completion_mask"].append(0)
            step["tokens"]["completion_logprobs"].append(0.0)
            step["tokens"]["prompt_mask"][-1] = 1
        step["completion"][0]["content"] += " (edited)"
        step["extras"]["seen"] = [len(messages)]
        step["extras"]["seen"].append("more")
        step["reward"] = 0.25
        return [{"role": "user", "content": "Sure?"}]

    @vf.cleanup
    async def last_words(self, state):
        state["trajectory"][-1]["completion"].append({"role": "user", "content": "bye"})


def edited(**kwargs):
    return Edited(dataset=sums(3), rubric=vf.Rubric(funcs=[num_turns]), max_turns=2, **kwargs)


class Held(vf.MultiTurnEnv):
    """Makes its steps, and edits what it put into them once they are in the trajectory."""

    async def env_response(self, messages, state, **kwargs):
        for tokens in state["held"]:
            tokens["completion_mask"] = [0] * len(tokens["completion_ids"])
            tokens["completion_logprobs"][0] = -1.5
        return [{"role": "user", "content": "Sure?"}]

    async def add_model_response(self, state, prompt_messages, response):
        tokens = await parse_response_tokens(response, "chat")
        completion = await parse_response_messages(response, "chat")
        step = vf.types.TrajectoryStep(
            prompt=prompt_messages,
            completion=completion,
            response=response,
            tokens=tokens,
            reward=None,
            advantage=None,
            extras={},
        )
        state["trajectory"].append(step)
        state.setdefault("held", []).append(tokens)
        completion[0]["content"] += " (edited)"


def held(**kwargs):
    return Held(dataset=sums(3), rubric=vf.Rubric(funcs=[num_turns]), max_turns=2, **kwargs)


class SeveralCalls(vf.MultiTurnEnv):
    """Asks three times in each turn, and keeps one of the answers; its `rollout` is its own."""

    async def env_response(self, messages, state, **kwargs):
        asked = await self.get_model_response(
            state["client"],
            state["model"],
            [{"role": "user", "content": f"A hint for {state['answer']}?"}],
        )
        return [{"role": "user", "content": f"Hint: {asked.choices[0].message.content}"}]

    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.setup_state(await self.init_state(input, client, model, sampling_args))
        state["said"] = []
        while not await self.is_completed(state):
            prompt = await self.get_prompt_messages(state)
            answers = [
                await self.get_model_response(client, model, prompt, sampling_args=sampling_args)
                for _ in range(3)
            ]
            state["said"].append([answer.choices[0].message.content for answer in answers])
            await self.add_model_response(state, prompt, answers[1])
        return state


def several_calls():
    rubric = vf.Rubric(funcs=[correct, num_turns])
    return SeveralCalls(dataset=sums(3), rubric=rubric, max_turns=2)


class OneTurnAsks(vf.SingleTurnEnv):
    """Answers with the best of three."""

    async def get_model_response(self, client, model, prompt, **kwargs):
        answers = [
            await super(OneTurnAsks, self).get_model_response(client, model, prompt, **kwargs)
            for _ in range(3)
        ]
        return max(answers, key=lambda answer: len(answer.choices[0].message.content or ""))


def one_turn_asks():
    return OneTurnAsks(dataset=sums(3), rubric=vf.Rubric(funcs=[correct]))


def own_sampling(**kwargs):
    """Has sampling arguments of its own."""
    sampling = {"extra_body": {"a": 1, "b": 2}, "top_p": 0.9}
    rubric = vf.Rubric(funcs=[correct])
    return vf.SingleTurnEnv(dataset=sums(2), rubric=rubric, sampling_args=sampling, **kwargs)


class Spoiled:
    """Spoils the arguments of what the model calls."""

    def __init__(self, arguments, **kwargs):
        super().__init__(tools=[add], dataset=sums(2), rubric=vf.Rubric(funcs=[used]), **kwargs)
        self.arguments = arguments

    async def get_prompt_messages(self, state):
        if len(state["trajectory"]) == 1:
            call = {"name": "add", "arguments": self.arguments}
            said = state["trajectory"][0]["completion"][0]
            said["tool_calls"] = [{"id": "1", "type": "function", "function": call}]
        return await super().get_prompt_messages(state)

    @vf.stop
    async def no_tools_called(self, state):
        return len(state["trajectory"]) == 2


class SpoiledTools(Spoiled, vf.ToolEnv):
    pass


class SpoiledStateful(Spoiled, vf.StatefulToolEnv):
    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return tool_args


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


def used(completion):
    return float(sum(message["role"] == "tool" for message in completion))


def spoiled(arguments, stateful=False):
    return (SpoiledStateful if stateful else SpoiledTools)(arguments, max_turns=3)


def load_environment(kind, **kwargs):
    return globals()[kind](**kwargs)
