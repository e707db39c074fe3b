"""What the two rooms promise to the others: names, arguments, and light imports."""

from __future__ import annotations

import inspect
import subprocess
import sys

import rolltree.samples as samples
import rolltree.tokens as tokens


def test_public_names_are_pinned() -> None:
    assert sorted(samples.__all__) == [
        "CallSpan",
        "PackedSamples",
        "SampleBatch",
        "SampleStream",
        "SkipReason",
        "Skipped",
        "TruncationEffect",
        "TruncationPolicy",
        "build_samples",
        "join_samples",
        "pack",
        "process_trajectories_for_training",
        "prune_sample",
        "sample_meta",
        "split_sample",
        "to_examples",
        "truncation_effect",
        "truncation_effects",
    ]
    assert sorted(tokens.__all__) == [
        "Break",
        "BreakCause",
        "CallTable",
        "Decoder",
        "Place",
        "PlacedStream",
        "ROOT",
        "RecordedStep",
        "StepTokens",
        "TokenArena",
        "TokenStream",
        "TokenTree",
        "Trajectory",
        "explain_break",
        "insert_step",
        "mask_list",
        "peek",
        "readable_floats",
    ]
    for room in (samples, tokens):
        assert all(hasattr(room, name) for name in room.__all__)


def test_arguments_are_pinned() -> None:
    def names(function: object) -> list[str]:
        return list(inspect.signature(function).parameters)  # type: ignore[arg-type]

    assert names(samples.build_samples) == [
        "trajectories", "scope", "truncation", "max_seq_len", "group_key", "decode",
    ]  # fmt: skip
    assert names(samples.process_trajectories_for_training) == ["states", "mask_prompts"]
    assert names(samples.pack) == ["samples", "max_tokens", "num_ranks"]
    assert names(tokens.TokenTree.insert) == [
        "self", "prompt_ids", "completion_ids", "logprobs", "temperature", "versions", "mask",
        "prompt_mask", "agent", "turn", "parent", "verify", "streams",
    ]  # fmt: skip
    assert names(tokens.Trajectory.append_call) == [
        "self", "prompt", "completion", "generation", "agent", "turn", "extras", "streams",
    ]  # fmt: skip


def test_importing_them_needs_numpy_only() -> None:
    code = (
        "import sys, rolltree.tokens, rolltree.samples; "
        "heavy = {'torch', 'transformers', 'httpx', 'jinja2', 'openai'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
