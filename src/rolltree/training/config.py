"""The config of a training run, from a TOML file, plain data, keywords or the command line.

Unknown keys, values out of range and settings that nothing would read are errors that name the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from rolltree._helpers.untrusted import read_toml
from rolltree.training.algorithm_section import AlgorithmSection
from rolltree.training.sections import (
    CheckpointSection,
    ClusterSection,
    EngineSection,
    EnvSection,
    EvalSection,
    ModelSection,
    OptimSection,
    RunSection,
    SamplingSection,
    Section,
    TrackSection,
    TrainSection,
)
from rolltree.values.errors import ConfigError, did_you_mean

MAY_CHANGE: tuple[str, ...] = (
    "run.dir",
    "engine",
    "cluster",
    "eval.every",
    "eval.after",
    "checkpoint",
    "track",
    "train.num_steps",
    "train.changed_sampling",
    "train.max_failed_share",
    "train.max_mismatch",
    "train.max_tokens",
    "train.num_threads",
    "train.record_tokens",
    "train.tree_attention",
    "train.gradient_checkpointing",
)
"""Settings in which a continued run may differ from its first start: they do not change what is
learned from one step, or only say how long to go on. See `TrainConfig.may_change`."""


REMOVED: dict[str, tuple[Any, str]] = {
    "engine.reload_method": (
        "reload_all_weights",
        "servers that read the weights from a disk load them with `reload_all_weights`",
    ),
    "engine.away_limit_s": (1800.0, "a run waits 1800 s for its servers"),
    "checkpoint.max_shard_size": ("5GB", "files of weights have at most 5 GB"),
    "track.transcripts_every": (10, "trackers get transcripts of every tenth step"),
    "optim.final_lr_share": (0.0, "a schedule that falls ends at 0"),
    "algorithm.baseline_decay": (0.9, "the moving average has the decay 0.9"),
    "cluster.orphan_s": (60.0, "a role ends 60 s after its driver"),
    "cluster.max_restarts": (5, "a role starts again at most 5 times without progress"),
    "cluster.queue_bytes": (2**28, "at most 256 MiB of results wait to be stored"),
    "cluster.stall_s": (20.0, "a role that is silent for 20 s is reported"),
    "train.chunk_rows": (256, "logits of at most 256 positions are in memory at once"),
}
"""Settings of earlier versions that no longer exist: the only value now, and what it means. Stored
runs may hold them."""


_ONCE_BY_CALL = ("grpo", "rloo", "reinforce", "zero")
"""Algorithms whose aggregation was `call` before `train.changed_sampling` existed."""


class TrainConfig(Section, frozen=True):
    """All settings of a training run, one section per field; the sections document their keys."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    env: EnvSection = EnvSection()
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    track: TrackSection = TrackSection()
    cluster: ClusterSection | None = None

    def __post_init__(self) -> None:
        self._check_cluster()
        shared = self.engine.kind == "local" and self.model.device == "cpu" and not self.cluster
        if self.train.async_steps and shared and self.model.backward_dtype != "float32":
            raise ConfigError(
                f"train.async_steps is {self.train.async_steps} and model.backward_dtype is "
                f"{self.model.backward_dtype!r}. That precision is process-wide, so the "
                "engine, which samples during the backward pass, would use it, too. Use 'float32', "
                "or train.async_steps = 0."
            )

    def _check_cluster(self) -> None:
        if self.cluster is None:
            return
        if self.engine.kind != "local":
            raise ConfigError(
                f"there is a [cluster] and engine.kind is {self.engine.kind!r}. The engines of a "
                "cluster are processes of the run: set cluster.engines.kind = 'serve' or 'vllm', "
                "and leave engine.kind out."
            )
        defaults = EngineSection()
        for name in ("kv_budget_bytes", "prefill_chunk", "max_concurrent"):
            if getattr(self.engine, name) != getattr(defaults, name):
                raise ConfigError(
                    f"there is a [cluster] and engine.{name} is set, which it does not read, so it "
                    "would have no effect. Leave it out (cluster.slots_per_worker says how many "
                    "rollouts a worker plays at a time)."
                )

    def may_change(self) -> tuple[str, ...]:
        """Return `MAY_CHANGE`, without `train.num_steps` if the learning rate depends on it."""
        falls = self.optim.schedule != "constant"
        return tuple(key for key in MAY_CHANGE if not (falls and key == "train.num_steps"))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: what the run store keeps, and `load_train_config` reads back."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


def as_started(config: TrainConfig, stored: Mapping[str, Any]) -> TrainConfig:
    """Return settings with the aggregation that a run's own, `stored` ones had when it began.

    The same command continues a run as it was, even if the default of its algorithm has changed.
    """
    old, name = stored.get("algorithm") or {}, config.algorithm.name
    is_older = "changed_sampling" not in (stored.get("train") or {})
    was = old.get("aggregation") or ("call" if is_older else None)
    if (
        name not in _ONCE_BY_CALL
        or old.get("name", name) != name
        or config.algorithm.aggregation is not None
        or was != "call"
        or "algorithm" not in stored
    ):
        return config
    return load_train_config(config, algorithm_aggregation=was)


def ignored_settings(stored: Mapping[str, Any]) -> list[str]:
    """Return a notice for each of `REMOVED` that a stored run has with another value."""
    notices = []
    for name, (_, now) in REMOVED.items():
        section, _, key = name.partition(".")
        values = stored.get(section)
        value = values.get(key) if isinstance(values, Mapping) else None
        if not is_unchanged(name, value):
            notices.append(
                f"the run was started with {name} = {value!r}, a setting that was removed: {now}."
            )
    return notices


def is_unchanged(name: str, value: object) -> bool:
    """Whether a setting was removed, and this value means what holds now."""
    return name in REMOVED and value in (None, REMOVED[name][0])


def load_train_config(
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> TrainConfig:
    """Return the config of a training run, checked.

        load_train_config("examples/demo/demo.toml", lr=2e-5, run_dir="runs/second")

    Args:
        config: a TOML file, plain data, or a config; None for the defaults.
        overrides: `"section.key=value"`, as on the command line; values are TOML, or strings.
        settings: a section (`optim={"lr": 1e-5}`; `model="tiny"` sets its name), a key that only
            one section has (`num_steps=20`), or any key after its section's name
            (`sampling_max_tokens=8`).

    Raises:
        ConfigError: the file cannot be read, an unknown section or key (with the nearest one), or a
            value of another type or out of range; the message names the dotted key.
    """
    # It was checked when it was created.
    if isinstance(config, TrainConfig) and not overrides and not settings:
        return config
    if isinstance(config, TrainConfig):
        config = config.as_dict()
    data = _read_toml(Path(config)) if isinstance(config, str | Path) else dict(config or {})
    # A copy: overrides write into it, at any depth, and the mapping is the caller's. A section that
    # is left out may be None in stored settings.
    data = {key: _with_text_paths(value) for key, value in data.items() if value is not None}
    for override in overrides:
        apply_override(data, override)
    for name, value in settings.items():
        _apply_setting(data, name, value)
    # Before msgspec, whose error would not name the nearest key.
    _check_names(data)
    try:
        return msgspec.convert(_with_text_paths(data), TrainConfig, strict=True)
    except msgspec.ValidationError as error:
        # What a section's own check raised, which msgspec has wrapped.
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        # msgspec names the place as "$.optim.lr" at the end of its message.
        text, _, path = str(error).partition(" - at `$.")
        raise ConfigError(_invalid(data, path.rstrip("`"), text)) from None


def _with_text_paths(value: Any) -> Any:
    """Return a copy of plain data with each path as text, as settings are stored."""
    if isinstance(value, Mapping):
        return {key: _with_text_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_paths(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key in nested data; a value that is not TOML is a string.

    >>> data = {"optim": {"lr": 1.0}}
    >>> apply_override(data, "optim.lr=1e-5"); data
    {'optim': {'lr': 1e-05}}

    Raises:
        ConfigError: there is no `=`, an empty key, or a key inside a value that is not a section.
    """
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(
            f"{override!r} is not an override. Write section.key=value, such as optim.lr=1e-5."
        )
    section = data
    for depth, name in enumerate(names[:-1], start=1):
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"{override!r} sets a key inside {'.'.join(names[:depth])}, which is a value and "
                "not a section."
            )
    section[names[-1]] = parse_value(text.strip())


def parse_value(text: str) -> Any:
    """Return the TOML value of a text, or the text itself if it is not one.

    >>> parse_value("1e-5"), parse_value("tiny")
    (1e-05, 'tiny')
    """
    try:
        return read_toml(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text


_SECTIONS: dict[str, Any] = {
    # The class of a section that may be left out is the first of its union.
    field.name: get_args(field.type)[0] if get_args(field.type) else field.type
    for field in msgspec.structs.fields(TrainConfig)
}
_MAIN_KEY = {"run": "dir", "model": "name", "env": "id", "algorithm": "name", "engine": "kind"}
"""The key that `section=value` sets if the value is not a mapping."""


_KNOWN_AS = {
    **dict.fromkeys(("learning_rate", "actor_lr"), "optim.lr"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_warmup_style"), "optim.schedule"),
    **dict.fromkeys(("warmup_ratio", "num_warmup_steps", "lr_warmup_steps"), "optim.warmup_steps"),
    **dict.fromkeys(("max_norm", "grad_clip", "gradient_clipping"), "optim.max_grad_norm"),
    **{"adam_beta1": "optim.beta1", "adam_beta2": "optim.beta2", "adam_epsilon": "optim.eps"},
    **dict.fromkeys(
        ("num_generations", "rollout_n", "num_return_sequences", "n"),
        "algorithm.group_size",
    ),
    **dict.fromkeys(
        ("batch_size", "train_batch_size", "per_device_train_batch_size", "prompts_per_step"),
        "algorithm.groups_per_step",
    ),
    **dict.fromkeys(
        ("max_completion_length", "max_new_tokens", "max_response_length", "response_length"),
        "sampling.max_tokens",
    ),
    **dict.fromkeys(("beta", "kl_loss_coef", "kl_beta", "init_kl_coef"), "algorithm.kl_coef"),
    **dict.fromkeys(("epsilon", "clip_ratio", "cliprange", "clip_ratio_low"), "algorithm.clip_low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), "algorithm.clip_high"),
    **dict.fromkeys(("ref_model", "reference_model", "teacher"), "algorithm.reference"),
    **dict.fromkeys(("loss_type", "policy_loss"), "algorithm.loss"),
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "scale_rewards"), "algorithm.credit"),
    **dict.fromkeys(("loss_agg_mode", "importance_sampling_level"), "algorithm.aggregation"),
    **dict.fromkeys(("entropy_coeff", "ent_coef"), "algorithm.entropy_coef"),
    **dict.fromkeys(
        (
            *("steps", "max_steps", "total_training_steps", "num_train_steps"),
            *("num_train_epochs", "epochs", "iterations"),
        ),
        "train.num_steps",
    ),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "mu"), "train.updates_per_step"),
    **dict.fromkeys(("ppo_mini_batch_size", "num_mini_batches"), "train.minibatches"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "micro_batch_size", "max_tokens_per_gpu"),
        "train.max_tokens",
    ),
    **dict.fromkeys(("max_length", "max_model_len", "max_prompt_length"), "train.max_seq_len"),
    **dict.fromkeys(("output_dir", "save_dir", "default_local_dir"), "run.dir"),
    **dict.fromkeys(("save_steps", "save_freq", "save_every"), "checkpoint.every"),
    "save_total_limit": "checkpoint.keep",
    **dict.fromkeys(("eval_steps", "test_freq", "eval_freq"), "eval.every"),
    **dict.fromkeys(("report_to", "logger", "trackers"), "track.to"),
    **dict.fromkeys(("project_name", "wandb_project"), "track.project"),
    **dict.fromkeys(("experiment_name", "run_name"), "track.name"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "dtype", "precision"), "model.compute_dtype"),
    **dict.fromkeys(("lora_r", "r", "rank"), "model.lora_rank"),
    **dict.fromkeys(("target_modules", "lora_target_modules"), "model.lora_targets"),
    **dict.fromkeys(("model_name_or_path", "model_path"), "model.name"),
    **dict.fromkeys(("use_vllm", "vllm_mode", "backend"), "engine.kind"),
    **dict.fromkeys(("vllm_server_base_url", "base_url", "server_url"), "engine.urls"),
    **dict.fromkeys(("environment_id", "env_name"), "env.id"),
}
"""Names of settings in other libraries, and the same or the closest setting here."""


def _meant(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for a key that does not exist."""
    # Names of other libraries first: by spelling, `beta` is nearer to `beta2` than to `kl_coef`.
    if place := _KNOWN_AS.get(name.rpartition(".")[2]):
        section, key = place.split(".")
        ways = sorted({key, f"{section}_{key}"} & set(known))
        way = f" (in Python {' or '.join(f'{each}=...' for each in ways)})" if ways else ""
        return f" Did you mean {place!r}{way}?"
    names = list(known)
    hint = did_you_mean(name, names)
    # A list of all keys would be too long to help.
    if "Did you mean" in hint or len(names) < 40:
        return hint
    return f" The sections are {', '.join(_SECTIONS)}; `rolltree docs settings` lists their keys."


def _was_removed(place: str) -> str:
    return f" It was removed: {REMOVED[place][1]}. Leave it out."


def _apply_setting(data: dict[str, Any], name: str, value: Any) -> None:
    if name in _SECTIONS:
        if not isinstance(value, Mapping) and name in _MAIN_KEY:
            value = {_MAIN_KEY[name]: value}
        # A keyword adds to the file's section and does not replace it.
        data[name] = {**_section(data, name), **value} if isinstance(value, Mapping) else value
        return
    keys = {(s, key): (key, f"{s}_{key}") for s in _SECTIONS for key in _keys(s)}
    places = [place for place, names in keys.items() if name in names]
    if len(places) > 1:
        ways = ", ".join(f"{section}_{key}" for section, key in places)
        raise ConfigError(f"{name} is a key of several sections. Write one of {ways}.")
    if not places:
        known = {spelling for names in keys.values() for spelling in names}
        for place in REMOVED:
            if name in (place.partition(".")[2], place.replace(".", "_")):
                raise ConfigError(f"there is no setting {name!r}.{_was_removed(place)}")
        raise ConfigError(f"there is no setting {name!r}.{_meant(name, {*known, *_SECTIONS})}")
    section, key = places[0]
    data[section] = {**_section(data, section), key: value}


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, Mapping):
        keys = f"{_MAIN_KEY[name]} = {section!r}" if name in _MAIN_KEY else "its keys"
        raise ConfigError(
            f"{name} is {section!r}, which is not a section, so its keys cannot be set. "
            f"In TOML, write {keys} below [{name}]; in Python, make it a dict."
        )
    return section


def _keys(section: str) -> tuple[str, ...]:
    keys: tuple[str, ...] = _SECTIONS[section].__struct_fields__
    return keys


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        # `rolltree train key=value` takes the setting for the file.
        key, is_setting, _ = str(path).partition("=")
        if is_setting:
            raise ConfigError(
                f"{key} is a setting, but a config file must come first: CONFIG.toml {key}=... "
                "examples/ has configs to start from."
            ) from error
        raise ConfigError(
            f"the config {path} cannot be read ({error.strerror}). Check the path; examples/ has "
            "configs to start from."
        ) from error
    except ValueError as error:
        raise ConfigError(f"the config {path} is not TOML: {error}.") from error


def _check_names(data: Mapping[str, Any]) -> None:
    for section, values in data.items():
        if section not in _SECTIONS:
            raise ConfigError(f"the config has no section {section!r}.{_meant(section, _SECTIONS)}")
        for key in values if isinstance(values, Mapping) else ():
            if key not in _keys(section):
                place = f"{section}.{key}"
                is_old = place in REMOVED
                hint = _was_removed(place) if is_old else _meant(str(key), _keys(section))
                raise ConfigError(f"the config has no key {place}.{hint}")


def _invalid(data: Any, where: str, text: str) -> str:
    """Return the message for a value that msgspec refused at the dotted key `where`."""
    names = where.split(".")
    for name in where.replace("[", ".").replace("]", "").split("."):
        if isinstance(data, list | tuple) and name.isdecimal():
            data = data[int(name)]
        else:
            data = data.get(name) if isinstance(data, Mapping) else None
    allowed = _choices(names) if "enum" in text else []
    remedy = did_you_mean(str(data), allowed) if allowed else " Change it."
    if "Did you mean" in remedy:
        remedy += f" Known: {', '.join(allowed)}."
    return f"{where or 'the config'} is {data!r}: {text[0].lower()}{text[1:]}.{remedy}"


def _choices(names: Sequence[str]) -> list[str]:
    """Return the values that a setting may have, if those are a few names."""
    if len(names) != 2 or names[0] not in _SECTIONS:
        return []
    # The annotations are text, because of the `__future__` import.
    hint = get_type_hints(_SECTIONS[names[0]]).get(names[1])
    options = (hint, *get_args(hint))
    return sorted({str(v) for o in options if get_origin(o) is Literal for v in get_args(o)})
