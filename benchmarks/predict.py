"""Is what `headrace profile` predicts what a run then does?

    python -m benchmarks.predict      # results/predict.json; half an hour

Each configuration is trained for a while and measured; then its parts are measured apart, and the
model (`cost_model/model.py`) puts them together. Besides, each is predicted from the parts of
another configuration with the same environment: that is what advice and plans rest on. Left out:
where the profile itself is wrong about where time goes (`tests/tools/profile/test_profiler.py`).
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.machine import RESULTS, ROOT, machine
from headrace.config.resolve import resolve
from headrace.cost_model.costs import Costs
from headrace.cost_model.model import simulate
from headrace.tools.profile.advice import topology_of

NAME = "predict"
ENV = "benchmarks.timed:Timed"
LAG_2 = ("--algo", "appo", "--lag", "2")


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        env: what its steps take, in words.
        kwargs: of the environment, as flags have them.
        flags: of the run.
        id: of another environment.
    """

    env: str
    kwargs: tuple[str, ...]
    flags: tuple[str, ...]
    id: str = ENV

    @property
    def command(self):
        kwargs = ("--env-kwargs", *self.kwargs) if self.kwargs else ()
        return [self.id, *self.flags, *kwargs]

    @property
    def name(self):
        return f"{self.env}: {' '.join(self.flags)}"


def sizes(envs, steps, workers, each, *more):
    return (
        *("--num-envs", str(envs), "--num-steps", str(steps)),
        *("--num-workers", str(workers), "--envs-per-vector", str(each), *more),
    )


def timed(env, *cases):
    """Cases of one environment."""
    times, mean_ms, *computes = env.split()
    kwargs = [f"times={times}", f"mean_ms={mean_ms}", f"computes={bool(computes)}"]
    what = "computes" if computes else "sleeps"
    return [Case(f"{what} {mean_ms} ms, {times}", tuple(kwargs), flags) for flags in cases]


CASES = [
    *timed(
        "constant 0.05 computes",
        sizes(16, 128, 0, 16),
        sizes(16, 128, 2, 8),
        sizes(16, 128, 2, 4, *LAG_2),
        sizes(16, 128, 0, 8, "--num-learners", "2"),
    ),
    *timed(
        "exponential 1 computes",
        sizes(16, 64, 2, 8),
        sizes(16, 64, 4, 2),
        sizes(16, 64, 4, 2, *LAG_2),
    ),
    *timed(
        "constant 1",
        sizes(8, 128, 8, 1),
        sizes(8, 128, 1, 8),
        sizes(8, 128, 8, 1, *LAG_2),
    ),
    *timed(
        "lognormal 7",
        sizes(24, 64, 12, 2),
        sizes(24, 64, 24, 1, *LAG_2),
    ),
    *timed(
        "stalls 4",
        sizes(24, 128, 24, 1),
        sizes(24, 128, 24, 1, *LAG_2),
        sizes(24, 128, 24, 1, "--num-learners", "2", *LAG_2),
    ),
    *timed(
        "constant 10",
        sizes(24, 32, 24, 1, "--num-learners", "2"),
        sizes(4, 32, 2, 2),
    ),
    Case("CartPole-v1", (), sizes(64, 128, 2, 32), "CartPole-v1"),
    Case("CartPole-v1", (), sizes(64, 128, 0, 32, "--num-learners", "2"), "CartPole-v1"),
]


def measured(case, seconds):
    """A profile, as `headrace profile` prints it."""
    command = [sys.executable, "-m", "headrace", "profile", *case.command]
    command += ["--seconds", str(seconds), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=240 + 4 * seconds, check=False
    )
    if done.returncode:
        raise SystemExit(f"{case.name}\n{done.stderr}\n{done.stdout}")
    return json.loads(done.stdout.splitlines()[-1])


def crossed(cases, profiles):
    """Each case, predicted from the parts of the one before it with the same environment."""
    found = []
    for i, case in enumerate(cases):
        same = [j for j, other in enumerate(cases) if other.env == case.env]
        costs = Costs.from_json(profiles[same[same.index(i) - 1]]["costs"])
        found.append(simulate(costs, topology_of(resolve(profiles[i]["settings"]))))
    return found


FIGURES = ("measured", "predicted", "from_another")


def one_turn(cases, seconds):
    """The figures of these cases, once."""
    profiles = []
    for case in cases:
        profiles.append(measured(case, seconds))
        found, predicted = _figures(profiles[-1])
        off = error(predicted, found)
        print(f"{case.name}: {found:,.0f}, predicted {predicted:,.0f} ({off:+.0%})", flush=True)
    return [
        dict(zip(FIGURES, (*_figures(profile), other), strict=True))
        for profile, other in zip(profiles, crossed(cases, profiles), strict=True)
    ]


def _figures(profile):
    return profile["env_steps_per_s"], profile["predicted_env_steps_per_s"]


def error(predicted, found):
    return predicted / found - 1


def summary(rows, name):
    """Median and worst error of a prediction."""
    errors = [abs(error(row[name], row["measured"])) for row in rows]
    return {"median": statistics.median(errors), "worst": max(errors)}


def tables(result):
    """For docs/profile.md."""
    rows = [
        "| environment | settings | measured | predicted | error | from another's parts | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        found, own, other = (row[name] for name in FIGURES)
        rows.append(
            f"| {row['env']} | {row['flags']} | {found:,.0f} | {own:,.0f} | "
            f"{error(own, found):+.0%} | {other:,.0f} | {error(other, found):+.0%} |"
        )
    own, other = (result["errors"][name] for name in FIGURES[1:])
    return "\n".join(
        [
            *rows,
            "",
            f"Env steps/s, medians of {result['num_turns']} turns. Error, without its sign: median "
            f"{own['median']:.1%}, worst {own['worst']:.1%}; from another configuration's parts: "
            f"median {other['median']:.1%}, worst {other['worst']:.1%}.",
        ]
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json", metavar="PATH")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each profile")
    parser.add_argument("--turns", type=int, default=3, help="through all configurations")
    parser.add_argument("--only", default="", metavar="TEXT", help="environments with this in them")
    arguments = parser.parse_args()
    about, cases = machine(), [case for case in CASES if arguments.only in case.env]
    turns = [one_turn(cases, arguments.seconds) for _ in range(arguments.turns)]
    rows = [
        {
            "env": case.env,
            "flags": " ".join(case.flags),
            **{name: statistics.median(of[name] for of in figures) for name in FIGURES},
            "turns": figures,
            "machine": about,
        }
        for case, *figures in zip(cases, *turns, strict=True)
    ]
    if arguments.only:  # the others stay as they were measured before
        before = json.loads(arguments.output.read_text())["rows"]
        new = {(row["env"], row["flags"]): row for row in rows}
        rows = [new.get((row["env"], row["flags"]), row) for row in before]
    errors = {name: summary(rows, name) for name in FIGURES[1:]}
    num_turns = min(len(row["turns"]) for row in rows)
    result = {"benchmark": NAME, "machine": about, "num_turns": num_turns}
    result |= {"errors": errors, "rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{tables(result)}\n\nWritten: {arguments.output}")


if __name__ == "__main__":
    main()
