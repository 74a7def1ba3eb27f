"""What all ranks of a run are told.

Left out: how it came about (`launch.py`), and what a rank does with it (`rank.py`).
"""

from dataclasses import dataclass
from pathlib import Path

from headrace.config.resolve import Settings
from headrace.envs.factory import EnvMaker
from headrace.models.custom import ModelFactory
from headrace.spec import Agents, EnvSpec
from headrace.storage.checkpoint import Checkpoint


@dataclass(frozen=True)
class Task:
    """Orders to a rank.

    Attributes:
        settings: resolved.
        maker: makes environments.
        model: makes the network, if it is the user's own.
        spec: of the environment.
        run_dir: where rank 0 writes.
        shares: the agents of each policy.
        saved: what to go on from; its directory must be there on every rank's machine.
        quiet: say nothing but errors.
        room_for: on a cluster: how many workers of a rank there is room for as it begins.
        rolled_back: on a cluster: env steps that were learned from, and are taken again since a
            learner was lost; None: it is the first time that the run begins here.
    """

    settings: Settings
    maker: EnvMaker
    model: ModelFactory | None
    spec: EnvSpec
    shares: dict[str, Agents]
    run_dir: Path
    saved: Checkpoint | None
    quiet: bool
    room_for: int = 0
    rolled_back: int | None = None
