"""Move every module to the layout of design/0032, and rewrite whatever names it: no logic.

    python tests/house/moves.py          in a clean checkout; prints what to look at

`TABLE` says what goes where. The script moves the files with git, then rewrites imports, dotted
names, paths and the lists of `.ci/suites.toml`, applies `EDITS` for the few places that no rule
covers, and sorts and formats the imports with ruff. A file that is new moves with its folder.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "src/rolltree"

TABLE = """
types.py                       values/types.py
steps.py                       values/steps.py
state.py                       values/state.py
errors.py                      values/errors.py
seeds.py                       values/seeds.py
estimate.py                    values/estimate.py
openai_shape.py                values/openai_shape.py

files.py                       _helpers/files.py
finished.py                    _helpers/finished.py
html_view.py                   _helpers/html_view.py
hub.py                         _helpers/hub.py
lazy.py                        _helpers/lazy.py
machine.py                     _helpers/machine.py
redact.py                      _helpers/redact.py
tasks.py                       _helpers/tasks.py
threads.py                     _helpers/threads.py
untrusted.py                   _helpers/untrusted.py
versions.py                    _helpers/versions.py
workers.py                     _helpers/workers.py

advice.py                      rollouts/advice.py
launch.py                      training/launch.py
models                         inference/models
parsers                        environments/parsers
rubrics                        environments/rubrics
tools                          environments/tools
environments/code.py           environments/code_hashes.py
training/lora.py               training/models/lora.py
training/plain_weights.py      training/models/plain_weights.py
training/ranks.py              training/models/ranks.py
training/recompute.py          training/models/recompute.py
training/recurrence_layout.py  training/models/recurrence_layout.py
training/recurrent_layers.py   training/models/recurrent_layers.py
training/routing.py            training/models/routing.py
training/tree_flex.py          training/models/tree_flex.py
training/tree_recurrence.py    training/models/tree_recurrence.py

environments/sandbox_env.py    sandbox/sandbox_env.py
environments/harbor_docker.py  sandbox/harbor_docker.py
environments/harbor_env.py     sandbox/harbor_env.py
environments/harbor_tasks.py   sandbox/harbor_tasks.py
environments/harbor_worlds.py  sandbox/harbor_worlds.py

protocols                      agents/protocols
worlds                         agents/worlds
environments/mcp_env.py        agents/mcp_env.py
environments/protocol_env.py   agents/protocol_env.py
environments/reasoning_gym_env.py  agents/reasoning_gym_env.py
environments/worlds.py         agents/world_env.py

cluster                        scale/cluster
inference/pool.py              scale/pool.py
inference/vllm                 scale/vllm
inference/weights              scale/weights
training/server_client.py      scale/server_client.py
training/servers.py            scale/servers.py
cli/cluster.py                 scale/cli.py

inference/server               gateway/serve
cli/gateway.py                 gateway/cli/gateway.py
cli/serve.py                   gateway/cli/serve.py

viewer                         insight/page
records/curves.py              insight/page/curves.py
records/evaluation_view.py     insight/page/evaluation_view.py
records/glance.py              insight/page/glance.py
records/group_tree.py          insight/page/group_tree.py
records/pages.py               insight/page/pages.py
records/rollout_view.py        insight/page/rollout_view.py
records/token_lens.py          insight/page/token_lens.py
records/watching.py            insight/page/watching.py
records/auditing               insight/auditing
records/comparison.py          insight/comparison.py
records/credit_states.py       insight/credit_states.py
records/export.py              insight/export.py
records/recorded.py            insight/recorded.py
records/replaying.py           insight/replaying.py
records/rescored.py            insight/rescored.py
records/rescoring.py           insight/rescoring.py
records/search.py              insight/search.py
reports/audit.py               insight/reports/audit.py
reports/comparison.py          insight/reports/comparison.py
reports/data.py                insight/reports/data.py
reports/replay.py              insight/reports/replay.py
reports/rescore.py             insight/reports/rescore.py
cli/audit.py                   insight/cli/audit.py
cli/compare.py                 insight/cli/compare.py
cli/data.py                    insight/cli/data.py
cli/replay.py                  insight/cli/replay.py
cli/rescore.py                 insight/cli/rescore.py
cli/runs.py                    insight/cli/runs.py
cli/view.py                    insight/cli/view.py

compat                         verifiers
cli/install.py                 verifiers/cli.py
"""
ROWS = [tuple(line.split()) for line in TABLE.split("\n") if line]

PACKAGES = {
    "values": "Every value that several rooms share, and the one hierarchy of exceptions.",
    "_helpers": "What several rooms need and users do not: files, tasks, threads, text, machines.",
    "training/models": "What only some models or settings ask for: adapters, ranks, recurrence, "
    "routed experts.",
    "scale": "A run on more than one process: servers, vLLM, weights on their way, clusters.",
    "gateway/cli": "The commands `rolltree gateway` and `rolltree serve`.",
    "insight": "Stored runs looked at: audit, compare, replay, rescore, search, export, the page.",
    "insight/cli": "The commands that look at stored runs.",
    "insight/reports": "What the commands that look at stored runs print.",
}
"""The folders that are new, each with the docstring of its `__init__.py`."""

CORE = [
    *("values", "_helpers", "tokens", "store", "samples", "inference", "rollouts", "environments"),
    *("evaluation", "training", "records", "reports", "cli"),
]
WINGS = ["sandbox", "agents", "scale", "gateway", "insight", "verifiers", "testing"]

CONTRACTS = """
[tool.importlinter]
root_package = "rolltree"
include_external_packages = true

[[tool.importlinter.contracts]]
name = "Rooms import downwards only"
type = "layers"
layers = [
  "rolltree.cli",
  "rolltree.reports",
  "rolltree.records",
  "rolltree.evaluation | rolltree.training",
  "rolltree.environments",
  "rolltree.rollouts",
  "rolltree.samples | rolltree.inference",
  "rolltree.tokens | rolltree.store",
  "rolltree._helpers.workers",
  "rolltree._helpers.html_view | rolltree._helpers.hub",
  "rolltree._helpers.threads | rolltree._helpers.tasks | rolltree._helpers.redact",
  "rolltree._helpers.untrusted | rolltree._helpers.files",
  "rolltree.values.errors",
  "rolltree.values.steps",
  "rolltree.values.types | rolltree.values.seeds",
  "rolltree.values.estimate | rolltree.values.state | rolltree.values.openai_shape",
  "rolltree._helpers.finished | rolltree._helpers.lazy | rolltree._helpers.machine",
  "rolltree._helpers.versions | rolltree.wings",
]
ignore_imports = [
  # `rt.train`, which nothing in training imports (below).
  "rolltree.training.launch -> rolltree.evaluation",
  "rolltree.training.launch -> rolltree.evaluation.report",
  "rolltree.training.launch -> rolltree.reports",
LOWER  # Of packages, for type checkers: what wings add to them.
  "rolltree.environments -> rolltree.agents.*",
  "rolltree.environments -> rolltree.sandbox.*",
  "rolltree.inference -> rolltree.scale.**",
  "rolltree.records -> rolltree.insight.**",
  "rolltree.reports -> rolltree.insight.**",
]

[[tool.importlinter.contracts]]
name = "Rooms inside rooms import downwards only"
type = "layers"
containers = ["rolltree.environments", "rolltree.agents"]
layers = ["(rubrics) | (protocols)", "(parsers) | (tools) | (worlds)"]

[[tool.importlinter.contracts]]
name = "Only commands and wings start whole training runs"
type = "protected"
protected_modules = ["rolltree.training.launch"]
allowed_importers = ["rolltree.cli", "rolltree.scale"]
ignore_imports = ["rolltree -> rolltree.training.launch"]

[[tool.importlinter.contracts]]
name = "No torch outside training, the embedded engine and the model maker"
type = "forbidden"
source_modules = [
  "rolltree.values",
  "rolltree._helpers",
  "rolltree.tokens",
  "rolltree.store",
  "rolltree.samples",
  "rolltree.rollouts",
  "rolltree.environments",
  "rolltree.evaluation",
  "rolltree.records",
  "rolltree.reports",
  "rolltree.sandbox",
  "rolltree.agents",
  "rolltree.insight",
]
forbidden_modules = ["torch", "transformers"]
allow_indirect_imports = true

[[tool.importlinter.contracts]]
name = "The core imports no wing"
type = "forbidden"
allow_indirect_imports = true
source_modules = [
  "rolltree.values",
  "rolltree._helpers",
  "rolltree.tokens",
  "rolltree.store",
  "rolltree.samples",
  "rolltree.inference",
  "rolltree.rollouts",
  "rolltree.environments",
  "rolltree.evaluation",
  "rolltree.training",
  "rolltree.records",
  "rolltree.reports",
  "rolltree.cli",
  "rolltree.wings",
]
forbidden_modules = [
  "rolltree.testing",
  "rolltree.verifiers",
  "rolltree.insight",
  "rolltree.gateway",
  "rolltree.scale",
  "rolltree.agents",
  "rolltree.sandbox",
]
ignore_imports = [  # of packages, for type checkers
  "rolltree.environments -> rolltree.agents.*",
  "rolltree.environments -> rolltree.sandbox.*",
  "rolltree.inference -> rolltree.scale.**",
  "rolltree.records -> rolltree.insight.**",
  "rolltree.reports -> rolltree.insight.**",
]

[[tool.importlinter.contracts]]
name = "Wings import lower wings only"  # tests/house/test_wall.py reads the list
type = "layers"
layers = [
  "rolltree.testing",
  "rolltree.verifiers",
  "rolltree.insight",
  "rolltree.gateway",
  "rolltree.scale",
  "rolltree.agents",
  "rolltree.sandbox",
]
ignore_imports = [  # of packages, for type checkers
  "rolltree -> rolltree.**",
  "rolltree.environments -> rolltree.agents.*",
  "rolltree.environments -> rolltree.sandbox.*",
  "rolltree.inference -> rolltree.scale.**",
  "rolltree.records -> rolltree.insight.**",
  "rolltree.reports -> rolltree.insight.**",
]
"""

CHANGES = """\
- The modules have a new layout: a core, and wings beside it that it never imports. Names of `rt` \
and of the packages that stay are where they
  were (`rolltree.records.audit`, `rolltree.environments.HarborEnv`, \
`rolltree.inference.EndpointPool`, ...). Imports of modules change, below
  `rolltree`:

  | was | is |
  |---|---|
  | `types`, `steps`, `state`, `errors`, `seeds`, `estimate` | `values.types`, `values.steps`, ... |
  | `models` | `inference.models` |
  | `parsers`, `rubrics`, `tools` | the same below `environments` |
  | `protocols`, `worlds` | the same below `agents` |
  | `environments.mcp_env`, `protocol_env`, `reasoning_gym_env` | the same below `agents` |
  | `environments.worlds` | `agents.world_env` |
  | `environments.sandbox_env`, `harbor_env`, `harbor_tasks`, ... | the same below `sandbox` |
  | `cluster` | `scale.cluster` |
  | `inference.vllm`, `inference.weights`, `inference.pool` | the same below `scale` |
  | `training.servers`, `training.server_client` | the same below `scale` |
  | `inference.server` | `gateway.serve` |
  | `viewer` | `insight.page` |
  | `records.auditing`, `records.comparison`, `records.replaying`, ... | the same below `insight` |
  | `compat` | `verifiers` |
  | `launch`, `advice` | `training.launch`, `rollouts.advice` |
  | `versions`, `workers`, `machine`, `lazy`, `files`, ... | `_helpers`, which is private |

  Commands name modules, too: vLLM's `--worker-extension-cls \
rolltree.scale.vllm.worker.WeightReload`, `python -m rolltree.scale.cluster.worker`. Loggers have
  the names of their rooms: `rolltree.insight.page`, `rolltree.verifiers`, ...
"""

EDITS = [
    # The names of `_ROOMS` that a person may write as attributes of `rt`.
    (
        "src/rolltree/__init__.py",
        'if name in _ROOMS or name in ("compat", "gateway"):',
        'if name in _ROOMS or name in ("gateway", "values", "verifiers"):',
    ),
    (
        "src/rolltree/__init__.py",
        """\
    "values.errors": "ConfigError ModelError PromptTooLong RolloutTimeout RolltreeError \
UnknownName",
""",
        """\
    "values.errors": "ConfigError ModelError PromptTooLong RolloutTimeout RolltreeError "
    "UnknownName",
""",
    ),
    (
        "src/rolltree/__init__.py",
        """\
    "environments.parsers": "MaybeThinkParser Parser ThinkParser XMLParser compose_parsers \
extract_boxed_answer "
    "extract_hash_answer",
""",
        """\
    "environments.parsers": "MaybeThinkParser Parser ThinkParser XMLParser compose_parsers "
    "extract_boxed_answer extract_hash_answer",
""",
    ),
    (
        "src/rolltree/__init__.py",
        """\
    "values.types": "BaseRolloutInput ChatMessage ErrorRecord FinishReason Info MessageType \
Messages "
    "ModelResponse RolloutInput RolloutRequest RolloutResult RolloutTiming Sample SamplingArgs "
    "SamplingParams State TrainingExample TrajectoryStep TrajectoryStepTokens TruncationReason",
""",
        """\
    "values.types": "BaseRolloutInput ChatMessage ErrorRecord FinishReason Info MessageType "
    "Messages ModelResponse RolloutInput RolloutRequest RolloutResult RolloutTiming Sample "
    "SamplingArgs SamplingParams State TrainingExample TrajectoryStep TrajectoryStepTokens "
    "TruncationReason",
""",
    ),
    (
        "src/rolltree/_helpers/workers.py",
        """\
    "import sys; sys.path[:] = sys.argv[4:]; from rolltree._helpers import workers; \
workers.serve_requests()"
""",
        """\
    "import sys; sys.path[:] = sys.argv[4:]; from rolltree._helpers import workers; "
    "workers.serve_requests()"
""",
    ),
    (
        "tests/cli/test_cli_replay.py",
        """\
    "raise rt.values.errors.SandboxUnavailable('no sandbox here')": "SandboxUnavailable: no \
sandbox here",
""",
        """\
    "from rolltree.values.errors import SandboxUnavailable as No; raise No('no sandbox here')": (
        "SandboxUnavailable: no sandbox here"
    ),
""",
    ),
    (
        "tests/models/test_models_hub.py",
        """\
        "from rolltree.values.errors import ConfigError\\nfrom rolltree.inference.models import \
resolve_model\\n"
""",
        """\
        "from rolltree.values.errors import ConfigError\\n"
        "from rolltree.inference.models import resolve_model\\n"
""",
    ),
    (
        "tests/house/test_run_files.py",
        """"a descriptor of a new file, opened without following links",
""",
        """"a descriptor of a new file: O_NOFOLLOW",
""",
    ),
    # The test did not read this folder before.
    (
        "tests/house/test_run_files.py",
        '    "store/metric_table.py:metric_rows"',
        """\
    "inference/models/layouts.py:_read_index": "weights that the user names",
    "inference/models/made.py:made_once": "a lock in the user's cache",
    "store/metric_table.py:metric_rows\"""",
    ),
    # The lines of imports that are broken since they are longer.
    ("tests/house/test_wall.py", "MOST_LINES = 29_200", "MOST_LINES = 29_220"),
    # Conditions of Harbor's environment, which the check counted among the room's before.
    (
        "src/rolltree/environments/environment.py",
        'str(condition.__module__).startswith("rolltree.environments.")',
        'str(condition.__module__).startswith(("rolltree.environments.", "rolltree.sandbox."))',
    ),
    # Parsers, tools and their worker processes are below this package now, and need none of it.
    (
        "src/rolltree/environments/__init__.py",
        """\
from rolltree.environments.batch_runner import GenerateMetadata, GenerateResults
from rolltree.environments.code_hashes import changed_code
from rolltree.environments.dataset import Rows
from rolltree.environments.environment import Environment
from rolltree.environments.lifecycle import cleanup, stop, teardown
from rolltree.environments.multiturn import MultiTurnEnv, SingleTurnEnv
from rolltree.environments.scoring import score_episode
""",
        "",
    ),
    (
        "src/rolltree/environments/__init__.py",
        "if TYPE_CHECKING:\n",
        """\
if TYPE_CHECKING:
    from rolltree.environments.batch_runner import GenerateMetadata, GenerateResults
    from rolltree.environments.code_hashes import changed_code
    from rolltree.environments.dataset import Rows
    from rolltree.environments.environment import Environment
    from rolltree.environments.lifecycle import cleanup, stop, teardown
    from rolltree.environments.multiturn import MultiTurnEnv, SingleTurnEnv
    from rolltree.environments.scoring import score_episode
""",
    ),
    (
        "src/rolltree/environments/__init__.py",
        "    **exports(__name__),\n",
        """\
    **exports(__name__),
    "batch_runner": "GenerateMetadata GenerateResults",
    "code_hashes": "changed_code",
    "dataset": "Rows",
    "environment": "Environment",
    "lifecycle": "cleanup stop teardown",
    "multiturn": "MultiTurnEnv SingleTurnEnv",
    "scoring": "score_episode",
""",
    ),
    (
        "src/rolltree/environments/__init__.py",
        "What only some environments need is loaded on first use (PEP 562).",
        "Names are loaded on first use (PEP 562): parsers and tools need no environment.",
    ),
    (
        ".ci/gate.py",
        """\
    *("types.py", "errors.py", "state.py", "steps.py", "seeds.py", "tokens", "store", "samples"),
    *("inference", "environments", "rollouts", "rubrics", "training", "evaluation"),
""",
        """\
    *("values", "_helpers", "tokens", "store", "samples", "inference", "environments", "rollouts"),
    *("training", "evaluation"),
""",
    ),
    (
        "tests/test_public_names.py",
        "torch_rooms = ('training', 'launch', ",
        "torch_rooms = ('training', 'training.launch', ",
    ),
    (
        "tests/cli/test_cli_hostile.py",
        """\
    bare = [
        f"{file.name}: {line.strip()}"
        for file in sorted(Path(rolltree.cli.__file__).parent.glob("*.py"))
""",
        """\
    package = Path(rolltree.cli.__file__).parents[1]
    files = [*package.glob("**/cli/*.py"), *package.glob("*/cli.py")]
    bare = [
        f"{file.name}: {line.strip()}"
        for file in sorted(files, key=lambda file: file.name)
""",
    ),
    (
        "tests/compat/test_unchanged_packages.py",
        'if "compat" in name]',
        'if "rolltree.verifiers" in name]',
    ),
    (
        "tests/environments/test_columns.py",
        'if "compat" not in path.parts',
        'if "verifiers" not in path.parts',
    ),
    (
        "tests/house/test_run_files.py",
        """\
    *("cli", "cluster", "compat", "environments", "evaluation", "gateway", "inference", "records"),
    *("reports", "rollouts", "sandbox", "store", "training", "viewer"),
""",
        """\
    *("cli", "environments", "evaluation", "gateway", "inference", "insight", "records", "reports"),
    *("rollouts", "sandbox", "scale", "store", "training", "verifiers"),
""",
    ),
]
"""(file after the moves, text after the rules, new text): each text stands there once."""


def git(*words):
    """Run git, and return what it prints."""
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


class Layout:
    """Where each file of the package is before and after."""

    def __init__(self, files):
        self.new = {file: self.of(file) for file in files}
        self.old_folders = {str(up) for file in files for up in PurePosixPath(file).parents}
        self.old_modules = {self.module(file) for file in files if file.endswith(".py")}
        self.moved = {
            old: new
            for old, new in ((self.module(old), self.module(new)) for old, new in ROWS)
            if old != new
        }

    @staticmethod
    def of(path):
        """Return the new place of a file or folder below the package."""
        for old, new in ROWS:
            if path == old or path.startswith(f"{old}/"):
                return new + path.removeprefix(old)
        return path

    @staticmethod
    def module(path):
        """Return the dotted name of a file or folder below the package."""
        bare = path.removesuffix(".py").removesuffix("/__init__")
        return "rolltree" if bare == "__init__" else "rolltree." + bare.replace("/", ".")

    def dotted(self, name):
        """Return a dotted name with the longest module in it that moved replaced."""
        parts = name.split(".")
        for end in range(len(parts), 1, -1):
            head = ".".join(parts[:end])
            if head in self.moved:
                return ".".join([self.moved[head], *parts[end:]])
        return name

    def path(self, path):
        """Return a path below the package, which may end with a slash, after the moves."""
        bare = path.rstrip("/.")
        return self.of(bare) + path[len(bare) :]

    def knows(self, path):
        """Whether there was such a file or folder."""
        bare = path.rstrip("/")
        return bare in self.new or bare in self.old_folders


def move(layout):
    """Move the files, and add the new packages."""
    for old, new in layout.new.items():
        if old != new:
            (ROOT / PACKAGE / new).parent.mkdir(parents=True, exist_ok=True)
            git("mv", f"{PACKAGE}/{old}", f"{PACKAGE}/{new}")
    for folder, docstring in PACKAGES.items():
        file = ROOT / PACKAGE / folder / "__init__.py"
        if not file.exists():
            file.write_text(f'"""{docstring}"""\n', encoding="utf-8")
    # What is left of the old folders is compiled code.
    left = [ROOT / PACKAGE / folder for folder in layout.old_folders if folder != "."]
    for folder in left:
        if folder.is_dir() and not [*folder.rglob("*.py")]:
            shutil.rmtree(folder)


IMPORT = re.compile(r"from (rolltree(?:\.\w+)*) import (\([^()]*\)|[^\n()#;\"'\\]+)")


def rewritten_imports(text, layout):
    """Return a text whose `from package import module` name modules where they are."""

    def statement(match):
        package, listed = match[1], match[2]
        end = re.search(r"\s*$", listed)[0] if "(" not in listed else ""
        names = [name.strip() for name in listed.strip("() \n").split(",") if name.strip()]
        places = {}
        for name in names:
            plain, _, alias = name.partition(" as ")
            full = f"{package}.{plain}"
            place, new = layout.dotted(package), plain
            if full in layout.old_modules:
                place, _, new = layout.dotted(full).rpartition(".")
            if new != plain and not alias:
                alias = plain
            places.setdefault(place, []).append(f"{new} as {alias}" if alias else new)
        if places == {layout.dotted(package): names}:
            return match[0]  # the rule for dotted names is enough
        before = match.string[: match.start()].rpartition("\n")[2]
        joint = "; " if before.strip() else f"\n{before}"
        lines = [f"from {place} import {', '.join(there)}" for place, there in places.items()]
        return joint.join(lines) + end

    return IMPORT.sub(statement, text)


DOTTED = re.compile(r"(?<![\w.])rolltree((?:\.[A-Za-z_]\w*)+)")
ESCAPED = re.compile(r"(?<![\w.])rolltree((?:\\\.[A-Za-z_]\w*)+)")
SHORT = re.compile(r"(?<![\w.])rt\.([a-z_]+)(?=\.)")
IN_SOURCE = re.compile(r"(?<![\w-])src/rolltree/([\w./-]*\w/?)")
IN_PACKAGE = re.compile(r"(?<![\w./-])rolltree/([\w./-]*\w/?)")
FILE = re.compile(r"(?<![\w./-])((?:\w+/)+\w+\.(?:py|js|css|html|toml))(?!\w)")
CITED = re.compile(r"(?<=`)(\w+\.py)(?=`)")
QUOTED = re.compile(r"(?<=[\"'`])(\w+(?:/\w+)*/?)(?=[\"'`])")


def rewritten(text, layout, folder, page=False, past=False):
    """Return the text of a file in this folder, which names modules and files where they are."""
    text = rewritten_imports(text, layout)
    text = DOTTED.sub(lambda match: layout.dotted(match[0]), text)
    text = ESCAPED.sub(
        lambda match: layout.dotted(match[0].replace("\\", "")).replace(".", "\\."), text
    )
    text = SHORT.sub(
        lambda match: "rt." + layout.dotted(f"rolltree.{match[1]}").removeprefix("rolltree."), text
    )
    text = IN_SOURCE.sub(lambda match: f"src/rolltree/{layout.path(match[1])}", text)
    text = IN_PACKAGE.sub(
        lambda match: f"rolltree/{layout.path(match[1])}" if layout.knows(match[1]) else match[0],
        text,
    )
    text = FILE.sub(lambda match: layout.new.get(match[1], match[0]), text)
    if page:
        text = CITED.sub(lambda match: layout.new.get(match[1], match[0]), text)
    if not past:  # design pages speak of rooms as they were when something was measured
        text = QUOTED.sub(
            lambda match: (
                layout.path(match[1])
                if "/" in match[1] and layout.knows(match[1]) and not (folder / match[1]).exists()
                else match[0]
            ),
            text,
        )
    return text


def rewritten_neighbours(text, old, layout):
    """Return a module's text in which files beside it that are elsewhere now have their folder."""

    def cited(match):
        beside = PurePosixPath(old).parent / match[1]
        if str(beside) not in layout.new:
            return match[0]
        new, own = layout.new[str(beside)], PurePosixPath(layout.of(old)).parent
        return match[1] if str(PurePosixPath(new).parent) == str(own) else new

    return CITED.sub(cited, text)


def rewritten_wings(text, layout):
    """Return `wings.py` with the modules of its table, which lack `rolltree.`."""
    head, table, rest = re.split(r'(?<=_TABLE = """\n)(.*?)(?=""")', text, maxsplit=1, flags=re.S)
    lines = []
    for row in table.replace("\\\n", "").strip().split("\n"):
        cells = row.split("|")
        module, colon, name = cells[2].strip().partition(":")
        cells[2] = f" {layout.dotted(f'rolltree.{module}')[9:]}{colon}{name} "
        for word in "|".join(cells).split(" "):
            if lines and not lines[-1].endswith("\n") and len(lines[-1]) + len(word) < 98:
                lines[-1] += f" {word}"
            elif lines and not lines[-1].endswith("\n"):
                lines[-1] += " \\\n"
                lines.append(word)
            else:
                lines.append(word)
        lines[-1] += "\n"
    return head + "".join(lines) + rest


def rewritten_rooms(text, layout):
    """Return `rolltree/__init__.py` with the rooms of its tables, which lack `rolltree.`."""
    return re.sub(
        r'(?m)^(    ")([a-z_.]+)(?=": ")',
        lambda match: match[1] + layout.dotted(f"rolltree.{match[2]}").removeprefix("rolltree."),
        text,
    )


def rewritten_suites(text, layout):
    """Return `.ci/suites.toml`: each list names the files that it named, wherever they are."""

    def places(item):
        if not item.startswith(f"{PACKAGE}/"):
            return [item]
        path = item.removeprefix(f"{PACKAGE}/")
        own = layout.of(path)
        files = [new for old, new in layout.new.items() if f"{old}/".startswith(f"{path}/")]
        rows = [new for _, new in ROWS]
        found = {own} if any(f"{new}/".startswith(f"{own}/") for new in files) else set()
        for new in files:
            if not f"{new}/".startswith(f"{own}/"):
                inside = [row for row in rows if f"{new}/".startswith(f"{row}/")]
                found.add(max(inside, key=len, default=new))
        return [f"{PACKAGE}/{place}" for place in sorted(found)]

    def lists(match):
        items = ast.literal_eval(f"[{match[3]}]")
        items = [*dict.fromkeys(place for item in items for place in places(item))]
        # Of a room of which several files count, all of it does; scale has suites that are long.
        for room in (f"{PACKAGE}/{wing}" for wing in WINGS if wing != "scale"):
            if sum(item.startswith(f"{room}/") for item in items) > 3:
                items = [*dict.fromkeys(room if i.startswith(f"{room}/") else i for i in items)]
        items = [
            one
            for one in items
            if not any(one != other and one.startswith(f"{other}/") for other in items)
        ]
        line = ", ".join(f'"{item}"' for item in items)
        if len(match[1]) + len(line) + 2 <= 110 and not match[2]:
            return f"{match[1]}[{line}]"
        lines = [""]
        for item in items:
            if len(lines[-1]) + len(item) + 4 > 106:
                lines.append("")
            lines[-1] += f'"{item}", '
        return f"{match[1]}[{match[2]}\n" + "".join(f"  {row.strip()}\n" for row in lines) + "]"

    return re.sub(r"(?ms)^(\w+ = )\[((?:  #[^\n]*)?)(.*?)\]$", lists, text)


def refill(path):
    """Break lines of comments and docstrings that are longer than the limit after the rules."""
    limit = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["line-length"]
    lines = path.read_text(encoding="utf-8").split("\n")
    docs = set()
    for node in ast.walk(ast.parse("\n".join(lines))):
        body = getattr(node, "body", None)
        for part in body if isinstance(body, list) else ():
            if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                docs.update(range(part.lineno, part.end_lineno + 1))
    at = 0
    while at < len(lines):
        line = lines[at]
        comment = re.match(r"\s*# ", line)
        if len(line) > limit and (comment or at + 1 in docs) and " " in line.strip():
            head = comment[0] if comment else re.match(r"\s*", line)[0]
            cut = line.rfind(" ", len(head), limit + 1)
            if cut > len(head):
                rest = line[cut + 1 :]
                lines[at] = line[:cut]
                after = lines[at + 1] if at + 1 < len(lines) else ""
                goes_on = after.startswith(head) and re.match(r"[A-Za-z`(]", after[len(head) :])
                # A closing quote, a list or the next part of a docstring begins a line of its own.
                if goes_on and not re.match(r"(\w+|\*\*?\w+): ", after[len(head) :]):
                    lines[at + 1] = f"{head}{rest} {after[len(head) :]}"
                else:
                    lines.insert(at + 1, head + rest)
                    docs = {n if n <= at + 1 else n + 1 for n in docs} | {at + 2}
        at += 1
    path.write_text("\n".join(lines), encoding="utf-8")


def lower_imports():
    """Return lines for the contract: rooms that import what is below them, inside environments."""
    lines = []
    for room in ("rollouts", "samples", "inference"):
        for file in sorted((ROOT / PACKAGE / room).rglob("*.py")):
            module = Layout.module(str(file.relative_to(ROOT / PACKAGE)))
            text = file.read_text(encoding="utf-8")
            below = re.findall(
                r"from (rolltree\.environments\.(?:rubrics|parsers|tools)[\w.]*) ", text
            )
            lines += [f'  "{module} -> {name}",\n' for name in sorted({*below})]
    reason = "  # Rubrics, parsers and tools are below rollouts, wherever their folder is.\n"
    return reason + "".join(lines) if lines else ""


def main():
    """Move, rewrite, format; print what nobody decided."""
    if git("status", "--porcelain", "--untracked-files=no"):
        sys.exit("there are changes that are not committed; commit or undo them first.")
    files = [file.removeprefix(f"{PACKAGE}/") for file in git("ls-files", PACKAGE).split("\n")]
    files = [file for file in files if file]
    if "types.py" not in files:
        sys.exit("the modules have moved already.")
    layout = Layout(files)
    assert not [new for new in layout.moved.values() if layout.dotted(new) != new]
    move(layout)
    git("add", "--all", PACKAGE)
    old_of = {new: old for old, new in layout.new.items()}
    texts = [
        name
        for name in git("ls-files").split("\n")
        if re.search(r"\.(py|md|js|toml|txt|yml|yaml|sbatch|css|html)$|Makefile$|\.ci/\w+$", name)
        and not (ROOT / name).is_symlink()
        and name not in (".ci/green", "tests/house/moves.py", "constraints.txt")
    ]
    for name in texts:
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        text = before
        if name == ".ci/suites.toml":
            path.write_text(rewritten_suites(text, layout), encoding="utf-8")
            continue
        if name == "pyproject.toml":
            head, _, rest = text.partition("\n[tool.importlinter]\n")
            after = re.search(r"(?m)^\[(?!\[?tool\.importlinter)", rest)
            unplaced = [
                module
                for contract in tomllib.loads(text)["tool"]["importlinter"]["contracts"]
                if contract["name"] == "Wings import lower wings only"
                for layer in contract["layers"]
                for module in layer.split(" : ")
                if layout.dotted(module).split(".")[1] not in WINGS
            ]
            for module in unplaced:
                print(f"LOOK: {module} was listed as a wing's, and has no line in TABLE.")
            text = head + CONTRACTS + ("\n" + rest[after.start() :] if after else "")
        inside = name.removeprefix(f"{PACKAGE}/")
        if name.startswith(PACKAGE) and name.endswith(".py") and inside in old_of:
            text = rewritten_neighbours(text, old_of[inside], layout)
        if inside == "wings.py":
            text = rewritten_wings(text, layout)
        if name == f"{PACKAGE}/__init__.py":
            text = rewritten_rooms(text, layout)
        past = name.startswith(("design/", "CHANGELOG"))
        text = rewritten(text, layout, path.parent, page=name.endswith(".md"), past=past)
        if name == "CHANGELOG.md":
            head, mark, rest = text.partition("**Lately**: for those who follow the repository\n")
            text = head + mark + CHANGES + rest
        if text != before:
            path.write_text(text, encoding="utf-8")
    pyproject = ROOT / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(text.replace("LOWER", lower_imports()), encoding="utf-8")
    for name, old, new in EDITS:
        text = (ROOT / name).read_text(encoding="utf-8")
        if text.count(old) == 1:
            (ROOT / name).write_text(text.replace(old, new), encoding="utf-8")
        else:
            print(f"LOOK: {name} has this {text.count(old)} times:\n{old}")
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"
    run = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    for words in (["check", "--select", "I", "--fix", "."], ["format", "."]):
        print(subprocess.run([ruff, *words], **run).stdout.strip())
    long = subprocess.run(
        [ruff, "check", "--select", "E501", "--output-format", "concise", "."], **run
    )
    for name in sorted(
        {line.partition(":")[0] for line in long.stdout.split("\n") if "E501" in line}
    ):
        refill(ROOT / name)
    subprocess.run([ruff, "format", "."], **run)
    print(subprocess.run([ruff, "check", "--output-format", "concise", "."], **run).stdout.strip())
    tops = {path.name for path in (ROOT / PACKAGE).iterdir() if path.name != "__pycache__"}
    rest = ("__init__.py", "__main__.py", "py.typed", "wings.py", "_docs", "_environments")
    for name in sorted(tops - {*CORE, *WINGS, *rest}):
        print(f"LOOK: {PACKAGE}/{name} is neither a room of the core nor a wing.")
    git("add", "--all")


if __name__ == "__main__":
    main()
