"""Forks Python programs from one process that has torch imported.

Run as `python -m tests.python_server FD` by `tests/python.py`. The process has one thread and has
run no operation, so that a fork of it is like a fresh interpreter after its imports.
"""

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import multiprocessing.util
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import tempfile
import types

from headrace.distributed.child_process import SIGNALS, end_with_parent

IMPORTS = (
    "headrace.cli.commands",
    "headrace.cli.tool_commands",
    "headrace.collectors.backends.worker_main",
    "headrace.learner.learner",
    "headrace.training.rank",
    "gymnasium.envs.classic_control",
)
"""What most programs import first. Nothing that a test may want absent or imported late."""


def num_threads():
    return len(os.listdir("/proc/self/task"))


def serve(requests):
    """Start a program for each request and report its end. Return the request in the program."""
    running = {}  # pidfd of a program -> (its pid, where its exit status is written)
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                pid, report = running.pop(ready)
                _, status = os.waitpid(pid, 0)
                os.write(report, _eight_bytes(os.waitstatus_to_exitcode(status)))
                os.close(report)
                os.close(ready)
                continue
            message, fds, *_ = socket.recv_fds(requests, 1 << 20, 20)
            if not message:  # the test session has ended
                os._exit(0)
            report = fds.pop()
            if pid := os.fork():
                running[os.pidfd_open(pid)] = pid, report
                os.write(report, _eight_bytes(pid))
                for fd in fds:
                    os.close(fd)
                continue
            requests.close()
            for fd in (report, *running, *(report for _, report in running.values())):
                os.close(fd)
            return pickle.loads(message), fds


def _eight_bytes(number):
    return number.to_bytes(8, sys.byteorder, signed=True)


def become(request, fds):
    """Take over the request's session, files, folder, environment and import path."""
    end_with_parent()  # a test session that is killed leaves no program
    if request["start_new_session"]:
        os.setsid()
    if request["process_group"] >= 0:
        os.setpgid(0, request["process_group"])
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1 + max(request["fds"])) for fd in fds]
    for fd in fds:
        os.close(fd)
    for number, fd in zip(request["fds"], above, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    base = [path for path in sys.path if path not in ("", *_python_path(), _START)]
    tempfile.tempdir = None  # follows the environment
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:] = [os.getcwd() if request["words"][0] != "-c" else "", *_python_path(), *base]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
        if number:
            stream.reconfigure(
                errors="backslashreplace" if number == 2 else None,
                line_buffering=number == 2 or os.isatty(number),
                write_through="PYTHONUNBUFFERED" in os.environ,
            )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    multiprocessing.util.spawnv_passfds = start_fork_server


_START = os.getcwd()


def _python_path():
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def start_fork_server(
    path, args, pass_fds, spawn=multiprocessing.util.spawnv_passfds, fork=os.fork
):
    """Fork multiprocessing's own server while there is one thread; else start it as it is."""
    if "multiprocessing.forkserver" not in args[-1] or num_threads() > 1:
        return spawn(path, args, pass_fds)
    if pid := fork():
        return pid
    for number in map(int, os.listdir("/proc/self/fd")):  # as `exec` does: a run's lock, for one
        with contextlib.suppress(OSError):
            if number not in pass_fds and not os.get_inheritable(number):
                os.close(number)
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS - {signal.SIGINT}:
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()
    sys.argv = ["-c"]
    try:
        exec(args[-1], {"__name__": "__main__"})
    finally:
        os._exit(0)


def run(words):
    """Run a program as `python WORDS` does."""
    first, *rest = words
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    end_with_parent()
    for module in IMPORTS:
        importlib.import_module(module)
    assert num_threads() == 1, "an import has started a thread: set OMP_NUM_THREADS=1 and the like"
    gc.freeze()
    REQUEST, FDS = serve(socket.socket(fileno=int(sys.argv[1])))
    become(REQUEST, FDS)
    run(REQUEST["words"])
