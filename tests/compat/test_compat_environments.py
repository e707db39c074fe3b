"""The environments of compat: what an author of verifiers 0.1.8 relies on."""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest

import rolltree as rt
from rolltree.samples import build_samples
from rolltree.testing import ScriptedClient
from rolltree.values.errors import ConfigError
from rolltree.values.types import ModelResponse
from rolltree.verifiers import verifiers as vf

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]


class Client:
    """Looks like AsyncOpenAI: it answers with `replies` in turn and keeps what it was asked."""

    def __init__(self, *replies, tool_calls=None):
        self.replies, self.tool_calls, self.asked = list(replies), tool_calls or {}, []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))
        self.completions = SimpleNamespace(create=self.create)

    async def create(self, **fields):
        self.asked.append(fields)
        number = len(self.asked) - 1
        reply = self.replies[min(number, len(self.replies) - 1)]
        if isinstance(reply, Exception):
            raise reply
        message = {"role": "assistant", "content": reply}
        if number in self.tool_calls:
            name, arguments = self.tool_calls[number]
            call = {"id": f"c{number}", "type": "function"}
            call["function"] = {"name": name, "arguments": arguments}
            message["tool_calls"] = [call]
        choice = {"index": 0, "message": message, "text": reply, "finish_reason": "stop"}
        return {"id": f"r{number}", "choices": [choice]}


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


def play(env, client, **settings):
    return env.evaluate_sync(client, "m", **{"num_examples": 1, **settings})


class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]


# -- construction ----------------------------------------------------------------------------------


def test_unknown_keywords_become_attributes_whatever_rolltree_calls_its_own():
    class Mine(vf.SingleTurnEnv):
        rows = ["mine"]

        def __init__(self, **settings):
            self.num_examples = 7
            super().__init__(**settings)

        async def _score(self, state):
            return 1

        async def setup_state(self, state):
            state["seen"] = [self.num_examples, self.rows, self.example, await self._score(state)]
            return state

    env = Mine(dataset=ROWS, colour="red", example={"a": 1}, rubric=vf.Rubric([exact]))
    assert (env.colour, env.num_examples, env.example) == ("red", 7, {"a": 1})
    results = play(env, Client("1"), num_examples=2)
    assert results.state[0]["seen"] == [7, ["mine"], {"a": 1}, 1]
    assert results.reward == [1.0, 0.0]


def test_defaults_are_theirs():
    env = vf.SingleTurnEnv(dataset=ROWS, sampling_args={"extra_body": {"a": 1}, "temperature": 0})
    assert env.sampling_args == {"n": 1, "extra_body": {"a": 1}, "temperature": 0}
    assert (env.env_id, env.oai_tools, env.few_shot) == ("", None, None)
    with pytest.raises(ValueError, match="dataset"):
        vf.SingleTurnEnv()


# -- the loop --------------------------------------------------------------------------------------


class SpecText(Talk):
    """`init_state` and `add_model_response` as verifiers documents them."""

    async def init_state(self, input, **kwargs):
        state = vf.State(input=dict(input))
        state["is_completed"] = False
        state["oai_tools"] = self.oai_tools
        state["trajectory"] = []
        state["reward"] = None
        state["metrics"] = None
        return state

    async def add_model_response(self, state, prompt_messages, response):
        completion = await vf.parse_response_messages(response, self.message_type)
        step = vf.TrajectoryStep(
            prompt=prompt_messages,
            completion=completion,
            response=response,
            tokens=await vf.parse_response_tokens(response, self.message_type),
            reward=None,
            advantage=None,
            extras={},
        )
        state["trajectory"].append(step)


def test_overrides_of_spec_1_play_and_train():
    env = SpecText(dataset=ROWS, max_turns=2, rubric=vf.Rubric([exact]))
    results = play(env, ScriptedClient(lambda *_: "1"), rollouts_per_example=2)
    state = results.state[0]
    assert (results.reward, len(state["trajectory"])) == ([1.0, 1.0], 2)
    assert state["trajectory"][1]["tokens"]["completion_ids"]
    samples = build_samples(results.state, "step").samples
    assert len(samples) == 4


def test_a_state_made_by_hand_is_scored():
    class Own(vf.SingleTurnEnv):
        async def rollout(self, input, client, model, sampling_args=None):
            said = [{"role": "assistant", "content": input["answer"]}]
            return vf.State(input=input, completion=said)

    results = play(Own(dataset=ROWS, rubric=vf.Rubric([exact])), Client("x"), num_examples=-1)
    assert results.reward == [1.0, 1.0, 1.0]


def test_stop_conditions_come_by_priority_then_alphabet_and_before_a_call_only():
    asked = []

    class Stops(Talk):
        @vf.stop
        async def b(self, state):
            asked.append("b")
            return False

        @vf.stop
        async def a(self, state):
            asked.append("a")
            return bool(state.get("over"))

        @vf.stop(priority=1)
        async def z(self, state):
            asked.append("z")
            return False

        async def env_response(self, messages, state, **kwargs):
            state["over"] = True
            return [{"role": "user", "content": "the end"}]

    results = play(Stops(dataset=ROWS), Client("1"))
    assert asked[:3] == ["z", "a", "b"]
    state = results.state[0]
    assert (state["stop_condition"], len(state["trajectory"])) == ("a", 2)  # one call after the end


class Grouped(Talk):
    """A game of two players, for example: a group has twice as many states as inputs."""

    async def run_group(self, inputs, *args, **settings):
        if inputs[0]["example_id"] == self.env_args.get("broken"):
            raise LookupError("no board")
        states = await super().run_group(inputs, *args, **settings)
        return [state | {"player": player} for state in states for player in range(2)]


def test_generate_calls_a_run_group_of_the_authors_own(caplog):
    env, client = Grouped(dataset=ROWS, max_turns=1), Client("1")
    results = play(env, client, num_examples=2, rollouts_per_example=3)
    assert [state["player"] for state in results.state] == [0, 1] * 6
    ids = [state["example_id"] for state in results.state]
    assert ids == sorted(ids)
    assert [len(set(ids)), len(ids)] == [2, 12]
    assert None not in results.reward
    assert "run_group" not in caplog.text


def test_a_run_group_that_fails_ends_generate():
    with pytest.raises(LookupError, match="no board"):
        play(Grouped(dataset=ROWS, max_turns=1, env_args={"broken": 0}), Client("1"))


async def test_elsewhere_a_run_group_of_the_authors_own_is_said_to_be_left_out(caplog):
    env = Grouped(dataset=ROWS, max_turns=1)
    await rt.evaluate_async(env, ScriptedClient(lambda messages: "1"))
    said = [text for text in caplog.messages if "Grouped.run_group is called by generate" in text]
    assert len(said) == 1


def test_an_override_without_the_decorator_is_no_stop_condition():
    class Off(Talk):
        async def max_turns_reached(self, state):
            return True

        @vf.stop
        async def done(self, state):
            return len(state["trajectory"]) == 2

    assert play(Off(dataset=ROWS, max_turns=1), Client("1")).state[0]["stop_condition"] == "done"


def test_cleanup_runs_inside_is_completed_and_once():
    class Cleans(Talk):
        @vf.cleanup
        async def note(self, state):
            state["cleaned"] = [*state.get("cleaned", []), state["completion"][-1]["content"]]

        async def rollout(self, input, client, model, sampling_args=None):
            state = await super().rollout(input, client, model, sampling_args)
            state["after"] = list(state["cleaned"])
            return state

    state = play(Cleans(dataset=ROWS, max_turns=1), Client("hi")).state[0]
    assert (state["after"], state["cleaned"]) == (["hi"], ["hi"])


def test_completion_is_theirs_and_never_empty_after_rewritten_histories():
    class Rewrites(Talk):
        async def get_prompt_messages(self, state):
            if not state["trajectory"]:
                return state["prompt"]
            return [{"role": "user", "content": f"summary {len(state['trajectory'])}"}]

    state = play(Rewrites(dataset=ROWS, max_turns=2), Client("a", "b")).state[0]
    assert [m["content"] for m in state["completion"]] == ["b"]
    rows = [{"prompt": [{"role": "user", "content": str(n)} for n in range(4)], "answer": ""}]
    state = play(Rewrites(dataset=rows, max_turns=2), Client("a", "b")).state[0]
    assert [m["content"] for m in state["completion"]] == ["a", "summary 1", "b"]


# -- requests --------------------------------------------------------------------------------------


def test_requests_carry_the_callers_fields_and_no_others():
    client = Client("1")
    play(vf.SingleTurnEnv(dataset=ROWS), client, sampling_args={"max_tokens": 5, "top_p": None})
    play(vf.SingleTurnEnv(dataset=ROWS), client, sampling_args={"max_completion_tokens": 6})
    common = {"model": "m", "messages": [{"role": "user", "content": "0 + 1?"}], "n": 1}
    common["extra_body"] = {}
    assert client.asked == [
        {**common, "max_completion_tokens": 5},
        {**common, "max_completion_tokens": 6},
    ]


def test_audio_asks_for_text_only():
    sound = {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}, "text": None}
    rows = [{"prompt": [{"role": "user", "content": [sound]}], "answer": ""}]
    client = Client("1")
    play(vf.SingleTurnEnv(dataset=rows), client)
    play(vf.SingleTurnEnv(dataset=rows), client, sampling_args={"modalities": ["text", "audio"]})
    assert [asked["modalities"] for asked in client.asked] == [["text"], ["text", "audio"]]
    assert "text" not in client.asked[0]["messages"][0]["content"][0]


def test_an_overlong_prompt_adds_the_step_that_says_so():
    long = ValueError("This model's maximum context length is 9")
    long.status_code, long.response = 400, SimpleNamespace(text=str(long))
    state = play(Talk(dataset=ROWS, max_turns=4), Client("1", long)).state[0]
    assert (state["stop_condition"], len(state["trajectory"])) == ("prompt_too_long", 2)
    assert state["completion"][-1]["content"] == "Prompt too long."
    assert (state["truncated"], state["trajectory"][1]["tokens"]) == (True, None)


def test_max_seq_len_cuts_tokens_and_does_not_stop():
    env = Talk(dataset=ROWS, max_turns=2, max_seq_len=3)
    state = play(env, ScriptedClient(lambda *_: "12345")).state[0]
    tokens = state["trajectory"][1]["tokens"]
    assert len(state["trajectory"]) == 2
    assert (tokens["overlong_prompt"], tokens["is_truncated"]) == (True, True)
    assert (len(tokens["prompt_ids"]), tokens["completion_ids"]) == (3, [])


# -- failures --------------------------------------------------------------------------------------


async def test_a_failing_call_is_raised_by_rollout_and_recorded_by_generate():
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([exact]))
    row = env.get_eval_inputs()[0]
    with pytest.raises(KeyError, match="down"):
        await env.rollout(row, Client(KeyError("down")), "m")
    results = await env.evaluate(Client(KeyError("down"), "2", "3"), "m", max_concurrent=1)
    assert results["reward"] == [None, 1.0, 1.0]
    assert results["metadata"]["avg_reward"] == 1.0
    assert (results.num_failed, results.state[0]["error"].type) == (1, "KeyError")
    with pytest.raises(KeyError, match="down"):  # nothing is lost where nothing was won
        await env.evaluate(Client(KeyError("down")), "m")


def test_an_author_may_catch_what_the_model_call_raised():
    class Catches(vf.SingleTurnEnv):
        async def get_model_response(self, client, model, prompt, **kwargs):
            try:
                return await super().get_model_response(client, model, prompt, **kwargs)
            except KeyError:
                return await super().get_model_response(client, model, prompt, **kwargs)

    env = Catches(dataset=ROWS, rubric=vf.Rubric([exact]))
    assert play(env, Client(KeyError("once"), "1")).reward == [1.0]


# -- tools -----------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_update_tool_args_fills_arguments_before_the_call():
    class Filled(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            return {**tool_args, "b": 5}

    env = Filled(dataset=ROWS)
    env.add_tool(add, args_to_skip=["b"])
    assert list(env.oai_tools[0]["function"]["parameters"]["properties"]) == ["a"]
    state = play(env, Client("", "done", tool_calls={0: ("add", '{"a": 2}')})).state[0]
    assert [m["content"] for m in state["completion"]] == ["", "7", "done"]


def test_the_authors_no_tools_called_is_asked_before_calls_only():
    class Nudged(vf.ToolEnv):
        @vf.stop
        async def no_tools_called(self, state):
            if await super().no_tools_called(state):
                state["nudges"] = state.get("nudges", 0) + 1
            return False

        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "Use a tool."}]

    env = Nudged(tools=[add], dataset=ROWS, max_turns=2)
    assert play(env, Client("no")).state[0]["nudges"] == 1  # max_turns_reached comes before it


@pytest.mark.parametrize("arguments", ["{", "[" * 100_000, "9" * 5_000])
@pytest.mark.parametrize("stateful", [False, True])
def test_no_arguments_end_a_rollout(stateful, arguments):
    class AsTheyAre(vf.StatefulToolEnv):
        def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
            return tool_args

    env = AsTheyAre(dataset=ROWS) if stateful else vf.ToolEnv(dataset=ROWS)
    env.add_tool(add)
    state = play(env, Client("", "done", tool_calls={0: ("add", arguments)})).state[0]
    assert state["error"] is None
    assert [m["role"] for m in state["completion"]] == ["assistant", "tool", "assistant"]


def test_what_goes_wrong_with_a_tool_is_told_in_its_own_words():
    env = vf.ToolEnv(tools=[add], dataset=ROWS, error_formatter=lambda e: f"! {e}")
    calls = {0: ("add", "{"), 1: ("nothing", "{}")}
    state = play(env, Client("", "", "done", tool_calls=calls)).state[0]
    told = [m["content"] for m in state["completion"] if m["role"] == "tool"]
    assert told == ["! add() missing 2 required positional arguments: 'a' and 'b'", "! 'nothing'"]


def test_tools_can_be_set_and_completion_prompts_go_with_tools():
    class ByText(vf.ToolEnv):
        @vf.stop
        async def no_tools_called(self, state):
            return len(state["trajectory"]) == 2

        async def env_response(self, messages, state, **kwargs):
            return f" [{self.tool_map['add'](1, 2)}]"

    env = ByText(tools=[add], dataset=[{"prompt": "1+2=", "answer": ""}], message_type="completion")
    env.oai_tools = env.tools = []
    client = Client("x", "y")
    assert play(env, client).state[0]["completion"] == "x [3]y"
    assert client.asked[1]["prompt"] == "1+2=x [3]"


# -- groups of environments ------------------------------------------------------------------------


def test_environments_of_one_name_keep_their_rows():
    envs = [vf.SingleTurnEnv(dataset=ROWS), vf.SingleTurnEnv(dataset=ROWS[:1])]
    group = vf.EnvGroup(envs, env_names=["sums", "sums"])
    assert (len(group.dataset), len(group.get_eval_dataset())) == (4, 4)


def test_only_rolltrees_own_evaluation_takes_rows_of_every_environment():
    envs = [vf.SingleTurnEnv(dataset=ROWS), vf.SingleTurnEnv(dataset=ROWS)]
    group = vf.EnvGroup(envs)
    assert play(group, Client("1"), num_examples=2).task == ["env_0", "env_0"]
    found = rt.evaluate(group, ScriptedClient(["1"]), num_examples=2)
    assert sorted(found.tasks) == ["env_0", "env_1"]


def test_a_group_names_tasks_as_it_did():
    def other(completion):
        return 0.5

    first = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([exact]), env_id="sums")
    second = vf.SingleTurnEnv(eval_dataset=ROWS[:1], rubric=vf.Rubric([other]))
    group = vf.EnvGroup([first, second])
    results = play(group, Client("1"), num_examples=-1)
    assert results.task == ["env_0", "env_0", "env_0", "env_1"]
    assert results.example_id == [0, 1, 2, 3]
    assert results.reward == [1.0, 0.0, 0.0, 0.5]
    assert results.metrics == {"exact": [1.0, 0.0, 0.0, 0.0], "other": [0.0, 0.0, 0.0, 0.5]}
    assert group.get_env_for_task("no such task") is first


# -- results ---------------------------------------------------------------------------------------


def test_results_are_a_mapping_and_are_written_as_vf_eval_does(tmp_path):
    pytest.importorskip("datasets")
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([exact]), env_id="sums")
    results = play(
        env,
        Client("1"),
        num_examples=2,
        rollouts_per_example=2,
        results_path=tmp_path / "run",
        state_columns=["trajectory", "nothing"],
        save_results=True,
        max_concurrent=None,
    )
    assert list(results) == list(vf.GenerateOutputs.__annotations__)
    assert "reward" in results
    assert results.get("nothing", 3) == 3
    assert results["metadata"].avg_reward == results.metadata["avg_reward"] == 0.5
    assert list(results.metadata) == list(vf.GenerateMetadata.__annotations__)
    with pytest.raises(AttributeError, match="rewards"):
        _ = results.rewards
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    head = ["example_id", "prompt", "completion", "task", "reward"]
    assert list(rows[0])[:5] == head
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert [row["exact"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert rows[0]["answer"] == "1"
    metadata = json.loads((tmp_path / "run" / "metadata.json").read_text())
    assert (metadata["env_id"], metadata["num_examples"], metadata["rollouts_per_example"]) == (
        *("sums", 2),
        2,
    )
    assert not {"date", "path_to_save"} & set(metadata)


def test_rows_with_the_same_text_as_example_id_are_one_group():
    def members(states):
        return [len(states)] * len(states)

    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([members]))
    rows = [{**env.get_eval_inputs()[0], "example_id": name} for name in ("b", "a", "b")]
    results = env.generate_sync(rows, Client("1"), model="m")
    assert (results["example_id"], results["reward"]) == (["a", "b", "b"], [1.0, 2.0, 2.0])


def test_results_are_saved_on_the_way(tmp_path, monkeypatch):
    from rolltree.verifiers import batches

    saved = []
    monkeypatch.setattr(
        batches, "save_rollout_results", lambda results: saved.append(len(results["state"]))
    )
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([exact]))
    play(env, Client("1"), num_examples=3, save_results=True, save_every=2, results_path=tmp_path)
    assert saved == [2, 3]


def test_limits_of_generation_and_scoring():
    running, most = {"play": 0, "score": 0}, {"play": 0, "score": 0}

    async def busy(what):
        running[what] += 1
        most[what] = max(most[what], running[what])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running[what] -= 1

    async def slow(completion):
        await busy("score")
        return 1.0

    class Busy(vf.SingleTurnEnv):
        async def setup_state(self, state):
            await busy("play")
            return state

    env = Busy(dataset=ROWS * 3, rubric=vf.Rubric([slow]))
    limits = {"max_concurrent_generation": 2, "max_concurrent_scoring": 1}
    results = play(env, Client("1"), num_examples=-1, rollouts_per_example=3, **limits)
    assert sum(results.reward) == 27.0
    assert most == {"play": 2, "score": 1}


def test_rolltrees_own_clients_answer_with_their_attributes():
    env = vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric([exact]))
    step = play(env, ScriptedClient(lambda *_: "1")).state[0]["trajectory"][0]
    response = step["response"]
    assert isinstance(response, ModelResponse)
    assert (response.choices[0].message.content, response.choices[0].finish_reason) == ("1", "stop")
    assert response.model_dump(exclude_none=True)["choices"][0]["token_ids"]


def test_an_env_response_that_returns_the_state_too_is_told():
    class Older(Talk):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": "again"}], state

    env = Older(dataset=ROWS, rubric=vf.Rubric([exact]), max_turns=2, env_id="older")
    with pytest.raises(AttributeError) as raised:
        play(env, Client("1"))
    assert "Older.env_response of 'older' returned a tuple (list, State), " in str(raised.value)
    assert "Return a list of messages" in str(raised.value)


# -- sandboxes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_count": 1}, "gpu_count is 1.*ROLLTREE_SANDBOX=hosted"),
        ({"team_id": "t"}, "team_id.*prime-sandboxes"),
        ({"start_command": "serve"}, "start_command.*setup_state"),
        ({"docker_image": "mine:1"}, "docker_image='mine:1' needs Docker|docker pull mine:1"),
    ],
)
def test_what_a_machine_cannot_do_is_said_at_construction(settings, words, monkeypatch):
    monkeypatch.setenv("ROLLTREE_SANDBOX", "auto")
    with pytest.raises(ConfigError, match=words):
        vf.SandboxEnv(dataset=ROWS, **settings)


def test_hosted_settings_configure_docker(monkeypatch):
    from rolltree.verifiers.sandbox_client import SandboxClient, SandboxRequest

    client = SandboxClient("docker", timeout_s=7)
    request = SandboxRequest(
        docker_image="mine:1", cpu_cores=3, memory_gb=4, disk_size_gb=1, environment_vars={"A": "b"}
    )
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/docker")
    backend, limits = client._backend(request), client._limits(request)
    assert (backend.image, backend.cpus, backend.env) == ("mine:1", 3.0, {"A": "b"})
    assert (limits.memory_bytes, limits.disk_bytes, limits.wall_s) == (4 * 2**30, 2**30, 7)


async def test_a_command_has_its_own_time_limit_and_folder():
    from rolltree.verifiers.sandbox_client import CommandTimeout, SandboxClient, SandboxRequest

    client = SandboxClient("local", timeout_s=20)
    name = (await client.create(SandboxRequest(cpu_cores=2))).id
    with pytest.raises(CommandTimeout, match=r"after 0\.2s"):
        await client.execute_command(name, "sleep 20", timeout=0.2)
    await client.execute_command(name, "mkdir 'a b; touch c'")
    await client.execute_command(name, "echo 1 > n", working_dir="a b; touch c")
    assert (await client.execute_command(name, "cat 'a b; touch c/n'")).stdout == "1\n"
    assert "c" not in (await client.execute_command(name, "ls")).stdout.split("\n")
    lost = await client.execute_command(name, "true; echo here", working_dir="no such folder")
    assert (lost.stdout, lost.exit_code > 0) == ("", True)
    with pytest.raises(TypeError, match="working_folder"):
        await client.upload_file(name, "x", __file__, working_folder="y")
    await client.delete(name)


def test_an_engine_that_hangs_is_said(tmp_path, monkeypatch):
    from rolltree.verifiers import sandbox_client

    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexec sleep 60\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sandbox_client, "_DOCKER_WAIT_S", 0.2)
    request = sandbox_client.SandboxRequest(docker_image="hanging:1")
    with pytest.raises(ConfigError, match=r"no Docker engine answers .*0\.2 s.*'hanging:1'"):
        sandbox_client.SandboxClient("docker").check(request)


def test_python_keeps_its_variables_and_post_rollout_sees_the_sandbox(monkeypatch):
    monkeypatch.setenv("ROLLTREE_SANDBOX", "local")

    class Looks(vf.PythonEnv):
        async def post_rollout(self, state):
            state["left"] = await self.bash("cat note", state["sandbox_id"])

    env = Looks(dataset=ROWS, max_turns=4)
    assert [tool["function"]["name"] for tool in env.oai_tools] == ["python"]
    assert list(env.oai_tools[0]["function"]["parameters"]["properties"]) == ["code"]
    codes = ["x = 20\nprint('hi')\nx + 1", "1 / 0", "open('note', 'w').write(str(x)) and None"]
    calls = {n: ("python", json.dumps({"code": code})) for n, code in enumerate(codes)}
    state = play(env, Client("", "", "", "done", tool_calls=calls)).state[0]
    told = [m["content"] for m in state["completion"] if m["role"] == "tool"]
    assert told[0] == "hi\nOut[1]: 21"
    assert told[1].endswith("ZeroDivisionError: division by zero")
    assert told[2] == "(no output)"
    assert state["left"] == "20"
    assert (env.active_sandboxes, env.sandbox_client._open) == (set(), {})


def test_a_sandbox_client_of_the_authors_own():
    class Own:
        deleted = []

        async def create(self, request):
            return SimpleNamespace(id=f"box of {request.docker_image}")

        async def wait_for_creation(self, name):
            assert name == "box of mine:1"

        async def execute_command(self, name, command):
            return SimpleNamespace(stdout=f" ran {command} ", stderr="oh", exit_code=0)

        async def delete(self, name):
            self.deleted.append(name)

    env = vf.SandboxEnv(dataset=ROWS, docker_image="mine:1", gpu_count=2, sandbox_client=Own())
    calls = {0: ("bash", '{"command": "ls"}')}
    state = play(env, Client("", "done", tool_calls=calls)).state[0]
    assert state["completion"][1]["content"] == "ran ls\nstderr:\noh"
    assert Own.deleted == ["box of mine:1"]


def test_python_in_sandboxes_of_the_authors_own_begins_with_its_worker(monkeypatch):
    monkeypatch.setenv("ROLLTREE_SANDBOX", "local")
    env = vf.PythonEnv(dataset=ROWS, sandbox_client=SimpleNamespace())
    assert "python_worker" in env.sandbox_request.start_command
    assert "python_worker" not in vf.PythonEnv(dataset=ROWS).sandbox_request.start_command


# -- data ------------------------------------------------------------------------------------------


def test_example_data_comes_from_a_file_where_there_is_one(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    from rolltree.verifiers import datasets as example

    monkeypatch.setenv("ROLLTREE_HOME", str(tmp_path))
    folder = tmp_path / "datasets"
    folder.mkdir()
    monkeypatch.setattr(example, "hub_rows", lambda *_: (_ for _ in ()).throw(ConfigError("off")))
    with pytest.raises(ConfigError, match=r"openrs_easy-train\.jsonl"):
        vf.load_example_dataset("openrs_easy")
    rows = [{"problem": str(n), "answer": "1", "level": level} for n, level in enumerate("EH")]
    rows = [{**row, "level": {"E": "Easy", "H": "Hard"}[row["level"]]} for row in rows]
    (folder / "openrs_easy-train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = vf.load_example_dataset("openrs_easy")
    assert found.to_list() == [{"question": "0", "answer": "1"}]
    assert (set(example._EXAMPLES)) >= {"prime_code", "openbookqa", "mmlu_pro", "aime2025"}


def test_a_hub_dataset_stays_one():
    datasets = pytest.importorskip("datasets")
    env = vf.SingleTurnEnv(dataset=datasets.Dataset.from_list(ROWS), system_prompt="Be brief.")
    assert env.dataset.column_names == ["question", "answer", "example_id", "prompt", "task"]
    assert [m["role"] for m in env.dataset[0]["prompt"]] == ["system", "user"]
    before = env.dataset["question"][:]
    assert sorted(env.get_dataset(seed=1)["question"]) == sorted(before)
    assert env.dataset["question"][:] == before  # a seed shuffles for the one who asked
    assert env.num_examples("train") == 3
    assert env.example("train", 1)["question"] == "1 + 1?"
