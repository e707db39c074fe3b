"""A real server that is killed and started again, and episodes; the easy ones end early."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "inference" / "server"))
import serve_kit
from loop_kit import make_config
from training_kit import LetterSource

from rolltree.tokens import Trajectory
from rolltree.training import Silent, load_train_config
from rolltree.values.types import State


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Phoenix:
    """`rolltree serve` on one port. `kill` is SIGKILL; `start` waits until it answers."""

    def __init__(self, model: str, *flags: str) -> None:
        self._words, self._port = (model, "--batch-invariant", *flags), free_port()
        self.num_starts = 0
        self._restart: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        self.served = serve_kit.start(*self._words, name="m", port=self._port)
        self.url = self.served.url
        self.num_starts += 1

    def kill(self) -> None:
        self.served.kill()
        self.served.process.communicate()

    def kill_and_restart(self) -> None:
        """Kill it now; another process takes its place, in a while."""
        self.kill()
        self._restart = threading.Thread(target=self.start)
        self._restart.start()

    def close(self) -> None:
        if self._restart is not None:
            self._restart.join()
        serve_kit.stop(self.served)


class At(Silent):
    """Calls `act` once when `num_done` rollouts of one of `steps` are done; keeps the notices."""

    def __init__(self, steps: Mapping[int, int], act: Callable[[], None]) -> None:
        self.steps, self.act = dict(steps), act
        self.notices: list[str] = []

    def on_rollouts(self, step: int, num_done: int, num_total: int) -> None:
        if num_done >= self.steps.get(step, num_total + 1):
            del self.steps[step]
            self.act()

    def on_notice(self, message: str) -> None:
        self.notices.append(message)


class EarlyIsEasy(LetterSource):
    """Turns until an answer begins in the lower half of the alphabet, at most six.

    The reward is the share of turns left, so episodes that end early have the high rewards.
    """

    async def run_request(self, request: Any, client: Any) -> list[State]:
        self.played.append(request.request_id)
        trajectory = Trajectory()
        state = State(input=dict(request.input), trajectory=trajectory, error=None, reward=None)
        session = client.session()
        messages = list(request.input["prompt"])
        for turn in range(6):
            sampling = replace(request.sampling, seed=request.sampling_seed + turn)
            answer = await session.chat(messages, sampling=sampling)
            trajectory.append_call(
                prompt=list(messages), completion=[answer.message], response=answer, turn=turn
            )
            self.versions += answer.versions.tolist()
            if answer.completion_ids[0] < 64:
                break
            messages += [answer.message, {"role": "user", "content": "again"}]
        state["reward"] = 1 - turn / 5
        return [state]


def server_config(folder: Path, path: Path, urls: list[str], **sections: Any) -> Any:
    """Return the config of a small run against servers."""
    data = make_config(folder, path).as_dict()
    data["engine"] = {
        "kind": "servers",
        "urls": urls,
        "served_model": "m",
        "api_key_env": "SERVE_TOKEN",
        "admin_key_env": "SERVE_ADMIN_TOKEN",
        **sections.pop("engine", {}),
    }
    for section, values in sections.items():
        data[section] = {**data[section], **values}
    return load_train_config(data)
