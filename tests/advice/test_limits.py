"""What a run says of its own speed at its end: by its meters, settings and place alone."""

import itertools
import math
import re
from dataclasses import replace

import pytest

import headrace
from headrace.advice import limits
from headrace.advice.changes import candidates
from headrace.advice.limits import Place, advise
from headrace.config.resolve import resolve
from headrace.envs.faulty import Faulty

PLACE = Place(
    cores=4, device="cpu", has_gpu=False, is_small=True, on_device=False, may_have_workers=True,
    interface="gym",
)  # fmt: skip
ENV = {"env_step": 70, "infer": 10, "rollout": 2, "learn": 15, "start": 5, "other": 3}
LEARN = {"env_step": 12, "infer": 6, "rollout": 2, "learn": 78, "start": 5, "other": 2}
INFER = {"env_step": 10, "infer": 60, "rollout": 2, "learn": 25, "start": 5, "other": 3}
WAITS = {"wait": 80, "learn": 15, "other": 5, "start": 5}
SAME = {"wait": 50, "learn": 45, "other": 5, "start": 5}
AT_WORK = {"env_step": 70, "infer": 8, "rollout": 2, "wait": 20}


def said(seconds, others=None, place=PLACE, **given):
    settings = resolve({"env": "Own-v0", "num_envs": 8, **given}, cores=place.cores)
    return advise(settings, seconds, others or {}, place)


def workers(count, spans=AT_WORK):
    return {f"worker {i}": spans for i in range(count)}


def test_one_process_and_idle_cores_name_workers_for_all_cores():
    first, second = said(ENV)
    assert first == (
        "What limited this run: the environments' steps and resets, 70% of the time, in one "
        "process on 4 cores."
    )
    # 82 of 100 seconds become 20.5.
    assert second == (
        "What would help most: --num-workers 4 (4 processes act and step environments at once): at "
        "best 2.6 times as fast."
    )


def test_a_preset_s_vectors_are_split_where_there_are_too_few_for_the_workers():
    assert "--num-workers 4 --envs-per-vector 2 (" in said(ENV, envs_per_vector=8)[1]


def test_workers_on_all_cores_leave_faster_environments_or_more_machines():
    first, second = said(WAITS, workers(4), num_workers=4)
    assert "steps and resets. The learner waited for 4 workers 80% of the time." in first
    assert second == (
        "What would help most: faster environments, or more machines (--cluster): all cores of "
        "this one are taken."
    )
    assert "--num-workers 4 (" in said(WAITS, workers(2), num_workers=2)[1]


def test_lag_1_is_named_with_what_it_changes_and_only_where_it_overlaps():
    said_of_lag = said(SAME, workers(4), num_workers=4)[1]
    assert "--lag 1 (" in said_of_lag
    assert "weights are one update older, and so what is learned changes" in said_of_lag
    for more in ({"lag": 1}, {"algo": "appo"}, {"algo": "appo", "lag": 0}):
        assert "--lag" not in said(SAME, workers(4), num_workers=4, **more)[1]


def test_learning_on_the_cpu_names_a_gpu_learners_or_threads():
    first, second = said(LEARN)
    assert first == "What limited this run: learning, 78% of the time."
    assert "nothing that leaves what is learned as it is" in second  # minibatches are small
    large = {"num_steps": 512, "num_minibatches": 4}
    assert "--num-learners 2 (" in said(LEARN, **large)[1]
    assert "nothing" in said(LEARN, **large, lr_scale="sqrt")[1]
    big = replace(PLACE, is_small=False)
    assert "--learner-threads 4, for cores that idle" in said(LEARN, place=big)[1]
    assert "--learner-threads" not in said(LEARN, place=big, learner_threads=4)[1]
    assert "--device cuda." in said(LEARN, place=replace(big, has_gpu=True))[1]
    assert "--device" not in said(LEARN, place=replace(big, has_gpu=True, device="cuda"))[1]
    assert "--device" not in said(LEARN, place=replace(PLACE, has_gpu=True))[1]


def test_a_gpu_is_not_named_where_a_cpu_was_chosen_beside_it():
    settings = resolve({"env": "X", "num_workers": 0})
    place = replace(PLACE, is_small=False, has_gpu=True)
    assert "--device cuda" in advise(settings, LEARN, {}, place)[1]
    chosen = settings.follow("auto, small gradient steps", device="cpu")
    assert "--device" not in advise(chosen, LEARN, {}, place)[1]


def test_inference_names_the_gpu_where_there_is_one_else_workers():
    big = replace(PLACE, is_small=False)
    assert "inference: the policy acting, 60% of the time" in said(INFER, place=big)[0]
    assert "--num-workers 4 (" in said(INFER, place=big)[1]
    gpu = replace(big, has_gpu=True)
    assert "--device cuda --num-workers -1 --inference learner." in said(INFER, place=gpu)[1]
    in_workers = workers(4, {"infer": 70, "env_step": 20, "wait": 10})
    gpu = replace(gpu, device="cuda")
    assert said(WAITS, in_workers, gpu, num_workers=4)[1].endswith(": --inference learner.")
    asked = said(WAITS, in_workers, gpu, num_workers=4, inference="learner")
    assert "--inference" not in asked[1]


@pytest.mark.parametrize(
    "seconds",
    [{"env_step": 9.9, "start": 1}, {"env_step": 60, "start": 61}, {"start": 3}, {}],
    ids=["short", "mostly its start", "only its start", "nothing"],
)
def test_a_run_that_is_too_short_says_nothing(seconds):
    assert said(seconds) == []


def test_learners_that_wait_for_each_other():
    busy = {"env_step": 15, "learn": 15, "ranks": 40, "allreduce": 30, "start": 5}
    slow = {"env_step": 60, "learn": 38, "ranks": 2, "start": 5}
    first, second = said(busy, {"rank 1": slow}, num_learners=2)
    assert first == (
        "What limited this run: learners that wait for each other, 70% of the time (they wait for "
        "rank 1)."
    )
    assert "--num-learners 1 (one learner waits for no other)" in second
    assert "they wait for" not in said(busy, {"rank 1": busy}, num_learners=2)[0]


def test_what_only_the_learner_s_process_can_step_gets_no_workers():
    tensors = replace(PLACE, may_have_workers=False, on_device=True, interface="tensor")
    second = said(ENV, place=tensors)[1]
    assert "faster environments (only the learner's process can step" in second
    kernel = replace(PLACE, on_device=True, interface="kernel", has_gpu=True)
    assert "the GPU of this machine: --device cuda." in said(ENV, place=kernel)[1]
    assert "--num-workers" not in said(ENV, vectorization="native")[1]


def test_evaluation_and_saving_are_named():
    assert "a larger --eval-every" in said(ENV | {"eval": 300})[1]
    assert "a larger --checkpoint-every-s" in said(ENV | {"checkpoint": 300})[1]


def test_a_cluster_gets_machines_and_not_this_one_s_cores():
    settings = resolve({"env": "Own-v0", "num_envs": 8, "cluster": "local", "num_workers": 2})
    first, second = advise(settings, WAITS, workers(2), PLACE)
    assert "cores" not in first
    assert "more machines in the cluster" in second


@pytest.mark.more
def test_whatever_is_named_can_be_typed():
    """Each flag that is named fits the run's other settings, and none has that value already."""
    named = 0
    for meter, envs, count, learners, cores, lag in itertools.product(
        (ENV, LEARN, INFER, WAITS), (6, 8, 9), (0, 1, 3), (1, 2), (1, 2, 4, 6), (0, 1)
    ):
        given = {"num_envs": envs, "num_workers": count, "num_learners": learners, "lag": lag}
        given |= {"num_steps": 256}
        place = replace(PLACE, cores=cores)
        try:
            before = resolve({"env": "Own-v0", **given}, cores=cores)
        except headrace.errors.ConfigError:
            continue
        second = advise(before, meter, workers(count), place)[1]
        flags = dict(re.findall(r"--(num-\w+|envs-per-vector|lag) (\d+)", second.split("(")[0]))
        changes = {name.replace("-", "_"): int(value) for name, value in flags.items()}
        after = resolve({"env": "Own-v0", **given, **changes}, cores=cores)
        assert all(getattr(before.run, name) != value for name, value in changes.items())
        assert max(after.run.num_workers, after.run.num_learners) <= max(cores, count, learners)
        named += bool(changes)
    assert named > 50


def test_changes_for_a_profile_and_for_a_run_are_the_same_ones():
    settings = resolve({"env": "Own-v0", "num_envs": 8}, cores=4)
    changes = list(candidates(settings, 4, on_device=False))
    assert {"num_workers": 4} in changes
    assert {"num_learners": 2} in changes
    assert all(values for values in changes)


def test_a_run_of_a_slow_environment_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(limits, "_MIN_S", 0.5)
    more = {"total_env_steps": 4 * 32 * 12, "num_envs": 4, "num_steps": 32, "num_minibatches": 4}
    run = headrace.train(
        lambda: Faulty(slow_step=0.002), run_dir=tmp_path / "run", device="cpu", **more
    )
    limit, remedy = run.summary["advice"]
    assert limit.startswith("What limited this run: the environments' steps and resets, ")
    assert "in one process on " in limit
    shown = capsys.readouterr().out.splitlines()
    assert shown[-3:] == [
        limit, remedy, f"Curves, time and faults on one page: headrace report {run.dir}",
    ]  # fmt: skip
    # Not a bound in seconds: on a busy disk one checkpoint may take longer than any short run
    monkeypatch.setattr(limits, "_MIN_S", math.inf)
    short = run.resume(total_env_steps=4 * 32 * 13, quiet=True)
    assert short.summary["advice"] == []


def test_replay_says_that_workers_change_nothing_where_the_learner_is_the_limit():
    first, second = said(LEARN, algo="dqn")
    assert first == "What limited this run: learning, 78% of the time: more workers change nothing."
    assert "a smaller --replay-ratio" in second
    assert "4 processes act and step" in said(ENV, algo="dqn")[1]
    drawing = {**LEARN, "learn": 28, "replay": 50}
    first, second = said(drawing, algo="dqn")
    assert "the replay buffer: storing and drawing" in first and "--replay-ratio" in second
    assert "--replay-ratio" in said(LEARN, algo="dqn", cluster="local")[1]
    # Workers would help, though learning is the limit
    first, second = said({**LEARN, "learn": 51, "env_step": 40, "infer": 5}, algo="dqn")
    assert first.endswith("% of the time.") and "--num-workers 4" in second


def test_replay_has_no_more_learners_named_since_its_minibatches_are_small():
    for algo, named in (("dqn", False), ("ppo", True)):
        settings = resolve({"env": "Own-v0", "algo": algo, "num_envs": 8, "num_workers": 0})
        found = list(candidates(settings, 4, on_device=False))
        assert ({"num_learners": 2} in found) == named
