"""The keyword arguments of `rt.train`: the settings, and what else it takes.

Written by `tests/golden/keywords.py` from the settings' sections; only type checkers read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from rolltree.inference import ModelClient
from rolltree.store import Run
from rolltree.training import Evaluate, Reporter, WeightTarget
from rolltree.training.advantages import BaselineName, OnError
from rolltree.training.sections import (
    AtLeast0,
    AtLeast1,
    ClusterEngines,
    ClusterTrainer,
    Decay,
    NonNegative,
    Positive,
    Share,
    Text,
)
from rolltree.values.types import Scope


class TrainSettings(TypedDict, total=False):
    """Sections, their keys, and their keys after the section's name, as `load_train_config`."""

    sampling: Mapping[str, Any]
    algorithm: Mapping[str, Any] | str
    optim: Mapping[str, Any]
    train: Mapping[str, Any]
    eval: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    track: Mapping[str, Any]
    dir: Text
    run_dir: Text
    seed: int
    run_seed: int
    model_name: str
    compute_dtype: Literal["float32", "bfloat16"]
    model_compute_dtype: Literal["float32", "bfloat16"]
    backward_dtype: Literal["float32", "bfloat16"]
    model_backward_dtype: Literal["float32", "bfloat16"]
    device: str
    model_device: str
    lora_rank: AtLeast0
    model_lora_rank: AtLeast0
    lora_alpha: Positive | None
    model_lora_alpha: Positive | None
    lora_targets: Sequence[str]
    model_lora_targets: Sequence[str]
    kind: Literal["local", "vllm", "servers"]
    engine_kind: Literal["local", "vllm", "servers"]
    urls: Sequence[str]
    engine_urls: Sequence[str]
    publish: Literal["auto", "shared", "transfer", "disk"]
    engine_publish: Literal["auto", "shared", "transfer", "disk"]
    transfer_address: str | None
    engine_transfer_address: str | None
    served_model: str | None
    engine_served_model: str | None
    api_key_env: str | None
    engine_api_key_env: str | None
    admin_key_env: str | None
    engine_admin_key_env: str | None
    probe_tolerance: Positive
    engine_probe_tolerance: Positive
    max_batch: AtLeast1
    engine_max_batch: AtLeast1
    max_context: AtLeast1 | None
    engine_max_context: AtLeast1 | None
    kv_budget_bytes: AtLeast1 | None
    engine_kv_budget_bytes: AtLeast1 | None
    prefill_chunk: AtLeast1
    engine_prefill_chunk: AtLeast1
    batch_invariant: bool
    engine_batch_invariant: bool
    record_experts: bool
    engine_record_experts: bool
    max_concurrent: AtLeast1
    engine_max_concurrent: AtLeast1
    time_limit_s: Positive | None
    engine_time_limit_s: Positive | None
    deadline_s: Positive | None
    engine_deadline_s: Positive | None
    retries: AtLeast0
    engine_retries: AtLeast0
    id: str
    env_id: str
    args: dict[str, Any]
    env_args: dict[str, Any]
    compat: bool
    env_compat: bool
    sampling_temperature: Positive | None
    sampling_max_tokens: AtLeast1 | None
    stop: Sequence[str] | None
    sampling_stop: Sequence[str] | None
    algorithm_name: str
    credit: str | None
    algorithm_credit: str | None
    loss: str | None
    algorithm_loss: str | None
    aggregation: str | None
    algorithm_aggregation: str | None
    clip_low: float | None
    algorithm_clip_low: float | None
    clip_high: float | None
    algorithm_clip_high: float | None
    dual_clip: float | None
    algorithm_dual_clip: float | None
    ratio_cap: float | None
    algorithm_ratio_cap: float | None
    group_size: AtLeast1
    algorithm_group_size: AtLeast1
    groups_per_step: AtLeast1
    algorithm_groups_per_step: AtLeast1
    dynamic_sampling_max: AtLeast0
    algorithm_dynamic_sampling_max: AtLeast0
    fixed_length: int | None
    algorithm_fixed_length: int | None
    correction: str | None
    algorithm_correction: str | None
    correction_low: float | None
    algorithm_correction_low: float | None
    correction_high: float | None
    algorithm_correction_high: float | None
    kl_coef: NonNegative | None
    algorithm_kl_coef: NonNegative | None
    kl: str | None
    algorithm_kl: str | None
    reference: str | None
    algorithm_reference: str | None
    entropy_coef: NonNegative
    algorithm_entropy_coef: NonNegative
    overlong_tokens: int | None
    algorithm_overlong_tokens: int | None
    overlong_buffer: int | None
    algorithm_overlong_buffer: int | None
    on_error: OnError
    algorithm_on_error: OnError
    truncation: Literal["keep", "drop", "mask", "penalise"]
    algorithm_truncation: Literal["keep", "drop", "mask", "penalise"]
    truncation_penalty: float
    algorithm_truncation_penalty: float
    mask_truncated_completions: bool
    algorithm_mask_truncated_completions: bool
    discount: Share
    algorithm_discount: Share
    flow: Literal["own", "shared", "discounted", "team"]
    algorithm_flow: Literal["own", "shared", "discounted", "team"]
    edge_discount: float | None
    algorithm_edge_discount: float | None
    baseline: BaselineName
    algorithm_baseline: BaselineName
    lr: Positive
    optim_lr: Positive
    beta1: Decay
    optim_beta1: Decay
    beta2: Decay
    optim_beta2: Decay
    eps: Positive
    optim_eps: Positive
    weight_decay: NonNegative
    optim_weight_decay: NonNegative
    max_grad_norm: Positive
    optim_max_grad_norm: Positive
    schedule: Literal["constant", "linear", "cosine"]
    optim_schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: AtLeast0
    optim_warmup_steps: AtLeast0
    num_steps: AtLeast1
    train_num_steps: AtLeast1
    scope: Scope
    train_scope: Scope
    share_prefix_across: Literal["group", "step", "rollout"]
    train_share_prefix_across: Literal["group", "step", "rollout"]
    max_seq_len: int | None
    train_max_seq_len: int | None
    train_max_tokens: AtLeast1
    forward: Literal["auto", "tree", "rows"]
    train_forward: Literal["auto", "tree", "rows"]
    tree_attention: Literal["segments", "flex"]
    train_tree_attention: Literal["segments", "flex"]
    updates_per_step: AtLeast1
    train_updates_per_step: AtLeast1
    minibatches: AtLeast1
    train_minibatches: AtLeast1
    skip_zero_advantage: bool
    train_skip_zero_advantage: bool
    gradient_checkpointing: bool
    train_gradient_checkpointing: bool
    replay_experts: bool | None
    train_replay_experts: bool | None
    async_steps: AtLeast0
    train_async_steps: AtLeast0
    max_lag: AtLeast0 | None
    train_max_lag: AtLeast0 | None
    max_failed_share: Share
    train_max_failed_share: Share
    max_mismatch: Positive
    train_max_mismatch: Positive
    changed_sampling: Literal["mask", "refuse"]
    train_changed_sampling: Literal["mask", "refuse"]
    record_tokens: bool
    train_record_tokens: bool
    num_threads: AtLeast1 | None
    train_num_threads: AtLeast1 | None
    before: bool
    eval_before: bool
    after: bool
    eval_after: bool
    eval_every: AtLeast0
    num_examples: int
    eval_num_examples: int
    rollouts_per_example: AtLeast1
    eval_rollouts_per_example: AtLeast1
    eval_temperature: NonNegative | None
    eval_max_tokens: AtLeast1 | None
    checkpoint_every: AtLeast1
    keep: AtLeast1
    checkpoint_keep: AtLeast1
    format: Literal["full", "sharded"]
    checkpoint_format: Literal["full", "sharded"]
    export: bool
    checkpoint_export: bool
    to: Sequence[str]
    track_to: Sequence[str]
    project: Text
    track_project: Text
    track_name: str | None
    transcripts: AtLeast0
    track_transcripts: AtLeast0
    launcher: Literal["local", "ray"]
    cluster_launcher: Literal["local", "ray"]
    address: str
    cluster_address: str
    rollout_workers: AtLeast1
    cluster_rollout_workers: AtLeast1
    engines: ClusterEngines
    cluster_engines: ClusterEngines
    trainer: ClusterTrainer
    cluster_trainer: ClusterTrainer
    slots_per_worker: AtLeast1
    cluster_slots_per_worker: AtLeast1


class TrainKeywords(TrainSettings, total=False):
    """What `rt.train` takes beside `config`, `environment` and `model`; see `train_async`."""

    tokenizer: Any
    client: ModelClient | None
    engine: WeightTarget | Mapping[str, Any] | None
    evaluate: Evaluate | None
    reporter: Reporter | None
    quiet: bool
    num_transcripts: int
    command: Sequence[str] | None
    run: Run | Mapping[str, Any] | str | Path | None
    cluster: Any  # what `rolltree.training.launch` calls `Outside`
