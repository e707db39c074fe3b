"""Every name of a wing that the core knows, in one table of strings (design/0032).

The core is what every run needs, and imports no wing: it looks a command, an engine or a class of a
wing up here, and loads it when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

_TABLE = """
command | runs | insight.cli.runs:list_stored_runs | | List the runs below a directory, newest \
first: state, age, progress, rewards, health.
command | view | insight.cli.view:view_runs | view | Show runs in the browser, live while in \
progress; only this machine can reach the page.
command | data | insight.cli.data:show_data | | Print a table of a run, or write it to a file.
command | export | insight.cli.data:export_rollouts | data | Write whole rollouts of a run as \
files for other programs.
command | audit | insight.cli.audit:audit_run | | Check a stored run against itself: tokens, text, \
versions, rewards, advantages, counts.
command | compare | insight.cli.compare:compare_stored_runs | | Compare runs with the first, \
example by example; one run: its first and last evaluation.
command | replay | insight.cli.replay:replay_rollouts | | Play recorded rollouts again and show \
the first difference.
command | rescore | insight.cli.rescore:rescore_run | | Score the rollouts of a run again, with \
other rewards, as a new run.
command | serve | gateway.cli.serve:serve_model | serve | Serve a model over OpenAI's API, with \
vLLM's token ids, logprobs and weight updates.
command | gateway | gateway.cli.gateway:serve_sessions | serve | Serve a model to agent programs, \
and record their calls as trajectories.
command | cluster | scale.cli:cluster | | Inspect or scale a run with a [cluster] in its config, \
while `rolltree train` runs it.
command | env install | verifiers.cli:install_environment | compat | Install an environment and \
what it needs, without verifiers.
section | cluster | scale.cluster.driver:train_on_cluster | | a training run on several processes
engine | vllm | scale.servers:vllm_engine | | vLLM in the trainer's process
engine | servers | scale.servers:server_engine | | servers that sample for a run
import | verifiers | verifiers.verifiers | compat | environments written for verifiers
import | MODULES SCRIPTS | verifiers.names | compat | environments written for verifiers
rolltree | Agent ReActAgent ToolAgent | agents | | agents that call models themselves
rolltree | HarborProgramEnv ProgramEnv | gateway | serve | agent programs as environments
rolltree | ScriptedClient | testing | | scripted models for tests
environments | HarborEnv | sandbox.harbor_env | sandbox | tasks of Harbor
environments | MCPEnv MCPServer | agents.mcp_env | mcp | tools of MCP servers
environments | ProtocolEnvironment | agents.protocol_env | | several agents in one episode
environments | PythonEnv SandboxEnv | sandbox.sandbox_env | sandbox | code in a sandbox
environments | ReasoningGymEnv | agents.reasoning_gym_env | worlds | tasks of reasoning-gym
environments | GymEnv OpenEnv TextArenaEnv WorldEnv | agents.world_env | worlds | games
inference | EndpointPool | scale.pool | | several servers as one client
inference | publish_adapter publish_weights | scale.weights.publish | | new weights for servers
inference | WeightTransfer | scale.weights.transfer | torch | new weights for servers
records | AuditReport CHECKS CheckResult Finding | insight.auditing.report | | audits
records | audit | insight.auditing.run | | audits
records | ComparedPair RunComparison compare | insight.comparison | | comparisons of runs
records | export_run | insight.export | data | files for other programs
records | Difference | insight.recorded | | rollouts played again
records | ReplayReport replay replay_async replay_many replay_many_async | insight.replaying | | \
rollouts played again
records | CreditChange RescoreReport | insight.rescored | | a run with other rewards
records | rescore rescore_async | insight.rescoring | | a run with other rewards
reports | audit_lines audit_table | insight.reports.audit | | audits
reports | comparison_markdown comparison_parts | insight.reports.comparison | | comparisons of \
runs
reports | print_columns print_table | insight.reports.data | data | tables of a run
reports | difference_lines replay_lines replays_summary | insight.reports.replay | | rollouts \
played again
reports | rescore_parts | insight.reports.rescore | | a run with other rewards
"""


class Wing(NamedTuple):
    """A row of the table.

    Attributes:
        kind: `command`, `section` of a config, `engine` (of `engine.kind`), or `import`; otherwise
            the package that has the names as its own.
        names: separated by spaces; a command's words are one name.
        where: `module:attribute` below `rolltree`; a module alone has attributes of these names.
        extra: the extra that installs the packages it needs, or nothing.
        help: what it is, in one line; a command's is its line in `rolltree --help`.
    """

    kind: str
    names: str
    where: str
    extra: str
    help: str

    @property
    def module(self) -> str:
        """The full name of its module."""
        return f"rolltree.{self.where.partition(':')[0]}"

    def load(self, name: str) -> Any:
        """Import the module, and return one of the objects."""
        return getattr(import_module(self.module), self.where.partition(":")[2] or name)


WINGS = [Wing(*map(str.strip, row.split("|"))) for row in _TABLE.strip().splitlines()]


def rows(kind: str) -> list[Wing]:
    """Return the rows of a kind."""
    return [wing for wing in WINGS if wing.kind == kind]


def exports(package: str) -> dict[str, str]:
    """Return the names of wings that a package has, by module; `lazy.loader` loads them."""
    kind = package.removeprefix("rolltree.")
    return {wing.module: wing.names for wing in rows(kind)}


def find(kind: str, name: str) -> Wing:
    """Return the row of this kind that has the name."""
    return next(wing for wing in rows(kind) if name in wing.names.split())


def load_wing(kind: str, name: str) -> Any:
    """Import the module of the row, and return the object."""
    return find(kind, name).load(name)


def absence(error: ImportError) -> str | None:
    """Return what to do if the import failed because a wing is not here, else None."""
    missing = f"{error.name}."
    for wing in WINGS if missing.startswith("rolltree.") else ():
        if f"{wing.module}.".startswith(missing):
            extra = wing.extra and f"[{wing.extra}]"
            return (
                f"{error.name} is not in this installation, and with it is missing: "
                f"{wing.help.rstrip('.')}. Install all of rolltree: "
                f"pip install --force-reinstall 'rolltree{extra}'."
            )
    return None
