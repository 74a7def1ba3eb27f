"""The architecture's import table, held over the source itself."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src/headrace"
# Each may import itself and everything to its left.
ORDER = ["", "models", "envs", "algos", "collect", "run", "scale", "cli"]
TOP_OF_CLI = {"cli", "verbs", "scale_verbs", "__main__"}
# Third-party packages that only these files may import.
ONLY_IN = {
    "mujoco": ("envs/mujoco.py",),
    "numba": ("envs/kernel.py",),
    "pettingzoo": ("envs/pettingzoo.py",),
    "ray": (
        "collect/ray_actors.py",
        "collect/ray_place.py",
        "collect/remote.py",
        "run/cluster.py",
        "run/ray_rank.py",
        "run/ray_start.py",
    ),
    "gymnasium": ("envs/", "run/rank.py"),
    "tensorboard": ("run/log.py",),
    "rich": ("run/log.py",),
    "scipy": ("scale/plan/programme.py",),
    "tyro": ("verbs.py", "scale_verbs.py", "run/runsettings.py"),
    "safetensors": ("run/checkpoint.py",),
    "cloudpickle": (
        "collect/channel.py",
        "collect/handle.py",
        "collect/worker.py",
        "collect/processes.py",
        "collect/ray_actors.py",
        "collect/remote.py",
        "envs/check/played.py",
        "run/learners.py",
        "run/ray_rank.py",
        "scale/sizes/trial.py",
    ),
    "matplotlib": ("run/plot.py",),
    "imageio_ffmpeg": ("envs/film.py",),
    "multiprocessing": (
        "collect/forkserver.py",
        "collect/handle.py",
        "collect/processes.py",
        "run/learners.py",
    ),
    "pickle": (),
}
FILES = sorted(SOURCE.rglob("*.py"))


def layer(module):
    """The place of `headrace.x.y` in ORDER."""
    parts = module.split(".")[1:]
    if parts and parts[0] in ORDER:
        return ORDER.index(parts[0])
    return ORDER.index("cli") if parts and parts[0] in TOP_OF_CLI else 0


def imports(path):
    """Absolute names of all that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path):
    return str(path.relative_to(SOURCE))


def modules():
    return {
        "headrace." + name_of(p).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for p in FILES
    }


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_one_way(path):
    if path == SOURCE / "__init__.py":
        return  # the public names: loaded when used
    own = layer("headrace." + name_of(path).removesuffix(".py").replace("/", "."))
    for module in imports(path):
        if module.startswith("headrace."):
            assert layer(module) <= own, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_third_party_packages_stay_where_they_belong(path):
    for module in imports(path):
        allowed = ONLY_IN.get(module.partition(".")[0])
        if allowed is not None:
            assert name_of(path).startswith(tuple(allowed)) if allowed else False, (
                f"{name_of(path)} imports {module}"
            )


def test_no_import_cycles():
    graph = {}
    known = modules()
    for path in FILES:
        own = "headrace." + name_of(path).removesuffix(".py").replace("/", ".")
        own = own.removesuffix(".__init__")
        graph[own] = {m for m in imports(path) if m in known and m != own and m != "headrace"}
    graph["headrace"] = set()
    done, under_way = set(), []

    def visit(module):
        assert module not in under_way, " -> ".join([*under_way, module])
        if module not in done:
            under_way.append(module)
            for other in graph[module]:
                visit(other)
            under_way.pop()
            done.add(module)

    for module in graph:
        visit(module)


def test_environment_variables_are_read_where_processes_start():
    users = {name_of(path) for path in FILES if "os.environ" in path.read_text()}
    assert users == {
        "cli.py",
        "collect/remote.py",
        "envs/check/played.py",
        "run/launch.py",
        "run/learners.py",
        "run/ray_rank.py",
        "run/ray_start.py",
    }


def test_there_is_one_backward_and_one_inner_loop():
    calls = [
        (name_of(path), node.func.attr)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert [file for file, name in calls if name == "backward"] == ["optim.py"]
    # envs/gym.py has the environments' `step` in a list
    steps = [file for file, name in calls if name == "step"]
    assert sorted(set(steps)) == [
        "collect/rollout.py",  # vector.step: the inner loop
        "envs/atari.py",
        "envs/check/played.py",
        "envs/check/vector.py",
        "envs/film.py",
        "envs/kernel.py",
        "envs/kernel_gym.py",
        "envs/kernel_steps.py",
        "envs/native.py",
        "envs/parallel.py",
        "envs/pettingzoo.py",
        "envs/replay.py",
        "envs/tensor.py",
        "optim.py",  # Adam's own
    ]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_stay_readable(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            most = 90 if name_of(path) == "run/train.py" and node.name == "train" else 60
            length = node.end_lineno - node.lineno + 1
            assert length <= most, f"{name_of(path)}: {node.name} has {length} lines"
