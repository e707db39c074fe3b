"""Whole training runs: `train(config, environment=env)` builds the parts, trains and evaluates.

This room is above training, evaluation and environments; `rolltree train` calls it, too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack, cast

from rolltree._helpers.redact import remember, secrets_in
from rolltree._helpers.tasks import run_sync
from rolltree.environments import Environment, changed_code
from rolltree.environments.leakage import shared_questions
from rolltree.evaluation import EvalProgress, evaluate_async, stored_report
from rolltree.evaluation.report import keep_report
from rolltree.inference import ModelClient
from rolltree.inference.models import check_loadable
from rolltree.reports import SafeConsole, TrainView, print_report, say
from rolltree.rollouts import RolloutEngine, RolloutSource
from rolltree.rollouts.requests import check_source
from rolltree.store import Run
from rolltree.store.run import make_run_folder
from rolltree.store.weights import note_weights
from rolltree.training import Reporter, Silent, TrainConfig, TrainReport, load_train_config
from rolltree.training.tracking import check_trackers
from rolltree.values.errors import ConfigError, Stopped, StoreError

if TYPE_CHECKING:
    from rolltree.training import Evaluate, TrainParts, WeightTarget
    from rolltree.training.keywords import TrainKeywords, TrainSettings
    from rolltree.training.models.ranks import Ranks

RENDEZVOUS = "ROLLTREE_RENDEZVOUS"
"""The variable that says where the ranks of a `[cluster]` find each other."""
ConfigSource = TrainConfig | Mapping[str, Any] | str | Path


class Outside(Protocol):
    """The other processes of a training run: engines, and workers that play rollouts."""

    async def engines(self, config: TrainConfig) -> TrainConfig:
        """Wait for engines, and return the config with their addresses."""
        ...

    def rollouts(
        self, config: TrainConfig, source: RolloutSource, parts: TrainParts, run: Run
    ) -> AbstractAsyncContextManager[RolloutEngine]:
        """Return a context manager whose value runs the rollouts of `run`."""
        ...


def train(
    config: ConfigSource | None = None,
    *,
    environment: RolloutSource | Mapping[str, Any] | str | Path | None = None,
    model: Any = None,
    **options: Unpack[TrainKeywords],
) -> TrainReport:
    """Train a model by reinforcement learning and return a report, which can be printed.

        rt.train("examples/demo/demo.toml")
        rt.train(environment=env, model="tiny", num_steps=2, run_dir="runs/first")

    The same call continues a run that was stopped or killed. It also works if an event loop is
    already running, as in a notebook. Under torchrun every rank makes the call and gets the report.

    Args:
        config: a TOML file, plain data or a `TrainConfig`; None for the defaults. An environment
            in its place counts as `environment`.
        environment: an environment, its name or path, or the `env` section as a mapping; None uses
            the config's `env.id`.
        model: the name or folder of a model, the `model` section as a mapping, or a Hugging Face
            causal LM in float32, which is trained in place and needs `tokenizer`.
        options: the other arguments of `train_async`, and settings in the form that
            `load_train_config` accepts: `num_steps=20`, `lr=1e-5`, `optim={"lr": 1e-5}`,
            `run_dir="runs/x"`.

    Raises:
        ConfigError: a setting is unknown or wrong, or the run was started with other settings.
        TrainingError: training cannot continue; the message says why.
        Stopped: SIGTERM came; progress is saved.
    """

    async def work() -> TrainReport:
        in_main_thread = threading.current_thread() is threading.main_thread()
        with stop_on_sigterm() if in_main_thread else nullcontext():
            return await train_async(config, environment=environment, model=model, **options)

    try:
        return run_sync(work())
    except KeyboardInterrupt:
        from rolltree.training.models.ranks import is_rank0

        if is_rank0() and not options.get("quiet") and options.get("reporter") is None:
            again = "call" if options.get("command") is None else "command"
            say(SafeConsole(stderr=True), f"stopped; the same {again} continues the run")
        raise


async def train_async(
    config: ConfigSource | None = None,
    *,
    environment: RolloutSource | Mapping[str, Any] | str | Path | None = None,
    model: Any = None,
    tokenizer: Any = None,
    client: ModelClient | None = None,
    engine: WeightTarget | Mapping[str, Any] | None = None,
    evaluate: Evaluate | None = None,
    reporter: Reporter | None = None,
    quiet: bool = False,
    num_transcripts: int = 2,
    command: Sequence[str] | None = None,
    run: Run | Mapping[str, Any] | str | Path | None = None,
    cluster: Outside | None = None,
    **settings: Unpack[TrainSettings],
) -> TrainReport:
    """Do what `train` does in the running event loop.

    Args:
        config, environment, model, settings: see `train`.
        tokenizer: the model's tokenizer, if the model is passed as an object.
        client: samples from `engine`; pass both, with `model`, or neither. They stay open.
        engine: serves `model`'s own tensors, or copies them when a version is published; or the
            `engine` section as a mapping.
        evaluate: `(phase, step) -> metrics`, instead of the held-out evaluation of the config.
        reporter: gets progress callbacks, and nothing is printed. None prints what `rolltree train`
            prints: progress on stderr, then the curve, held-out results and transcripts.
        quiet: print nothing.
        num_transcripts: held-out examples to print at the end, before and after training.
        command: the words of the command that called this, for suggestions of what to run next.
        run: where everything is stored, opened for writing, instead of the config's `run.dir`.
        cluster: the engines and rollout workers of a run on several processes, in which this one
            trains; `rolltree train` starts them from the config's `[cluster]` section.

    If cancelled, it saves a checkpoint and raises.
    """
    # rt.train(env)
    if _is_source(config) and environment is None:
        config, environment = None, cast(RolloutSource, config)
    named = {"env": environment, "engine": engine, "run": run, "model": model}
    values = cast(dict[str, Any], settings)
    objects = {name: _object(name, given, values) for name, given in named.items()}
    world, target, opened, model = objects.values()
    _check_arguments(
        config,
        world,
        model=model,
        tokenizer=tokenizer,
        client=client,
        engine=target,
        run=opened,
        reporter=reporter,
        evaluate=evaluate,
    )
    if model is not None:
        from rolltree.training.models.lora import unwrapped

        model = unwrapped(model)
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        settings.setdefault("model_name", str(name))
    if opened is not None:
        settings["run_dir"] = str(opened.path)
    if (client is None) != (target is None) or (client is not None and model is None):
        raise ConfigError(
            "client, engine and model belong together: the engine serves the model that is "
            "trained. Pass all three, or leave client and engine out."
        )
    checked = load_train_config(config, **settings)
    if checked.cluster is not None and cluster is None:
        raise ConfigError(
            "the config has a [cluster], whose processes `rolltree train CONFIG` starts; this call "
            "trains in one process. Use the command, or leave the section out."
        )
    check_trackers(checked)
    if model is None:
        check_loadable(checked.model.name, device=checked.model.device)
    # Before the environment is loaded: errors and events may quote the config.
    remember(*secrets_in(checked.as_dict()))
    # A process that trains alone loads the environment here. One of several ranks does it once they
    # have met, since the others would wait for a rank that failed before.
    source: RolloutSource | None = None
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if is_alone:
        checked, source = _environment(checked, world)
    if opened is None:
        make_run_folder(checked.run.dir)
    # From here on torch is needed. It is slow to import, so the checks above come before it.
    from rolltree.training import TrainParts, build_parts, open_run, run_training
    from rolltree.training.config import ignored_settings
    from rolltree.training.parts import settings_of_run, started_settings

    if model is not None:
        from rolltree.training.given import accept_given

        checked = accept_given(model, checked)
    # Every rank, before any of them trains.
    checked = started_settings(checked)
    stopped: BaseException | None = None
    met: AbstractContextManager[Ranks | None] = nullcontext()
    if not is_alone:
        from rolltree.training.models.ranks import start_ranks

        met = start_ranks(checked.model.device, os.environ.get(RENDEZVOUS, "env://"))
    with met as ranks:
        # Only one rank has an environment, a store and an engine; the others train.
        if ranks is not None and not ranks.leads:
            from rolltree.training.rank0 import follow

            follow(checked, ranks, model)
        else:
            try:
                async with AsyncExitStack() as stack:
                    if source is None:
                        checked, source = _environment(checked, world)
                    # A given one stays open.
                    if source is not world:
                        await stack.enter_async_context(cast(Environment, source))
                    began_with = opened.config if opened else settings_of_run(checked)
                    stored: Run = opened or stack.enter_context(open_run(checked))
                    shown = reporter or Silent()
                    if reporter is None and not quiet:
                        view = TrainView(SafeConsole(stderr=True, only_shows=True))
                        shown = stack.enter_context(view)
                    for message in ignored_settings(began_with):
                        stored.announce(message, shown.on_notice)
                    if model is not None:
                        from rolltree.training.given import begin

                        notify = partial(stored.announce, show=shown.on_notice)
                        # A model object keeps its weights when a call fails, so they are compared
                        # with those that the run began with.
                        begin(model, checked, stored, notify, is_alone=ranks is None)
                    if client is not None:
                        _check_engine(checked, ranks is not None)
                        parts = TrainParts(model, tokenizer, target, client, model)
                    else:
                        where = checked if cluster is None else await cluster.engines(checked)
                        parts = build_parts(where, ranks, model=model, tokenizer=tokenizer)
                        stack.push_async_callback(parts.aclose)
                    rollouts: RolloutEngine | None = None
                    if cluster is not None:
                        outside = cluster.rollouts(checked, source, parts, stored)
                        rollouts = await stack.enter_async_context(outside)
                    _warn_of_shared_questions(source, stored, shown)
                    note_weights(source, stored)
                    changed = changed_code(source, stored)
                    if changed is not None:
                        stored.announce(changed, shown.on_notice)
                    await run_training(
                        checked,
                        parts,
                        source=source,
                        run=stored,
                        evaluate=evaluate
                        or held_out(checked, source, parts.client, stored, shown, rollouts),
                        reporter=shown,
                        ranks=ranks,
                        rollouts=rollouts,
                    )
                    # Stored only to save time: `show --phase train` would read every rollout.
                    with suppress(StoreError):
                        if stored.kept_report("train") is None:
                            keep_report(stored, stored_report(stored, "train"))
            # Raised once the other ranks have been told to stop; otherwise they would wait forever.
            except (asyncio.CancelledError, Stopped) as error:
                stopped = error
            if ranks is not None:
                from rolltree.training.models.ranks import STOP

                ranks.send(STOP)
    if stopped is not None:
        raise stopped
    with Run.open(checked.run.dir, "r") as finished:
        if reporter is None and not quiet and (ranks is None or ranks.leads):
            print_report(
                finished,
                SafeConsole(only_shows=True),
                num_transcripts=num_transcripts,
                train_command=command,
                has_env_object=not isinstance(world, str | Path | None),
            )
        return TrainReport.read(finished)


def environment_config(name: str) -> dict[str, Any]:
    """Return the config that `rolltree train NAME` starts from: the environment's own `train.toml`.

    Its runs go to `runs/NAME`. Without a `train.toml`, the settings are chosen to fit the machine.

    Raises:
        UnknownName: there is no such environment.
        ConfigError: its `train.toml` cannot be read.
    """
    from rolltree._helpers.machine import suggested_config
    from rolltree.environments import train_config_file

    file = train_config_file(name)
    data = suggested_config() if file is None else load_train_config(file).as_dict()
    env = {**data.get("env", {}), "id": name}
    return {**data, "env": env, "run": {**data.get("run", {}), "dir": f"runs/{Path(name).stem}"}}


def _object(name: str, given: Any, settings: dict[str, Any]) -> Any:
    """Return an object as it is; a section, or a section's main key, becomes a setting instead."""
    # An environment may be a path, and is loaded later.
    is_name = isinstance(given, str | Path) and name != "env"
    if not is_name and not isinstance(given, Mapping):
        return given
    if name in settings:
        raise ConfigError(f"the section {name!r} is given twice. Put its keys into one of them.")
    settings[name] = str(given) if isinstance(given, Path) else given
    return None


def _is_source(value: object) -> bool:
    return not isinstance(value, type) and all(
        hasattr(value, name) for name in ("env_id", "num_examples", "run_request")
    )


# Objects that `train_async` takes: a check of each, and what the error message recommends.
_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (
        lambda given: callable(getattr(given, "named_parameters", None)),
        "a name, a folder, the model section as a mapping, or a Hugging Face causal LM.",
    ),
    "tokenizer": (
        callable,
        "the tokenizer object of the model: model, tokenizer = rt.load_model(...).",
    ),
    "client": (
        lambda given: hasattr(given, "generate"),
        "a client of the engine, such as rt.local_client returns. Servers are set by "
        "engine={'kind': 'servers', 'urls': [...]}.",
    ),
    "engine": (
        lambda given: hasattr(given, "publish"),
        "the engine section as a mapping, or the engine of a client, such as client.engine.",
    ),
    "run": (
        lambda given: isinstance(given, Run),
        "an rt.Run, or the run section as a mapping. A folder is named by run_dir='runs/x'.",
    ),
    "reporter": (
        lambda given: hasattr(given, "on_step"),
        "an rt.Reporter. Trackers are named by track={'to': ['wandb']}.",
    ),
    "evaluate": (
        callable,
        "an async function (phase, step) -> metrics. The evaluation of the config is set by "
        "eval={...}.",
    ),
}


def _check_arguments(config: Any, environment: Any, **given: Any) -> None:
    """Reject objects of the wrong kind before anything is loaded."""
    if config is not None and not isinstance(config, TrainConfig | Mapping | str | Path):
        raise ConfigError(
            f"the first argument is {_kind(config)}; it takes the config (a TOML file, a mapping "
            "or a TrainConfig). Pass an environment as environment=, a model as model=."
        )
    if not (environment is None or isinstance(environment, str | Path)):
        check_source(environment)
    for name, value in given.items():
        fits, takes = _ARGUMENTS[name]
        if value is not None and not fits(value):
            raise ConfigError(f"{name} is {_kind(value)}; it takes {takes}")
    if (given["model"] is None) != (given["tokenizer"] is None):
        raise ConfigError(
            "the model was given as an object, without its tokenizer. Pass both."
            if given["tokenizer"] is None
            else "a model that is loaded by name has its own tokenizer. Leave tokenizer out, or "
            "pass the model object too."
        )


def _kind(value: object) -> str:
    name = getattr(value, "__name__", None)
    return f"{type(value).__name__} {name!r}" if name else f"of type {type(value).__name__}"


def _environment(
    config: TrainConfig, given: RolloutSource | str | Path | None
) -> tuple[TrainConfig, RolloutSource]:
    """Return the environment, loaded unless it is given, and the config with its name."""
    if given is None or isinstance(given, str | Path):
        env_id = config.env.id if given is None else str(given)
        if not env_id:
            raise ConfigError(
                "there is no environment to train on: the config has no env.id. Set it, or pass "
                "environment= (an object, a name or a path)."
            )
        from rolltree.environments import load_environment

        source = load_environment(env_id, compat=config.env.compat, **config.env.args)
        return load_train_config(config, env={"id": env_id}), source
    check_source(given)
    if config.env.args:
        raise ConfigError(
            f"env.args is {config.env.args!r}, but the environment was given as an object, so they "
            "would have no effect. Leave env.args out, or pass the environment's name."
        )
    if config.env.compat:
        raise ConfigError(
            "env.compat is true, but the environment was given as an object, so it would have "
            "no effect. Leave it out, or pass the environment's name."
        )
    return load_train_config(config, env={"id": given.env_id}), given


def _warn_of_shared_questions(source: RolloutSource, run: Run, reporter: Reporter) -> None:
    """Announce it if the held-out evaluation contains training questions."""
    shared, num_tested = shared_questions(source) if isinstance(source, Environment) else ([], 0)
    if shared:
        message = (
            f"{len(shared)} of {num_tested} evaluation questions are also training questions, so "
            f"the held-out reward includes memorization; the first: {shared[0][-80:]!r}."
        )
        run.announce(message, reporter.on_notice)


def held_out(
    config: TrainConfig,
    source: RolloutSource,
    client: Any,
    run: Run,
    reporter: Reporter,
    rollouts: RolloutEngine | None = None,
) -> Evaluate:
    """Return the evaluation on the held-out split that the config's `eval` section describes."""

    async def evaluate_phase(phase: str, step: int) -> Mapping[str, Any]:
        def progress(at: EvalProgress) -> None:
            reporter.on_eval_progress(phase, at.num_done, at.num_total)

        report = await evaluate_async(
            source,
            client,
            num_examples=config.eval.num_examples,
            rollouts_per_example=config.eval.rollouts_per_example,
            sampling=config.eval.sampling_args(config.sampling),
            max_concurrent=config.engine.max_concurrent,
            seed=config.run.seed,
            run=run,
            phase=phase,
            time_limit_s=config.engine.time_limit_s,
            deadline_s=config.engine.deadline_s,
            retries=config.engine.retries,
            on_progress=progress,
            engine=rollouts,
        )
        return report.as_dict()

    return evaluate_phase


def _check_engine(config: TrainConfig, has_ranks: bool) -> None:
    """Reject a given engine that would not serve the weights that are trained."""
    if has_ranks or config.model.lora_rank:
        what = "several ranks train" if has_ranks else "model.lora_rank is set"
        raise ConfigError(
            f"an engine was given and {what}, so the engine needs a plain copy of the weights. "
            "Leave client and engine out, or call training.run_training with TrainParts."
        )


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Let SIGTERM cancel the current task inside this block, which then raises `Stopped`.

    Only in the main thread. `train_async` saves when it is cancelled.

    Raises:
        Stopped: SIGTERM came.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    received: list[int] = []

    def stop() -> None:
        # A second cancellation would interrupt the saving.
        if not received:
            received.append(signal.SIGTERM)
            task.cancel()

    # Not `signal.signal`: its handler could run between any two bytecodes, even while a checkpoint
    # is written.
    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    except asyncio.CancelledError:
        if not received:
            raise
        # `stop` cancelled the task, and no caller expects it to be cancelled.
        task.uncancel()
        raise Stopped(
            "stopped by SIGTERM; progress is saved. The same command continues the run."
        ) from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
