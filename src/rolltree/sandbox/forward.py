"""Forward TCP connections to a Unix socket and become the command: the only way out of a sandbox.

`python -I -S -c SOURCE`, with a call of `main` appended by `local`. It runs confined, in a network
namespace without any other network, and uses only the standard library. A program in the sandbox
that replaces this one cannot reach anything more.
"""

from __future__ import annotations

import os
import selectors
import socket

# Importing `typing` takes longer than all else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_MOST_BYTES = 2**18


def main(target: str, port: int, command: list[str]) -> NoReturn:
    """Listen, forward connections in a child process, and execute the command."""
    try:
        # Before the command starts, since its first request must find a listener.
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        if os.fork() == 0:
            # This process must not hold the command's pipes open.
            null = os.open("/dev/null", os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            try:
                Forwarder(listener, target).run()
            finally:
                os._exit(1)
        listener.close()
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(126)


class Forwarder:
    """Pairs of connections, each with the bytes that have not been sent to it yet."""

    def __init__(self, listener: socket.socket, target: str) -> None:
        self._listener, self._target = listener, target
        self._selector = selectors.DefaultSelector()
        self._other: dict[socket.socket, socket.socket] = {}
        self._unsent: dict[socket.socket, bytearray] = {}
        # Connections whose peer has sent everything.
        self._ended: set[socket.socket] = set()

    def run(self) -> NoReturn:
        """Forward bytes until the process is killed."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while True:
            for key, events in self._selector.select():
                found = key.fileobj
                if found is self._listener:
                    self._accept()
                elif isinstance(found, socket.socket) and found in self._other:
                    self._serve(found, events)

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            far.connect(self._target)
        except OSError:
            # As if the address had no listener.
            near.close()
            far.close()
            return
        for one, other in ((near, far), (far, near)):
            one.setblocking(False)
            self._other[one], self._unsent[one] = other, bytearray()
        self._watch(near)
        self._watch(far)

    def _serve(self, one: socket.socket, events: int) -> None:
        other = self._other[one]
        try:
            if events & selectors.EVENT_WRITE:
                self._push(one)
            if events & selectors.EVENT_READ:
                data = one.recv(65536)
                if data:
                    self._unsent[other] += data
                else:
                    self._ended.add(one)
                self._push(other)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(one)
            return
        if self._ended >= {one, other} and not (self._unsent[one] or self._unsent[other]):
            self._drop(one)
            return
        self._watch(one)
        self._watch(other)

    def _push(self, one: socket.socket) -> None:
        unsent = self._unsent[one]
        try:
            while unsent:
                del unsent[: one.send(unsent)]
        except BlockingIOError:
            return
        if self._other[one] in self._ended:
            one.shutdown(socket.SHUT_WR)

    def _watch(self, one: socket.socket) -> None:
        """Select the events to wait for: reading stops while the other side is too slow."""
        events = selectors.EVENT_WRITE if self._unsent[one] else 0
        if one not in self._ended and len(self._unsent[self._other[one]]) < _MOST_BYTES:
            events |= selectors.EVENT_READ
        known = self._selector.get_map()
        if not events:
            if one in known:
                self._selector.unregister(one)
        elif one in known:
            self._selector.modify(one, events)
        else:
            self._selector.register(one, events)

    def _drop(self, one: socket.socket) -> None:
        for each in (one, self._other[one]):
            if each in self._selector.get_map():
                self._selector.unregister(each)
            each.close()
            self._other.pop(each)
            self._unsent.pop(each)
            self._ended.discard(each)
