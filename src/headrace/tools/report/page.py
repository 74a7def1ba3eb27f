"""`headrace report`: a run on one page, which needs no network to open.

Its layout is in `report.html` (a Jinja template), `report.css` and `report.js`. What other pages
share with it is in `base.html` and `macros.html`.
"""

import math
import re
import shlex
import time
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

import headrace
from headrace.errors import ConfigError
from headrace.storage.files import write_whole
from headrace.tools.report import figures, panels
from headrace.tools.report.history import History, read_history
from headrace.tools.runs.groups import format_setting
from headrace.training.job import code_flags

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
    save_page(_page(read_history(run_dir), usd_per_hour), output)
    return output


def save_page(page: str, output: Path) -> None:
    """Write a page; ConfigError if it cannot be written."""
    try:
        write_whole(output, page.encode())
    except OSError as error:
        raise ConfigError(
            f"The page {output} cannot be written: {error.strerror or error}.\n"
            "Name another file, in a folder that exists and has room."
        ) from None


def render(package: str, template: str, **values: Any) -> str:
    """Fill a template of a package that extends `base.html`; return the page."""
    templates = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(name, "") for name in (package, "headrace.tools.report")]
        ),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    templates.filters |= {
        "duration": _duration,
        "when": _when,
        "fill": panels.fill,
        "setting": format_setting,
        "with_fill": lambda span: (span, panels.fill(span)),
    }
    return templates.get_template(template).render(
        now=time.time(), headrace_version=headrace.__version__, **values
    )


def _page(history: History, usd_per_hour: float | None) -> str:
    config, ledger = history.config, history.ledger
    run, origin = config["settings"], config["origin"]
    curves, constant = panels.curves(history)
    return render(
        "headrace.tools.report",
        "report.html",
        history=history,
        run=run,
        origin=origin,
        state=_state(history),
        env_parts=re.split(r"(?<=[./:_])", run["env"]),  # a long name may break there
        numbers=_numbers(history, usd_per_hour),
        curves=curves,
        constant=constant,
        has_returns=any(panel.name == "mean_return" for panel in curves),
        policy_colors=[(policy, figures.line_fill(i)) for i, policy in enumerate(history.policies)],
        time=panels.time_spent(history),
        min_share=panels.MIN_SHARE,
        timeline=panels.timeline(history),
        lag=panels.lag(history),
        ledger={"collected": 0, "learned": _env_steps(history), **ledger},
        ledger_texts=_LEDGER,
        incidents=[each for each in history.incidents if set(each.counts) - {"lost"}],
        max_incidents=_MAX_INCIDENTS,
        commands=_commands(history),
        chosen=[name for name in run if origin.get(name) != "default"],
        defaults=[name for name in run if origin.get(name) == "default"],
        versions={"headrace": config.get("headrace"), **config.get("versions", {})},
    )


def _state(history: History) -> str:
    steps, goal = _env_steps(history), history.config["settings"]["total_env_steps"]
    if history.is_running:
        return f"running, {steps / goal:.0%} of {goal:,} env steps"
    if steps >= goal:
        return "finished"
    return f"{'failed' if history.error else 'stopped'} at {steps / goal:.0%} of {goal:,} env steps"


def _env_steps(history: History) -> int:
    return int(history.env_steps[-1]) if history.rows else 0


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(seconds))


def _numbers(history: History, usd_per_hour: float | None) -> list[tuple[str, str, str]]:
    """Return name, value and note of each key figure."""
    wall_s = float(history.wall_s[-1]) if history.rows else 0.0
    numbers = []
    for policy in history.policies or [""]:  # a mean over policies says little about a game
        means = history.values(f"{policy}/mean_return" if policy else "mean_return")
        known = means[np.isfinite(means)]
        mean = panels.number(float(known[-1])) if len(known) else _NONE
        note = "last 100 episodes" if len(known) else "no episode has ended"
        numbers.append((f"mean return, {policy}" if policy else "mean return", mean, note))
    if not history.policies and (best := history.best):
        numbers.append((f"best {best[0]}", panels.number(best[1]), ""))
    speed = history.mean_speed()
    numbers.append(("env steps", f"{_env_steps(history):,}", ""))
    numbers.append(("env steps/s", f"{speed:,.0f}" if speed else _NONE, "while training"))
    numbers.append(("wall time", _duration(wall_s), ""))
    if usd_per_hour is not None:
        usd = wall_s / 3600 * usd_per_hour
        cost = f"{usd:,.2f} USD" if usd >= 0.1 or not usd else f"{usd:.2g} USD"
        numbers.append(("cost so far", cost, f"at {usd_per_hour:,.4g} USD/h"))
    return numbers


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = divmod(round(seconds / 60), 60)[::-1]
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def _commands(history: History) -> list[list[str]]:
    """Return the commands that resume and evaluate the run; none before its first checkpoint.

    They are divided so that lines break before a flag, not between a flag and its value.
    """
    if not any(history.run_dir.glob("checkpoints/step_*")):
        return []
    run, run_dir = history.config["settings"], shlex.quote(str(history.run_dir))
    code = [f"{name} {shlex.join(of)}" for name, of in code_flags(history.config).items()]
    more = "" if _env_steps(history) < run["total_env_steps"] else " --total-env-steps N"
    lines = [" ".join([f"headrace resume {run_dir}{more}", *code])]
    lines.append(" ".join([f"headrace eval {run_dir} --episodes 20", *code]))
    if (history.run_dir / "best").is_dir():
        lines.append(f"{lines[-1]} --best")
    return [re.split(r"(?= --)", line) for line in lines]
