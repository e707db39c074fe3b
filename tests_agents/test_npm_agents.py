"""Agents from npm, unmodified, fix a file with their own tools in front of a gateway."""

from __future__ import annotations

import json

import pytest
from agents_kit import RIGHT, TASK, calling, causes, check_recorded, continues, num_answers, run

import rolltree as rt
from rolltree.inference import ChatRenderer
from rolltree.testing import ByteTokenizer, ScriptedClient

BOTH = pytest.mark.parametrize("how", ["whole", "streamed"])
TOKEN_DELAY_S = 0.0002


def gateway(script):
    return rt.gateway(ScriptedClient(script, token_delay_s=TOKEN_DELAY_S))


def in_turn(*answers):
    return lambda messages: answers[num_answers(messages)]


# -- Codex CLI -----------------------------------------------------------------------------------

CODEX = """
model = "{model}"
model_provider = "gateway"
check_for_update_on_startup = false

[model_providers.gateway]
name = "gateway"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false

[features]
apps = false
plugins = false
remote_plugin = false
"""
PATCH = """*** Begin Patch
*** Update File: add.py
@@
 def add(a, b):
-    return a - b
+    return a + b
*** End Patch"""


# It offers its tool for patches to models that it knows, as a custom tool with a grammar.
@pytest.mark.parametrize("model", ["gpt-5.5", "my-model"])
async def test_codex(from_npm, tested, home, work, model):
    patch = ("apply_patch", {"input": PATCH})
    if model == "my-model":
        patch = ("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}\nEOF"})
    script = in_turn(calling(("exec_command", {"cmd": "cat add.py"})), calling(patch), "Fixed.")
    async with gateway(script) as g, g.session() as s:
        (home / ".codex").mkdir()
        settings = CODEX.format(model=model, base_url=s.base_url)
        (home / ".codex" / "config.toml").write_text(settings)
        command = [from_npm / ".bin" / "codex", "exec", "--skip-git-repo-check"]
        said = await run([*command, "--sandbox=danger-full-access", TASK], s, home, work)
        assert said.strip() == "Fixed."
        assert (work / "add.py").read_text() == RIGHT
        assert continues(s) == [None, 0, 1]
        assert causes(s) == []
        if model == "gpt-5.5":
            tested("Codex CLI", "responses", s, "fixed a file with its custom tool `apply_patch`")


# -- Claude Code ---------------------------------------------------------------------------------

CLAUDE = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "IS_SANDBOX": "1",  # it may run its tools without asking although it is root
}
COUNT, NAME = "Count the lines of add.py.", "Say the name of the function in add.py."


def claude_team(path):
    """Return the script of a lead, which fixes a file, and of the two sub-agents that it asks."""
    asked = {"subagent_type": "general-purpose", "run_in_background": False}
    lead = in_turn(
        calling(("Read", {"file_path": path})),
        calling(("Edit", {"file_path": path, "old_string": "a - b", "new_string": "a + b"})),
        calling(
            ("Agent", {"description": "count", "prompt": COUNT, **asked}),
            ("Agent", {"description": "name", "prompt": NAME, **asked}),
        ),
        "Fixed.",
        "It was add.py.",
    )
    count = in_turn(calling(("Bash", {"command": "wc -l add.py", "description": "count"})), "2")
    name = in_turn(calling(("Read", {"file_path": path})), "add")

    def team(messages):
        said = next(each["content"] for each in messages if each["role"] == "user")
        return (count if COUNT in said else name if NAME in said else lead)(messages)

    return team


@pytest.fixture
def claude(from_npm, home, work):
    """Have Claude Code answer a task, and return what it says about it."""

    async def play(session, task, *options):
        command = [from_npm / ".bin" / "claude", *options, "-p", task, "--output-format=json"]
        command += ["--dangerously-skip-permissions"]
        done = json.loads(await run(command, session, home, work, **CLAUDE))
        assert done["subtype"] == "success"
        return done

    return play


async def test_claude_code_with_two_sub_agents(claude, tested, work):
    async with gateway(claude_team(str(work / "add.py"))) as g, g.session() as s:
        done = await claude(s, TASK)
        assert done["result"] == "Fixed."
        assert done["subagent_stats"]["completed"] == 2
        assert (work / "add.py").read_text() == RIGHT
        found = continues(s)
        # Three conversations: the lead's, and each sub-agent's, whose calls overlap.
        assert found.count(None) == 3
        assert len(found) == 8
        # It sends its edit back with a default filled in.
        assert causes(s) == []
        tested("Claude Code", "messages", s, "fixed a file, then two sub-agents in parallel")


def in_json(call):
    """Write a call as Qwen3 does."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def in_tags(call):
    """Write a call as Qwen3.5 does."""
    given = json.loads(call["function"]["arguments"]).items()
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given)
    return f"<tool_call>\n<function={call['function']['name']}>\n{body}</function>\n</tool_call>"


def reasoned(script, start, write):
    """Return the script of a model that reasons before each answer, and writes calls so."""

    def answer(messages):
        said = script(messages)
        said = {"content": said} if isinstance(said, str) else said
        thought = f"{start}Answer {num_answers(messages)} comes next.\n</think>\n\n"
        return thought + said["content"] + "\n".join(map(write, said.get("tool_calls", ())))

    return answer


@pytest.mark.parametrize("history", ["keep", "template"])
@pytest.mark.parametrize(
    ("model", "name", "start", "write"),
    [("Qwen3", "qwen3", "<think>\n", in_json), ("Qwen3.5", "qwen3_5_think", "", in_tags)],
)
async def test_claude_code_on_a_vendors_template(
    claude, chat_template, tested, work, model, name, start, write, history
):
    """The templates are the vendor's own, as trl's package has them; each byte is a token."""
    renderer = ChatRenderer(ByteTokenizer(chat_template(name)), history=history)
    script = reasoned(claude_team(str(work / "add.py")), start, write)
    client = ScriptedClient(script, renderer=renderer, token_delay_s=TOKEN_DELAY_S)
    async with rt.gateway(client) as g, g.session() as s:
        done = await claude(s, TASK)
        assert done["result"] == "Fixed."
        assert done["subagent_stats"]["completed"] == 2
        assert (work / "add.py").read_text() == RIGHT
        done = await claude(s, "Which file was it?", "--continue")
        assert done["result"] == "It was add.py."
        found = continues(s)
        assert len(found) == 9
        shown = renderer.decode(s.trajectory[-1]["tokens"]["prompt_ids"])
        if history == "template":
            # Reasoning before the last question is left out, as the templates have it.
            assert "comes next." not in shown
            assert causes(s)[:5] == ["reasoning_stripped"] * 5
            check_recorded(s)
            return
        assert shown.count("comes next.") == 4
        assert found.count(None) == 3
        assert causes(s) == []
        did = "the same, with reasoning before each answer, and a second question"
        tested(f"Claude Code, {model}", "messages", s, did)


# -- OpenCode ------------------------------------------------------------------------------------


async def test_opencode(opencode, tested, work):
    path = str(work / "add.py")
    edit = {"filePath": path, "oldString": "a - b", "newString": "a + b"}
    fix = in_turn(calling(("read", {"filePath": path})), calling(("edit", edit)), "Fixed.")

    def script(messages):
        return "A wrong sign" if "title generator" in messages[0]["content"] else fix(messages)

    async with gateway(script) as g, g.session() as s:
        said = await opencode(s)
        assert "Fixed." in said
        assert (work / "add.py").read_text() == RIGHT
        # A title for the session, which it asks for at the same time, and the task.
        assert sorted(continues(s), key=str) == [1, 2, None, None]
        assert causes(s) == []
        tested("OpenCode", "chat", s, "named the session, and fixed a file")


# -- goose ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["chat", "messages"])
async def test_goose(from_npm, tested, home, work, api):
    goose = from_npm / "@aaif" / "goose-binary-linux-x64" / "bin" / "goose"
    if not goose.exists():
        pytest.skip("goose's package is for x86-64 Linux")
    edit = {"path": str(work / "add.py"), "before": "a - b", "after": "a + b"}
    lead = in_turn(
        calling(("shell", {"command": "cat add.py"})),
        calling(("edit", edit)),
        calling(("delegate", {"instructions": COUNT}), ("delegate", {"instructions": NAME})),
        "Fixed.",
    )
    count = in_turn(calling(("shell", {"command": "wc -l add.py"})), "2")
    name = in_turn(calling(("shell", {"command": "cat add.py"})), "add")

    def script(messages):
        said = "".join(each["content"] for each in messages if each["role"] == "user")
        if "short title" in messages[0]["content"]:
            return "A wrong sign"
        return (count if COUNT in said else name if NAME in said else lead)(messages)

    async with gateway(script) as g, g.session() as s:
        quiet = {"GOOSE_DISABLE_KEYRING": "1", "GOOSE_TELEMETRY_OFF": "1"}
        provider = {"chat": "openai", "messages": "anthropic"}[api]
        model = {"GOOSE_PROVIDER": provider, "GOOSE_MODEL": "any", "GOOSE_MODE": "auto"}
        if api == "messages":
            model["ANTHROPIC_HOST"] = s.root_url
        command = [goose, "run", "--no-session", "--with-builtin", "developer", "-t", TASK]
        said = await run(command, s, home, work, **model, **quiet)
        assert "Fixed." in said
        assert (work / "add.py").read_text() == RIGHT
        # A title, for which it asks at the same time, the task, and two sub-agents, whose calls it
        # sends back in messages of their own.
        assert continues(s).count(None) == 4
        assert len(s.trajectory) == 9
        assert causes(s) == []
        did = "named the session, fixed a file, then two sub-agents in parallel"
        tested("goose", api, s, did)


# -- Qwen Code -----------------------------------------------------------------------------------


async def test_qwen_code(from_npm, tested, home, work):
    path = str(work / "add.py")
    edit = {"file_path": path, "old_string": "a - b", "new_string": "a + b"}
    fix = in_turn(calling(("read_file", {"file_path": path})), calling(("edit", edit)), "Fixed.")
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
    }
    (home / ".qwen").mkdir()
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    async with gateway(fix) as g, g.session() as s:
        command = [from_npm / ".bin" / "qwen", "-p", TASK, "--yolo", "--auth-type=openai"]
        said = await run(command, s, home, work, OPENAI_MODEL="any")
        assert said.strip().endswith("Fixed.")
        assert (work / "add.py").read_text() == RIGHT
        assert continues(s) == [None, 0, 1]
        assert causes(s) == []
        tested("Qwen Code", "chat", s, "fixed a file")


# -- Vercel AI SDK -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
async def test_vercel_ai_sdk(vercel, tested, api, how):
    script = in_turn(calling(("add", {"a": 17, "b": 25})), "It is 42.")
    async with gateway(script) as g, g.session() as s:
        said = await vercel(s, api, how)
        assert said == {"answer": "It is 42.", "steps": 2}
        assert continues(s) == [None, 0]
        assert causes(s) == []
        tested("Vercel AI SDK", api, s, "used a tool")
