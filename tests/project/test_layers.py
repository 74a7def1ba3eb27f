"""The architecture's import table, held over the source itself."""

import ast
import re
from pathlib import Path

import pytest

import headrace

SOURCE = Path(__file__).parents[2] / "src/headrace"
PAGE = Path(__file__).parents[2] / "docs/architecture.md"
# Third-party packages that only these files may import.
ONLY_IN = {
    "mlflow": ("tools/trackers/to_mlflow.py",),
    "trackio": ("tools/trackers/to_trackio.py",),
    "wandb": ("tools/trackers/to_wandb.py",),
    "huggingface_hub": ("interop/hub.py",),
    "yaml": ("interop/zoo_file.py",),
    "lightning": ("lightning/",),
    "onnx": ("interop/export/",),
    "onnxruntime": ("interop/export/",),
    "onnxscript": ("interop/export/",),
    "stable_baselines3": (),
    "minari": ("datasets/minari.py",),
    "mujoco": ("envs/gym/mujoco.py",),
    "numba": ("envs/kernels/compiler.py",),
    "pettingzoo": ("envs/kernels/pettingzoo_adapter.py",),
    "ray": (
        "collectors/backends/ray_backend.py",
        "collectors/backends/ray_host.py",
        "collectors/backends/ray_requests.py",
        "distributed/ray_internals.py",
        "training/ray/",
        "tuning/runners/cluster.py",
        "tuning/runners/part_actor.py",
    ),
    "gymnasium": ("envs/", "training/rank.py"),
    "tensorboard": ("training/log.py",),
    "rich": ("training/log.py",),
    "scipy": ("tools/plan/integer_program.py",),
    "optuna": ("tuning/samplers.py",),
    "cmaes": ("tuning/samplers.py",),
    "tyro": ("cli/", "config/run_config.py"),
    "safetensors": ("storage/",),
    "cloudpickle": (
        "collectors/backends/",
        "distributed/channel.py",
        "distributed/local_ranks.py",
        "envs/check/plays.py",
        "envs/registry.py",
        "evaluation/process.py",
        "tools/autoscale/trial.py",
        "training/ray/learner_actor.py",
        "tuning/runners/part.py",
    ),
    "matplotlib": ("tools/plotting.py",),
    "imageio_ffmpeg": ("envs/video.py",),
    "multiprocessing": (
        "collectors/backends/processes.py",
        "collectors/backends/worker_host.py",
        "distributed/child_process.py",
        "distributed/local_ranks.py",
    ),
    "pickle": (),
}
FILES = sorted(SOURCE.rglob("*.py"))


ROOM = re.compile(r"^\| (\d+) \| `([a-z_/]+)/` \| (.+) \|$", re.MULTILINE)
RANKS = {room: int(rank) for rank, room, _ in ROOM.findall(PAGE.read_text())}


def rank_of(module):
    """The number of the room of `headrace.x.y`."""
    room = module.split(".")[1]
    return RANKS.get(room, RANKS["headrace"])


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
    if path in (SOURCE / "__init__.py", SOURCE / "__main__.py"):
        return  # the public names, loaded when used; the command line
    own = rank_of("headrace." + name_of(path).removesuffix(".py").replace("/", "."))
    for module in imports(path):
        if module.startswith("headrace."):
            assert rank_of(module) <= own, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_third_party_packages_stay_where_they_belong(path):
    for module in imports(path):
        allowed = ONLY_IN.get(module.partition(".")[0])
        if allowed is not None:
            assert name_of(path).startswith(tuple(allowed)) if allowed else False, (
                f"{name_of(path)} imports {module}"
            )


def test_private_parts_of_ray_are_in_one_file():
    uses = re.compile(r"ray\._private|_ray\._private|ray\._raylet|\bray_constants\b")
    found = [name_of(path) for path in FILES if uses.search(path.read_text())]
    assert found == ["distributed/ray_internals.py"]


def test_the_page_lists_every_room():
    rooms = {str(path.parent.relative_to(SOURCE)) for path in FILES}
    assert {"headrace" if room == "." else room for room in rooms} == set(RANKS)


@pytest.mark.parametrize("room", sorted(RANKS))
def test_a_room_has_at_most_twelve_files(room):
    folder = SOURCE if room == "headrace" else SOURCE / room
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= 12, f"{room}: {files}"


def test_no_room_bears_the_name_of_a_public_function():
    # An import from such a room would put the package in place of the function.
    public = headrace.__all__
    assert not {room.split("/")[0] for room in RANKS} & set(public)


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
        "__init__.py",
        "cli/main.py",
        "collectors/backends/ray_host.py",
        "envs/check/plays.py",
        "distributed/local_ranks.py",
        "training/launch.py",
        "training/ray/learner_actor.py",
    }


def test_there_is_one_backward_and_one_inner_loop():
    calls = [
        (name_of(path), node.func.attr)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert [file for file, name in calls if name == "backward"] == ["learner/optimizer.py"]
    # envs/gym/python_vector.py has the environments' `step` in a list
    steps = [
        file
        for file, name in calls
        if name == "step" and not file.startswith("algos/")  # ctx.step
    ]
    assert sorted(set(steps)) == [
        "collectors/rollout.py",  # vector.step: the inner loop
        "envs/check/plays.py",
        "envs/check/vector_checks.py",
        "envs/episode_replay.py",
        "envs/games/parallel.py",
        "envs/games/turns.py",
        "envs/games/vector.py",
        "envs/gym/atari.py",
        "envs/gym/native_vector.py",
        "envs/kernels/gym_adapter.py",
        "envs/kernels/pettingzoo_adapter.py",
        "envs/tensor_vector.py",
        "envs/video.py",
        "learner/learner.py",  # an optimizer's, for `ctx.step`
        "learner/optimizer.py",  # Adam's own
    ]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_stay_readable(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{name_of(path)}: {node.name} has {length} lines"


def test_public_methods_have_a_docstring_of_their_own_or_their_base_s():
    classes = {
        node.name: node
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }

    def is_documented(owner, method):
        if owner not in classes:
            return False
        node = classes[owner]
        for each in node.body:
            is_it = isinstance(each, ast.FunctionDef) and each.name == method
            if is_it and ast.get_docstring(each):
                return True
        bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        return any(is_documented(base, method) for base in bases)

    missing = [
        f"{name}.{method.name}"
        for name, node in classes.items()
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not (name + method.name).startswith("_")
        if not method.name.startswith("_") and not is_documented(name, method.name)
    ]
    # nn.Module's own `forward` needs no word where the class says what it maps to what
    assert [name for name in missing if not name.endswith(".forward")] == []
