"""mini-swe-agent as it comes, on the repository in the folder that this is started in."""

import json
import os
import sys

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
model = LitellmModel(
    model_name="openai/gpt-4o",
    cost_tracking="ignore_errors",
    **{
        **config["model"],
        "model_kwargs": {
            **config["model"]["model_kwargs"],
            "api_base": os.environ["OPENAI_BASE_URL"],
        },
    },
)
shown = {name: config["agent"][name] for name in ("system_template", "instance_template")}
agent = DefaultAgent(model, LocalEnvironment(**config["environment"]), **shown)
done = agent.run(sys.argv[1])
print(json.dumps({"exit_status": done["exit_status"], "submission": done["submission"]}))
