"""What a sample says about its episodes: spec 2's metadata, one dict per rollout in the sample.

Pure: reads samples and states. It knows the difference between how a step ended, how the episode
ended, why the model stopped, and what was cut for length. It leaves out what is done about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolltree.types import Sample, TruncationReason

_SEQ_LEN = ("seq_len_original", "seq_len_kept", "seq_len_lost")


def sample_meta(sample: Sample, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metadata of each origin of a sample made by `build_samples(states, ...)`.

    `terminated` and `truncated` are the flags of the origin's last step in this sample;
    `truncated` is also set when the sample was cut at `max_seq_len`. `episode_truncated` and
    `truncation_reason` are the episode's; the reason is "max_seq_len" for a cut sample of an
    episode that has none. `finish_reason` says why the model stopped and nothing else.
    `seq_len_truncated`, with `seq_len_original`, `seq_len_kept` and `seq_len_lost` where it is
    true, is about this sample alone.
    """
    metas = []
    for origin, index in zip(sample.origins, sample.info["rollouts"], strict=True):
        state = states[index]
        steps = state["trajectory"]
        last = origin.calls[-1]
        extras = steps[last].get("extras") or {}
        is_end = last == len(steps) - 1
        episode_truncated = bool(state.get("truncated"))
        is_cut = bool(sample.info.get("seq_len_truncated")) and origin.truncated
        ended = bool(extras.get("truncated", is_end and episode_truncated))
        reason = state.get("truncation_reason")
        if is_cut and not reason:
            reason = TruncationReason.MAX_SEQ_LEN
        meta: dict[str, Any] = {
            "rollout_id": origin.rollout_id,
            "agent": origin.agent,
            "calls": origin.calls,
            "reward": origin.reward,
            "advantage": steps[last].get("advantage"),
            "terminated": bool(extras.get("terminated", is_end and bool(state.get("terminated")))),
            "truncated": ended or is_cut,
            "episode_truncated": episode_truncated,
            "truncation_reason": None if reason is None else str(reason),
            "finish_reason": origin.finish_reason,
            "incomplete_completion": bool(extras.get("incomplete_completion", False)),
            "seq_len_truncated": is_cut,
        }
        if is_cut:
            meta |= {key: sample.info[key] for key in _SEQ_LEN}
        for key in ("parent_rollout", "parent_step", "depth", "subtask"):
            if state.get(key) is not None:
                meta[key] = state[key]
        metas.append(meta)
    return metas
