"""A fork server of a script: each run is a process of its own, forked from one that has done the imports.

To start an interpreter and to import takes a short command nine tenths of its CPU time.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from types import TracebackType

BEFORE_PYTHON = ("LD_", "PYTHON", "LC_", "LANG", "MALLOC_", "TZ")
"""Prefixes of the variables that are read before a script runs: a fork comes too late for them."""


class ForkServer:
    """Runs of a script in processes that share the imports of one.

    Arguments:
        script: the Python file.
        imports: what is imported once, before the forks; none of it may start a thread.
    """

    def __init__(self, script: Path, imports: Sequence[str]) -> None:
        self._script = script
        self._variables = dict(os.environ)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        self._process.communicate()

    def run(
        self,
        arguments: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        stdin: bytes,
        timeout: float,
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run the script as `subprocess.run` does, and return what it left behind.

        Arguments:
            env: all variables of the process; where they concern the interpreter, one is started.
            timeout: seconds that it may take.

        Raises: subprocess.TimeoutExpired.
        """
        command = [str(self._script), *arguments]
        if _before_python(env) != _before_python(self._variables):
            return subprocess.run(
                [sys.executable, *command],
                cwd=cwd,
                env=env,
                input=stdin,
                capture_output=True,
                timeout=timeout,
                check=False,
            )
        request = {"command": command, "cwd": str(cwd), "env": dict(env)}
        pipes = [os.pipe() for _ in range(3)]
        ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        answers, caller = socket.socketpair()
        with caller:
            socket.send_fds(self._control, [b"."], [*theirs, caller.fileno()])
        for each in theirs:
            os.close(each)
        with answers, answers.makefile("rb") as lines, ThreadPoolExecutor(3) as pool:
            answers.sendall(json.dumps(request).encode() + b"\n")
            pool.submit(_write, ours[0], stdin)
            out, err = pool.submit(_read, ours[1]), pool.submit(_read, ours[2])
            pid = int(lines.readline())
            answers.settimeout(timeout)
            try:
                code = int(lines.readline())
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
                raise subprocess.TimeoutExpired(command, timeout) from None
            return subprocess.CompletedProcess(command, code, out.result(), err.result())


def _before_python(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(BEFORE_PYTHON)}


def _write(descriptor: int, data: bytes) -> None:
    with suppress(BrokenPipeError), open(descriptor, "wb") as file:
        file.write(data)


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
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
            caller.sendall(b"%d\n" % pid)
            caller.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
    for number, each in enumerate(streams):
        os.dup2(each, number)
        os.close(each)
    # The streams of the server know whether its own files can be sought, which is not true of these pipes.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - until the exit
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    command: list[str] = request["command"]
    return command


def _main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection of every fork would copy all pages
    sys.argv = _serve(control)
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
