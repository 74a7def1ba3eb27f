"""Workers, vectors and threads that are `auto` are found from costs, or from the cores alone."""

import threading
from dataclasses import replace

import pytest

from headrace.config.derive import derive, needs_calibration
from headrace.config.resolve import read_settings
from headrace.cost_model.costs import Costs, LinearCost, mixture
from headrace.errors import ConfigError
from headrace.spec import EnvSpec, Space

FAST = Costs(
    step=mixture((5e-6, 1.0)),
    reset=mixture((2e-5, 1.0)),
    resets_per_step=0.02,
    cpu_share=1.0,
    vector=LinearCost(3e-5, 5e-7),
    inference=0.7,
    hand_over=1e-4,
    latency=5e-5,
    learn=LinearCost(0.02, 2e-5),
    allreduce=LinearCost(5e-5, 0.0),
)
SLOW = replace(FAST, step=mixture((1e-3, 1.0)))
EVEN, UNEVEN = mixture((1e-2, 1.0)), mixture((5e-3, 0.95), (0.1, 0.05))
SLEEPING = replace(FAST, step=mixture((1e-2, 1.0)), cpu_share=0.01)


def found(costs=None, cores=2, interface="gym", **given):
    settings = derive(read_settings({"env": "X", **given}), interface, cores, costs)
    run = settings.run
    return run.num_workers, run.envs_per_vector, run.num_learners, run.learner_threads


@pytest.mark.parametrize("cores", [2, 4, 16])
def test_slow_environments_are_stepped_on_all_cores_and_fast_ones_in_one_process(cores):
    sizes = {"num_envs": 64, "num_steps": 64}
    workers, size, *_ = found(SLOW, cores, **sizes)
    assert workers in (cores - 1, cores) or workers >= 0.7 * cores
    assert size <= 64 // workers
    assert found(FAST, cores, **sizes, total_env_steps=50_000) == (0, 64, 1, 1)  # soon done


def test_environments_that_sleep_have_more_workers_than_there_are_cores():
    workers, size, *_ = found(SLEEPING, 2, num_envs=24, num_steps=32)
    assert workers == 24 and size == 1


def test_with_one_core_there_is_one_process():
    assert found(SLOW, 1, num_envs=8) == (0, 8, 1, 1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_workers": 3}, (3, 2)),
        ({"num_workers": 0, "envs_per_vector": 4}, (0, 4)),
        ({"num_workers": "auto", "envs_per_vector": 2}, (2, 2)),
        ({"num_workers": -1}, (2, 4)),
    ],
)
def test_what_is_given_is_kept(given, expected):
    assert found(SLOW, 2, num_envs=8, num_steps=256, **given)[:2] == expected


def test_what_is_given_by_the_word_is_as_if_it_were_not_given():
    words = dict.fromkeys(("num_workers", "envs_per_vector", "num_learners"), "auto")
    assert found(SLOW, **words, learner_threads="auto") == found(SLOW)
    with pytest.raises(ConfigError, match=r"num_envs='auto' \(given\): expected int"):
        found(num_envs="auto")
    with pytest.raises(ConfigError, match=r"num_workers='many' \(given\): expected int"):
        found(num_workers="many")


def test_what_is_chosen_is_said_and_changes_nothing_that_is_learned():
    settings = derive(read_settings({"env": "X", "num_envs": 8}), "gym", 2, SLOW)
    assert settings.source["num_workers"] == "auto, 2 cores, a step of 1,000 µs"
    alone = derive(read_settings({"env": "X", "num_envs": 8}), "gym", 1)
    speed = {"num_workers", "envs_per_vector"}
    differ = {k for k, v in settings.flat().items() if alone.flat()[k] != v}
    assert differ == speed


def test_what_needs_workers_has_them_where_vectors_are_native_too():
    given = {"env": "ALE/Pong-v5", "num_envs": 8}
    assert found(cores=4, **given)[0] == 0
    assert found(cores=4, algo="impala", lag=2, **given)[0] > 0
    assert found(cores=4, inference="learner", **given)[0] > 0


def test_deterministic_follows_from_the_cores_alone():
    for costs in (None, FAST, SLEEPING):
        assert found(costs, 4, num_envs=8, deterministic=True)[:2] == (4, 2)
        # Where learning is the limit, more processes would be no faster
        assert found(costs, 4, num_envs=8, deterministic=True, algo="dqn")[:2] == (0, 8)


@pytest.mark.parametrize(
    ("given", "interface", "is_needed"),
    [
        ({}, "gym", True),
        ({"num_workers": 2}, "gym", False),
        ({"deterministic": True}, "gym", False),
        ({"total_env_steps": 4_096}, "gym", False),
        ({}, "tensor", False),
        ({}, "kernel", True),  # by how many learners
        ({"num_learners": 1}, "kernel", False),
        ({"learner_threads": 2}, "kernel", False),
        ({"lr_scale": "linear"}, "kernel", False),
        ({"num_envs": 7}, "kernel", False),
        ({"env": "ALE/Pong-v5"}, "gym", False),
        ({"algo": "appo"}, "gym", False),
        ({"algo": "dqn"}, "gym", True),
        ({"algo": "dqn"}, "kernel", False),
        ({"cluster": "local"}, "gym", False),
    ],
)
def test_nothing_is_measured_where_the_answer_is_plain(monkeypatch, given, interface, is_needed):
    monkeypatch.setattr("headrace.config.derive.cpu_cores", lambda: 2)
    settings = read_settings({"env": "X", **given})
    assert needs_calibration(settings, interface) == is_needed


@pytest.mark.parametrize(("costs", "workers"), [(FAST, 0), (SLOW, 1), (SLEEPING, 8)])
def test_replay_has_workers_for_slow_environments_and_else_says_that_the_learner_is_the_limit(
    costs, workers
):
    given = {"env": "X", "algo": "dqn", "num_envs": 8, "num_steps": 8}
    settings = derive(read_settings(given), "gym", 2, replace(costs, learn=LinearCost(0, 1e-3)))
    assert settings.run.num_workers == workers
    assert ("the learner is the limit" in settings.source["num_workers"]) == (workers == 0)


@pytest.mark.parametrize(
    ("step", "given", "lag"),
    [
        (EVEN, {}, 1),
        (UNEVEN, {}, 2),
        (UNEVEN, {"lag": 0}, 0),
        (UNEVEN, {"deterministic": True}, 0),
        (UNEVEN, {"num_workers": 8}, 1),
        (UNEVEN, {"algo": "ppo"}, 0),
        (UNEVEN, {"learner_threads": 2}, 0),
    ],
)
def test_a_replay_is_filled_while_the_learner_learns_where_that_is_faster(step, given, lag):
    """Where step times are uneven, workers do not wait for each other either."""
    given = {"env": "X", "algo": "dqn", "num_envs": 8, "num_steps": 8} | given
    costs = replace(SLEEPING, step=step, learn=LinearCost(0, 1.5e-3))
    settings = derive(read_settings(given), "gym", 2, costs)
    assert settings.run.lag == lag
    if lag and "num_workers" not in given:
        assert settings.source["lag"].startswith("auto, 2 cores, a step of ")


def test_algorithms_that_correct_for_lag_have_workers():
    assert found(None, 4, algo="appo")[0] == 4
    assert found(None, 4, algo="impala", total_env_steps=1_000)[0] == 0
    assert found(None, 4, lag=1, total_env_steps=1_000)[0] == 4


@pytest.mark.parametrize(
    "given",
    [
        {"algo": "appo"},
        {"lag": 1},
        {"inference": "learner"},
        {"deterministic": True},
        {"deterministic": True, "num_learners": 4},
    ],
)
def test_there_are_no_more_workers_than_vectors_for_them(given):
    workers, size, learners, _ = found(None, 16, num_envs=8, **given)
    assert 0 < workers <= 8 // size and workers % learners == 0


def test_a_machine_may_have_more_cores_than_there_are_environments():
    sizes = {"num_steps": 256, "num_learners": 1}
    assert found(SLOW, 16, num_envs=8, **sizes)[:2] == (8, 1)
    assert found(SLOW, 16, num_envs=8, envs_per_vector=2, **sizes)[:2] == (4, 2)
    assert found(SLEEPING, 16, num_envs=5, **sizes)[:2] == (5, 1)


LEARNING = replace(FAST, learn=LinearCost(1e-3, 4e-5))
"""Costs of which most is learning from many rows."""


@pytest.mark.parametrize(
    ("given", "learners"),
    [
        ({}, 2),
        ({"cores": 8}, 8),
        ({"interface": "kernel"}, 2),
        ({"cores": 64}, 8),
        ({"num_learners": "auto"}, 2),
        ({"backend": "nccl"}, 1),
        ({"num_envs": 63}, 1),
        ({"num_learners": 1}, 1),
        ({"num_learners": 2, "costs": FAST, "total_env_steps": 50_000}, 2),
        ({"num_workers": 2}, 1),
        ({"learner_threads": 2}, 1),
        ({"lr_scale": "linear"}, 1),
        ({"deterministic": True}, 1),
        ({"device": "cpu"}, 2),
        ({"total_env_steps": 20_000}, 1),  # sooner done than a second one has started
        ({"costs": replace(LEARNING, allreduce=LinearCost(0.3, 0.0))}, 1),
        ({"costs": replace(LEARNING, learn=LinearCost(0.16, 1e-7))}, 1),  # small minibatches
    ],
)
def test_on_the_cpu_several_learners_share_large_batches(given, learners):
    given = {"costs": LEARNING, "num_envs": 64, "num_steps": 128, **given}
    workers, size, found_learners, threads = found(**given)
    assert found_learners == learners
    if learners > 1:
        assert (workers, size, threads) == (0, 64 // learners, 1)


def test_several_learners_have_the_vectors_that_were_chosen():
    assert found(LEARNING, 4, num_envs=10, num_steps=128)[:3] == (0, 5, 2)


def test_no_learners_are_started_from_another_thread():
    numbers = []
    thread = threading.Thread(target=lambda: numbers.extend(found(LEARNING, num_envs=64)))
    thread.start()
    thread.join()
    assert numbers[2] == 1


def test_several_learners_change_nothing_else():
    given = {"env": "X", "num_envs": 64, "num_steps": 128}
    one, two = (derive(read_settings(given), "gym", 2, costs) for costs in (None, LEARNING))
    differ = {name for name, value in one.flat().items() if two.flat()[name] != value}
    assert differ == {"num_learners", "envs_per_vector"}
    assert two.source["num_learners"] == "auto, 2 cores, a step of 5 µs"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 4),
        ({"num_envs": 1}, 1),
        ({"num_envs": 6}, 3),
        ({"num_workers": 2}, 2),
        ({"num_envs_per_learner": 2}, 4),
    ],
)
def test_learners_with_gpus_share_what_was_asked_for(monkeypatch, given, expected):
    monkeypatch.setattr("headrace.config.derive.visible_gpus", lambda device: 4)
    assert found(None, 8, **given)[2] == expected


def test_environments_are_as_many_as_learners_that_nobody_asked_for_can_share(monkeypatch):
    monkeypatch.setattr("headrace.config.derive.visible_gpus", lambda device: 3)
    settings = derive(read_settings({"env": "X"}), "gym", 8)
    assert (settings.run.num_envs, settings.source["num_envs"]) == (9, "follows num_learners")


LARGE_DQN = {"algo": "dqn", "batch_size": 128, "hidden_sizes": (256, 256)}


@pytest.mark.parametrize(
    ("num_inputs", "given", "device"),
    [
        (4, {}, "cpu"),
        (4, {"device": "auto"}, "cpu"),
        (4, {"algo": "dqn"}, "cpu"),
        (4, LARGE_DQN, "auto"),
        (4, LARGE_DQN | {"arithmetic": "plain"}, "cpu"),  # no graphs
        (4, LARGE_DQN | {"replay_dir": "/tmp"}, "cpu"),  # not for GPUs
        (4, {"num_learners": 2}, "cpu"),
        (4, {"num_envs": 4096, "num_steps": 128, "num_minibatches": 4}, "auto"),
        (4, {"hidden_sizes": (2048, 2048)}, "auto"),
        (20_000, {}, "auto"),
        (0, {}, "auto"),
        (4, {"model": "package:Network"}, "auto"),
        (4, {"cluster": "auto"}, "auto"),
        (4, {"device": "cuda"}, "cuda"),
    ],
)
def test_beside_a_gpu_small_gradient_steps_are_made_on_the_cpu(
    monkeypatch, num_inputs, given, device
):
    gpus = {"auto": 2, "cuda": 2, "cpu": 0}
    monkeypatch.setattr("headrace.config.derive.visible_gpus", gpus.get)
    settings = replace(read_settings({"env": "X"} | given), num_inputs=num_inputs)
    run = derive(settings, "gym", 8).run
    assert run.device == device
    if not {"num_learners", "cluster"} & given.keys():
        share = device != "cpu" and settings.algorithm.learners_help
        assert run.num_learners == (2 if share else 1)
    monkeypatch.setattr("headrace.config.derive.visible_gpus", lambda device: 0)
    assert derive(settings, "gym", 8).run.device == given.get("device", "auto")


def test_one_gpu_makes_smaller_gradient_steps_than_several_which_share_them(monkeypatch):
    """A learner alone records them as CUDA graphs."""
    given = {"env": "X", "num_envs": 64, "num_steps": 32, "num_minibatches": 4}
    settings = replace(read_settings(given), num_inputs=4)
    for gpus, device in ((1, "auto"), (2, "cpu")):
        monkeypatch.setattr("headrace.config.derive.visible_gpus", {"auto": gpus, "cpu": 0}.get)
        assert derive(settings, "gym", 8).run.device == device


def test_beside_a_gpu_a_kernel_environment_is_stepped_there(monkeypatch):
    monkeypatch.setattr("headrace.config.derive.visible_gpus", lambda device: 1)
    settings = replace(read_settings({"env": "X"}), num_inputs=4)
    assert derive(settings, "kernel", 8).run.device == "auto"


@pytest.mark.parametrize(
    ("observation", "given", "num_inputs"),
    [
        (Space("box", (3, 2), "float32"), {}, 6),
        (Space("box", (84, 84, 3), "uint8"), {}, 0),
        (Space("box", (3,), "float32"), {"core": "lstm"}, 0),
        (Space("box", (3,), "float32"), {"algo": "headrace.algos.ppo:PPOAlgorithm"}, 0),
    ],
)
def test_the_inputs_of_a_network_of_hidden_layers_are_counted(observation, given, num_inputs):
    spec = EnvSpec("X", observation, Space("discrete", (), "int64", nvec=(2,)))
    assert read_settings({"env": "X"} | given, spec=spec).num_inputs == num_inputs


def test_learners_of_one_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr("headrace.config.derive.cpu_cores", lambda: 8)
    assert found(None, 8, num_learners=2, learner_threads=0)[3] == 4
    assert found(None, 8, num_learners=16, num_envs=16, learner_threads=0)[3] == 1


@pytest.mark.parametrize(("start_s", "workers"), [(1.5, 4), (30.0, 0)])
def test_processes_that_start_slowly_have_to_pay_for_it(start_s, workers):
    sizes = {"num_envs": 64, "num_steps": 64, "total_env_steps": 20_000}
    assert found(replace(SLOW, start=start_s), 4, **sizes)[0] == workers
