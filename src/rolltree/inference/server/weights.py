"""Weights from a folder of safetensors into a model that runs, in place.

Names and shapes are checked before anything is changed. It needs torch, and imports it when it is
called. It knows nothing about engines; whoever calls it sees to it that no step runs meanwhile.
"""

from __future__ import annotations

import json
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
    for path in safetensors_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    found[name] = path
                    shape = tuple(file.get_slice(name).get_shape())
                    if name in own and shape != tuple(own[name].shape):
                        raise _unfit(folder, f"{name} has shape {shape}", tuple(own[name].shape))
        except (SafetensorError, OSError) as error:
            raise _unfit(folder, f"{path.name} cannot be read ({error})") from error
    if unknown := sorted(found.keys() - own.keys()):
        raise _unfit(folder, f"{_some(unknown)} are none of the model's parameters")
    loaded = {own[name].data_ptr() for name in found}
    missing = sorted(name for name in own.keys() - found if own[name].data_ptr() not in loaded)
    if missing:
        raise _unfit(folder, f"{_some(missing)} are missing")
    with torch.no_grad():
        for path in sorted(set(found.values())):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    own[name].copy_(file.get_tensor(name))


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


def _unfit(folder: Path, what: str, expected: object = None) -> ConfigError:
    wanted = "" if expected is None else f", not {expected}"
    return ConfigError(
        f"the weights in {folder} do not fit the served model: {what}{wanted}. The model is "
        "unchanged. Publish weights of the same architecture."
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
