"""Codex CLI as an environment: tasks in a folder, and a reward for the file that it leaves there.

    user       Write the larger of 3 and 8 into out.txt
    assistant  exec_command {"cmd": "echo 8 > out.txt"}
    tool       Process exited with code 0 ...
    assistant  Done.

`codex exec` runs as its authors publish it; what is set is set in its own `config.toml`.
"""

from __future__ import annotations

import json
import random
from typing import Any

import rolltree as rt

OUT = "out.txt"
# In place of Codex's own instructions (`model_instructions_file`).
INSTRUCTIONS = "You work in a folder. Call exec_command, then say Done."
# Codex's own settings, in its own file: where its model is, and what its prompt leaves out.
CONFIG = """\
model = "any"
model_provider = "gateway"
model_instructions_file = "instructions.md"
include_apps_instructions = false
include_collaboration_mode_instructions = false
include_environment_context = false
include_permissions_instructions = false
project_doc_max_bytes = 0
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.gateway]
name = "gateway"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[agents]
enabled = false

[analytics]
enabled = false

[skills]
include_instructions = false

[tools.experimental_request_user_input]
enabled = false

[features]
apps = false
goals = false
plugins = false
remote_plugin = false
shell_snapshot = false
view_image = false
"""


@rt.run_inline
def right(state: rt.State) -> float:
    """1 if the file has the right number and nothing else."""
    return float((state["program"]["files"].get(OUT) or "").strip() == state["answer"])


@rt.run_inline
def wrote(state: rt.State) -> float:
    """1 if there is a file, whatever is in it."""
    return float(state["program"]["files"].get(OUT) is not None)


def load_environment(codex: str = "codex", held_out: bool = False) -> rt.Environment:
    """Return the environment; evaluation has the 40 tasks of training, or 32 others.

    `codex` is the command, or the path of it.
    """
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10) if a != b]
    random.Random(0).shuffle(pairs)
    rows = [
        {"question": f"Write the larger of {a} and {b} into {OUT}", "answer": str(max(a, b))}
        for a, b in pairs
    ]
    known, others = rows[32:], rows[:32]
    rubric = rt.Rubric([right])
    rubric.add_metric(wrote)
    options = ("--skip-git-repo-check", "--ephemeral", "--sandbox=danger-full-access")
    return rt.ProgramEnv(
        [codex, "exec", *options, "{question}"],
        files={".codex/config.toml": CONFIG, ".codex/instructions.md": INSTRUCTIONS},
        collect=[OUT],
        dataset=known * 5,  # the teacher answers each of them differently each time
        eval_dataset=others if held_out else known,
        rubric=rubric,
        max_calls=3,
        time_limit_s=120,
    )


def teacher(seed: int) -> Any:
    """Return a player for the warm-up who writes one of the two numbers, at random."""
    rng = random.Random(seed)

    def talk(messages: rt.Messages) -> Any:
        if messages[-1]["role"] == "tool":
            return "Done."
        words = str(messages[-1]["content"]).split()
        number = rng.choice((words[4], words[6]))
        cmd = json.dumps({"cmd": f"echo {number} > {OUT}"})
        call = {"function": {"name": "exec_command", "arguments": cmd}}
        return {"content": "", "tool_calls": [call]}

    return talk
