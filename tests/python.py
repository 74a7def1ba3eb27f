"""Starts Python programs quickly: in forks of a process that has torch imported.

`Python` and `run` take the place of `subprocess.Popen` and `subprocess.run`; tests of the start
itself use those two. Left out: the process that forks (`python_server.py`).
"""

import atexit
import functools
import os
import pickle
import select
import socket
import subprocess
import sys
import types
from pathlib import Path

ONE_THREAD = [f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL")]
"""A process with threads cannot be forked."""


def command(*words):
    """Return the command `headrace WORDS`, as a list that starts with the interpreter."""
    return [sys.executable, "-m", "headrace", *map(str, words)]


def can_fork(words):
    """Return whether a command is a Python program without options of the interpreter."""
    first, second, *_ = map(str, words)
    return first == sys.executable and (second in ("-m", "-c") or not second.startswith("-"))


def forked_subprocess():
    """Return the module `subprocess` as it would be if it forked Python programs."""
    return types.SimpleNamespace(**vars(subprocess) | {"Popen": Python})


def run(command, *, timeout=100, check=False, **more):
    """Run a Python program to its end. Return what `subprocess.run` does, with output as text."""
    pipe = subprocess.PIPE
    with Python(command, stdout=pipe, stderr=pipe, text=True, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


@functools.cache
def server():
    """Start the process that forks, once a session. Return its process and the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.python_server", str(theirs.fileno())],
            cwd=Path(__file__).parents[1], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            start_new_session=True, env=os.environ | dict.fromkeys(ONE_THREAD, "1"),
        )  # fmt: skip
    atexit.register(lambda: (ours.close(), process.wait()))
    return process, ours


def server_pids():
    """Return the process id of that process, if it has been started, in a list."""
    return [server()[0].pid] if server.cache_info().currsize else []


class Python(subprocess.Popen):
    """A Python program in a process, as `subprocess.Popen` has it.

    Args:
        command: begins with `sys.executable`; then `-m MODULE`, `-c CODE` or a script.
        files: `stdin`, `stdout`, `stderr` and `text`, as `subprocess.Popen` takes them.
    """

    def __init__(
        self, command, *, cwd=None, env=None, start_new_session=False, process_group=-1,
        pass_fds=(), **files,
    ):  # fmt: skip
        assert can_fork(command), command
        self._request = {
            "words": [str(word) for word in command[1:]],
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "start_new_session": start_new_session,
            "process_group": process_group,
            "fds": [0, 1, 2, *pass_fds],
        }
        super().__init__(command, **files)

    def _execute_child(self, *args):
        """Let the server fork. `args` are those of `subprocess.Popen._execute_child`."""
        p2cread, _, _, c2pwrite, _, errwrite = pipes = args[10:16]
        fds = self._request["fds"].copy()
        for number, fd in enumerate((p2cread, c2pwrite, errwrite)):
            fds[number] = number if fd == -1 else fd
        self._report, report = os.pipe()
        _, requests = server()
        socket.send_fds(requests, [pickle.dumps(self._request)], [*fds, report])
        os.close(report)
        self.pid = self._read_report()
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _read_report(self):
        number = os.read(self._report, 8)
        assert number, "the process that forks has ended"
        return int.from_bytes(number, sys.byteorder, signed=True)

    def _wait(self, timeout):
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._read_report()
            os.close(self._report)
        return self.returncode

    def _internal_poll(self, **_):
        try:
            return self._wait(0)
        except subprocess.TimeoutExpired:
            return None
