"""The work behind `rolltree train`: config, environment, run, model, training, report.

Imported when the command runs. Held-out evaluation is injected here: training never imports it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from rolltree.environments import Environment, load_environment
from rolltree.errors import ConfigError, Stopped
from rolltree.evaluation import evaluate
from rolltree.reports import TrainView, next_commands, save_reward_curve, say, training_report
from rolltree.store import Run


def run_training(data: Mapping[str, Any], words: Sequence[str], *, num_transcripts: int) -> None:
    """Train as `data` says and print the report. `words` is the command, for what to try next.

    Under torchrun rank 0 does that, and the others train with it and print nothing.

    Raises:
        Stopped: SIGTERM came; the run is saved.
    """
    from rolltree.training import load_train_config
    from rolltree.training.leading import follow
    from rolltree.training.ranks import STOP, start_ranks

    config = load_train_config(data)
    if not config.env.id:
        raise ConfigError("the config has no env.id, so there is nothing to train on. Name one.")
    stopped: Stopped | KeyboardInterrupt | None = None
    with start_ranks(config.model.device) as ranks:
        if ranks is not None and not ranks.leads:
            follow(config, ranks)
            return
        try:
            _lead(config, ranks, words, num_transcripts)
        except (Stopped, KeyboardInterrupt) as error:
            stopped = error
        if ranks is not None:
            ranks.tell(STOP)
    if stopped is not None:
        raise stopped


def _lead(config: Any, ranks: Any, words: Sequence[str], num_transcripts: int) -> None:
    from rolltree.training import open_run

    errors, out = Console(stderr=True), Console()
    environment = load_environment(config.env.id, **config.env.args)
    with open_run(config) as run:
        try:
            with TrainView(errors) as view:
                asyncio.run(_train(config, environment, run, view, ranks))
        except KeyboardInterrupt:
            say(errors, "stopped; the same command continues the run")
            raise
        for part in training_report(run, num_transcripts=num_transcripts):
            out.print(part)
        curve = save_reward_curve(run)
        say(out, f"run    {run.path}")
        if curve is not None:
            say(out, f"curve  {curve}")
        say(out, "next")
        for command in next_commands(run, words):
            say(out, f"  {command}")


async def _train(
    config: Any, environment: Environment, run: Run, view: TrainView, ranks: Any
) -> None:
    from rolltree.training import build_local, train_async
    from rolltree.training.stopping import stop_on_sigterm

    parts = build_local(config, ranks)

    async def held_out(phase: str, step: int) -> Mapping[str, Any]:
        report = await evaluate(
            environment,
            parts.client,
            num_examples=config.eval.num_examples,
            rollouts_per_example=config.eval.rollouts_per_example,
            sampling=_eval_sampling(config),
            max_concurrent=config.engine.max_concurrent,
            seed=config.run.seed,
            run=run,
            phase=phase,
            time_limit_s=config.engine.time_limit_s,
            retries=config.engine.retries,
            on_progress=functools.partial(view.on_eval_progress, phase),
        )
        return report.as_dict()

    try:
        async with environment:
            with stop_on_sigterm():
                await train_async(
                    config,
                    source=environment,
                    run=run,
                    client=parts.client,
                    engine=parts.engine,
                    model=parts.model,
                    tokenizer=parts.tokenizer,
                    evaluate=held_out,
                    reporter=view,
                    served=parts.served,
                    ranks=ranks,
                )
    finally:
        await parts.aclose()


def _eval_sampling(config: Any) -> dict[str, Any]:
    own = {"temperature": config.eval.temperature, "max_tokens": config.eval.max_tokens}
    given = {name: value for name, value in own.items() if value is not None}
    return {**config.sampling.as_args(), **given}
