"""The documented columns of every table, in their order; `docs/records.md` shows the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from rolltree.records.table import Column
from rolltree.store import StoredRollout

_CALL = Column("call", "int32", "the model call of the rollout, from 0, in order")

# What is made from a stored column comes after it, with its own description.
_AFTER = {
    "train_step": Column(
        "trained_step", "int64", "the step that trained its group; none if no step did"
    ),
    "error_phase": Column("error_message", "string", "what the first of its errors says"),
}


def _stored() -> Iterator[Column]:
    """Yield a column for each field of a stored row with a description."""
    for each in fields(StoredRollout):
        if about := each.metadata["description"]:
            yield Column(each.name, each.metadata["stored"].kind, about)
        if each.name in _AFTER:
            yield _AFTER[each.name]


ROLLOUTS = tuple(_stored())
_KEY = ROLLOUTS[:2]

STEPS = (
    Column("step", "int64", "the optimizer step, from 1"),
    Column("created_at", "float64", "when it was stored, s since 1970 (UTC)"),
)

EVALUATIONS = (
    Column("step", "int64", "optimizer steps before it; 0: before training"),
    Column("phase", "string", "the phase of its rollouts"),
)

EVENTS = (
    Column("created_at", "float64", "s since 1970 (UTC)"),
    Column("kind", "string", "what happened"),
    Column("step", "int64", "the optimizer step it belongs to, if any"),
    Column("data", "string", "what else is known, as JSON"),
)

CALLS = (
    *_KEY,
    _CALL,
    Column("agent", "string", "the agent that called"),
    Column("turn", "int32", "the agent's turn, from 0"),
    Column("num_prompt_tokens", "int32", "prompt tokens"),
    Column("num_new_tokens", "int32", "prompt tokens that no earlier call of the rollout had"),
    Column("num_completion_tokens", "int32", "sampled tokens"),
    Column("finish_reason", "string", "why the model stopped"),
    Column("temperature", "float32", "the sampling temperature"),
    Column("min_version", "int32", "oldest policy version of its sampled tokens"),
    Column("max_version", "int32", "newest policy version of its sampled tokens"),
    Column("mean_logprob", "float32", "mean of the engine's logprobs"),
    Column("sent_ms", "float64", "ms from the episode's start to the call"),
    Column("time_ms", "float64", "ms that the episode waited for the answer"),
    Column("wait_ms", "float64", "ms of queueing and retries in it, which time limits leave out"),
    Column("reward", "float64", "the step's own reward"),
    Column("advantage", "float64", "the step's own advantage, if a rubric or script set one"),
    Column("left_out", "string", "why it is not trained, if its session leaves it out"),
)

TOKENS = (
    *_KEY,
    _CALL,
    Column("agent", "string", "the agent that called"),
    Column("position", "int32", "in the call's context, from 0"),
    Column("token_id", "int32", "the id"),
    Column("is_sampled", "bool", "sampled in this call"),
    Column("author", "string", "`model`: sampled, here or in an earlier call; else `environment`"),
    Column("sampled_in", "int32", "the call that sampled it first"),
    Column("logprob", "float32", "the engine's, at the temperature it sampled at"),
    Column("version", "int32", "policy version that sampled it"),
    Column("mask", "float32", "its recorded loss mask; 1 if none was set"),
    Column("trained_step", "int64", "the optimizer step that trained the rollout"),
    Column("advantage", "float32", "the advantage that credit gave the token"),
    Column("loss_weight", "float32", "what multiplies its policy loss; 0 outside the loss"),
    Column(
        "trainer_logprob",
        "float32",
        "the trainer's logprob, when the step's first update reads the token",
    ),
    Column("entropy", "float32", "of the trainer's distribution there, in nats"),
    Column("reference_logprob", "float32", "the logprob of the KL's reference model"),
    Column("kl", "float32", "the KL over the vocabulary, if `algorithm.kl` is `full`"),
)

BREAKS = (
    *_KEY,
    _CALL,
    Column("previous_call", "int32", "the agent's call before, if it had one"),
    Column("agent", "string", "the agent that called"),
    Column("position", "int32", "how many ids agree"),
    Column("cause", "string", "why, as docs/token-tree.md lists them"),
    Column("previous_ids", "int32 list", "up to 16 ids on each side of `position`, before"),
    Column("current_ids", "int32 list", "the same, now"),
    Column("previous_text", "string", "`previous_ids` decoded, if a decoder was given"),
    Column("current_text", "string", "`current_ids` decoded"),
)

# Name to columns. `rollouts`, `steps` and `evaluations` also have one column per metric.
TABLES = {
    "rollouts": ROLLOUTS,
    "steps": STEPS,
    "evaluations": EVALUATIONS,
    "calls": CALLS,
    "tokens": TOKENS,
    "breaks": BREAKS,
    "events": EVENTS,
}

CONVERSATIONS = (
    *ROLLOUTS,
    Column("prompt", "messages", "the first messages"),
    Column("completion", "messages", "what model and environment said after them"),
)

SFT = (
    *_KEY,
    Column("sample", "int32", "which row of the rollout, from 0: each break begins another"),
    Column("env_id", "string", "the environment"),
    Column("example_id", "string", "the example, as text"),
    Column("task", "string", "the example's task"),
    Column("agent", "string", "the agent, if there are several"),
    Column("reward", "float64", "the rollout's"),
    Column("messages", "messages", "the conversation up to the last token"),
    Column("input_ids", "int32 list", "the exact ids that the engine saw and sampled"),
    Column("labels", "int32 list", "the id where it is to be learned, else -100"),
    Column("loss_mask", "int32 list", "1 where it is to be learned, else 0"),
)
