"""The rollouts of a step as flat metrics: rewards, lengths, ends, errors, throughput.

Pure: reads results, never changes them. It knows states and steps. It leaves out what the trainer
sees (`metrics.py`) and anything per task, which is a query on the run store.
"""

from __future__ import annotations

import resource
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

from rolltree.types import FinishReason, RolloutResult, State


def rollout_metrics(results: Sequence[RolloutResult]) -> dict[str, float]:
    """Return the metrics of all rollouts of one step.

    Rewards and metrics are those of the episodes' own rollouts; with several agents, or delegation,
    `reward/<agent>/mean` is each agent's. Lengths and calls are those of all.
    Rewards and `metric/*` are means over rollouts that have one; failed rollouts have none and are
    counted in `error/*`. Lengths count sampled tokens (`rollout/max_sampled_tokens`: of one call),
    `rollout/length_cut_share` is the share of calls that ran into their token limit.
    """
    states = [state for result in results for state in result.states]
    own = [state for state in states if state.get("parent_rollout") is None]
    rewards = [float(s["reward"]) for s in own if s.get("reward") is not None]
    metrics: dict[str, float] = {}
    if rewards:
        metrics["reward/mean"] = fmean(rewards)
        metrics["reward/std"] = pstdev(rewards)
        metrics["reward/max"] = max(rewards)
    metrics |= _agent_rewards(states)
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for state in own:
        for name, value in (state.get("metrics") or {}).items():
            if isinstance(value, int | float):
                by_name[name].append(float(value))
    metrics |= {f"metric/{name}": fmean(values) for name, values in sorted(by_name.items())}
    extras = [_extras(step) for state in states for step in state.get("trajectory") or ()]
    sampled = [int(extra.get("num_completion_tokens") or 0) for extra in extras]
    prompts = [int(extra.get("num_prompt_tokens") or 0) for extra in extras]
    cut = [str(extra.get("finish_reason")) == FinishReason.LENGTH for extra in extras]
    count = max(1, len(states))
    metrics |= {
        "rollout/num_calls": len(extras) / count,
        "rollout/sampled_tokens": sum(sampled) / count,
        "rollout/max_sampled_tokens": float(max(sampled, default=0)),
        "rollout/prompt_tokens": sum(prompts) / count,
        "rollout/total_sampled_tokens": float(sum(sampled)),
        "rollout/length_cut_share": sum(cut) / max(1, len(extras)),
        "rollout/truncated_share": sum(bool(s.get("truncated")) for s in states) / count,
        "rollout/generation_ms": _mean_timing(states, "generation_ms"),
        "rollout/scoring_ms": _mean_timing(states, "scoring_ms"),
        "memory/peak_rss_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }
    errors = Counter(result.error.type for result in results if result.error is not None)
    metrics["error/share"] = sum(errors.values()) / max(1, len(results))
    metrics |= {f"error/{kind}": float(number) for kind, number in sorted(errors.items())}
    return metrics


def _agent_rewards(states: Sequence[State]) -> dict[str, float]:
    """Return the mean reward of each agent, nothing where there is only one."""
    by_agent: defaultdict[str, list[float]] = defaultdict(list)
    for state in states:
        if state.get("reward") is not None:
            by_agent[str(state.get("agent") or "agent")].append(float(state["reward"]))
    if len(by_agent) < 2:
        return {}
    return {f"reward/{agent}/mean": fmean(values) for agent, values in sorted(by_agent.items())}


def _extras(step: Any) -> dict[str, Any]:
    return step.get("extras") or {}


def _mean_timing(states: Sequence[State], name: str) -> float:
    values = [float((state.get("timing") or {}).get(name) or 0.0) for state in states]
    return fmean(values) if values else 0.0
