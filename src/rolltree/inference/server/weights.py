"""Weights into a model that runs, in place: from a folder of safetensors, and the check of them.

Names and shapes are checked before anything is changed. It needs torch, and imports it when it is
called. It knows nothing about engines; whoever calls it sees to it that no step runs meanwhile.
Weights that a trainer sends are `receiver`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolltree.errors import ConfigError

INDEX = "model.safetensors.index.json"


def load_weights(model: Any, folder: Path) -> None:
    """Copy every tensor in `folder` into `model`'s parameter or buffer of the same name.

    Parameters that share their memory with a loaded one (tied embeddings) may be missing.

    Raises:
        ConfigError: the folder has no safetensors, or their names or shapes are not the model's;
            the model is unchanged.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    own = model.state_dict()
    found: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in safetensors_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    found[name] = path
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise _unfit(f"in {folder}", f"{path.name} cannot be read ({error})") from error
    check_fit(own, shapes, f"in {folder}")
    with torch.no_grad():
        for path in sorted(set(found.values())):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    own[name].copy_(file.get_tensor(name))


def check_fit(own: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Refuse weights of other names or shapes than those of the state dict `own`.

    Parameters that share their memory with one that is there may be missing.

    Raises:
        ConfigError: naming what is wrong.
    """
    for name, shape in shapes.items():
        if name in own and shape != tuple(own[name].shape):
            raise _unfit(where, f"{name} has shape {shape}", tuple(own[name].shape))
    if unknown := sorted(shapes.keys() - own.keys()):
        raise _unfit(where, f"{_some(unknown)} are none of the model's parameters")
    loaded = {own[name].data_ptr() for name in shapes}
    missing = sorted(name for name in own.keys() - shapes if own[name].data_ptr() not in loaded)
    if missing:
        raise _unfit(where, f"{_some(missing)} are missing")


def safetensors_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those of its index, or all.

    Raises:
        ConfigError: there are none.
    """
    index = folder / INDEX
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise ConfigError(
            f"{folder} holds no *.safetensors, so there are no weights to load; the model is "
            "unchanged. Save it with save_pretrained, on a disk that the server can read."
        )
    return files


def _unfit(where: str, what: str, expected: object = None) -> ConfigError:
    wanted = "" if expected is None else f", not {expected}"
    return ConfigError(
        f"the weights {where} do not fit the served model: {what}{wanted}. The model is "
        "unchanged. Publish weights of the same architecture."
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
