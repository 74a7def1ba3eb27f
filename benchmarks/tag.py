"""The two games of tag, learned on this machine's CPU: each side against random and frozen others.

    python -m benchmarks.tag            # about 10 minutes on two cores
    python -m benchmarks.tag --share 0.1

Four runs of each game, with `headrace train`: runners learn while taggers act at random; taggers
learn while runners do; taggers learn against the frozen runners of the first run; both learn.
Then policies of these runs meet: 100 games of each pair, with actions as they are sampled. The
tables (docs/tag.md) have mean returns, of a tagger and of a runner; "random" is the policy that
`--frozen NAME=random` plays. Curves, and films of one game of the last run, are beside the results.

TagGridWorld is its preset: 4 taggers and a runner on 101 × 101 cells, 100 steps, 2,000 games at a
time. TagContinuous is 10 taggers and 100 runners, each of whom sees the 10 nearest others, with
games of 100 steps; 20 games at a time, because 100 runners learn from each step of one.

Left out: speed (`kernels.py`).
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.machine import RESULTS, cores, machine

EPISODES = 100


@dataclasses.dataclass(frozen=True)
class Game:
    """What is learned, and for how many env steps by each of `RUNS`."""

    env: str
    env_steps: dict[str, int]
    flags: tuple[str, ...] = ()
    kwargs: dict | None = None

    @property
    def name(self):
        return self.env.removeprefix("headrace/").partition("-")[0]


GAMES = (
    Game(
        "headrace/TagGridWorld-v0",
        {"runner": 2_000_000, "tagger": 6_000_000, "against": 6_000_000, "both": 6_000_000},
    ),
    Game(
        "headrace/TagContinuous-v0",
        {"runner": 100_000, "tagger": 150_000, "against": 150_000, "both": 100_000},
        (
            "--num-envs", "20", "--num-steps", "25", "--num-minibatches", "5", "--num-epochs", "2",
            "--lr", "2e-3", "--ent-coef", "0.003",
        ),
        {
            "num_taggers": 10, "num_runners": 100, "length": 20.0, "max_episode_steps": 100,
            "full_observation": False, "num_other_agents_observed": 10, "tagging_distance": 0.02,
            "min_acceleration": -0.1, "max_acceleration": 0.1, "num_acceleration_levels": 20,
            "min_turn": -2.356, "max_turn": 2.356, "num_turn_levels": 20,
            "tag_reward": 10.0, "tag_penalty": -10.0,
        },
    ),
)  # fmt: skip
# Who is frozen, as what: a path has the folder of this game's runs in front.
RUNS = {
    "runner": "tagger=random",
    "tagger": "runner=random",
    "against": "runner={}/runner",
    "both": None,
}
LEARNS = {
    "runner": "runners, against random taggers",
    "tagger": "taggers, against random runners",
    "against": "taggers, against those runners, frozen",
    "both": "both, together",
}
# The run whose policies play, and who plays in place of some of them.
PAIRS = {
    "random taggers, random runners": ("both", ["tagger=random", "runner=random"]),
    "random taggers, runners that learned against them": ("runner", []),
    "taggers that learned against random runners, random runners": ("tagger", []),
    "the same taggers, runners that learned against random ones": ("tagger", ["runner={}/runner"]),
    "taggers that learned against these frozen runners, the same": ("against", []),
    "both, learned together": ("both", []),
    "taggers of that run, random runners": ("both", ["runner=random"]),
    "random taggers, runners of that run": ("both", ["tagger=random"]),
}


def train(game, run, folder, share):
    """One run, by the command line; its last line of output."""
    frozen = RUNS[run]
    command = [
        sys.executable, "-m", "headrace", "train", game.env, *game.flags, "--device", "cpu",
        "--learner-threads", "1", "--total-env-steps", str(int(game.env_steps[run] * share)),
        "--run-dir", str(folder / run), "--json",
        *(["--frozen", frozen.format(folder)] if frozen else []),
        *(["--env-kwargs", *(f"{k}={v}" for k, v in game.kwargs.items())] if game.kwargs else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{game.name}, {run}: {result['env_steps']:,} env steps, "
        f"{result['env_steps_per_s']:,.0f}/s; {result['mean_return_by_policy']}",
        flush=True,
    )
    return result


def meet(run, frozen, folder, episodes, *flags):
    """Policies of a run, and others in place of some, play: the last line of output."""
    command = [
        sys.executable, "-m", "headrace", "eval", str(folder / run), "--episodes", str(episodes),
        "--stochastic", "--json", *flags,
        *(["--frozen", *(of.format(folder) for of in frozen)] if frozen else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def curves_of(folder):
    """By run, the lines of its learning: env steps and mean returns, by role; some of them."""
    from headrace.storage.metrics import read_metrics, returns_by_policy

    found = {}
    for run in RUNS:
        rows = [row for row in read_metrics(folder / run) if returns_by_policy(row)]
        rows = rows[:: max(1, len(rows) // 100)]
        found[run] = {
            "env_steps": [row["env_steps"] for row in rows],
            **{
                role: [returns_by_policy(row)[role] for row in rows]
                for role in returns_by_policy(rows[0] if rows else {})
            },
        }
    return found


def measure(game, share, episodes):
    """Everything of one game."""
    with TemporaryDirectory(prefix="tag-") as at:
        folder = Path(at)
        with ThreadPoolExecutor(cores()) as pool:
            first, *others = (
                pool.submit(train, game, run, folder, share) for run in RUNS if run != "against"
            )
            results = {"runner": first.result()}
            results["against"] = train(game, "against", folder, share)
            names = [run for run in RUNS if run not in ("runner", "against")]
            results |= {run: of.result() for run, of in zip(names, others, strict=True)}
        rows = {}
        for name, (run, frozen) in PAIRS.items():
            rows[name] = meet(run, frozen, folder, episodes)
            print(f"{game.name}: {name}: {rows[name]['mean_return_by_policy']}", flush=True)
        meet("both", [], folder, 1, "--video", str(RESULTS / f"{game.name}.mp4"))
        return {"runs": results, "games": rows, "curves": curves_of(folder)}


def tables(results):
    """A table for each game."""
    lines = []
    for env, found in results["games"].items():
        lines += ["", f"**{env}**", "", "| | a tagger | a runner | steps |", "|---|---|---|---|"]
        for name, row in found["games"].items():
            means = row["mean_return_by_policy"]
            lines.append(
                f"| {name} | {means['tagger']:.2f} | {means['runner']:.2f} "
                f"| {row['mean_length']:.0f} |"
            )
        episodes = next(iter(found["games"].values()))["episodes"]
        lines += ["", f"Mean returns over {episodes} games. Learned in:", ""]
        lines += [
            f"- {LEARNS[run]}: {of['env_steps']:,} env steps, {of['agent_steps']:,} agent steps, "
            f"in {of['wall_s']:.0f} s."
            for run, of in found["runs"].items()
        ]
    return "\n".join(lines[1:])


def draw(results, output):
    """Draw the curves: a row for each game, a panel for each run.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    from matplotlib.figure import Figure

    games = results["games"]
    figure = Figure(figsize=(13, 3 * len(games)), layout="constrained")
    all_axes = figure.subplots(len(games), len(RUNS), squeeze=False)
    for row, (env, found) in zip(all_axes, games.items(), strict=True):
        for axes, run in zip(row, RUNS, strict=True):
            curves = found["curves"][run]
            for role, color in (("tagger", "#d95f02"), ("runner", "#0b4f8a")):
                axes.plot(curves["env_steps"], curves[role], label=role, color=color)
            axes.set(title=LEARNS[run], xlabel="env steps")
            axes.grid(alpha=0.3)
        row[0].set_ylabel(f"{env.partition('/')[2]}\nmean return")
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(output, dpi=100)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the env steps: for a look")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="of each pair")
    flags = parser.parse_args()
    found = {game.env: measure(game, flags.share, flags.episodes) for game in GAMES}
    path = RESULTS / "tag.json"
    path.write_text(json.dumps({"machine": machine(), "share": flags.share, "games": found}))
    print(f"Written: {path}; python -m benchmarks.table draws and tells it.")


if __name__ == "__main__":
    main()
