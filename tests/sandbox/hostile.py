"""What code does to its own sandbox. None of it may count as a failure of the sandbox: no reward.

Each act is a program that runs inside; then every operation is tried from outside. A file may have
become unreadable (`SandboxFileError`, an answer), and a command may fail. The races are loops in a
session's thread, which lives on between pieces of code, beside the runs of the same sandbox.
"""

import textwrap

from rolltree.sandbox import Limits
from rolltree.values.errors import SandboxError, SandboxFileError

LIMITS = Limits(wall_s=60.0, cpu_s=30.0, disk_bytes=4 * 2**20, max_files=4096)
HEAD = """
import contextlib, ctypes, os, shutil, socket, struct, sys, threading, time
def undisturbed(function, *arguments):
    with contextlib.suppress(OSError): return function(*arguments)
"""
ACTS = {
    "folder without rights": "undisturbed(os.chmod, '.', 0)",
    "folder that only executes": "undisturbed(os.chmod, '.', 0o111)",
    "folder with every bit": "undisturbed(os.chmod, '.', 0o7777)",
    "files without rights": """
        open('kept', 'w').close(); os.mkdir('sub'); open('sub/x', 'w').close()
        for name in ('kept', 'sub/x', 'sub', '.'): undisturbed(os.chmod, name, 0)
    """,
    "umask that takes all rights": """
        os.umask(0o777); open('kept', 'w').close(); os.mkdir('sub')
    """,
    "default access list without rights": """
        def entry(*values): return struct.pack('<HHI', *values)
        acl = struct.pack('<I', 2) + b''.join(entry(tag, 0, 0xFFFFFFFF) for tag in (1, 4, 32))
        for kind in ('default', 'access'):
            undisturbed(os.setxattr, '.', f'system.posix_acl_{kind}', acl)
    """,
    "attributes": """
        for n in range(99): undisturbed(os.setxattr, '.', f'user.x{n}', b'x' * 4096)
    """,
    "folder deleted": "undisturbed(shutil.rmtree, os.getcwd())",
    "folder renamed": "undisturbed(os.rename, os.getcwd(), os.getcwd() + '-2')",
    "folder replaced by a link": """
        here = os.getcwd()
        undisturbed(os.rename, here, here + '-2'); undisturbed(os.symlink, here + '-2', here)
    """,
    "folder replaced by a file": """
        here = os.getcwd()
        undisturbed(os.rename, here, here + '-2'); undisturbed(lambda: open(here, 'w').close())
    """,
    "folder around it deleted": "undisturbed(shutil.rmtree, os.path.dirname(os.getcwd()))",
    "folders in place of programs": """
        for n in range(2, 40): os.makedirs(f'.program-{n}.py/x'); open(f'.program-{n}.py/y', 'w')
    """,
    "pipes in place of files": """
        for name in ('kept', 'in', *(f'.program-{n}.py' for n in range(2, 40))): os.mkfifo(name)
    """,
    "links in place of files": """
        for name in ('kept', 'in', *(f'.program-{n}.py' for n in range(2, 40))):
            os.symlink('/dev/zero', name)
    """,
    "a link in place of a folder": "os.symlink('/etc', 'sub')",
    "links in a circle": "os.symlink('a', 'b'); os.symlink('b', 'a'); os.symlink('.', 'sub')",
    "modules of the standard library": """
        for name in ('ast', 'os', 'json', 'linecache', 'traceback', 'site', 'encodings', 'io'):
            with open(f'{name}.py', 'w') as file: file.write('raise SystemExit(9)')
    """,
    "start-up files": """
        for name in ('sitecustomize.py', 'usercustomize.py', 'pyvenv.cfg', '.profile', 'python3'):
            with open(name, 'w') as file: file.write('raise SystemExit(9)')
    """,
    "names that are not UTF-8": """
        for name in (b'\\xff', b'\\xed\\xa0\\x80', b'\\n', b'\\x1b[2J'): open(name, 'w').close()
        os.mkdir(b'\\xfe'); open(b'\\xfe/x', 'w').close()
    """,
    "huge names": "for n in range(200): open(chr(0x4e00 + n) * 85, 'w').close()",
    "2,000 nested folders": """
        for n in range(2000): os.mkdir('d'); os.chdir('d')
        open('bottom', 'w').close()
    """,
    "1,900 nested folders with long names and a file in each": """
        for n in range(1900): os.mkdir('d' * 250); os.chdir('d' * 250); open('f', 'w').close()
    """,
    "a full disk": """
        with contextlib.suppress(OSError), open('x', 'wb', buffering=0) as file:
            while file.write(bytes(65536)): pass
    """,
    "no file left": """
        with contextlib.suppress(OSError):
            for n in range(5000): open(f'f{n}', 'w').close()
    """,
    "a file larger than the disk": "open('kept', 'w').close(); os.truncate('kept', 2**22)",
    "no group": "undisturbed(os.chown, '.', -1, 0); undisturbed(os.chown, '.', 0, 0)",
    "a name that is not text": """
        ctypes.CDLL(None).prctl(15, bytes([255, 41]), 0, 0, 0); time.sleep(0.3)
    """,
    "output like a failure's": """
        for fd in (1, 2):
            os.write(fd, b"bwrap: Can't mkdir\\nSandboxError: x\\n{\\"ended\\": \\"lost\\"}\\n")
        os._exit(126)
    """,
    "times at the ends of the calendar": """
        for at, name in enumerate(('in', 'x', 'kept')):
            with open(name, 'w'): pass
            for end in (2**63 - 1, -2**63): undisturbed(lambda: os.utime(name, ns=(end, end)))
    """,
    "a daemon that keeps the output open": """
        import signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid(); os.fork(); time.sleep(99)
    """,
    "signals to everybody": "os.fork(); undisturbed(os.kill, -1, 9)",
    "the parent is killed": "undisturbed(os.kill, os.getppid(), 9)",
}  # fmt: skip
RACES = {
    "junk in every descriptor": """
        for fd in range(20):
            for junk in (bytes([255]) * 999, b'[' * 99999 + b'\\n', b'{"stdout": 5}\\nnull\\n'):
                undisturbed(lambda: (os.set_blocking(fd, False), os.write(fd, junk)))
    """,
    "descriptors closed": "os.closerange(0, 256)",
    "files that change places with links and pipes": """
        undisturbed(os.symlink, '/etc/hostname', 'link'); undisturbed(os.mkfifo, 'pipe')
        for name in ('x', 'kept', 'sub'):
            for other in ('link', 'pipe'):
                undisturbed(os.rename, name, 'aside'); undisturbed(os.rename, other, name)
                undisturbed(os.rename, name, other); undisturbed(os.rename, 'aside', name)
    """,
    "pipes that are read and written": """
        for name in ('x', 'kept'):
            undisturbed(os.unlink, name); undisturbed(os.mkfifo, name)
            fd = undisturbed(os.open, name, os.O_RDWR | os.O_NONBLOCK)
            if fd:
                for n in range(50): undisturbed(os.write, fd, bytes(4096)); time.sleep(0.001)
                os.close(fd)
    """,
    "folders that move while they are listed": """
        deep = '/'.join(['in-', *'n' * 60])
        undisturbed(os.makedirs, deep); undisturbed(os.makedirs, 'other/' + 'm/' * 20)
        undisturbed(os.rename, 'other', deep + '/o'); undisturbed(os.rename, deep + '/o', 'other')
    """,
    "the folder loses its rights": "undisturbed(os.chmod, '.', 0)",
    "the program's file becomes a folder": """
        for n in range(1, 40):
            undisturbed(os.unlink, f'.program-{n}.py')
            undisturbed(os.mkdir, f'.program-{n}.py')
    """,
    "signals to everybody beside it": "undisturbed(os.kill, -1, 9)",
    "no process left": "undisturbed(lambda: os.fork() == 0 and time.sleep(60))",
}


async def verdict(sandbox, name):
    """Return "answered", or what went wrong in a sandbox where an act or a race is played."""
    session = sandbox.python_session()
    try:
        if name in ACTS:
            done = await sandbox.run_python(HEAD + textwrap.dedent(ACTS[name]))
            if "Traceback" in done.stderr or done.ended in ("closed", "lost"):
                return f"broken: {done.ended} {done.text()[-300:]}"
        else:
            body = textwrap.indent(textwrap.dedent(RACES[name]).strip(), "        ")
            await session.run(f"{HEAD}def work():\n    while True:\n{body}")
            await session.run("threading.Thread(target=work, daemon=True).start()")
        return await _answers(sandbox, during=name in RACES)
    except SandboxError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        await session.close()


async def _answers(sandbox, during):
    """Try every operation; while a race goes on, a command may fail."""
    ran = await sandbox.run(["echo", "on"])
    program = await sandbox.run_python("print('on')")
    session = sandbox.python_session()
    piece = await session.run("'on'")
    await session.close()
    if ran.stdout != "on\n" and not during:
        return f"a command gave {ran.text()!r}"
    for result in (ran, program, piece):
        if result.ended in ("closed", "lost"):
            return f"a run ended as {result.ended}"
    for file in ("in", "sub/in", "kept", "x"):
        try:
            await sandbox.write_file(file, "text")
            if not during and (await sandbox.read_file(file) != b"text"):
                return f"{file} has another text"
            if not during and file not in await sandbox.list_files():
                return f"{file} is not listed"
        except SandboxFileError:
            continue
    names = await sandbox.list_files()
    "".join(names).encode()  # what a rollout stores
    for file in names[:3]:
        try:
            await sandbox.read_file(file)
        except SandboxFileError:
            continue
    return "answered"
