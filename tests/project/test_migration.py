"""docs/migrate: tables name flags and defaults as they are, and the examples on the pages run."""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import json
import operator
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from benchmarks.peers import install
from examples.thermostat import Thermostat
from headrace.config.algorithms import ALGORITHMS
from headrace.config.derive import derive
from headrace.config.resolve import read_settings
from headrace.config.run_config import AUTO_THREADS, AUTO_WORKERS, RunConfig
from headrace.envs.factory import EnvMaker, env_spec
from headrace.envs.kernels.library import TagGridWorld
from headrace.models.policy import Network
from tests import python

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/migrate"
AUTO = {"num_workers": AUTO_WORKERS, "learner_threads": AUTO_THREADS, "num_learners": -1}
"""Settings that follow from the machine: both columns have the word."""
pytestmark = pytest.mark.timeout(300)
COLUMNS = ["default", "Headrace", "class", "run", "what differs"]


def tables(page):
    """Return table -> rows, each (their name, their default, our flag, class, run)."""
    found, rows = {}, None
    for line in (PAGES / f"{page}.md").read_text().splitlines():
        if line.startswith("#"):
            heading, rows = line.lstrip("# "), None
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[1:] == COLUMNS:
            rows = found.setdefault(heading, [])
        elif rows is not None and line.startswith("| "):
            assert len(cells) == len(COLUMNS) + 1, line
            rows.append([cell.strip("`") for cell in cells[:5]])
    return found


def each_table(*pages):
    return pytest.mark.parametrize(
        ("page", "table"), [(page, table) for page in pages for table in tables(page)]
    )


def value_of(cell):
    """Return the value that a cell shows: a Python literal, or a word."""
    try:
        return ast.literal_eval(cell)
    except (ValueError, SyntaxError):
        return cell


def is_same(value, cell):
    shown = value_of(cell)
    value, shown = (tuple(v) if isinstance(v, list) else v for v in (value, shown))
    return value == shown and isinstance(value, bool) == isinstance(shown, bool)


@functools.cache
def our_defaults(algo, make_env):
    """Return name -> value: of the classes, and in a run of an environment without a preset."""
    spec = env_spec(EnvMaker(make_env, {}))
    settings = read_settings({"env": "mine", "algo": algo}, spec=spec)
    of_classes = {
        f.name: f.default
        for cls in (RunConfig, Network, ALGORITHMS[algo].Config)
        for f in dataclasses.fields(cls)
    }
    in_run = derive(settings, spec.interface, cores=1).flat() | {"lag": settings.run.lag}
    words = dict.fromkeys(AUTO, "auto")
    assert {name: of_classes[name] for name in AUTO} == AUTO
    return of_classes | words, in_run | words


def pendulum():
    return gym.make("Pendulum-v1")


def env_of(page, algo):
    return TagGridWorld if page == "warpdrive" else pendulum if algo == "sac" else Thermostat


@each_table("sb3", "rllib", "cleanrl", "warpdrive", "sample-factory")
def test_our_flags_exist_and_have_the_defaults_of_the_table(page, table):
    algo = table.lower()
    classes, run = our_defaults(algo, env_of(page, algo))
    wrong = []
    for _, _, ours, of_class, in_run in tables(page)[table]:
        name = ours.removeprefix("--").replace("-", "_")
        if ours == "-":
            wrong += [ours] if (of_class, in_run) != ("-", "-") else []
        elif not (is_same(classes[name], of_class) and is_same(run[name], in_run)):
            wrong.append(f"{ours}: {classes[name]}, {run[name]}")
    assert not wrong


def test_every_page_has_its_tables():
    found = {path.stem: set(tables(path.stem)) for path in PAGES.glob("*.md")}
    assert found == {
        "README": set(),
        "sb3": {"PPO", "DQN", "SAC"},
        "rllib": {"PPO", "DQN", "SAC"},
        "cleanrl": {"PPO", "DQN", "SAC"},
        "warpdrive": {"A2C"},
        "sample-factory": {"APPO"},
    }


@functools.cache
def sb3_model(table):
    import stable_baselines3

    kwargs = {} if table == "PPO" else {"buffer_size": 10}
    env = pendulum() if table == "SAC" else Thermostat()
    return getattr(stable_baselines3, table)("MlpPolicy", env, device="cpu", **kwargs)


def sb3_default(table, name):
    """Return what Stable-Baselines3 has for `NAME` of the algorithm, or `OWNER.NAME`."""
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    owner, _, name = name.rpartition(".")
    model = sb3_model(table)
    if owner == "MlpPolicy":
        policy = model.policy
        optimizer = policy.actor.optimizer if table == "SAC" else policy.optimizer
        if name == "eps":
            return optimizer.defaults["eps"]
        if name == "activation_fn":
            return policy.activation_fn.__name__.lower()
        value = getattr(policy, name)
        return value["pi"] if isinstance(value, dict) and value["pi"] == value["vf"] else value
    owners = {o.__name__: o for o in (EvalCallback, VecNormalize, make_vec_env)}
    return inspect.signature(owners.get(owner, type(model))).parameters[name].default


def wrong_defaults(page, table, default_of):
    """Return the rows whose second column is not what `default_of` says of their name."""
    given = [(name, shown) for name, shown, *_ in tables(page)[table] if name != "-"]
    return [f"{n}: {default_of(n)}" for n, shown in given if not is_same(default_of(n), shown)]


@each_table("sb3")
def test_stable_baselines3_has_the_defaults_of_the_table(page, table):
    assert not wrong_defaults(page, table, functools.partial(sb3_default, table))


def test_the_pages_name_the_version_that_is_installed():
    import ray
    import stable_baselines3

    for page, said in (
        ("sb3", f"stable-baselines3 {stable_baselines3.__version__}"),
        ("rllib", f"ray {ray.__version__}"),
    ):
        assert said in (PAGES / f"{page}.md").read_text()


def assignments(body):
    """Return name -> value of `self.name = value`, and of fields, where the value is constant."""
    found = {}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        target, value = targets[0], getattr(node, "value", None)
        if value is None or not isinstance(target, ast.Attribute | ast.Name):
            continue
        factory = isinstance(value, ast.Call) and value.keywords
        if factory and isinstance(value.keywords[0].value, ast.Lambda):
            value = value.keywords[0].value.body
        code = compile(ast.Expression(value), "", "eval")
        try:
            of_name = eval(code, {"__builtins__": {}}, {"int": int})
        except (NameError, TypeError, AttributeError):
            continue
        found[target.attr if isinstance(target, ast.Attribute) else target.id] = of_name
    return found


@functools.cache
def rllib_defaults(table):
    """Return the settings of a config class, as its source sets them: RLlib needs more packages."""
    folder = Path(importlib.util.find_spec("ray").origin).parent / "rllib"

    def body(path, cls, method=None):
        tree = ast.parse((folder / path).read_text())
        (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls)
        if method is None:
            return found.body
        (found,) = (n for n in found.body if getattr(n, "name", "") == method)
        return found.body

    values = assignments(body("algorithms/algorithm_config.py", "AlgorithmConfig", "__init__"))
    own = f"algorithms/{table.lower()}/{table.lower()}.py", f"{table}Config"
    values |= assignments(body(*own, "__init__"))
    model = assignments(body("core/rl_module/default_model_config.py", "DefaultModelConfig"))
    if table == "PPO":
        (returned,) = body(*own, "_model_config_auto_includes")
        model |= ast.literal_eval(returned.value.right)
    return values | {"model_config": model}


@each_table("rllib")
def test_rllib_has_the_defaults_of_the_table(page, table):
    def default_of(name):
        return functools.reduce(operator.getitem, name.split("."), rllib_defaults(table))

    assert not wrong_defaults(page, table, default_of)


@functools.cache
def sample_factory_defaults():
    code = (
        "import json; from sample_factory.cfg.arguments import parse_sf_args;"
        "parser, _ = parse_sf_args(['--env=x']);"
        "print(json.dumps({a.dest: a.default for a in parser._actions}))"
    )
    interpreter = install.installed_python("sf")
    out = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


needs_sample_factory = pytest.mark.skipif(
    not install.is_installed("sf"), reason="python benchmarks/peers/install.py sf"
)
needs_rllib = pytest.mark.skipif(
    not install.is_installed("rllib"), reason="python benchmarks/peers/install.py rllib"
)


@needs_sample_factory
@pytest.mark.more
def test_sample_factory_has_the_defaults_of_the_table():
    page = "sample-factory"
    assert not wrong_defaults(page, "APPO", sample_factory_defaults().__getitem__)


# Examples


def blocks(page, section, language):
    """Return the blocks of code in that language below a heading."""
    text = (PAGES / f"{page}.md").read_text()
    (of_section,) = re.findall(rf"^##+ {section}\n(.*?)(?=^#|\Z)", text, re.S | re.M)
    found = re.findall(r"^```(\w*)\n(.*?)^```$", of_section, re.S | re.M)
    return [code for language_of, code in found if language_of == language]


@functools.cache
def environment():
    """Return the variables of a process that finds the environment of the examples."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(ROOT)])}


def commands(block, tmp_path):
    """Run a block of `headrace` commands, as a shell would. Return what the last one printed."""
    for line in block.replace("\\\n", "").splitlines():
        program, *words = shlex.split(line)
        assert program == "headrace"
        command = python.command(*words)
        done = python.run(command, cwd=tmp_path, env=environment(), timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script(block, tmp_path, interpreter=None, flags=()):
    """Run a block of Python as a script, here or with another interpreter. Return its output."""
    (tmp_path / "train.py").write_text(block)
    if interpreter is None:
        command = [sys.executable, "train.py"]
        done = python.run(command, cwd=tmp_path, env=environment(), timeout=280)
    else:
        done = subprocess.run(
            [interpreter, "train.py", *flags], cwd=tmp_path, env=environment(),
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def printed_return(text):
    return float(re.findall(r"(?:mean return|Return) (-?[\d.]+)", text)[-1])


AT_RANDOM, LEARNED = -34, -4.5
"""Returns of thermostat.py. The likeliest actions of a policy that never learned: -7.5 or less."""


def test_random_actions_have_that_return():
    env, returns = Thermostat(), []
    for seed in range(100):
        env.reset(seed=seed)
        env.action_space.seed(seed)
        is_over, total = False, 0.0
        while not is_over:
            _, reward, _, is_over, _ = env.step(env.action_space.sample())
            total += reward
        returns.append(total)
    assert sum(returns) / 100 == pytest.approx(AT_RANDOM, abs=2)


@pytest.mark.parametrize(
    "library", ["Headrace", pytest.param("Stable-Baselines3", marks=pytest.mark.more)]
)
def test_both_scripts_of_the_page_for_stable_baselines3_learn(tmp_path, library):
    (block,) = blocks("sb3", f"In {library}", "python")
    assert LEARNED < printed_return(script(block, tmp_path)) < 0


@pytest.mark.parametrize("page", ["rllib", "sample-factory"])
def test_our_commands_learn(tmp_path, page):
    (block,) = blocks(page, "In Headrace", "sh")
    assert LEARNED < printed_return(commands(block, tmp_path)) < 0


def test_the_command_with_several_policies_trains_both(tmp_path):
    (block,) = blocks("rllib", "Several policies", "sh")
    last = commands(f"{block.strip()} --json", tmp_path).splitlines()[-1]
    assert set(json.loads(last)["mean_return_by_policy"]) == {"hunters", "hare"}


@needs_rllib
@pytest.mark.more
def test_rllib_s_script_learns(tmp_path):
    (block,) = blocks("rllib", "In RLlib", "python")
    assert LEARNED < printed_return(script(block, tmp_path, install.python_of("rllib"))) < 0


@needs_sample_factory
@pytest.mark.more
def test_sample_factory_s_script_learns(tmp_path):
    (block,) = blocks("sample-factory", "In Sample Factory", "python")
    (command,) = blocks("sample-factory", "In Sample Factory", "")
    _, script_name, *flags = shlex.split(command.replace("\\\n", ""))
    assert script_name == "train.py"
    said = script(block, tmp_path, install.python_of("sf"), flags)
    returns = re.findall(r"Avg episode reward: \[\(0, '(-?[\d.]+)'\)\]", said)
    assert -8 < float(returns[-1]) < 0  # sampled actions, over the last 100 episodes


def test_cleanrl_s_settings_learn(tmp_path):
    (block,) = blocks("cleanrl", "In Headrace", "sh")
    assert printed_return(commands(block, tmp_path)) > 120  # without learning: 54


def test_taggers_of_the_kernel_environment_learn(tmp_path):
    (code,) = blocks("warpdrive", "In Headrace", "python")
    _, training = blocks("warpdrive", "In Headrace", "sh")
    (tmp_path / "ring_tag.py").write_text(code)
    (tagger,) = re.findall(r"tagger: (-?[\d.]+)", commands(training, tmp_path))
    assert float(tagger) > 0  # without learning: -1.4


@pytest.mark.more
def test_nothing_is_wrong_with_the_kernel_environment(tmp_path):
    (code,) = blocks("warpdrive", "In Headrace", "python")
    check, _ = blocks("warpdrive", "In Headrace", "sh")
    (tmp_path / "ring_tag.py").write_text(code)
    assert "nothing is wrong (0 warnings)" in commands(check, tmp_path)
