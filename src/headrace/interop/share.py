"""`headrace push` and `headrace pull`: policies that are shared.

Left out: the files (`shared_policy.py`), the card's text (`model_card.py`), the hub (`hub.py`).
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.evaluation.evaluate import Evaluation
from headrace.evaluation.trained_policies import folder_of
from headrace.interop import hub
from headrace.interop.model_card import HERE, Facts, model_card
from headrace.interop.shared_policy import (
    CARD,
    check_names,
    names_in,
    shareable_config,
    take_over,
    write_shared,
)
from headrace.storage import checkpoint
from headrace.storage import run_dir as rundir
from headrace.training.api import evaluate_run
from headrace.training.job import RunRequest, eval_flags

EPISODES = 20


@dataclass(frozen=True)
class Pushed:
    """A policy that was shared, at `address`, with the returns that its card tells."""

    address: str
    played: Evaluation
    film: Path | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        film = None if self.film is None else str(self.film)
        return self.played.to_json() | {"address": self.address, "film": film}

    def describe(self) -> str:
        """Return where it is, and what its card says."""
        played = self.played.to_json()
        return (
            f"Shared: {self.address}\nIts card tells the return "
            f"{played['mean_return']:.1f} ± {played['std_return']:.1f} over {played['episodes']} "
            f"episodes, and has {'no film' if self.film is None else f'the film {self.film}'}."
        )


@dataclass(frozen=True)
class Pulled:
    """A shared policy that was copied and checked.

    `code` has the flags that name code of its run again to `headrace eval`; "" without any.
    """

    run_dir: Path
    env: str
    policies: list[str]
    code: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return vars(self) | {"run_dir": str(self.run_dir)}

    def describe(self) -> str:
        """Return where it is, and what can follow."""
        card = self.run_dir / CARD
        told = f"Its card, which has no checksum: {card}" if card.exists() else "It has no card."
        return (
            f"Pulled: {self.run_dir} ({', '.join(self.policies)} for {self.env}). The checksums of "
            f"weights, settings and film agree.\n{told}\n"
            f"To evaluate: headrace eval {self.run_dir} {self.code}".rstrip()
        )


def push(
    run_dir: Path,
    to: str,
    request: RunRequest,
    *,
    best: bool = False,
    episodes: int = EPISODES,
    seed: int = 0,
    say: Callable[[str], None] = lambda progress: None,
) -> Pushed:
    """Share the policies of a run, with the returns that they reach now.

    Args:
        to: a directory that does not exist, or `hf:USER/NAME`.
        request: the run's code, if it has some.
        best: the best policies, not the newest.
        episodes, seed: of the evaluation.

    Raises:
        ConfigError: the directory exists, or `hf:` has no USER/NAME after it.
        CheckpointError, EnvError: as `headrace eval`.
        HubError: the hub refuses it.
    """
    repo_id = hub.repository(to)
    api = hub.client(to) if repo_id else None
    if not repo_id and Path(to).exists():
        raise ConfigError(f"{to} exists already.\nName another directory: --to DIR.")
    # One checkpoint is played and shared, although a run may be writing others.
    saved = checkpoint.newest(folder_of(run_dir, best=best))
    played = evaluate_run(run_dir, request, saved=saved.path, episodes=episodes, seed=seed, say=say)
    films = sorted(run_dir.glob("*.mp4"), key=lambda path: path.stat().st_mtime)
    film = films[-1] if films else None
    facts = Facts(
        shareable_config(run_dir), played, seed, to if repo_id else HERE, saved.env_steps or 0,
        bool(films), saved.manifest["policies"], saved.manifest.get("imported", {}),
    )  # fmt: skip
    if api is None:
        write_shared(facts.config, saved, model_card(facts), film, Path(to))
        return Pushed(to, played, film)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "policy"
        write_shared(facts.config, saved, model_card(facts), film, folder)
        message = f"{facts.config['settings']['algo']} for {facts.config['settings']['env']}"
        return Pushed(hub.upload(api, repo_id, folder, message), played, film)


def pull(place: str, run_dir: Path | None = None) -> Pulled:
    """Copy a shared policy into a new directory, and check it.

    Args:
        place: a directory, or `hf:USER/NAME`.
        run_dir: the new directory; default: below `runs/`.

    Raises:
        ConfigError: it is a URL, a file, or no directory.
        CheckpointError: it has unexpected files, which are not read, or is damaged.
        HubError: the hub has no such repository, or cannot be reached.
        RunDirError: the new directory exists.
    """
    repo_id = hub.repository(place)
    if "://" in place:
        raise ConfigError(
            f"{place}: URLs are not read.\nDownload the directory of the shared policy and name "
            "it, or name a repository on the Hugging Face Hub: hf:USER/NAME."
        )
    new = run_dir or rundir.unused(Path(repo_id or place).name)
    if not repo_id:
        check_names(names_in(Path(place)), place)
        manifest = take_over(Path(place), new, place)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "policy"
            hub.download(hub.client(place), repo_id, folder)
            manifest = take_over(folder, new, place)
    config = rundir.read_config(new)
    policies = list(manifest["policies"])
    return Pulled(new, config["settings"]["env"], policies, eval_flags(config))
