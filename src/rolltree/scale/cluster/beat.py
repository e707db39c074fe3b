"""A role's client of the control server: it registers, sends beats, and learns addresses.

A separate thread sends the beats, so they continue while the main loop is busy. The main loop calls
`advance`, so that the driver can tell a busy process from a stuck one.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from rolltree._helpers.files import MAX_BYTES
from rolltree._helpers.lazy import EXTRAS, import_problem
from rolltree._helpers.redact import remember
from rolltree.scale.cluster.roles import CLUSTER_TOKEN, CLUSTER_URL, HOST, ROLE
from rolltree.training import TrainConfig, load_train_config
from rolltree.training.sections import ClusterSection
from rolltree.values.errors import ClusterError, ConfigError, RolltreeError, Stopped, UnknownName

ENDED = 75
"""The exit status of a role that was told to end, or whose driver is gone."""
ORPHAN_S = 60.0
"""Seconds without an answer of the driver after which a role ends: longer than a live driver's
pauses, and no longer, because a driver that follows a killed one waits as long."""
_BEAT_S = 2.0
_TIMEOUT_S = 10.0
_LAST_S = 60.0
"""Seconds that a role which was told to end may take to save its state."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given: Any) -> None:
        """Follow no redirection, which would carry the token away."""


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
"""Opens URLs of roles without a proxy of the environment, which would get their token."""


class Link:
    """The connection to the control server, from the variables that the driver sets.

    Raises:
        ConfigError: a variable is missing.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        missing = [name for name in (CLUSTER_URL, CLUSTER_TOKEN, ROLE) if not environment.get(name)]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} is not set, so this role does not know its run. `rolltree "
                "train` with a [cluster] starts roles; docs/cluster.md says how to start one by "
                "hand."
            )
        self.url, self.token = environment[CLUSTER_URL], environment[CLUSTER_TOKEN]
        self.name = environment[ROLE]
        self.host = environment.get(HOST) or "127.0.0.1"
        remember(self.token)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request between roles."""
        return {"Authorization": f"Bearer {self.token}"}

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer to a GET, or with a body to a POST.

        Raises:
            ClusterError: the control server refuses the request.
            OSError: the control server cannot be reached.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            with DIRECT.open(request, timeout=_TIMEOUT_S) as answer:
                found = json.loads(answer.read(MAX_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(2000).decode(errors="replace")
            raise ClusterError(f"the driver answered {error.code} to {path}: {said}") from None
        # An answer that breaks off, or that of another program that now has the driver's port.
        except (http.client.HTTPException, ValueError, RecursionError) as error:
            raise ConnectionError(f"{self.url} did not answer as a driver: {error!r}") from error
        if not isinstance(found, dict):
            raise ConnectionError(f"{self.url} did not answer as a driver: {str(found)[:100]}")
        return found

    def config(self) -> dict[str, Any]:
        """Return the settings of the run; wait if the driver does not answer yet."""
        end = time.monotonic() + _LAST_S
        while True:
            try:
                return self.ask("/config")
            except OSError as error:
                if time.monotonic() > end:
                    raise ClusterError(
                        f"the driver at {self.url} does not answer ({error}). Does `rolltree "
                        "train` still run?"
                    ) from error
                time.sleep(0.5)

    def note(self, message: str) -> None:
        """Have the driver report a notice."""
        self.ask("/note", {"name": self.name, "message": message})

    def fail(self, error: Exception) -> None:
        """Tell the driver that it is useless to start this role again."""
        body: dict[str, Any] = {
            "name": self.name,
            "error": type(error).__name__,
            "message": str(error),
        }
        body["pid"] = os.getpid()
        try:
            self.ask("/fail", body)
        except (OSError, ClusterError) as unheard:
            print(f"the driver could not be told of this error: {unheard}", file=sys.stderr)


class Beats:
    """Registers a role and beats until the process ends.

    Args:
        link: the connection to the driver.
        kind: `engine`, `worker`, `trainer` or `rank`.
        url: the role's URL; None if nobody calls it.
        has_loop: whether a loop calls `advance`.
        on_notice: gets the driver's notices, in the head.

    `state`, `waits_for` and `metrics` go into the next beat; `answer` is the last answer.
    """

    def __init__(
        self,
        link: Link,
        kind: str,
        url: str | None,
        *,
        has_loop: bool = True,
        on_notice: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.state = "starting"
        self.waits_for: str | None = None
        self.metrics: dict[str, Any] = {}
        self.answer: dict[str, Any] = {}
        self.is_ending = False
        self._link, self._kind, self._url = link, kind, url
        self._has_loop, self._on_notice = has_loop, on_notice
        self._advanced_at = time.monotonic()
        self._who = {"pid": os.getpid(), "host": socket.gethostname()}
        self._wake = threading.Event()

    def start(self) -> None:
        """Register, and beat from now on."""
        threading.Thread(target=self._run, name="rolltree-beats", daemon=True).start()

    def say(self, state: str, waits_for: str | None = None) -> None:
        """Set what the role does, and which kind of role it waits for; the loop has advanced."""
        self.state, self.waits_for = state, waits_for
        self.advance()

    def advance(self) -> None:
        """Note that the main loop advances."""
        self._advanced_at = time.monotonic()

    def hurry(self) -> None:
        """Beat now, because an answer is needed."""
        self._wake.set()

    def _run(self) -> None:
        heard_at, is_registered = time.monotonic(), False
        while True:
            try:
                if not is_registered:
                    body = {"name": self._link.name, "kind": self._kind, "url": self._url}
                    self._link.ask("/register", {**body, **self._who})
                    is_registered = True
                self.answer = answer = self._link.ask("/beat", self._beat())
                heard_at = time.monotonic()
                for notice in answer.get("notices", ()):
                    self._on_notice(notice)
                    # The next beat says that it has arrived, so it comes soon.
                    self.hurry()
                if answer.get("stop"):
                    self._end("the driver stops this role")
            except ClusterError:
                # The driver has forgotten this role, which it took for dead, or is a new one.
                is_registered = False
            except OSError:
                if time.monotonic() - heard_at > ORPHAN_S:
                    self._end(f"no driver has answered for {ORPHAN_S:g} s")
            self._wake.wait(_BEAT_S)
            self._wake.clear()

    def _beat(self) -> dict[str, Any]:
        return {
            "name": self._link.name,
            "state": self.state,
            "waits_for": self.waits_for,
            "busy_since_s": time.monotonic() - self._advanced_at if self._has_loop else 0.0,
            "metrics": self.metrics,
            "num_notices": self.answer.get("num_notices", 0),
            **self._who,
        }

    def _end(self, why: str) -> None:
        """End the process: with SIGTERM, so that it saves its state, and later by force."""
        if self.is_ending:
            return
        self.is_ending = True
        print(f"ending: {why}", file=sys.stderr, flush=True)
        timer = threading.Timer(_LAST_S, os._exit, (ENDED,))
        timer.daemon = True
        timer.start()
        os.kill(os.getpid(), signal.SIGTERM)


def run_role(
    link: Link,
    work: Callable[[Link, TrainConfig, ClusterSection], int | None],
    useless: tuple[type[Exception], ...] = (ConfigError, UnknownName),
) -> int:
    """Run a role with the driver's config; return the exit status.

    The driver is told not to start the role again after the errors in `useless`, among which a
    package that cannot be imported counts as a `ConfigError`.
    """
    try:
        config = load_train_config(link.config())
        if config.cluster is None:
            raise ConfigError("the driver's config has no [cluster].")
        try:
            return work(link, config, config.cluster) or 0
        except ImportError as error:
            traceback.print_exc()
            raise _not_importable(link.name, error) from error
    except (Stopped, KeyboardInterrupt) as error:
        print(error, file=sys.stderr)
        return ENDED
    except RolltreeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error, useless):
            link.fail(error)
        return 1


def _not_importable(name: str, error: ImportError) -> ConfigError:
    package = (error.name or "").partition(".")[0]
    if not package:
        problem = f"{name} cannot import what it needs ({error})."
    else:
        extra = EXTRAS.get(package, "rolltree[train,serve]")
        problem = import_problem(name, package, error, extra)
    return ConfigError(f"{problem} Its interpreter is {sys.executable}.")
