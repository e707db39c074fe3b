"""The config of a training run, from a TOML file, plain data, keywords or the command line.

Unknown keys, values out of range and settings that nothing would read are errors that name the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, get_args

import msgspec

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
from rolltree.values.errors import ConfigError

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
        overrides: `"section.key=value"` or the names of `settings`, as on the command line; values
            are TOML, or strings.
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
    if isinstance(config, str | Path):
        from rolltree.training.config_input import read_config

        config = read_config(Path(config))
    data = dict(config or {})
    # A copy: overrides write into it, at any depth, and the mapping is the caller's. A section that
    # is left out may be None in stored settings.
    data = {key: _with_text_paths(value) for key, value in data.items() if value is not None}
    for override in overrides:
        from rolltree.training.config_input import apply_override

        apply_override(data, override)
    for name, value in settings.items():
        apply_setting(data, name, value)
    # Before msgspec, whose error would not name the nearest key.
    _check_names(data)
    try:
        return msgspec.convert(_with_text_paths(data), TrainConfig, strict=True)
    except msgspec.ValidationError as error:
        # What a section's own check raised, which msgspec has wrapped.
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        from rolltree.training.config_input import invalid

        # msgspec names the place as "$.optim.lr" at the end of its message.
        text, _, path = str(error).partition(" - at `$.")
        raise ConfigError(invalid(data, path.rstrip("`"), text)) from None


def _with_text_paths(value: Any) -> Any:
    """Return a copy of plain data with each path as text, as settings are stored."""
    if isinstance(value, Mapping):
        return {key: _with_text_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_paths(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


SECTIONS: dict[str, Any] = {
    # The class of a section that may be left out is the first of its union.
    field.name: get_args(field.type)[0] if get_args(field.type) else field.type
    for field in msgspec.structs.fields(TrainConfig)
}
_MAIN_KEY = {"run": "dir", "model": "name", "env": "id", "algorithm": "name", "engine": "kind"}
"""The key that `section=value` sets if the value is not a mapping."""


def apply_setting(data: dict[str, Any], name: str, value: Any) -> None:
    """Set a section, or a key by its own name or after its section's, in a config's data."""
    if name in SECTIONS:
        if not isinstance(value, Mapping) and name in _MAIN_KEY:
            value = {_MAIN_KEY[name]: value}
        # A keyword adds to the file's section and does not replace it.
        data[name] = {**_section(data, name), **value} if isinstance(value, Mapping) else value
        return
    keys = {(s, key): (key, f"{s}_{key}") for s in SECTIONS for key in keys_of(s)}
    places = [place for place, names in keys.items() if name in names]
    if len(places) > 1:
        ways = ", ".join(f"{section}_{key}" for section, key in places)
        raise ConfigError(f"{name} is a key of several sections. Write one of {ways}.")
    if not places:
        from rolltree.training.config_input import meant, was_removed

        known = {spelling for names in keys.values() for spelling in names}
        for place in REMOVED:
            if name in (place.partition(".")[2], place.replace(".", "_")):
                raise ConfigError(f"there is no setting {name!r}.{was_removed(place)}")
        raise ConfigError(f"there is no setting {name!r}.{meant(name, {*known, *SECTIONS})}")
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


def keys_of(section: str) -> tuple[str, ...]:
    """Return the keys of a section."""
    keys: tuple[str, ...] = SECTIONS[section].__struct_fields__
    return keys


def _check_names(data: Mapping[str, Any]) -> None:
    unknown = [place for section, values in data.items() for place in _unknown_in(section, values)]
    if unknown:
        from rolltree.training.config_input import unknown_keys

        raise ConfigError(unknown_keys(unknown))


def _unknown_in(section: str, values: Any) -> list[str]:
    if section not in SECTIONS:
        return [section]
    keys = values if isinstance(values, Mapping) else ()
    return [f"{section}.{key}" for key in keys if key not in keys_of(section)]
