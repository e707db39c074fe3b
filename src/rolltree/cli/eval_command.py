"""`rolltree eval`: measure a model on an environment.

The flags are those of verifiers' `vf-eval` where it has them. The API key is read from the
environment variable that `-k` names; it is neither stored nor printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from rolltree.cli.arguments import default_run_dir, json_object, secret


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed flags."""

    env: str
    model: str
    base_urls: tuple[str, ...]
    api_key: str | None
    num_examples: int
    rollouts_per_example: int
    max_concurrent: int
    sampling: dict[str, Any]
    env_args: dict[str, Any]
    seed: int
    split: Literal["train", "eval"]
    run: Path
    save: bool
    as_json: bool
    num_transcripts: int
    retries: int
    retry_failed: bool
    time_limit_s: float | None
    pass_threshold: float

    def config(self) -> dict[str, Any]:
        """Return what the run is made of: the same command again must agree with it."""
        return {
            "env": self.env,
            "env_args": self.env_args,
            "model": self.model,
            "base_url": ", ".join(self.base_urls) or None,
            "sampling": self.sampling,
            "seed": self.seed,
            "split": self.split,
            "num_examples": self.num_examples,
            "rollouts_per_example": self.rollouts_per_example,
            "max_concurrent": self.max_concurrent,
        }


MAY_CHANGE = ("num_examples", "rollouts_per_example", "max_concurrent", "base_url")
"""Settings in which a continued evaluation may differ from its first start."""


def evaluate_environment(
    env: Annotated[str, typer.Argument(help="Environment: a name, or a path to its folder.")],
    model: Annotated[
        str, typer.Option("-m", "--model", help="Model name; without -b a local one.")
    ] = "smollm2-135m",
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            "-b",
            "--base-url",
            help="OpenAI-compatible URL; several times: a pool. Without it: this process.",
        ),
    ] = None,
    api_key_var: Annotated[
        str | None,
        typer.Option("-k", "--api-key-var", help="Environment variable that holds the API key."),
    ] = None,
    num_examples: Annotated[
        int, typer.Option("-n", "--num-examples", help="How many examples; -1 for all.")
    ] = 5,
    rollouts: Annotated[
        int, typer.Option("-r", "--rollouts-per-example", help="Rollouts per example.", min=1)
    ] = 3,
    max_concurrent: Annotated[
        int, typer.Option("-c", "--max-concurrent", help="Rollouts in flight at once.", min=1)
    ] = 32,
    max_tokens: Annotated[
        int | None, typer.Option("-t", "--max-tokens", help="Most tokens of one answer.", min=1)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("-T", "--temperature", help="Sampling temperature.", min=0.0)
    ] = None,
    sampling_args: Annotated[
        str | None,
        typer.Option("-S", "--sampling-args", help="More sampling arguments, a JSON object."),
    ] = None,
    env_args: Annotated[
        str | None,
        typer.Option("-a", "--env-args", help="Arguments of the environment, a JSON object."),
    ] = None,
    save: Annotated[
        bool,
        typer.Option("-s", "--save-results", help="Also write results.jsonl and metadata.json."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of worlds and sampling.")] = 0,
    split: Annotated[str, typer.Option("--split", help="eval or train.")] = "eval",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Run directory; one that exists is continued."),
    ] = None,
    transcripts: Annotated[
        int, typer.Option("--transcripts", help="Print that many rollouts.", min=0)
    ] = 0,
    retries: Annotated[
        int, typer.Option("--retries", help="Run an episode again when the server failed.", min=0)
    ] = 0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run stored failures of --run again.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Seconds an episode may take.")
    ] = None,
    pass_threshold: Annotated[
        float, typer.Option("--pass-threshold", help="Reward that counts as a pass in pass@k.")
    ] = 1.0,
) -> None:
    """Evaluate a model on an environment."""
    from rolltree.cli.eval_run import run_evaluation

    given = {"max_tokens": max_tokens, "temperature": temperature}
    sampling = json_object(sampling_args, "-S")
    sampling.update({key: value for key, value in given.items() if value is not None})
    options = EvalOptions(
        env=env,
        model=model,
        base_urls=tuple(base_url or ()),
        api_key=secret(api_key_var, "-k"),
        num_examples=num_examples,
        rollouts_per_example=rollouts,
        max_concurrent=max_concurrent,
        sampling=sampling,
        env_args=json_object(env_args, "-a"),
        seed=seed,
        split=_split(split),
        run=run or default_run_dir("eval", env, model),
        save=save,
        as_json=as_json,
        num_transcripts=transcripts,
        retries=retries,
        retry_failed=retry_failed,
        time_limit_s=time_limit,
        pass_threshold=pass_threshold,
    )
    raise typer.Exit(run_evaluation(options))


def _split(text: str) -> Literal["train", "eval"]:
    from rolltree.errors import ConfigError

    if text == "eval":
        return "eval"
    if text == "train":
        return "train"
    raise ConfigError(f"--split is {text!r}; an environment has the splits 'eval' and 'train'.")
