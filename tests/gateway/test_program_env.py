"""`ProgramEnv` with real processes: what they get, what becomes of them, and how it is scored."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from program_kit import (
    ASK,
    PYTHON,
    is_alive,
    one,
    play,
    play_hurried,
    rows,
    said,
    script,
    wait_for_death,
)

import rolltree as rt
from rolltree.gateway.calls import AgentCall
from rolltree.inference.deadline import Clock
from rolltree.rollouts import build_requests
from rolltree.rollouts.requests import Episode, playing
from rolltree.samples import build_samples
from rolltree.sandbox import Limits
from rolltree.testing import ScriptedClient
from rolltree.tokens import peek
from rolltree.values.errors import (
    AnswerTooLarge,
    BadResponse,
    ConfigError,
    ConnectionFailed,
    ModelError,
    PromptTooLong,
    ServerError,
    TokenError,
    UnknownArgument,
    UnsupportedSetting,
)
from rolltree.values.types import SamplingParams


def test_a_command_is_given_a_folder_a_url_a_key_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_SECRET", "not-for-programs")
    monkeypatch.setenv("MY_SETTING", "for programs")
    code = """
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "files": sorted(os.listdir("."))}))
print(ask(sys.argv[1]), sys.stdin.read(), open("task/row.json").read(), sep="|")
"""
    (state,) = play_row(
        [*script(code), "{question}"],
        files={"task/row.json": "{row}", "note.txt": "{info.note}"},
        stdin="<{prompt}>",
        env={"MODEL": "{model}", "WHERE": "{folder}"},
        pass_env=["MY_SETTING"],
    )
    assert state.error is None
    first, second = state["program"]["stdout"].splitlines()
    seen = json.loads(first)
    folder = seen["cwd"]
    assert seen["files"] == ["note.txt", "task"]
    assert seen["env"].pop("PATH")
    assert seen["env"].pop("LANG")
    assert {name: seen["env"].pop(name) for name in ("HOME", "TMPDIR", "WHERE")} == {
        "HOME": folder, "TMPDIR": folder, "WHERE": folder,
    }  # fmt: skip
    assert seen["env"].pop("MY_SETTING") == "for programs"
    assert seen["env"].pop("MODEL") == "scripted"
    url = seen["env"].pop("OPENAI_BASE_URL")
    assert url.startswith("http://127.0.0.1:")
    assert seen["env"].pop("ANTHROPIC_BASE_URL") == url.removesuffix("/v1")
    # The key is a secret of this rollout, and does not get into its record.
    assert seen["env"] == {"OPENAI_API_KEY": "[redacted]", "ANTHROPIC_API_KEY": "[redacted]"}
    answer, stdin, row = second.split("|")
    assert (answer, stdin) == ("answer 0", "<question 0>")
    assert json.loads(row)["question"] == "question 0"
    assert "answer" not in json.loads(row)
    assert state["completion"] == [{"role": "assistant", "content": "answer 0"}]
    assert (state["terminated"], state["stop_condition"]) == (True, "program_exit")


def test_a_fixed_seed_of_the_agent_does_not_make_a_group_equal():
    async def agent(session, state):
        for seed in (42, 42, 7, None):
            messages = [{"role": "user", "content": "?"}]
            await session.complete(AgentCall(messages, SamplingParams(seed=seed)))

    client = ScriptedClient(lambda messages: "yes")
    env = rt.ProgramEnv(agent, dataset=rows(1), rubric=rt.Rubric([one]))
    for _ in range(2):
        env.evaluate_sync(client, rollouts_per_example=2, max_concurrent=1)
    seeds = [call.sampling.seed for call in client.calls]
    assert seeds[:8] == seeds[8:]  # an evaluation can be repeated
    assert None not in seeds
    first, second = seeds[:4], seeds[4:8]
    assert first[0] == first[1] != first[2]
    assert not set(first) & set(second)


@pytest.mark.parametrize("num_after", [0, 100, 990, 1010, 1030])
def test_no_half_of_a_key_is_kept(num_after):
    """Wherever the output is cut: the key is printed across the beginning of what is kept."""
    code = f"""
import sys
ask("?")
sys.stdout.write("x" * 200_000)
sys.stdout.flush()
sys.stdout.write(os.environ["OPENAI_API_KEY"] + "y" * {num_after})
"""
    (state,) = play(script(code), tail_bytes=1024)
    stdout = state["program"]["stdout"]
    assert len(stdout) == 1024
    assert set(stdout) <= set("xy[redacted]")


def play_row(program, **settings):
    env = rt.ProgramEnv(
        program,
        dataset=[{"question": "question 0", "answer": "answer 0", "info": {"note": "read me"}}],
        rubric=rt.Rubric([one]),
        **settings,
    )
    return env.evaluate_sync(ScriptedClient(said)).state


def test_rewards_read_the_folder_the_files_the_output_and_the_exit_status():
    seen = []

    def reward(state):
        program = state["program"]
        with open(f"{program['folder']}/made.txt") as file:
            seen.append(file.read())
        return program["exit_status"] + len(program["files"])

    code = """
open("made.txt", "w").write(ask("question 7"))
os.mkdir("out"); open("out/a.log", "w").write("log"); open("out/big.log", "w").write("x" * 100)
os.symlink("/etc/passwd", "out/link.log")
print("end of output", file=sys.stderr)
sys.exit(3)
"""
    (state,) = play(
        script(code),
        rubric=rt.Rubric([reward]),
        collect=["out/*.log", "made.txt", "out/link.log"],
        max_file_bytes=50,
    )
    assert seen == ["answer 7"]
    program = state["program"]
    assert program["files"] == {
        "made.txt": "answer 7", "out/link.log": None, "out/a.log": "log", "out/big.log": None,
    }  # fmt: skip
    assert (state["reward"], state["error"]) == (7.0, None)
    assert (program["exit_status"], program["stderr"]) == (3, "end of output\n")
    # Scored: the folder is gone.
    assert program["folder"] is None
    assert program["cpu_s"] > 0


def test_files_that_are_too_many_are_counted():
    code = """
ask("q")
for number in range(103): open(f"{number:03}.log", "w").write("log")
"""
    (state,) = play(script(code), collect=["*.log", "none.txt"])
    files = state["program"]["files"]
    assert (len(files), files["none.txt"], state["program"]["num_files_left_out"]) == (100, None, 4)
    assert state["error"] is None


def test_folders_stay_until_the_group_was_compared():
    seen = []

    def best(states):
        seen.extend(Path(s["program"]["folder"], "made.txt").read_text() for s in states)
        return [1.0 for _ in states]

    env = rt.ProgramEnv(
        script("open('made.txt', 'w').write(ask('question 1'))"),
        dataset=rows(1),
        rubric=rt.Rubric([best]),
    )
    states = env.evaluate_sync(ScriptedClient(said), rollouts_per_example=3).state
    assert seen == ["answer 1"] * 3
    assert [state["program"]["folder"] for state in states] == [None] * 3
    assert not env._folders


ENDS = {
    "exit": ("ask('q'); sys.exit(7)", {"exit_status": 7}, None),
    "signal": ("ask('q'); os.kill(os.getpid(), 9)", {"exit_status": None, "signal": 9}, None),
    "time": ("print('here', flush=True); ask('q'); time.sleep(1000)", {}, "time_limit"),
    "output": ("ask('q')\nwhile True: os.write(1, b'flood ' * 10000)", {}, "env"),
}


@pytest.mark.parametrize("ended", ENDS)
def test_what_a_model_can_cause_is_scored(ended):
    """A model that could make its program fail, and so have no reward, would learn to."""
    code, expected, reason = ENDS[ended]
    run = play_hurried if ended == "time" else (lambda *a, **s: play(*a, **s)[0])
    state = run(script(code), max_output_bytes=2**20)
    program = state["program"]
    assert program["ended"] == ended
    assert {key: program[key] for key in expected} == expected
    assert (state["error"], state["reward"]) == (None, 1.0)
    assert len(state["trajectory"]) == 1
    assert state["truncation_reason"] == reason
    assert state["truncated"] is (reason is not None)
    assert state["terminated"] is (reason is None)
    if ended == "time":
        assert program["stdout"] == "here\n"
    if ended == "output":
        assert 0 < len(program["stdout"]) <= 2**14
        assert program["stdout"].startswith("flood ") or "flood " in program["stdout"]


def test_nothing_of_a_program_is_left(tmp_path):
    """One child in a session of its own, one that ignores signals, one that forked twice."""
    pids = tmp_path / "pids"
    code = f"""
import signal
def note():
    with open({str(pids)!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
for kind in range(3):
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if kind > 0:
            os.setsid()
        if kind > 1 and os.fork():
            os._exit(0)
        note()
        time.sleep(1000)
while not os.path.exists({str(pids)!r}) or len(open({str(pids)!r}).readlines()) < 3:
    time.sleep(0.01)
ask("q")
"""
    (state,) = play(script(code))
    assert state["program"]["exit_status"] == 0
    assert len(pids.read_text().split()) == 3
    wait_for_death(pids.read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="it needs /proc")
@pytest.mark.parametrize("num_killed", [1, 2])
def test_nothing_is_left_of_a_program_that_kills_its_supervisors(tmp_path, num_killed):
    """A daemon in a session of its own, whose parents are dead."""
    pids = tmp_path / "pids"
    code = f"""
ask("q")
above, pid = [], os.getpid()
for _ in range({num_killed}):
    stat = open(f"/proc/{{pid}}/stat").read()
    pid = int(stat.rpartition(")")[2].split()[1])
    assert b"supervisor.py" in open(f"/proc/{{pid}}/cmdline", "rb").read()
    above.append(pid)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    for fd in range(3):
        os.close(fd)
    open({str(pids)!r}, "a").write(f"{{os.getpid()}} {{os.getppid()}}")
    time.sleep(1000)
while not os.path.exists({str(pids)!r}) or not open({str(pids)!r}).read():
    time.sleep(0.01)
for pid in reversed(above):
    os.kill(pid, 9)
time.sleep(1000)
"""
    (state,) = play(script(code))
    assert state["program"]["ended"] == "lost"
    assert not is_alive(pids.read_text().split()[0])


def test_a_program_that_ignores_sigterm_is_ended_with_its_rollout(tmp_path):
    pid = tmp_path / "pid"
    code = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(pid)!r}, "w").write(str(os.getpid()))
ask("q")
time.sleep(1000)
"""
    state = play_hurried(script(code))
    assert state["program"]["ended"] == "time"
    wait_for_death([pid.read_text()])


@pytest.mark.parametrize("own", [None, 600.0])
def test_the_time_limit_of_the_run_holds_for_programs(own):
    request = build_requests(rt.ProgramEnv(["x"], dataset=rows(1)), "eval")[0]
    env = rt.ProgramEnv(["x"], dataset=rows(1), time_limit_s=own)
    assert env._clock(env.time_limit_s).limit_s == own
    with playing(Episode(request, Clock(60.0))):
        assert 0 < env._clock(env.time_limit_s).limit_s <= 60


def test_a_deadline_ends_the_program_and_keeps_its_steps(tmp_path):
    pid = tmp_path / "pid"
    code = f"open({str(pid)!r}, 'w').write(str(os.getpid())); ask('q'); time.sleep(1000)"
    state = play_hurried(script(code), "deadline_s")
    assert state["error"].type == "RolloutTimeout"
    assert len(state["trajectory"]) == 1
    assert state["reward"] is None
    wait_for_death([pid.read_text()])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (["no-such-program-here"], "there is no program 'no-such-program-here'"),
        (["/no/such/program"], "/no/such/program cannot be run"),
        ([*PYTHON, "import sys; sys.exit('I could not start')"], "I could not start"),
        ([*PYTHON, "import os; os.kill(os.getpid(), 15)"], "ended by signal 15"),
        ([*PYTHON, ASK + "ask('q', os.environ['OPENAI_BASE_URL'] + '/nowhere')"], "status 404"),
    ],
)
def test_a_program_that_never_asks_is_a_failed_rollout(program, message):
    program = [*program[:-1], program[-1].replace("{", "{{").replace("}", "}}")]
    (state,) = play(program)
    assert state["error"].type == "ProgramError"
    assert message in state["error"].message
    assert (state["reward"], state["is_completed"]) == (None, False)


class Failing(ScriptedClient):
    """Its server fails in the given calls."""

    def __init__(self, failing, error=None):
        super().__init__(said)
        self.failing, self.num = failing, 0
        self.error = error or ConnectionFailed("the server is gone")

    async def respond(self, call, memory):
        self.num += 1
        if self.num in self.failing:
            raise self.error
        return await super().respond(call, memory)


ASK_ALWAYS = """
for number in range(3):
    try:
        print(ask(f"question {number}"))
    except SystemExit as error:
        print(error)
"""


@pytest.mark.parametrize(("failing", "error"), [({3}, "ConnectionFailed"), ({2}, None)])
def test_a_server_that_fails_at_the_end_is_not_the_programs_failure(failing, error):
    (state,) = play(script(ASK_ALWAYS), Failing(failing))
    assert getattr(state["error"], "type", None) == error
    assert (state["reward"] is None) == (error is not None)
    assert "status 503" in state["program"]["stdout"]
    assert len(state["trajectory"]) == 2
    if error:
        assert state["error"].phase == "model"


REFUSED = ServerError("the template has no such role", status=400, retryable=False)


@pytest.mark.parametrize(
    ("error", "failing", "failed"),
    [
        (REFUSED, {3}, False),  # it may have been what the model wrote
        (REFUSED, {1, 2, 3}, True),  # the harness asks for what the server never does
        (ServerError("wrong key", status=401, retryable=False), {3}, True),
        (ServerError("overloaded", status=503, retryable=True), {3}, True),
        (TokenError("no logprobs"), {3}, True),
        (UnsupportedSetting("no logit_bias"), {1, 2, 3}, True),
        # Only an answer that cannot be parsed makes the agent ask for JSON.
        (UnsupportedSetting("no response_format"), {3}, False),
        (AnswerTooLarge("1 GB"), {3}, False),
        (BadResponse("no choices"), {3}, True),
        (ModelError("the engine is closed"), {3}, True),
        (PromptTooLong("too long"), {3}, False),
        (ValueError("a message of no known kind"), {3}, False),
    ],
)
def test_whose_failure_it_is(error, failing, failed):
    (state,) = play(script(ASK_ALWAYS), Failing(failing, error))
    assert (state["reward"] is None) is failed
    if failed:
        assert (state["error"].type, state["error"].phase) == (type(error).__name__, "model")
    else:
        assert state["error"] is None
    if isinstance(error, PromptTooLong):
        assert (state["truncation_reason"], state["prompt_too_long"]) == ("max_seq_len", True)


def test_a_refusal_does_not_hide_that_the_server_failed_before_it():
    class Worse(Failing):
        async def respond(self, call, memory):
            if self.num == 2:
                self.error = UnsupportedSetting("no response_format")
            return await super().respond(call, memory)

    (state,) = play(script(ASK_ALWAYS), Worse({2, 3}))
    assert (state["error"].type, state["reward"]) == ("ConnectionFailed", None)


@pytest.mark.parametrize("failing", [set(), {2}])
def test_an_agent_whose_library_gives_up_on_an_answer_is_scored(failing):
    async def agent(session, state):
        import openai

        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            for text in ("question 1", "in JSON, please"):
                messages = [{"role": "user", "content": text}]
                await client.chat.completions.create(model="m", messages=messages)
        raise SystemExit("cannot be parsed")

    (state,) = play(agent, Failing(failing, UnsupportedSetting("no response_format")))
    assert (state["error"], state["reward"]) == (None, 1.0)
    ended = state["program"]["error"]
    assert ended["type"] == ("BadRequestError" if failing else "SystemExit")


def test_limits_of_calls_and_tokens_end_the_rollout():
    (state,) = play(script(ASK_ALWAYS), max_calls=2)
    assert (state["truncation_reason"], len(state["trajectory"])) == ("max_steps", 2)
    assert (state["reward"], state["stop_condition"]) == (1.0, "max_steps")
    (state,) = play(script(ASK_ALWAYS), max_tokens=4)
    assert state["truncation_reason"] == "budget"
    (state,) = play(script(ASK_ALWAYS), max_seq_len=8)
    assert (state["truncation_reason"], len(state["trajectory"])) == ("max_seq_len", 1)
    assert state["prompt_too_long"] is True


def test_sub_agents_are_the_agents_of_steps():
    code = """
root = os.environ["ANTHROPIC_BASE_URL"]
ask("question 1")
ask("question 2", root + "/agents/helper/v1")
"""
    (state,) = play(script(code))
    agents = [peek(step, "extras").get("agent", "") for step in state["trajectory"]]
    assert sorted(agents) == ["", "helper"]


@pytest.mark.parametrize("num", [25, pytest.param(100, marks=pytest.mark.long)])
def test_programs_at_once_keep_their_calls_apart(num):
    code = """
history = []
for turn in range(2):
    history.append({"role": "user", "content": f"{sys.argv[1]} turn {turn}"})
    history.append({"role": "assistant", "content": ask(history)})
print(history[-1]["content"])
"""
    env = rt.ProgramEnv([*script(code), "{question}"], dataset=rows(num), rubric=rt.Rubric([one]))
    states = env.evaluate_sync(ScriptedClient(said), max_concurrent=num).state
    assert [state["error"] for state in states] == [None] * num
    for number, state in enumerate(states):
        assert state["program"]["stdout"] == f"answer {number} turn 1\n"
        assert [len(step["prompt"]) for step in state["trajectory"]] == [1, 3]
        assert build_samples([state]).breaks == ()


# Functions


async def test_what_a_function_returns_may_be_nested_deeply():
    """It may be what the model wrote, parsed."""

    async def agent(session, state):
        await ask(session)
        found = []
        for _ in range(5000):
            found = [found]
        return found

    async def ask(session):
        import openai

        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            messages = [{"role": "user", "content": "q"}]
            await client.chat.completions.create(model="m", messages=messages)

    async with rt.ProgramEnv(agent, dataset=rows(1), rubric=rt.Rubric([one])) as env:
        (state,) = (await env.evaluate(ScriptedClient(["[[[["]))).state
    assert (state["error"], state["reward"]) == (None, 1.0)


async def test_a_function_is_played():
    async def agent(session, state):
        import openai

        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            messages = [{"role": "user", "content": state["question"]}]
            reply = await client.chat.completions.create(model="m", messages=messages)
        return {"said": reply.choices[0].message.content}

    env = rt.ProgramEnv(agent, dataset=rows(3), rubric=rt.Rubric([one]))
    async with env:
        states = (await env.evaluate(ScriptedClient(said))).state
    assert [s["program"]["returned"] for s in states] == [{"said": f"answer {i}"} for i in range(3)]
    assert [s["program"]["exit_status"] for s in states] == [0, 0, 0]


def test_a_function_that_fails_or_hangs_is_scored():
    async def fails(session, state):
        await session.complete(rt.gateway.calls.AgentCall([{"role": "user", "content": "q"}]))
        raise ValueError("the answer is not a number")

    async def hangs(session, state):
        await session.complete(rt.gateway.calls.AgentCall([{"role": "user", "content": "q"}]))
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            raise

    (state,) = play(fails)
    assert (state["reward"], state["error"]) == (1.0, None)
    assert state["program"]["exit_status"] == 1
    assert state["program"]["error"]["message"] == "the answer is not a number"
    state = play_hurried(hangs)
    assert (state["reward"], state["truncation_reason"]) == (1.0, "time_limit")
    (state,) = play(lambda_that_never_asks)
    assert state["error"].type == "ProgramError"
    assert "KeyError: 'nothing'" in state["error"].message


async def lambda_that_never_asks(session, state):
    raise KeyError("nothing")


# Settings


def plain(session, state):
    return None


async def agent(session, state):
    return None


@pytest.mark.parametrize(
    ("program", "settings", "message"),
    [
        ("python agent.py", {}, "has to be a list of arguments"),
        ([], {}, "has to be a list of arguments"),
        (plain, {}, "async def agent"),
        (agent, {"sandbox": "local"}, "sandbox is for commands"),
        (["x", "{qestion}"], {}, "Did you mean 'question'"),
        (["x", "{question!r}"], {}, "cannot be filled in"),
        (["x", "{"], {}, "cannot be filled in"),
        (["x"], {"env": {"A": "{info.repo}"}}, "this row does not have"),
        (["x"], {"files": {"a": "{nothing}"}}, "this row does not have"),
        (["x"], {"time_limit_s": 0}, "time_limit_s is 0"),
        (agent, {"sandbox_limits": Limits()}, "sandbox_limits is for commands"),
        (["x"], {"system_prompt": "be good"}, "'system_prompt' has no effect"),
        (["x"], {"max_calls": 0}, "max_calls is 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(program, settings, message):
    with pytest.raises(ConfigError, match=None) as caught:
        rt.ProgramEnv(program, dataset=rows(1), **settings)
    assert message in str(caught.value)


def test_unknown_settings_and_stop_conditions_are_refused():
    with pytest.raises(UnknownArgument, match="Did you mean 'time_limit_s'"):
        rt.ProgramEnv(["x"], dataset=rows(1), time_limit=3)

    class Stopping(rt.ProgramEnv):
        @rt.stop
        async def over(self, state):
            return True

    with pytest.raises(ConfigError, match="'over' has no effect"):
        Stopping(["x"], dataset=rows(1))


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        rt.ProgramEnv([sys.executable], files={"a.py": tmp_path / "a.py"}, dataset=rows(1))


def test_an_event_loop_that_ends_frees_the_port():
    import socket

    ports = []

    def note(state):
        ports.append(int(state["program"]["stdout"]))
        return 1.0

    code = "ask('q'); print(urlsplit(os.environ['OPENAI_BASE_URL']).port)"
    env = rt.ProgramEnv(script(code), dataset=rows(1), rubric=rt.Rubric([note]))
    for _ in range(2):  # each in a loop of its own
        env.evaluate_sync(ScriptedClient(said))
    for port in ports:
        with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", port))


def test_a_column_that_the_outcome_would_hide_is_refused():
    rows = [{"question": "q", "answer": "a", "program": "p"}]
    with pytest.raises(ConfigError, match="Rename it"):
        rt.ProgramEnv(["true"], dataset=rows, rubric=rt.Rubric([lambda: 1.0]))


# -- limits without a sandbox ---------------------------------------------------------------------

GREEDY = {
    "memory": ("kept = bytearray(2**29); kept[::4096] = b'x' * 2**17", {"memory_bytes": 2**28}),
    # Each of the two has less than the limit.
    "memory of all": (
        "os.fork(); kept = bytearray(150 * 2**20); kept[::4096] = b'x' * 38400",
        {"memory_bytes": 2**28},
    ),
    "disk": ("open('a', 'wb').write(bytes(2**24))", {"disk_bytes": 2**20}),
    "disk of many": ("[open(str(i), 'w') for i in range(50)]", {"max_files": 20}),
    "cpu": ("while True: pass", {"cpu_s": 0.5}),
    "processes": ("[os.fork() for _ in range(6)]", {"max_processes": 8}),
}


@pytest.mark.parametrize("what", GREEDY)
def test_a_command_without_a_sandbox_is_held_to_the_limits_that_were_asked_for(what):
    code, limits = GREEDY[what]
    program = script(f"ask('q'); {code}; time.sleep(600)" if what != "cpu" else f"ask('q')\n{code}")
    (state,) = play(program, sandbox_limits=Limits(wall_s=600, **limits))
    assert (state["program"]["ended"], state["truncation_reason"]) == (what.split()[0], "env")
    assert (state["error"], state["reward"]) == (None, 1.0)
    level = state["sandbox_level"]
    assert level["protections"]["memory"].startswith("polled")
    assert "network" in level["missing"]


def test_a_command_without_limits_is_not_watched():
    code, _ = GREEDY["disk"]
    (state,) = play(script(f"ask('q'); {code}"))
    assert (state["program"]["ended"], state["program"]["exit_status"]) == ("exit", 0)
    assert "memory" in state["sandbox_level"]["missing"]
