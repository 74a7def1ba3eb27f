"""One episode of a kernel environment, whole: as arrays, and as a film.

Left out: playing many (`evaluate.py`), and how a picture is drawn (`KernelEnv.draw`).
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from headrace.envs.factory import EnvMaker
from headrace.envs.kernels.vector import KernelVector
from headrace.envs.video import write_film
from headrace.errors import EnvError, UsageError
from headrace.evaluation.players import Players
from headrace.evaluation.trained_policies import TrainedPolicy
from headrace.meter import Meter
from headrace.spec import Agents, Array

_MOST_STEPS = 100_000
_FPS = 20


def play_episode(
    policy: TrainedPolicy | Mapping[str, TrainedPolicy],
    maker: EnvMaker,
    *,
    shares: Mapping[str, Agents] | None = None,
    seed: int = 0,
    stochastic: bool = False,
) -> dict[str, Array]:
    """Play one episode: the first that `evaluate` plays with this seed.

    Args:
        policy: acts; or several, by name.
        maker: makes the environment.
        shares: the agents of each of several.
        seed: of the environment and of sampled actions.
        stochastic: sample actions, as in training; default: the likeliest.

    Returns:
        Everything that there is in the world, by name, `[steps + 1, ...]`: row t is after step t.
        Row 0 is the start, where `action` and `reward` say nothing.

    Raises:
        UsageError: it is no kernel environment.
        EnvError: it failed, or does not end.
    """
    env = maker.kernel()
    if env is None:
        raise UsageError(
            f"{maker.name} is no kernel environment: of others there are no arrays to keep.\n"
            "A film can be made of those that draw themselves: evaluate(video=...)."
        )
    players = Players(policy, shares, 1, 1, seed=seed, stochastic=stochastic)
    vector = KernelVector(
        env, players.spec, np.arange(1), seed, Meter(),
        parts=players.parts, role="eval", autoreset=False, sampler="evaluation",
    )  # fmt: skip
    vector.restart(seed)
    rows = [_copied(vector)]
    while not vector.books["over"][0] or len(rows) == 1:
        players.play(vector)
        vector.finish()
        rows.append(_copied(vector))
        if len(rows) > _MOST_STEPS:
            raise EnvError(f"The episode of {maker.name} did not end in {_MOST_STEPS:,} steps.")
    vector.close()
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def film_episode(episode: Mapping[str, Array], maker: EnvMaker, path: Path) -> None:
    """Draw an episode from `play_episode` (MP4).

    Raises:
        UsageError: the environment does not draw itself.
        MissingExtraError: imageio-ffmpeg is not installed.
    """
    env = maker.kernel()
    assert env is not None, maker.name
    steps = range(len(episode["step"]))
    write_film(path, (env.draw({k: of[t] for k, of in episode.items()}) for t in steps), _FPS)


def _copied(vector: KernelVector) -> dict[str, Array]:
    return {name: of[0].numpy().copy() for name, of in vector.world.items()}
