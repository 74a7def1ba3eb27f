"""How much of the source one step and one worker touch: counted on trainings that run."""

import gc
import re
import sys
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import torch

import headrace

SOURCE = Path(headrace.__file__).parent
PAGE = Path(__file__).parents[2] / "docs/architecture.md"
WORKER = "collectors/backends/worker_main.py"
STANDS_FOR_A_WORKER = {"ProcessWorker", "WorkerState"}
PARTS_OF_THESE = {
    "ChildProcess", "Channel", "WorkerMemory", "Timings", "RolloutResult",  # of ProcessWorker
    "StallTimer", "RestartRate",  # of WorkerState
}  # fmt: skip
STOPS = re.compile(r"^\| \d \| `([a-z_/]+\.py)`", re.MULTILINE)
SMALL = {"num_envs": 4, "num_steps": 16, "total_env_steps": 128, "quiet": True}


def files_on_the_stack():
    """Files of the package between here and the loop, or the worker's orders."""
    frame, files = sys._getframe(1), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            files.append(str(path.relative_to(SOURCE)))
        frame = frame.f_back
    ends = [i for i, name in enumerate(files) if name in ("training/loop.py", WORKER)]
    return files[: ends[-1] + 1] if ends else []  # [] before training: a network is tried


class Seen(gym.Env):
    """Notes the files through which its step is called: in `folder`, a file each."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, folder):
        self.folder, self.noted = Path(folder), False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        if not self.noted:
            self.noted = True
            for name in files_on_the_stack():
                (self.folder / name.replace("/", "+")).touch()
        self.steps += 1
        return np.zeros(3, np.float32), 1.0, self.steps == 9, False, {}

    def files(self):
        return {path.name.replace("+", "/") for path in self.folder.iterdir()}


class Noting(torch.nn.Module):
    """A network that notes the files through which it is called."""

    files: set = set()  # noqa: RUF012

    def __init__(self, spec):
        super().__init__()
        self.params, self.value = torch.nn.Linear(3, 2), torch.nn.Linear(3, 1)

    def forward(self, obs):
        self.files.update(files_on_the_stack())
        return self.params(obs), self.value(obs).squeeze(-1)


def files_from_step_to_gradient(tmp_path, monkeypatch, **settings):
    """Files on the stack of an env's step, of the network, and of `backward`."""
    Noting.files = set()
    backward = torch.Tensor.backward

    def noted_backward(self, *args, **kwargs):
        Noting.files.update(files_on_the_stack())
        return backward(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", noted_backward)
    kwargs = {"folder": str(tmp_path)}
    settings |= {"env_kwargs": kwargs, "model": Noting, "run_dir": tmp_path / "run"}
    headrace.train(Seen, **SMALL | settings)
    return Noting.files | {p.name.replace("+", "/") for p in tmp_path.iterdir() if p.is_file()}


def test_a_step_passes_the_nine_files_of_the_page(tmp_path, monkeypatch):
    files = files_from_step_to_gradient(tmp_path, monkeypatch)
    assert files == set(STOPS.findall(PAGE.read_text()))
    assert len(files) <= 9


def test_with_workers_a_step_passes_five_files_in_place_of_inline(tmp_path, monkeypatch):
    dumps = cloudpickle.dumps  # of an order, on its way to the worker

    def noted_dumps(*args, **kwargs):
        Noting.files.update(files_on_the_stack())
        return dumps(*args, **kwargs)

    monkeypatch.setattr(cloudpickle, "dumps", noted_dumps)
    files = files_from_step_to_gradient(tmp_path, monkeypatch, num_workers=2)
    added = {
        "collectors/synchronous.py",
        "collectors/worker_pool.py",
        "collectors/backends/processes.py",
        "distributed/channel.py",
        WORKER,
    }
    inline = set(STOPS.findall(PAGE.read_text())) - {"collectors/inline.py"}
    assert files == inline | added


def test_two_classes_stand_for_a_worker(tmp_path):
    """Two more workers are two more objects of these classes, in the learner's process."""

    def count(num_workers):
        objects = {}

        def look(*_):
            for thing in gc.get_objects():
                kind = type(thing)
                if str(getattr(kind, "__module__", "")).startswith("headrace."):
                    objects[kind.__qualname__] = objects.get(kind.__qualname__, 0) + 1

        headrace.train(
            Seen, env_kwargs={"folder": str(tmp_path)}, num_workers=num_workers,
            envs_per_vector=1, run_dir=tmp_path / f"run{num_workers}", on_update=look,
            **SMALL | {"total_env_steps": 64},
        )  # fmt: skip
        return objects

    two, four = count(2), count(4)
    grown = {name for name in four if four[name] - two.get(name, 0) == 2}
    assert STANDS_FOR_A_WORKER <= grown <= STANDS_FOR_A_WORKER | PARTS_OF_THESE
