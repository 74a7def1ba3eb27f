"""Trains the presets with their seeds, resumes what was cut, and writes docs/presets.md.

    make presets ENV=CartPole-v1                       # or a family, or a pattern such as 'ALE/*'
    python -m benchmarks.presets --deadline-s 3600     # an hour's work; the next call goes on
    python -m benchmarks.presets --who sb3             # what is not published: Stable-Baselines3
    python -m benchmarks.presets --render              # the page from the results that are there
    python -m benchmarks.presets --env CartPole-v1 --total-env-steps 4096    # a trial

A seed's run is in runs/presets/ENV-ALGO-SEED. A run that was killed or that the deadline cut is
resumed by the next call. A seed that has a result with the settings of today is not trained
again, unless --again. Results are kept seed by seed in benchmarks/results/presets. The page, and
what `headrace list` shows of ours, are made of them. A trial writes below runs/presets-trial.
"""

import argparse
import concurrent.futures
import os
import signal
import sys
import time

from benchmarks.harness.machine import ROOT
from benchmarks.presets import page, results, runs
from benchmarks.presets.tasks import chosen
from headrace.catalog.returns import published
from headrace.errors import UsageError

NAMES = {results.RANDOM: "random actions", results.PEER: "Stable-Baselines3, seed 1"}
PEER_BATCH = 2048
"""Env steps of a batch of Stable-Baselines3's PPO."""


def main(argv=None):
    args = _arguments(argv)
    folders, more, episodes = runs.HERE, (), 100
    if args.total_env_steps:
        folders, episodes = runs.trial(ROOT / "runs/presets-trial"), 5
        more = ("--total-env-steps", str(args.total_env_steps))
    try:
        tasks = [] if args.render else chosen(args.env, args.algo, args.label)
    except UsageError as error:
        sys.exit(f"presets: {error}")
    processes = runs.Processes()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left running
    failed = measure(tasks, args, folders, processes, more, episodes)
    write(folders, more)
    if processes.stopping:
        print("Stopped before the end: the same command goes on.")
    sys.exit(1 if failed else 0)


def _arguments(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="", help="an id, a pattern of ids, or a family")
    parser.add_argument("--algo", default="", help="only tasks of this algorithm")
    parser.add_argument("--label", help="only this variant, such as dueling; '': the preset itself")
    parser.add_argument("--who", choices=["headrace", "sb3"], default="headrace")
    parser.add_argument("--seeds", default="", help="such as 1,2,3; default: 1 to what is listed")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--deadline-s", type=float, help="stop all after so many seconds")
    parser.add_argument("--again", action="store_true", help="train finished seeds again")
    parser.add_argument("--render", action="store_true", help="train nothing")
    parser.add_argument("--total-env-steps", type=int, default=0, help="a trial, kept apart")
    return parser.parse_args(argv)


def measure(tasks, args, folders, processes, more=(), episodes=100):
    """Measure what is not measured yet; results are kept one by one. Return how many failed."""
    folders.results.mkdir(parents=True, exist_ok=True)
    folders.runs.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + args.deadline_s if args.deadline_s else None
    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        try:
            jobs = _submit(pool, tasks, args, folders, processes, more, episodes)
            return _gather(jobs, ends, folders, processes)
        except BaseException:
            processes.stop()  # or the pool would wait for their ends
            raise


def _submit(pool, tasks, args, folders, processes, more, episodes):
    """Hand all that is to be measured to the pool.

    Returns:
        dict: job -> its task, and a seed, `results.RANDOM` or `results.PEER`.
    """
    if args.who == "sb3":
        return _submit_peer(pool, tasks, args, folders, processes, episodes)
    jobs, known = {}, set(results.read_others(folders.results, results.RANDOM))
    for task in tasks:
        for seed in wanted_seeds(task, args, folders, more):
            run_dir = folders.run_dir(task, seed)
            given = (task, seed, run_dir, processes, more, episodes, args.at_once)
            jobs[pool.submit(runs.measure_seed, *given)] = (task, seed)
        if task.env not in known:
            known.add(task.env)
            given = (task.env, folders.runs, processes, episodes)
            jobs[pool.submit(runs.measure_random, *given)] = (task, results.RANDOM)
    return jobs


def _submit_peer(pool, tasks, args, folders, processes, episodes):
    """Hand over what has no published return, with as many env steps as our result."""
    jobs, ours = {}, results.read(folders.results)
    known = results.read_others(folders.results, results.PEER)
    for task in tasks:
        comparable = results.is_comparable(task.algo, task.flags) and task.name in ours
        if not comparable or task.algo in published(task.env):
            continue
        env_steps = ours[task.name]["runs"][0]["env_steps"]
        if args.again or not enough_steps(known.get(task.env), env_steps):
            given = (task.env, env_steps, folders.runs, processes, episodes)
            jobs[pool.submit(runs.measure_peer, *given)] = (task, results.PEER)
    return jobs


def enough_steps(found, env_steps):
    """Whether a result of Stable-Baselines3 has our env steps: its batches end a little later."""
    return found is not None and 0 <= found["env_steps"] - env_steps < PEER_BATCH


def wanted_seeds(task, args, folders, more):
    """The seeds that have no result with these settings, or whose run is under way."""
    seeds = [int(seed) for seed in args.seeds.split(",") if seed]
    before = results.read(folders.results).get(task.name, {"runs": []})["runs"]
    done = {run["seed"]: run["settings"] for run in before}
    for seed in seeds or range(1, 1 + task.num_seeds):
        settings = runs.settings_of(task, seed, more)
        under_way = runs.is_under_way(folders.run_dir(task, seed), settings)
        if args.again or under_way or not runs.is_as_now(task, done.get(seed), seed, more):
            yield seed


def _gather(jobs, ends, folders, processes):
    failed, left = 0, set(jobs)
    while left:
        try:
            timeout = None if ends is None or processes.stopping else ends - time.monotonic()
            done, left = concurrent.futures.wait(
                left,
                None if timeout is None else max(0.0, timeout),
                concurrent.futures.FIRST_COMPLETED,
            )
        except KeyboardInterrupt:
            done = set()
            processes.stop()
        if not done and not processes.stopping:
            processes.stop()  # the deadline has passed
        for job in done:
            failed += _keep(job, *jobs[job], folders)
    return failed


def _keep(job, task, what, folders):
    """Keep the result of a job, and say so; return whether it failed.

    `what`: a seed, `results.RANDOM` or `results.PEER`.
    """
    name = f"{task.name}, {NAMES.get(what, f'seed {what}')}"
    try:
        found = job.result()
    except runs.CutError:
        print(f"{name}: cut", flush=True)
        return False
    except Exception as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return True
    if what in NAMES:
        results.add_other(folders.results, what, task.env, found)
        print(f"{name}: {found['mean_return']:.2f}", flush=True)
    else:
        results.add_seed(folders.results, task, found)
        runs.mark_finished(folders.run_dir(task, what))
        trained, played = found["mean_return"], found["evaluation"]["mean_return"]
        trained = "-" if trained is None else f"{trained:.2f}"  # None: no episode ended
        print(f"{name}: {trained} in training, {played:.2f} evaluated", flush=True)
    return False


def write(folders, more=()):
    """Write the page, its pictures, and what `headrace list` shows."""
    found = results.read(folders.results)
    outdated = runs.outdated(found, more)
    page.write(folders, found, outdated)
    current = {name: task for name, task in found.items() if name not in outdated}
    results.write_own_returns(folders.own_returns, current)
    print(f"Written: {os.path.relpath(folders.page)}")


if __name__ == "__main__":
    main()
