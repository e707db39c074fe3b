"""A Python process that has imported modules, and forks for each program: a separate program.

It is run with the interpreter and the flags of the programs, and uses only the standard library.
Its arguments are the descriptor of a socket, the path of `supervisor.py`, and the modules. A
message on the socket carries six descriptors: standard input, output and error, the supervisor's
control and status pipes, and a file with its spec. The child that is forked becomes the program's
supervisor, and the supervisor's child the program. The process itself never reads a spec, whose
secrets would be in the memory of later programs.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import threading
import types

# Importing `typing` takes longer than all else here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MARK = "ROLLTREE_FOLDER"
_NUM_FDS = 6
_IS_SAFE = getattr(sys.flags, "safe_path", False) or sys.flags.isolated


def main() -> dict[str, Any]:
    """Import the modules, and serve; return the spec in a program's process."""
    fd, path, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    server = socket.socket(fileno=fd)
    supervisor = _load(path)
    if not _IS_SAFE:
        del sys.path[0]  # the folder of this file, whose names are not the modules'
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001  also what exits while it is imported
            server.sendall(f"{name} cannot be imported ({type(error).__name__}: {error})".encode())
            os._exit(1)
    if threading.active_count() > 1:
        others = [each.name for each in threading.enumerate()][1:]
        problem = f"importing {', '.join(names)} starts threads, which a fork lacks: {others}"
        server.sendall(problem.encode())
        os._exit(1)
    # What the modules keep open stays open in programs; what is opened from here on does not.
    own = set(filter(_is_open, map(int, os.listdir("/proc/self/fd")))) - {fd}
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    # Collections would write to pages that the children share.
    gc.collect()
    gc.freeze()
    server.sendall(b"ready")
    while True:
        with contextlib.suppress(InterruptedError):
            fds = _receive(server)
            if os.fork():
                for each in fds:
                    os.close(each)
                continue
            server.close()
            return _become(fds, supervisor, own)


def _is_open(fd: int) -> bool:
    # The list itself was read through a descriptor.
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("_rolltree_supervisor", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _receive(server: socket.socket) -> list[int]:
    message, ancillary, _, _ = server.recvmsg(1, socket.CMSG_LEN(_NUM_FDS * 4))
    if not message:  # its owner has ended
        os._exit(0)
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _become(fds: list[int], supervisor: Any, own: set[int]) -> dict[str, Any]:
    """Be the supervisor of a program; return in the program's process only."""
    is_program = False
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for standard in (0, 1, 2):
            os.dup2(fds[standard], standard)
            os.close(fds[standard])
        control, status, about = fds[3:]
        with open(about, "rb") as file:
            spec: dict[str, Any] = json.load(file)
        spec |= {"control_fd": control, "status_fd": status}
        # Before the fork of the supervisor, so that all that follow have it: a search for what is
        # left of a program reads the variables that processes were started with.
        _mark(spec["folder"])
        is_program = supervisor.supervise(spec)
    finally:
        if not is_program:
            os._exit(0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # The program must not have its supervisor's pipes: it could forge the report.
    for each in map(int, os.listdir("/proc/self/fd")):
        if each > 2 and each not in own:
            with contextlib.suppress(OSError):
                os.close(each)
    return spec


def _mark(folder: str) -> None:
    """Write the folder into the environment that the system shows of this process."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place, value = libc.getenv(_MARK.encode()), folder.encode()
    if place and len(value) <= len(os.environ.get(_MARK, "")):
        ctypes.memmove(place, value + b"\0", len(value) + 1)


def prepare(spec: dict[str, Any]) -> tuple[str, str]:
    """Give this process the arguments and variables of its program; return what to run."""
    os.environ.clear()
    os.environ.update(spec["variables"])
    kind, name, *arguments = spec["program"]
    sys.argv = [{"-c": "-c", "-m": "-m"}.get(kind, name), *arguments]
    tempfile: Any = sys.modules.get("tempfile")
    numpy: Any = sys.modules.get("numpy")
    if tempfile is not None:
        tempfile.tempdir = None  # of the zygote
    if numpy is not None:
        numpy.random.seed()  # `random` does so by itself
    if not _IS_SAFE:
        first = {"-c": "", "-m": os.getcwd()}.get(kind)
        sys.path.insert(0, os.path.dirname(os.path.realpath(name)) if first is None else first)
    return kind, name


def execute(kind: str, name: str) -> None:
    """Run the program as `python` does."""
    if kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if kind != "-c" and os.path.isdir(name):
        runpy.run_path(name, run_name="__main__")
        return
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    source: str | bytes = name
    if kind != "-c":
        name = module.__file__ = os.path.abspath(name)
        try:
            with open(name, "rb") as file:
                source = file.read()
        except OSError as error:
            print(f"{sys.executable}: can't open file {name!r}: {error}", file=sys.stderr)
            sys.exit(2)
    sys.modules["__main__"] = module
    exec(compile(source, "<string>" if kind == "-c" else name, "exec"), module.__dict__)


if __name__ == "__main__":
    program = prepare(main())
    try:
        execute(*program)
    except Exception as raised:  # noqa: BLE001  shown as the interpreter shows it
        # Without the frames of this file.
        own_frame: Any = raised.__traceback__
        raised = raised.with_traceback(own_frame.tb_next.tb_next)
        sys.excepthook(type(raised), raised, raised.__traceback__)
        sys.exit(1)
