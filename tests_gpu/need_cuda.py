"""Says why a command for GPUs cannot run here, or nothing: `python tests_gpu/need_cuda.py NAME`."""

from __future__ import annotations

import sys

import torch


def missing(command: str) -> str | None:
    """Return what keeps `command` from running, None if torch sees a CUDA device."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA"
        then = (
            "install the CUDA build of the same version into the environment (pytorch.org says "
            "from where)"
        )
    else:
        why = f"torch {torch.__version__} sees no CUDA device"
        then = "check that nvidia-smi lists one"
    return (
        f"make {command} needs an NVIDIA GPU: {why}. On a machine with a GPU, {then} and run it "
        "again. Everything that needs none is in make test."
    )


if __name__ == "__main__":
    sys.exit(missing(sys.argv[1]))
