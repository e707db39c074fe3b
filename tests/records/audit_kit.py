"""A training run to corrupt: three-turn rollouts, failures, evaluations, trained tokens."""

import rolltree as rt
from golden import make_runs
from rolltree.inference.models import make_tiny


def make_trained_run(folder):
    """Train the run of the golden runs in `folder`; return its directory."""
    (folder / "model").mkdir()
    make_tiny(folder / "model", make_runs.TINY)
    sections = {
        "run": {"dir": str(folder / "run"), "seed": 3},
        "model": {"name": str(folder / "model")},
    }
    rt.train(
        make_runs.TRAIN | sections,
        environment=make_runs.letters_environment(),
        reporter=rt.Silent(),
    )
    return folder / "run"
