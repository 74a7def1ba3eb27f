"""What only a CUDA device shows. `make gpu` runs these; elsewhere they are left out by name."""

import datetime
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

import headrace
from headrace.batch import join
from headrace.config.resolve import resolve
from headrace.distributed.ranks import SINGLE_RANK, JoinedRanks, RankInfo
from headrace.envs.check.plays import Play, kernel_spec, play, random_actions
from headrace.envs.kernels import library
from headrace.envs.kernels.library.tag_gridworld import TagGridWorld
from headrace.learner.recorded import Recorded
from headrace.models.policy import Network
from headrace.replay.buffer import ReplayBuffer
from headrace.storage.metrics import read_metrics
from tests.algos.reach import Reach
from tests.replay.test_buffer import Frames, Stream
from tests.support import (
    RAINBOW,
    REPLAY,
    inline,
    learner_for,
    plan_for,
    policies_for,
    policy_for,
    short_cartpole,
    workers,
)

pytestmark = pytest.mark.gpu


GIVEN = {
    "env": "short", "num_envs": 4, "num_steps": 32, "envs_per_vector": 4, "normalize_obs": True,
    "normalize_reward": True, "target_kl": 1.0,
}  # fmt: skip


@pytest.fixture
def collected():
    plan = plan_for(short_cartpole, num_steps=32, num_envs=4, envs_per_vector=4)
    collector = inline(plan)
    collector.publish(policies_for(plan), 0)
    yield plan.spec, collector.collect().fragments
    collector.close()


def learn(collected, device="cuda", ranks=SINGLE_RANK, **given):
    """Metrics and weights after one update."""
    spec, fragments = collected
    settings = resolve(GIVEN | given)
    learner = learner_for(settings, spec, ranks, device=device)
    metrics = learner.update(learner.assemble(fragments), 0)
    return metrics, learner.policies["default"].cpu().state_dict()


def assert_close(learned, expected, rtol, atol):
    for one, other in zip(learned, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=rtol, atol=atol, msg=name)


def test_one_update_on_cuda_is_the_cpu_s(collected):
    on_cpu = learn(collected, "cpu")
    assert_close(learn(collected), on_cpu, rtol=1e-3, atol=1e-5)


RECORDED = [
    ("ppo", {"clip_schedule": "linear"}), ("ppo", {"precision": "bf16", "target_kl": 1.0}),
    ("ppo", {"normalize_obs": True, "normalize_reward": True}),
    ("ppo", {"ent_schedule": [[0, 0.0], [512, 0.5]], "clip_schedule": [[0, 0.2], [512, 0.01]]}),
    ("a2c", {}), ("a2c", {"ent_schedule": [[0, 0.0], [512, 0.5]]}),
    ("appo", {}), ("impala", {}), ("pqn", {}),
    ("dqn", {}), ("dqn", RAINBOW), ("dqn", {"distribution": "qr", "normalize_obs": True}),
]  # fmt: skip


@pytest.mark.parametrize(("algo", "parts"), RECORDED)
def test_a_recorded_gradient_step_is_the_one_of_single_operations(collected, algo, parts):
    """Over updates with schedules; `--arithmetic plain` starts each operation."""
    spec, fragments = collected
    given = {"env": "short", "num_envs": 4, "num_steps": 32, "envs_per_vector": 4, "algo": algo}
    given |= {"lr_schedule": "linear", "schedule_env_steps": 1000, "num_workers": 0}
    given |= REPLAY if algo == "dqn" else {}
    found = []
    for arithmetic in ("plain", "auto"):
        settings = resolve(given | parts | {"arithmetic": arithmetic})
        learner = learner_for(settings, spec, device="cuda")
        metrics = [learner.update(learner.assemble(fragments), 128 * i, 128) for i in range(4)]
        graphs = learner.learners["default"]._graphs
        assert ("step of policy" in graphs) == (arithmetic == "auto")
        found.append((*metrics, learner.policies["default"].cpu().state_dict()))
    assert [len(graph._layouts) for graph in graphs.values()] == [1] * (
        4 if parts is RAINBOW else 1
    )
    assert_close(*found, rtol=1e-5, atol=1e-7)


def test_a_function_is_recorded_for_each_layout_and_a_large_one_not_at_all():
    done = []

    def scale(of):
        done.append(1)
        return {"sum": of["x"].sum() * of["factor"]}

    scaled = Recorded(scale, torch.device("cuda"))
    sizes = (3, 5, 3, 5, 3, 5, 3, 5, 2**23)
    found = [
        scaled({"x": torch.ones(size, device="cuda"), "factor": number})["sum"]
        for number, size in enumerate(sizes)
    ]
    assert [float(total) for total in found] == [size * i for i, size in enumerate(sizes)]
    assert len(scaled._layouts) == 2
    assert len(done) == 2 * 3 + 1  # two ordinary calls and the recording of each


def test_the_learner_s_device_acts_for_workers_as_the_cpu_does():
    """Until an action differs by rounding (1e-3 of these noises are so close to a boundary)."""
    sizes = {"num_steps": 32, "num_envs": 8, "network": Network(normalize_obs=True)}
    ours = workers(plan_for(short_cartpole, inference_device=torch.device("cuda"), **sizes))
    theirs = inline(plan_for(short_cartpole, **sizes))
    compared = 0
    for version in range(3):
        policy = policy_for(theirs._plan, seed=version)
        ours.publish({"default": policy.cuda()}, version)
        theirs.publish({"default": policy.cpu()}, version)
        for a, b in zip(ours.collect().fragments, theirs.collect().fragments, strict=True):
            alike = (a.obs[:-1] == b.obs[:-1]).all(2) & (a.action == b.action)
            same = alike.cumprod(0).bool()  # afterwards it is another episode
            compared += int(same.sum())
            for name, column in a.stored_outputs.items():
                expected = b.stored_outputs[name][same]
                torch.testing.assert_close(column[same], expected, rtol=1e-4, atol=1e-5)
            assert (a.policy_version == version).all()
    ours.close()
    theirs.close()
    assert compared > 0.9 * 3 * 32 * 8


def test_bf16_learns_nearly_the_same(collected):
    """8 significant bits in the network; losses are summed in fp32."""
    once = {"num_epochs": 1, "num_minibatches": 1}
    (fp32, _), (bf16, _) = (learn(collected, precision=p, **once) for p in ("fp32", "bf16"))
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        assert bf16[name] == pytest.approx(fp32[name], rel=5e-2, abs=1e-2), name
    assert bf16 != fp32


def test_accumulation_on_cuda_gives_the_same_in_less_memory(collected):
    parts = {"num_minibatches": 1, "num_epochs": 2}
    found, peaks = [], []
    for count in (1, 4):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found.append(learn(collected, num_accumulation_steps=count, **parts))
        peaks.append(torch.cuda.max_memory_allocated())
    assert_close(*found, rtol=1e-3, atol=1e-5)
    assert peaks[1] < peaks[0]


def test_one_rank_over_nccl_is_alone(collected):
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    job = JoinedRanks(RankInfo(0, 1, 0), store, "auto", torch.device("cuda", 0), 60.0)
    try:
        assert job.transport == "nccl"
        assert job.gather_bytes(b"said") == [b"said"]
        over_nccl = learn(collected, "cuda:0", job)
    finally:
        job.close()
    assert_close(over_nccl, learn(collected, "cuda:0"), rtol=1e-4, atol=1e-6)


def test_torchrun_with_one_gpu(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    train = ["train", "CartPole-v1", "--device", "cuda", "--check-ranks", "1", "--json"]
    train += ["--total-env-steps", "20000", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "1", "-m", "headrace", *train],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] >= 20_000


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_on_cuda_learns_saves_and_resumes(tmp_path, num_workers):
    run = headrace.train(
        "CartPole-v1", device="cuda", num_workers=num_workers, total_env_steps=40_000,
        schedule_env_steps=99_840, run_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert run.mean_return > 150
    resumed = headrace.resume(tmp_path / "run", total_env_steps=41_000, quiet=True)
    assert resumed.summary["env_steps"] >= 41_000


@pytest.mark.parametrize(("algo", "lag"), [("ppo", 1), ("appo", 2), ("impala", 2)])
def test_a_learner_on_cuda_beside_samplers_that_go_on(tmp_path, algo, lag):
    run = headrace.train(
        "CartPole-v1", algo=algo, lag=lag, device="cuda", num_workers=2, num_envs=8,
        envs_per_vector=4, num_steps=64, total_env_steps=20_000, run_dir=tmp_path / "run",
        quiet=True,
    )  # fmt: skip
    ledger = run.summary["ledger"]
    assert run.summary["env_steps"] == ledger["collected"] - run.summary["lost_env_steps"] >= 20_000
    rows = read_metrics(run.dir)
    assert all(row["lag_learning_max"] <= 1 for row in rows) or algo != "ppo"
    assert any(row["lag_learning"] > 0 for row in rows)


@pytest.mark.parametrize("env", sorted(library.IDS))
def test_a_kernel_environment_is_the_same_on_cuda(env):
    """From hundreds of states, and over whole episodes where they are of whole numbers."""
    report = headrace.check_env(env)
    gpu = report.checks[-1]
    assert report.ok, report
    assert (gpu.name, gpu.status, gpu.missing) == ("gpu", "ok", "")


@pytest.mark.parametrize("num_envs", [1, 33, 20_000])
def test_any_number_of_games_fills_blocks_as_it_may(num_envs):
    """Whole numbers: the same to the bit, over whole episodes."""
    env = TagGridWorld(num_taggers=4, length=6, max_episode_steps=9)
    spec = kernel_spec(env)
    action = random_actions(spec, (30, num_envs * env.num_agents), 0)
    what = Play(env, np.arange(num_envs), action, seed=3)
    on_cpu, on_cuda = play(what, "cpu"), play(what, "cuda")
    assert (on_cpu.length > 0).sum() >= 3 * num_envs
    np.testing.assert_array_equal(on_cuda.length, on_cpu.length)
    for name in ("state", "seen"):
        one, other = getattr(on_cuda, name), getattr(on_cpu, name)
        for key, expected in other.items():
            np.testing.assert_array_equal(one[key], expected, err_msg=key)


def test_a_game_of_two_policies_is_trained_on_cuda(tmp_path):
    run = headrace.train(
        "headrace/TagContinuous-v0", num_envs=64, num_steps=25, total_env_steps=64 * 25 * 6,
        env_kwargs={"num_taggers": 3, "num_runners": 20, "max_episode_steps": 40}, device="cuda",
        run_dir=tmp_path / "r", quiet=True,
    )  # fmt: skip
    assert set(run.summary["mean_return_by_policy"]) == {"runner", "tagger"}
    lines = read_metrics(run.dir)
    assert run.summary["env_steps"] == lines[-1]["env_steps"] == 64 * 25 * 6


@pytest.mark.parametrize("kind", [Stream, Frames])
def test_rows_of_a_replay_on_cuda_are_the_cpu_s(kind):
    stream = kind(0)
    on_cpu, on_cuda = (
        ReplayBuffer(kind.spec, 120, 3, prioritized=True).to(device) for device in ("cpu", "cuda")
    )
    for step, envs in enumerate([[0, 1, 2], [1], [2, 0, 1], [0, 0, 2]] * 4):
        fragment = stream.fragment(envs)
        found = []
        for buffer in (on_cpu, on_cuda):
            device = buffer.end.device
            buffer.insert(join([fragment], device))
            of_step = []
            for rows, weight in (
                (buffer.draw(1, step, 2, 6)[0], None),
                buffer.draw_by_priority(1, step, 6, 0.5),
            ):
                taken = buffer.transitions(rows, 3, 0.9, lambda reward: reward)
                of_step.append(taken | {"number": rows.number, "env": rows.env})
                if weight is not None:
                    of_step[-1]["weight"] = weight
                    buffer.set_priorities(rows, 1.0 + rows.number % 7)
            found.append(of_step)
        for one, other in zip(*found, strict=True):
            for name, expected in one.items():
                torch.testing.assert_close(other[name].cpu(), expected, msg=name)
    rows, _ = on_cuda.new_rows()
    assert all(column.device.type == "cpu" for column in rows.values())


@pytest.mark.parametrize("parts", [{}, {"normalize_obs": True}, RAINBOW, {"distribution": "qr"}])
def test_one_update_of_dqn_on_cuda_is_the_cpu_s(collected, parts):
    spec, fragments = collected
    found = []
    for device in ("cpu", "cuda"):
        learner = learner_for(resolve(REPLAY | parts), spec, device=device)
        metrics = learner.update(learner.assemble(fragments), 0, 128)
        found.append((metrics, learner.policies["default"].cpu().state_dict()))
    assert learner.learner_steps == 16
    assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("parts", [{}, RAINBOW])
def test_dqn_on_cuda_saves_and_resumes(tmp_path, parts):
    run = headrace.train(
        "CartPole-v1", algo="dqn", device="cuda", num_workers=2, total_env_steps=6_000,
        schedule_env_steps=12_000, run_dir=tmp_path / "run", quiet=True, learning_starts=500,
        replay_ratio=0.1, **parts,
    )  # fmt: skip
    assert run.summary["learner_steps"] == (run.summary["env_steps"] - 500) // 10
    resumed = headrace.resume(tmp_path / "run", total_env_steps=8_000, quiet=True)
    assert resumed.summary["learner_steps"] == (resumed.summary["env_steps"] - 500) // 10 >= 750


CRITICS = [
    ("sac", {}), ("sac", {"priority_alpha": 0.6, "n_step": 3}), ("sac", {"precision": "bf16"}),
    ("tqc", {}), ("redq", {"num_critics": 3, "policy_delay": 2}),
    ("droq", {"dropout": 0.1, "policy_delay": 2}), ("crossq", {}),
    ("td3", {}), ("td3", {"priority_alpha": 0.6}), ("ddpg", {}),
]  # fmt: skip


def learn_critics(algo, parts, device, arithmetic="auto"):
    """Metrics of each of four updates, weights, and what is recorded."""
    given = {key: value for key, value in REPLAY.items() if key != "target_update_interval"}
    given |= {"algo": algo, "replay_ratio": 0.25, "learner_threads": 1, "arithmetic": arithmetic}
    settings = resolve(given | parts)
    plan = plan_for(Reach, num_steps=32, num_envs=4, envs_per_vector=4, settings=settings)
    collector = inline(plan)
    learner = learner_for(settings, plan.spec, device=device)
    collector.publish(policies_for(plan), 0)
    fragments = collector.collect().fragments
    metrics = [learner.update(learner.assemble(fragments), 128 * i, 128) for i in range(4)]
    collector.close()
    weights = learner.policies["default"].cpu().state_dict()
    return (*metrics, weights), learner.learners["default"]._graphs


@pytest.mark.parametrize(("algo", "parts"), CRITICS)
def test_recorded_gradient_steps_of_critics_are_those_of_single_operations(algo, parts):
    recorded, graphs = learn_critics(algo, parts, "cuda")
    single, none = learn_critics(algo, parts, "cuda", arithmetic="plain")
    assert {"step of critics", "step of policy"} <= graphs.keys() and not none
    assert_close(recorded, single, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("algo", "parts"), CRITICS[:2] + CRITICS[3:])
def test_critics_on_cuda_learn_what_those_on_the_cpu_learn(algo, parts):
    assert_close(
        learn_critics(algo, parts, "cuda")[0], learn_critics(algo, parts, "cpu")[0],
        rtol=1e-2, atol=1e-3,
    )  # fmt: skip


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_critics_on_cuda_save_and_resume(tmp_path, algo):
    run = headrace.train(
        "Pendulum-v1", algo=algo, device="cuda", total_env_steps=2_000, replay_ratio=0.5,
        learning_starts=1_000, run_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert run.summary["learner_steps"] == (run.summary["env_steps"] - 1_000) // 2
    resumed = headrace.resume(tmp_path / "run", total_env_steps=3_000, quiet=True)
    assert resumed.summary["learner_steps"] == (resumed.summary["env_steps"] - 1_000) // 2


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_critics_learn_beside_thousands_of_kernel_environments_on_cuda(tmp_path, algo):
    run = headrace.train(
        "headrace/Reacher-v0", algo=algo, device="cuda", num_envs=4096, num_steps=8,
        replay_ratio=1 / 2048, batch_size=32768, precision="bf16", total_env_steps=32768 * 60,
        run_dir=tmp_path / "run", quiet=True,
    )  # fmt: skip
    assert run.summary["learner_steps"] == (32768 * 60 - 1_000) // 2048


@pytest.mark.parametrize("algo", ["dqn", "pqn"])
def test_values_of_actions_are_learned_beside_a_kernel_environment_on_cuda(tmp_path, algo):
    run = headrace.train(
        "headrace/CartPole-v1", algo=algo, device="cuda", num_envs=256, num_steps=32,
        total_env_steps=256 * 32 * 10, run_dir=tmp_path / "run", quiet=True,
        **({"replay_ratio": 1 / 256, "batch_size": 128} if algo == "dqn" else {}),
    )  # fmt: skip
    assert run.summary["env_steps"] == 256 * 32 * 10
    assert run.summary["learner_steps"] > 100
