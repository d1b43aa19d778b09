"""A fork server of Python: each run is a process of its own, forked from one that has done the imports.

To start an interpreter and to import takes a short command nine tenths of its CPU time.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from signal import SIGKILL
from types import ModuleType, TracebackType
from typing import IO

BEFORE_PYTHON = ("LD_", "PYTHON", "LC_", "LANG", "MALLOC_", "TZ")
"""Prefixes of the variables that are read before a script runs: a fork comes too late for them."""

UNBUFFERED = "PYTHONUNBUFFERED"
"""The one of them that a fork obeys."""

SHARED_IMPORTS: list[str] = []
"""What the fork server imports that the tests of this process share; without any, `popen` does not fork."""

_shared: list["ForkServer"] = []


def shared_server() -> "ForkServer":
    """Return the fork server that all tests of this process share."""
    if not _shared:
        _shared.append(ForkServer(SHARED_IMPORTS))
        atexit.register(_shared[0].close)
    return _shared[0]


def popen(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start this Python or one of its scripts as `subprocess.Popen` does, if possible as a fork.

    Arguments:
        command: begins with `sys.executable` and a script, `-m` or `-c`, or with a script beside it.
        stdin: as the other streams, `PIPE`, `DEVNULL` or a file; those that are None are our own.
    """
    variables = os.environ if env is None else env
    if (arguments := _forkable(command)) is None or not shared_server().can_fork(variables):
        return subprocess.Popen(command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
    return shared_server().start(arguments, cwd, variables, stdin, stdout, stderr)


def can_fork(command: Sequence[str | Path]) -> bool:
    """Tell whether `popen` starts a command with our variables as a fork."""
    return _forkable(command) is not None and shared_server().can_fork(os.environ)


def _forkable(command: Sequence[str | Path]) -> list[str] | None:
    """Return the arguments of Python that a command stands for, or None if a fork can't run it."""
    program, *arguments = map(str, command)
    if program == str(Path(sys.executable).with_name("postroom")):
        arguments = [program, *arguments]
    elif program != sys.executable:
        return None
    known = arguments and (arguments[0] in ("-m", "-c") or not arguments[0].startswith("-"))
    return arguments if known and SHARED_IMPORTS else None


class ForkedProcess(subprocess.Popen[bytes]):
    """A process that a fork server started: its parent is a process that tells us of its end.

    It is killed when nobody waits for it any more, as when the tests end.
    """

    def __init__(
        self, command: list[str], answers: socket.socket, streams: Sequence[IO[bytes] | None]
    ) -> None:
        """Take over a process whose id is the first line that `answers` receives."""
        self.args = command
        self.stdin, self.stdout, self.stderr = streams
        self.returncode = None
        self._answers = answers
        self._answered = b""
        self._output: tuple[bytes, bytes] | None = None
        self._waiting = threading.Lock()
        self.pid = int(self._line())

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code; raise TimeoutExpired after some seconds."""
        if not self._waiting.acquire(timeout=-1 if timeout is None else timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        try:
            if self.returncode is None:
                self._answers.settimeout(timeout)
                self.returncode = int(self._line() or -SIGKILL)  # without a parent it was killed, too
                self._answers.close()
        except (TimeoutError, BlockingIOError):
            raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
        finally:
            self._waiting.release()
        return self.returncode

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Write and read its streams until it ends; kill it and raise TimeoutExpired after some seconds."""
        if self._output is not None:
            return self._output
        with ThreadPoolExecutor(3) as pool:
            if self.stdin:
                pool.submit(_write, self.stdin, input or b"")
            out, err = (pool.submit(_read, each) if each else None for each in (self.stdout, self.stderr))
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            self._output = out.result() if out else b"", err.result() if err else b""
        return self._output

    def send_signal(self, sig: int) -> None:
        """Send it a signal unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def __del__(self) -> None:
        """Have it killed if it has not ended."""
        self._answers.close()

    def _line(self) -> bytes:
        """Return the next line that its parent sends, or nothing when there is no parent any more."""
        while b"\n" not in self._answered and (received := self._answers.recv(64)):
            self._answered += received
        line, _, self._answered = self._answered.partition(b"\n")
        return line


class ForkServer:
    """Processes of Python that share the imports of one.

    Arguments:
        imports: what is imported once, before the forks; the forks lack the threads that it may start.
    """

    def __init__(self, imports: Sequence[str]) -> None:
        self._variables = dict(os.environ)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        """End the server; what it started goes on."""
        self._control.close()
        self._process.communicate()

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def can_fork(self, env: Mapping[str, str]) -> bool:
        """Tell whether a process with these variables needs no interpreter of its own."""
        return _before_python(env) == _before_python(self._variables)

    def start(
        self,
        arguments: Sequence[str],
        cwd: Path | None,
        env: Mapping[str, str],
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = subprocess.PIPE,
        stderr: int | IO[bytes] | None = subprocess.PIPE,
    ) -> "subprocess.Popen[bytes]":
        """Start Python as `subprocess.Popen` does.

        Arguments:
            arguments: a script, `-m` and a module or `-c` and code, and the arguments of that.
            env: all variables of the process; where they concern the interpreter, one is started.
            stdin: as the other streams, `PIPE`, `DEVNULL` or a file; those that are None are our own.
        """
        command = [*arguments]
        if not self.can_fork(env):
            return subprocess.Popen(
                [sys.executable, *command], cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr
            )
        ours: list[IO[bytes] | None] = []
        theirs: list[int] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            own = None
            if stream == subprocess.PIPE:
                pipe = os.pipe()
                own = os.fdopen(pipe[number == 0], "rb" if number else "wb")
                theirs.append(pipe[number != 0])
            elif stream == subprocess.STDOUT:
                theirs.append(os.dup(theirs[1]))
            elif stream == subprocess.DEVNULL:
                theirs.append(os.open(os.devnull, os.O_RDWR))
            elif stream is None:
                theirs.append(os.dup(number))
            else:
                theirs.append(os.dup(stream if isinstance(stream, int) else stream.fileno()))
            ours.append(own)
        answers, caller = socket.socketpair()
        with caller:
            socket.send_fds(self._control, [b"."], [*theirs, caller.fileno()])
        for each in theirs:
            os.close(each)
        request = {"command": command, "cwd": str(cwd or Path.cwd()), "env": dict(env)}
        answers.sendall(json.dumps(request).encode() + b"\n")
        return ForkedProcess(command, answers, ours)

    def run(
        self,
        arguments: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        stdin: bytes,
        timeout: float,
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run Python as `subprocess.run` does, and return what it left behind.

        Arguments:
            arguments: as of `start`.
            env: all variables of the process; where they concern the interpreter, one is started.
            timeout: seconds that it may take.

        Raises: subprocess.TimeoutExpired.
        """
        process = self.start(arguments, cwd, env, stdin=subprocess.PIPE)
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _before_python(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(BEFORE_PYTHON) and name != UNBUFFERED
    }


def _write(file: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError), file:
        file.write(data)


def _read(file: IO[bytes]) -> bytes:
    with file:
        return file.read()


def _serve(control: socket.socket) -> list[str]:
    """Fork for every request, and return the command in the process that is to run it."""
    while True:
        wanted, descriptors, _, _ = socket.recv_fds(control, 1, 4)
        if not wanted:
            os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            break
        for each in descriptors:
            os.close(each)
    control.close()
    *streams, answers = descriptors
    with socket.socket(fileno=answers) as caller:
        request = json.loads(caller.makefile("rb").readline())
        if pid := os.fork():  # this process waits for the command, so that the server need not
            for each in (0, 1, 2, *streams):
                os.close(each)
            with suppress(OSError):
                caller.sendall(b"%d\n" % pid)
            threading.Thread(target=_end_with, args=(caller, pid), daemon=True).start()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):
                caller.sendall(b"%d\n" % code)
            os._exit(0)
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    # The streams of the server know whether its own files can be sought, which is not true of these pipes.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - until the exit
    if UNBUFFERED in request["env"]:
        sys.stdout = TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    command: list[str] = request["command"]
    return command


def _end_with(caller: socket.socket, pid: int) -> None:
    """Kill a command whose caller has gone."""
    caller.recv(1)
    with suppress(ProcessLookupError):
        os.kill(pid, SIGKILL)


def _main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which forks lack
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection of every fork would copy all pages
    kind, *arguments = _serve(control)
    try:
        _run(kind, arguments)
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
    _leave(code)


def _run(kind: str, arguments: list[str]) -> None:
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        exec(compile(arguments[0], "<string>", "exec"), _fresh_main())
    elif kind == "-m":
        sys.argv, sys.path[0] = arguments, os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *arguments], os.path.dirname(kind)
        runpy.run_path(kind, run_name="__main__")


def _leave(code: object) -> None:
    """End as Python does, but without freeing what was imported, which takes longer than most commands."""
    if isinstance(code, int):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
        atexit._run_exitfuncs()
        gc.collect()  # what it says of our own garbage
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 0xFF)
    sys.exit(code)  # type: ignore[arg-type]  # says what can't be written


def _fresh_main() -> dict[str, object]:
    """Return the names of a new module `__main__`, which takes our place."""
    sys.modules["__main__"] = ModuleType("__main__")
    return sys.modules["__main__"].__dict__


if __name__ == "__main__":
    _main()
