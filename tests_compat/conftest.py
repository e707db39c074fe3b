"""Plays the asked cases once per session on the real verifiers and on rolltree, side by side."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, PUBLISHED
from server import Scripted

HERE = Path(__file__).parent
ROOT = HERE.parent
REAL = Path(os.environ.get("ROLLTREE_VERIFIERS", ROOT / ".venv-verifiers")) / "bin" / "python"
TIME_LIMIT_S = 800  # a minute on two idle cores


@dataclass
class Played:
    """What each side wrote, by case, and the requests its server saw."""

    real: dict[str, Any]
    ours: dict[str, Any]
    real_requests: dict[str, list[dict[str, Any]]]
    our_requests: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    """Play the cases of the tests of this session."""
    if not REAL.exists():
        pytest.skip(f"the real verifiers is not installed at {REAL}: run `make test-compat`")
    asked: list[str] = []
    for item in request.session.items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        if name and name not in asked:
            asked.append(name)
    if not asked:
        asked = list(CASES)
    out = ROOT / "runs" / "compat"
    out.mkdir(parents=True, exist_ok=True)
    cache = out / f"real-{fingerprint()}.json"
    known = json.loads(cache.read_text()) if cache.exists() else {"results": {}, "requests": {}}
    with Scripted() as real_server, Scripted() as our_server:
        new = [name for name in asked if name not in known["results"]]
        real = start([str(REAL)], real_server.url, out / "real.json", new) if new else None
        ours = start(
            [sys.executable, str(HERE / "as_verifiers.py")],
            our_server.url,
            out / "ours.json",
            asked,
        )
        try:
            for process in filter(None, (real, ours)):
                process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"gave up after {TIME_LIMIT_S} s; see {out}/*.log", file=sys.stderr)
        finally:
            for process in filter(None, (real, ours)):
                process.kill()
                process.wait()
        if real is not None:
            known["results"] |= read(out / "real.json", real_server.url)
            known["requests"] |= {name: real_server.requests_of(name) for name in new}
            if real.returncode == 0:
                cache.write_text(json.dumps(known))
        made = Played(
            known["results"],
            read(out / "ours.json", our_server.url),
            known["requests"],
            {name: our_server.requests_of(name) for name in asked},
        )
        (out / "played.json").write_text(json.dumps(asdict(made)))
        yield made


def fingerprint() -> str:
    """Return a name for what the real side plays: its results are kept while nothing changes."""
    digest = hashlib.sha256(str(PUBLISHED).encode())
    ours = ("compare.py", "conftest.py", "differences.py", "surface.py")
    for path in sorted(HERE.rglob("*")):
        if path.suffix in (".py", ".json", ".txt") and not path.name.startswith("test_"):
            digest.update(b"" if path.name in ours else path.read_bytes())
    return digest.hexdigest()[:12]


def start(command: list[str], url: str, out: Path, names: list[str]) -> subprocess.Popen[bytes]:
    """Start one side; what it prints goes to a file beside its results."""
    out.unlink(missing_ok=True)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("OPENAI")
    }
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [*command, str(HERE / "play.py"), *names, "--server", url, "--out", str(out)],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )


def read(path: Path, url: str) -> dict[str, Any]:
    """Return the results of one side, none if it died before the first."""
    if not path.exists():
        return {}
    text = path.read_text().replace(url, "http://server")
    for python in (str(REAL), sys.executable):
        text = text.replace(python, "PYTHON")
    path.write_text(text)
    return json.loads(text)


@pytest.fixture(scope="session")
def surfaces(real_python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """What surface.py finds on the real side, and of that on ours."""
    script, names = str(HERE / "surface.py"), tmp_path_factory.mktemp("surface") / "names.json"
    own = [sys.executable, str(HERE / "as_verifiers.py"), script, str(names)]
    for command in ([str(real_python), script], own):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        if not names.exists():
            names.write_text(done.stdout)
    return json.loads(names.read_text()), json.loads(done.stdout)


@pytest.fixture(scope="session")
def real_python() -> Path:
    """The interpreter of the environment with the real package."""
    if not REAL.exists():
        pytest.skip(f"the real verifiers is not installed at {REAL}: run `make test-compat`")
    return REAL


@pytest.fixture(scope="session")
def published() -> Path:
    """The folder of the published environments."""
    if not PUBLISHED.exists():
        pytest.skip(
            f"the published environments are not at {PUBLISHED}: docs/compat.md says how to set "
            "ROLLTREE_PEERS"
        )
    return PUBLISHED
