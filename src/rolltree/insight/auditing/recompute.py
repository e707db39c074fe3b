"""Compares engine logprobs with a recomputation by the weights that sampled them; needs torch.

The weights come from the run's checkpoints and, for version 0, from the model that its settings
name. If logprobs differ, simple causes are tried: values shifted by a token, raw ones instead of
those at the sampling temperature, and the weights of another version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rolltree.inference.models.load import load_model, local_model_folder
from rolltree.insight.auditing.report import Finding, Ledger, some, tolerance
from rolltree.rollouts.decode import decode_rollout
from rolltree.samples import build_samples
from rolltree.samples.transform import take_records
from rolltree.store import Run
from rolltree.store.settings import without
from rolltree.training.config import REMOVED, TrainConfig, load_train_config
from rolltree.values.errors import ConfigError, TrainingError
from rolltree.values.types import FloatArray, Sample

# The default of `train.max_mismatch`.
MOST_TOLERANCE = 0.1


@dataclass(slots=True)
class _Chosen:
    """A rollout to recompute: its version, its samples, and the differences that are found."""

    request_id: str
    trajectory_index: int
    version: int
    samples: list[Sample]
    difference: FloatArray | None = None

    @property
    def engine(self) -> FloatArray:
        return np.concatenate([sample.records.logprob for sample in self.samples])

    @property
    def size(self) -> float:
        assert self.difference is not None
        return float(np.abs(self.difference).mean())


def recompute_logprobs(run: Run, ledger: Ledger, number: int) -> Mapping[str, float]:
    """Recompute the logprobs of up to `number` rollouts; return figures of the differences.

    Raises:
        ConfigError: no weights are available that sampled a stored rollout.
    """
    weights = VersionedWeights(run)
    chosen = list(_choose(run, weights, number))
    if not chosen:
        there = some(weights.versions) or "none"
        raise ConfigError(
            f"{run.path} has no rollout that can be recomputed: the weights here are of version "
            f"{there}, and no rollout with logprobs of the model's own distribution was sampled by "
            "one of these alone. The setting "
            "checkpoint.keep keeps more of them; leave --recompute out to check the rest."
        )
    ledger.skipped.pop("logprobs", None)
    # Version by version, so that each version's weights are read once, into the same model.
    for version in sorted({item.version for item in chosen}):
        compute = weights.at(version)
        for item in chosen:
            if item.version == version:
                item.difference = item.engine - compute(item.samples)
                ledger.count("logprobs")
    _, limit = tolerance((item.size for item in chosen), MOST_TOLERANCE)
    # Not `>`: NaN differs, too.
    wrong = [item for item in chosen if not item.size <= limit]
    for item in wrong:
        ledger.keep(_explain(item, weights, limit))
    values = np.concatenate([item.difference for item in chosen if item.difference is not None])
    return {
        "num_rollouts": float(len(chosen)),
        "num_tokens": float(len(values)),
        "abs_mean": float(np.abs(values).mean()),
        "abs_max": float(np.abs(values).max()),
        "tolerance": limit,
    }


def _choose(run: Run, weights: VersionedWeights, number: int) -> Iterator[_Chosen]:
    """Yield rollouts that one known version sampled, spread evenly over the run."""
    names = ("request_id", "trajectory_index", "min_version", "max_version")
    known = [
        (request_id, index, low)
        for request_id, index, low, high in run.columns(names)
        if low is not None and low == high and weights.has(low)
    ]
    # Evenly instead of the first ones: an error may have begun in the middle of the run.
    places = np.unique(np.linspace(0, len(known) - 1, min(number, len(known))).astype(int))
    for request_id, index, version in (known[place] for place in places.tolist()):
        for row in run.rollouts(request_id=request_id, trajectory_index=index):
            states = decode_rollout(row).states
            steps = [states[0]["trajectory"]]
            samples = build_samples(steps, "interleave", skip_invalid=True).samples
            # NaN stands for a logprob that the engine did not give.
            samples = [
                s
                for s in map(_of_own, samples)
                if not np.isnan(s.records.logprob).any() and s.records
            ]
            if samples:
                yield _Chosen(request_id, index, version, samples)


def _of_own(sample: Sample) -> Sample:
    """Leave out calls with `top_p` and the like: their logprobs are of another distribution."""
    changed = [call for _, call, _ in sample.info.get("changed_sampling", ())]
    if not changed:
        return sample
    keep = ~np.isin(sample.records.call, changed)
    return replace(sample, records=take_records(sample.records, keep))


def _explain(item: _Chosen, weights: VersionedWeights, limit: float) -> Finding:
    """Return the finding of a rollout that differs, with the cause that would explain it."""
    engine = item.engine
    cause, why = "engine_differs", ""
    # Causes are tried from the simplest on; the first that makes the numbers fit is named.
    compute = weights.at(item.version)
    right = compute(item.samples)
    # Some servers return logprobs before the temperature, which are not those of sampling.
    raw = compute([at_temperature(sample, 1.0) for sample in item.samples])
    if len(engine) > 1 and _near(engine[1:], right[:-1], limit):
        cause, why = "shifted", "; they fit when each is moved to the token before"
    elif len(engine) > 1 and _near(engine[:-1], right[1:], limit):
        cause, why = "shifted", "; they fit when each is moved to the token after"
    elif _near(engine, raw, limit):
        cause, why = "raw_logprobs", "; they are those at temperature 1, not at the sampler's"
    else:
        for version in weights.versions:
            if version != item.version and _near(engine, weights.at(version)(item.samples), limit):
                cause, why = "other_version", f"; they are those of version {version}"
                break
    return Finding(
        *("logprobs", cause),
        f"its engine logprobs differ from those of version {item.version} by {item.size:.2g} on "
        f"average, {np.abs(engine - right).max():.2g} at most{why}",
        item.request_id,
        item.trajectory_index,
    )


def _near(one: FloatArray, other: FloatArray, limit: float) -> bool:
    # The median, because after a shift the tokens at the edges of calls have arbitrary values.
    return bool(np.median(np.abs(one - other)) <= limit)


def at_temperature(sample: Sample, temperature: float) -> Sample:
    """Return a sample as if it had been sampled at a different temperature."""
    records = sample.records
    return replace(
        sample,
        records=replace(records, temperature=np.full_like(records.temperature, temperature)),
    )


class VersionedWeights:
    """The policy versions whose weights are available; one model loads each in turn."""

    def __init__(self, run: Run) -> None:
        self._config = _settings(run)
        self._folders: dict[int, Path | None] = {}
        base = local_model_folder(self._config.model.name)
        if base is not None:
            self._folders[0] = None
        for folder in sorted(run.checkpoints.glob("step-*")):
            number = folder.name.removeprefix("step-")
            if number.isdecimal() and any(folder.glob("*.safetensors")):
                self._folders[int(number)] = folder
        if base is None:
            raise ConfigError(
                f"the model {self._config.model.name!r} of {run.path} is not on this machine, so "
                "nothing can be recomputed. `rolltree models NAME` makes one that rolltree knows."
            )
        self._base = base
        self._model: Any = None
        self._reader: Any = None
        self._now: int | None = None

    @property
    def versions(self) -> list[int]:
        """The versions, oldest first."""
        return sorted(self._folders)

    def has(self, version: int) -> bool:
        """Whether the weights of a version are available."""
        return version in self._folders

    def at(self, version: int) -> Callable[[Sequence[Sample]], FloatArray]:
        """Return a function that computes the logprobs of samples with a version's weights."""
        from rolltree.training.checkpoint_reading import read_weights
        from rolltree.training.forward import logprob_reader, sample_logprobs
        from rolltree.training.parts import adapt

        folder = self._folders[version]
        if self._model is None or (folder is None and self._now != version):
            self._model, _ = load_model(str(self._base), "float32")
            adapt(self._model, self._config)
            # Probing takes longer than a rollout, and its result does not depend on the weights.
            self._reader = logprob_reader(self._model)
            self._now = 0
        if folder is not None and self._now != version:
            try:
                read_weights(folder, self._model)
            except TrainingError as error:
                raise ConfigError(str(error)) from error
        self._now = version
        return partial(sample_logprobs, self._reader)


def _settings(run: Run) -> TrainConfig:
    """Return the settings of a run that determine its weights."""
    config = without(run.config, REMOVED)
    if run.meta["kind"] == "train":
        return load_train_config({name: config.get(name, {}) for name in ("run", "model")})
    name = config.get("model")
    if not isinstance(name, str):
        raise ConfigError(f"{run.path} does not name its model, so nothing can be recomputed.")
    return load_train_config({"model": {"name": name}})
