"""What one types: flags in every spelling that tyro takes, a pipe as the config file, --quiet."""

import json
import os
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import pytest

from headrace.algos.schedules import SCHEDULES
from headrace.cli.argv import flag_names, is_on, rename_flags, value_of, without_flags
from headrace.cli.commands import FLAGS
from headrace.cli.flags import explicit, parse, with_changes
from headrace.cli.main import _main, _may_start_processes
from headrace.cli.tool_commands import FLAGS as TOOLS
from headrace.cli.verbs import help_texts
from headrace.config.algorithms import ALGORITHMS, load_algorithm
from headrace.config.resolve import read_settings
from headrace.config.run_config import GROUPS
from headrace.errors import ConfigError, flag, flags_of
from headrace.models.policy import Network
from tests import python

TEXTS = {"algo": None, "env": None, "config": "a.toml", "run_dir": "runs/a"}
"""Values of flags for which any word would not do; None: the test itself gives it."""
SPELLINGS = {
    "two words": lambda name, value: [flag(name), value],
    "=": lambda name, value: [f"{flag(name)}={value}"],
    "underscores": lambda name, value: [f"--{name}", value],
    "underscores and =": lambda name, value: [f"--{name}={value}"],
}


def other_value(name, kind, default):
    """A word for a value that is not the default."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is types.UnionType:
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if name in TEXTS:
        return TEXTS[name]
    if name in SCHEDULES.values():
        return "0:0.5,1k:0.25"
    if get_origin(kind) is Literal:
        return next(word for word in get_args(kind) if word != default)
    if get_origin(kind) is tuple:
        return "7" if get_args(kind)[0] is int else "my_module:other"
    if get_origin(kind) is dict:
        return "word=0:1"
    if kind is int:
        return str(max(0, default) + 3)
    if kind is float:
        return str((default or 0.25) * 2.0 if name == "rank_timeout_s" else (default or 0.25) / 2.0)
    assert kind is str, (name, kind)
    return "my_module:other"


def test_settings_that_are_printed_as_flags_can_be_typed():
    settings = {
        "lr": 3.5e-4, "hidden_sizes": (64, 32), "normalize_obs": False, "activation": "relu",
        "lr_schedule": ((0.0, 3e-4), (1_500_000.0, 1.25e-4)), "normalize_reward": True,
    }  # fmt: skip
    words = ["CartPole-v1", *flags_of(settings).split()]
    given = explicit(words, parse("train", "", FLAGS["train"], words))
    assert {name: given[name] for name in settings} == settings


def all_flags(algo):
    """Name, other value (a word, or True and False) of each flag of `headrace train`."""
    classes = [FLAGS["train"], *GROUPS.values(), Network, load_algorithm(algo).Config]
    for cls in classes:
        hints = get_type_hints(cls, include_extras=True)
        for f in fields(cls):
            if hints[f.name] is bool:
                yield f.name, not f.default
            elif (value := other_value(f.name, hints[f.name], f.default)) is not None:
                yield f.name, value


def spelled(algo, spell):
    """A command line with every flag."""
    argv = ["CartPole-v1", *spell("algo", algo)]
    for name, value in all_flags(algo):
        if isinstance(value, bool):
            switch = name if value else f"no_{name}"
            argv.append(spell(switch, "")[0].rstrip("="))
        else:
            argv += spell(name, value)
    return argv


def read(argv):
    """Every flag's value, the settings that are named, and what all settings come to."""
    verb = parse("train", "", FLAGS["train"], argv)
    values = {}
    for f in fields(verb):
        value = getattr(verb, f.name)
        values |= vars(value) if is_dataclass(value) else {f.name: value}
    values.pop("_explicit", None)
    named = explicit(argv, verb)
    return values, named, read_settings(named).flat()


@pytest.fixture(scope="module", params=ALGORITHMS)
def reference(request):
    return request.param, read(spelled(request.param, SPELLINGS["two words"]))


def test_every_flag_has_another_value_than_its_default(reference):
    algo, (values, named, settled) = reference
    defaults, *_ = read(["CartPole-v1", "--algo", algo])
    flags = {name for name, _ in all_flags(algo)}
    assert {name for name in flags if values[name] == defaults[name]} == set()
    settings = flags & set(settled)
    assert len(settings) > 50
    assert set(named) == settings | {"env", "algo"}
    assert {name: settled[name] for name in named} == named


@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if name != "two words"])
def test_every_flag_means_the_same_in_every_spelling(reference, spelling):
    algo, expected = reference
    assert read(spelled(algo, SPELLINGS[spelling])) == expected


def test_the_last_of_several_values_counts():
    argv = ["X", "--algo=a2c", "--num-workers", "3", "--algo", "impala", "--num_workers=0"]
    assert value_of(argv, "algo") == "impala"
    assert value_of(argv, "num_workers") == "0"
    assert value_of(argv, "lr") is None
    assert value_of([*argv, "--lr"], "lr") is None
    assert flag_names(argv) == ["algo", "num_workers", "algo", "num_workers"]
    verb = parse("train", "", FLAGS["train"], argv)
    assert (verb.policies.algo, verb.collection.num_workers) == ("impala", 0)


def test_a_switch_is_on_unless_it_is_switched_off_later():
    assert is_on(["X", "--auto_scale"], "auto_scale")
    assert is_on(["X", "--no-auto-scale", "--auto-scale"], "auto_scale")
    assert not is_on(["X", "--auto-scale", "--no_auto_scale"], "auto_scale")
    assert not is_on(["auto_scale"], "auto_scale")


def test_flags_are_taken_out_with_their_values():
    argv = [
        "--budget_s=3",
        "X",
        "--memory-gib",
        "2",
        "--lr",
        "1",
        "--no-again",
        "--env-kwargs",
        "again=1",
    ]
    kept = without_flags(argv, {"budget_s": True, "memory_gib": True, "again": False})
    assert kept == ["X", "--lr", "1", "--env-kwargs", "again=1"]


def test_former_flags_are_replaced_in_every_spelling():
    given = ["--on_sampler_loss=fail", "--on-sampler-loss", "fail", "--inference", "sampler"]
    now = ["--on-worker-loss=fail", "--on-worker-loss", "fail", "--inference", "worker"]
    assert rename_flags([*given, "--inference=sampler", "sampler"]) == [
        *now, "--inference=worker", "sampler",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train X --num-workers 2", True), ("train X --num_workers=2", True),
        ("train X --auto_scale", True), ("autoscale X", True), ("train X", False),
        ("train X --num-workers=0", False), ("train X --num-workers 2 --num-workers 0", False),
        ("simulate P --num-workers 10", False),
    ],
)  # fmt: skip
def test_workers_are_expected_before_flags_are_parsed(words, expected):
    verb, *argv = words.split()
    assert _may_start_processes(verb, argv) == expected


@pytest.fixture
def pipe():
    """The end to read of a pipe that holds settings, as `<(echo ...)` makes it."""
    reader, writer = os.pipe()
    os.write(writer, b"lr = 0.5\nnum_steps = 16\nnum_minibatches = 4\n")
    os.close(writer)
    yield reader
    os.close(reader)


def test_a_config_file_may_be_a_pipe(pipe, tmp_path, monkeypatch):
    """Settings are resolved twice, and a pipe can be read once."""
    monkeypatch.chdir(tmp_path)
    argv = ["CartPole-v1", "--total-env-steps=64", "--run-dir=run", f"--config=/dev/fd/{pipe}"]
    assert _main(["train", *argv, "--quiet"]) == 0
    settings = json.loads(Path("run/config.json").read_text())["settings"]
    assert (settings["lr"], settings["num_steps"], settings["num_minibatches"]) == (0.5, 16, 4)


def test_a_pipe_is_refused_where_each_of_several_processes_would_read_it(pipe, tmp_path):
    done = python.run(
        python.command("train", "CartPole-v1", "--config", "/dev/stdin"),
        cwd=tmp_path, stdin=pipe, env=os.environ | {"RANK": "0", "WORLD_SIZE": "2"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "/dev/stdin is a pipe, and each process of torchrun reads it" in done.stderr
    assert not list(tmp_path.iterdir())


def test_quiet_leaves_errors_and_json(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    sizes = ["--num-envs=4", "--num-steps=16", "--num-minibatches=4", "--total-env-steps=64"]
    assert _main(["train", "CartPole-v1", *sizes, "--run-dir=run", "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    assert _main(["resume", "run", "--total-env-steps=128", "--quiet", "--json"]) == 0
    out, err = capfd.readouterr()
    assert (json.loads(out)["env_steps"], err) == (128, "")
    assert _main(["resume", "nowhere", "--quiet"]) == 1
    out, err = capfd.readouterr()
    assert out == "" and "not a run directory" in err


def test_the_flags_are_those_of_the_algorithm_that_the_config_file_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text('algo = "impala"\n')
    argv = ["CartPole-v1", "--config", "a.toml", "--rho-clip", "0.9"]
    train = parse("train", "", FLAGS["train"], argv)
    assert explicit(argv, train)["rho_clip"] == 0.9
    with pytest.raises(ConfigError, match="--rho-clip is a setting of appo, impala"):
        parse("train", "", FLAGS["train"], [*argv, "--algo", "ppo"])


@pytest.mark.parametrize("algo", sorted(ALGORITHMS))
@pytest.mark.parametrize("verb", ["train", "profile", "autoscale"])
def test_no_flag_of_a_verb_has_the_name_of_an_algorithm_s_setting(verb, algo):
    flags = (FLAGS | TOOLS)[verb]
    parsed = parse(verb, "", flags, ["CartPole-v1", "--algo", algo, "--lr", "0.5"])
    assert explicit(["--lr", "0.5"], parsed)["lr"] == 0.5


def test_a_verb_with_settings_needs_no_source_of_its_made_class():
    """Python 3.12 and later give it the module that made it, as if its source were there."""
    made = with_changes(FLAGS["resume"])
    made.__module__ = "headrace.cli.flags"
    texts = help_texts(made)
    assert texts["run_dir"] == help_texts(FLAGS["resume"])["run_dir"]
    assert "num_workers" not in texts  # of fields that were added, their metadata has it
