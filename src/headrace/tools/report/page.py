"""`headrace report`: a run on one page, which needs no network to open."""

import json
import math
import re
import shlex
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import headrace
from headrace.errors import ConfigError
from headrace.storage.files import write_whole
from headrace.tools.report import panels
from headrace.tools.report.figures import Markup, join, tag
from headrace.tools.report.history import History, read_history

_MAX_INCIDENTS = 20
_NONE = "\N{EN DASH}"
_LEDGER = {
    "collected": "env steps collected",
    "learned": "learned from",
    "lost": "lost (sampled, never learned from)",
    "remade": "sampled again after a loss",
    "restarts": "workers replaced",
    "dropped_episodes": "episodes dropped after an environment's error",
}


def write_report(
    run_dir: Path, output: Path | None = None, usd_per_hour: float | None = None
) -> Path:
    """Write a run's page.

    Args:
        output: file of the page; default: `report.html` in the run's directory.
        usd_per_hour: price of the run's machines (USD/h), to show the cost so far.

    Returns:
        The file of the page.

    Raises:
        ConfigError: the price is invalid, or the page cannot be written.
        MissingExtraError: the `plot` extra is missing.
        RunDirError: the directory holds no run with an update, or cannot be read.
    """
    if usd_per_hour is not None and not 0 <= usd_per_hour < math.inf:
        raise ConfigError(f"usd_per_hour={usd_per_hour}: expected a price of 0 or more.")
    output = output or run_dir / "report.html"
    page = _page(read_history(run_dir), usd_per_hour)
    try:
        write_whole(output, page.encode())
    except OSError as error:
        raise ConfigError(
            f"The page {output} cannot be written: {error.strerror or error}.\n"
            "Name a file in a folder that exists and has room: --output"
        ) from None
    return output


def _page(history: History, usd_per_hour: float | None) -> str:
    run = history.config["settings"]
    sections = (
        _header(history, usd_per_hour),
        _section("Curves", panels.curves(history), "over env steps"),
        _section("Time", panels.time_spent(history), "by span"),
        _section("Timeline", panels.timeline(history)),
        _section("Lag", panels.lag(history), "age of the weights"),
        _section("Faults", _faults(history)),
        _section("Commands", _commands(history)),
        _section("Configuration", _configuration(history)),
    )
    here = resources.files("headrace.tools.report")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{run['env']}, {run['algo']}: headrace"),
        tag("style", Markup(here.joinpath("report.css").read_text())),
    )
    script = tag("script", Markup(here.joinpath("report.js").read_text()))
    body = tag("body", tag("main", *sections, _footer(history)), script)
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _section(title: str, content: Markup | None, note: str = "") -> Markup | None:
    """Build a section with a heading; None without content."""
    note_tag = tag("span", note, class_="note") if note else None
    return content and tag("section", tag("h2", title, " ", note_tag), content)


def _header(history: History, usd_per_hour: float | None) -> Markup:
    run, words = history.config["settings"], _state(history)
    facts = [str(history.run_dir.resolve()), f"seed {run['seed']}"]
    if history.began is not None:
        facts.append("began " + _when(history.began))
    if (starts := int(history.is_start.sum())) > 1:
        facts.append(f"started {starts} times")
    return tag(
        "header",
        tag("p", tag("span", words, class_="state " + words.split()[0].strip(","))),
        tag("h1", _breakable(run["env"]), " ", tag("small", run["algo"])),
        tag("p", *(tag("span", fact) for fact in facts), class_="facts"),
        tag("dl", *_numbers(history, usd_per_hour), class_="numbers"),
    )


def _breakable(name: str) -> Markup:
    """Allow line breaks in a long name after its separators."""
    parts = re.split(r"(?<=[./:_])", name)
    return join(*(join(tag("wbr") if i else "", part) for i, part in enumerate(parts)))


def _state(history: History) -> str:
    steps, goal = _env_steps(history), history.config["settings"]["total_env_steps"]
    if history.is_running:
        return f"running, {steps / goal:.0%} of {goal:,} env steps"
    if steps >= goal:
        return "finished"
    return f"stopped at {steps / goal:.0%} of {goal:,} env steps"


def _env_steps(history: History) -> int:
    return int(history.env_steps[-1]) if history.rows else 0


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(seconds))


def _numbers(history: History, usd_per_hour: float | None) -> list[Markup]:
    """Build the key figures."""
    wall_s = float(history.wall_s[-1]) if history.rows else 0.0
    speed = history.mean_speed()
    numbers = _returns(history)
    numbers.append(_number("env steps", f"{_env_steps(history):,}"))
    numbers.append(_number("env steps/s", f"{speed:,.0f}" if speed else _NONE, "while training"))
    numbers.append(_number("wall time", _duration(wall_s)))
    if usd_per_hour is not None:
        usd = wall_s / 3600 * usd_per_hour
        cost = f"{usd:,.2f} USD" if usd >= 0.1 or not usd else f"{usd:.2g} USD"
        numbers.append(_number("cost so far", cost, f"at {usd_per_hour:,.4g} USD/h"))
    return numbers


def _returns(history: History) -> list[Markup]:
    """Build the returns of each policy; a mean over policies says little about a game."""
    numbers = []
    for policy in history.policies or [""]:
        means = history.values(f"{policy}/mean_return" if policy else "mean_return")
        known = means[np.isfinite(means)]
        mean = panels.number(float(known[-1])) if len(known) else _NONE
        note = "last 100 episodes" if len(known) else "no episode has ended"
        numbers.append(_number(join("mean return", policy and f", {policy}"), mean, note))
    if not history.policies and (best := history.best):
        numbers.append(_number(f"best {best[0]}", panels.number(best[1])))
    return numbers


def _number(name: str, value: str, note: str = "") -> Markup:
    note_tag = tag("dd", note, class_="note") if note else None
    return tag("div", tag("dt", name), tag("dd", value), note_tag)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = divmod(round(seconds / 60), 60)[::-1]
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def _faults(history: History) -> Markup:
    ledger = history.ledger
    if not ledger:
        return tag("p", "Neither metrics nor a checkpoint have counts of steps.", class_="note")
    known = {"collected": ledger.get("collected", 0), "learned": _env_steps(history), **ledger}
    rows = [
        tag("tr", tag("td", text), tag("td", f"{known[name]:,}", class_="num"))
        for name, text in _LEDGER.items()
        if name in known
    ]
    parts = [tag("table", tag("tbody", *rows), class_="ledger")]
    incidents = [each for each in history.incidents if set(each.counts) - {"lost"}]
    lines = []
    for incident in incidents[:_MAX_INCIDENTS]:
        counts = ", ".join(f"{_LEDGER[name]}: {n:,}" for name, n in incident.counts.items())
        when = f"{incident.env_steps:,}", _duration(incident.wall_s)
        cells = (tag("td", text, class_="num") for text in when)
        lines.append(tag("tr", *cells, tag("td", counts)))
    if lines:
        head = [tag("th", "env steps", class_="num"), tag("th", "wall time", class_="num")]
        head.append(tag("th", "what happened"))
        parts.append(tag("table", tag("thead", tag("tr", *head)), tag("tbody", *lines)))
    if (left := len(incidents) - _MAX_INCIDENTS) > 0:
        parts.append(tag("p", f"And {left:,} more.", class_="note"))
    if not ledger.get("restarts") and not ledger.get("dropped_episodes"):
        parts.append(tag("p", "No worker was replaced, no episode dropped.", class_="note"))
    return tag("div", *parts, class_="faults")


def _commands(history: History) -> Markup:
    """Build the commands that resume and evaluate the run."""
    run, run_dir = history.config["settings"], shlex.quote(str(history.run_dir))
    env = run["env"] if ":" in run["env"] else "module:callable"
    code = [f"--env {shlex.quote(env)}"] if history.config["env_is_code"] else []
    wrapper = [w if isinstance(w, str) else "module:callable" for w in run["wrapper"]]
    code += [f"--wrapper {' '.join(map(shlex.quote, wrapper))}"] if wrapper else []
    code += [f"--model {shlex.quote(run['model'])}"] if run["model"] else []
    more = "" if _env_steps(history) < run["total_env_steps"] else " --total-env-steps N"
    lines = [" ".join([f"headrace resume {run_dir}{more}", *code])]
    lines.append(" ".join([f"headrace eval {run_dir} --episodes 20", *code]))
    if (history.run_dir / "best").is_dir():
        lines.append(f"{lines[-1]} --best")
    # Break long lines before a flag, not between a flag and its value.
    broken = (join(*(tag("span", part) for part in re.split(r"(?= --)", line))) for line in lines)
    return tag("pre", *(join(line, "\n") for line in broken))


def _configuration(history: History) -> Markup:
    settings, origin = history.config["settings"], history.config["origin"]
    rows = {
        name: tag("tr", tag("td", tag("code", name)), tag("td", tag("code", _value(value))),
                  tag("td", origin.get(name, "")), class_="setting")
        for name, value in settings.items()
    }  # fmt: skip
    chosen = [row for name, row in rows.items() if origin.get(name) != "default"]
    others = [row for name, row in rows.items() if origin.get(name) == "default"]
    search = tag(
        "input", type="search", placeholder="search settings", aria_label="search settings"
    )
    head = tag("thead", tag("tr", tag("th", "setting"), tag("th", "value"), tag("th", "origin")))
    summary = tag("summary", f"{len(others)} settings at their defaults")
    return join(
        search,
        tag("table", head, tag("tbody", *chosen), class_="settings"),
        tag("details", summary, tag("table", tag("tbody", *others), class_="settings")),
    )


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _footer(history: History) -> Markup:
    versions = {"headrace": history.config.get("headrace"), **history.config.get("versions", {})}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    made = f"Written {_when(time.time())} by headrace {headrace.__version__}."
    return tag("footer", tag("p", f"The run: {listed}."), tag("p", made))
