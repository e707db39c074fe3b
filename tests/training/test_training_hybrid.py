"""A model with recurrent layers goes through the whole loop: sampled, trained and sampled again."""

import shutil
from pathlib import Path
from typing import Any

import torch
from loop_kit import make_config, start
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from rolltree.training import build_parts


def hybrid(folder: Path, tokenizer: Path) -> Path:
    """Save a small Qwen3-Next: three gated delta nets, one attention layer, a mixture."""
    shutil.copytree(
        tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=265,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=258,
        pad_token_id=256,
    )
    Qwen3NextForCausalLM(config).save_pretrained(folder)
    return folder


def test_it_is_trained_on_what_it_sampled(model: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"num_steps": 2, "num_threads": 1, "scope": "interleave"}}
    config = make_config(hybrid(tmp_path / "hybrid", model), tmp_path / "run", **sections)
    parts = build_parts(config)
    assert parts.client.engine.route.row_mode is not None
    report = start(config, parts=parts)
    assert len(report.metrics) == 2
    for step in report.metrics:
        assert step["train/num_records"] > 0
        assert (
            step["train/sampling/sampling_logp_difference/mean"] < 1e-4
        )  # the engine has each step's new weights
