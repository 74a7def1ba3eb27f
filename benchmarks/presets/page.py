"""The page docs/presets.md and the table of docs/choose.md, from the results alone.

Published returns are those of `headrace.catalog`; reasons are in `notes.toml`. Left out: training,
and drawing (`pictures.py`).
"""

import os
import tomllib
from collections import Counter
from pathlib import Path

from benchmarks.presets import pictures
from benchmarks.presets.results import PEER, RANDOM, is_comparable, mean_and_error, read_others
from benchmarks.presets.tasks import tasks
from benchmarks.table import filled_in
from headrace.catalog.returns import Published, format_return, format_steps, published

NOTES = Path(__file__).with_name("notes.toml")

INTRODUCTION = """\
# Presets and the curves they give

Made by `make presets` (`python -m benchmarks.presets`); do not edit. A preset applies whenever its
environment is trained, and is printed at the start of a run; flags override single settings.

- **evaluated** is the return of the final policy over 100 episodes with its likeliest actions: the
  mean of the seeds ± its standard error; of a single seed (¹) the standard error is over episodes.
- **training** is the mean return of the last 100 training episodes (raw rewards), mean of seeds.
- **published** is the source's return and its env steps (`headrace list` has both). With ³ nothing
  is published: the figure is Stable-Baselines3's PPO with its defaults, seed 1, evaluated here in
  the same way.
- **share** is (evaluated - random) / (published - random); "-" if what is published is no more than
  random. Random actions played 100 episodes.
- **s** are seconds of a seed's training, with other runs on the same machine: no benchmark.
- "-": there is no such figure.
- ² the result has other settings than the preset and the defaults have now; it is to be made
  again."""


def read_notes():
    """Reasons by task's name; ValueError for one that is of no task."""
    notes = tomllib.loads(NOTES.read_text())
    if unknown := set(notes) - {task.name for task in tasks()}:
        raise ValueError(f"{NOTES} has reasons for {sorted(unknown)}, which are no tasks.")
    return notes


def render(found, random, peers, notes, pictures, outdated):
    """The page's text.

    `random`, `peers`: returns of random actions and of Stable-Baselines3, by environment.
    `pictures`: family -> path of its picture, as the page links it. `outdated`: names of results
    with other settings than today's.
    """
    lines = [INTRODUCTION]
    for family, of in by_family(found).items():
        head = "environment | algorithm | evaluated | training | published | share | random"
        lines += ["", f"## {family}", "", f"| {head} | env steps | s | seeds |", "|---" * 10 + "|"]
        lines += [
            _row(task, random.get(task["env"]), theirs_of(task, peers), name in outdated)
            for name, task in of.items()
        ]
        picture = [f"![Mean return over env steps: {family}]({pictures[family]})"]
        said = [f"- {_title(of[name])}: {notes[name]}" for name in of if name in notes]
        for part in (picture, said, list(_commands(of.values())), list(_where(of.values()))):
            lines += ["", *part] if part else []
    return "\n".join(lines) + "\n"


def by_family(found):
    """Results by family and task, in the order of the tasks; those of no task are left out."""
    grouped = {}
    for task in tasks():
        if task.name in found:
            grouped.setdefault(task.family, {})[task.name] = found[task.name]
    return grouped


def by_algorithm(found):
    """Results by algorithm and task, with the settings of presets; PPO's are the whole page."""
    grouped = {}
    for of in by_family(found).values():
        for name, task in of.items():
            if task["algo"] != "ppo" and task["label"] in ("", "rainbow"):
                grouped.setdefault(task["algo"], {})[name] = task
    return grouped


def _panels(of, peers):
    """What `pictures.draw` takes of some tasks: title, runs, and the return beside them."""
    return [(_title(task), task["runs"], theirs_of(task, peers)) for task in of.values()]


def _title(task):
    return " ".join(filter(None, (task["env"], task["algo"], task["label"])))


def theirs_of(task, peers):
    """What a task is held against: what is published, or what Stable-Baselines3 reached here."""
    theirs = published(task["env"]).get(task["algo"])
    if theirs is None and task["env"] in peers and is_comparable(task["algo"], task["flags"]):
        found = peers[task["env"]]
        theirs = Published(found["eval_return"], found["env_steps"], source="")
    return theirs


def _row(task, random, theirs, is_outdated):
    runs = task["runs"]
    played = [run["evaluation"] for run in runs if run["evaluation"]]
    # None: no episode ended in training
    trained = [run["mean_return"] for run in runs if run["mean_return"] is not None]
    mean, cell = None, "-"
    if played:
        mean, error = mean_and_error([each["mean_return"] for each in played])
        single = len(played) == 1
        error = played[0]["standard_error"] if single else error
        cell = f"{format_return(mean)} ± {format_return(error)}{' ¹' if single else ''}"
    cells = [
        task["env"],
        " ".join(filter(None, (task["algo"], task["label"]))),
        f"{cell} ²" if is_outdated else cell,
        format_return(mean_and_error(trained)[0]) if trained else "-",
        _published(theirs),
        _share(mean, theirs, random),
        format_return(random["mean_return"]) if random else "-",
        f"{max(run['env_steps'] for run in runs):,}",
        f"{sum(run['wall_s'] for run in runs) / len(runs):,.0f}",
        str(len(runs)),
    ]
    return f"| {' | '.join(cells)} |"


def _published(theirs):
    if theirs is None:
        return "-"
    text = f"{format_return(theirs.mean_return)} ({format_steps(theirs.env_steps)})"
    return text if theirs.source else f"{text} ³"


def _share(mean, theirs, random):
    if mean is None or theirs is None or random is None:
        return "-"
    chance = random["mean_return"]
    if theirs.mean_return <= chance:  # it learned nothing that one could have a share of
        return "-"
    return f"{(mean - chance) / (theirs.mean_return - chance):.0%}"


def _commands(tasks):
    """Lines with the commands that are not just `headrace train ENV --algo ALGO`."""
    for task in tasks:
        if task["flags"]:
            words = ["headrace train", task["env"], "--algo", task["algo"], *task["flags"]]
            yield f"- {_title(task)}: `{' '.join(words)}`"


def _where(tasks):
    """Sources of what is published, and machines and commits of ours."""
    rows = [(task["env"], published(task["env"]).get(task["algo"])) for task in tasks]
    sources = {}
    for env, row in rows:
        if row is not None:
            other = f"{env} there: {row.of}" if row.of else ""
            sources.setdefault(row.source, {})[other] = None  # once, by several algorithms
    for source, others in sources.items():
        said = "; ".join(filter(None, others))
        yield f"Published: {source}{f' ({said})' if said else ''}."
    yield f"Measured: {places([run['machine'] for task in tasks for run in task['runs']])}."


def places(machines):
    """Where, when and at which commit runs were made, and how many."""
    counts = Counter()
    for of in machines:
        cores = f"{of['cores']} core{'s' if of['cores'] > 1 else ''}" if of["cores"] else ""
        where = ", ".join(filter(None, (cores, of["cpu"], of["date"][:10])))
        counts[f"{where}, commit {(of['git_commit'] or 'unknown')[:7]}"] += 1
    return "; ".join(f"{key} ({n} run{'s' if n > 1 else ''})" for key, n in counts.items())


def compared(found):
    """By environment, its tasks of several algorithms: what docs/choose.md sets side by side."""
    by_env = {}
    for of in by_family(found).values():
        for task in of.values():
            if not task["label"] or task["label"] == "rainbow":
                name = f"{task['algo']} {task['label']}".rstrip()
                by_env.setdefault(task["env"], {})[name] = task
    return {env: of for env, of in by_env.items() if len(of) > 1}


def comparison(found):
    """The table of docs/choose.md."""
    lines = ["| environment | algorithm | evaluated | env steps | s |", "|---" * 5 + "|"]
    for env, of in compared(found).items():
        for algo, task in of.items():
            means = [run["evaluation"]["mean_return"] for run in task["runs"]]
            steps = max(run["env_steps"] for run in task["runs"])
            seconds = sum(run["wall_s"] for run in task["runs"]) / len(means)
            mean = format_return(mean_and_error(means)[0])
            lines.append(f"| {env} | {algo} | {mean} | {steps:,} | {seconds:,.0f} |")
    return "\n".join(lines)


def text(folders, found, outdated):
    """The page's text, with links to the pictures that `draw` makes."""
    pictures = {
        family: os.path.relpath(folders.results / f"{family}.png", folders.page.parent)
        for family in by_family(found)
    }
    random, peers = (read_others(folders.results, name) for name in (RANDOM, PEER))
    return render(found, random, peers, read_notes(), pictures, outdated)


def write(folders, found, outdated):
    """Write the page and its pictures, and the table of docs/choose.md beside it."""
    peers = read_others(folders.results, PEER)
    pictures.draw(
        {family: _panels(of, peers) for family, of in by_family(found).items()}
        | {f"algo-{algo}": _panels(of, peers) for algo, of in by_algorithm(found).items()},
        folders.results,
    )
    if side_by_side := compared(found):
        pictures.draw_compared(side_by_side, folders.results / "compared.png")
    folders.page.write_text(text(folders, found, outdated))
    choose = folders.page.with_name("choose.md")
    if choose.exists():
        choose.write_text(filled_in(choose.read_text(), comparison(found), "compared"))
