"""What is told of a full fragment where the environments are on a device: episodes, and bad values.

Here the host waits for the device, once. Left out: who writes the accounts (`vector.py`,
`tensor_vector.py`, `pettingzoo_vector.py`).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from headrace.batch import Fragment
from headrace.envs.api import Episode
from headrace.errors import EnvError
from headrace.spec import Agents, Array, EnvSpec


def ended_episodes(
    length: Tensor, total: Tensor, env_id: Array, sizes: Sequence[int], last: int
) -> tuple[list[Episode], int]:
    """The episodes that ended in a fragment, and how many there were.

    Args:
        length: `[T, n]`: steps of the episode that ended there; 0: none did.
        total: `[T, n, policies]`: its return, the mean over the agents of each policy.
        env_id: `[n]`.
        sizes: agents of each policy.
        last: give so many of them, the last ones; 0: all.
    """
    num_envs = length.shape[1]
    flat = length.flatten()
    ended = flat.nonzero().squeeze(-1)
    count = len(ended)
    ended = ended[-last:] if last else ended
    where, returns = ended.cpu().numpy(), total.flatten(0, 1)[ended].cpu().numpy()
    columns = [
        (where // num_envs).tolist(),
        env_id[where % num_envs].tolist(),
        np.average(returns, axis=-1, weights=sizes).tolist(),
        flat[ended].tolist(),
    ]
    if len(sizes) > 1:
        columns.append([tuple(of) for of in returns.tolist()])
    return [Episode(*each) for each in zip(*columns, strict=True)], count


def check_finite(
    fragment: Fragment, env_id: Array, agents: Agents, spec: EnvSpec, sampler: str
) -> None:
    """EnvError for NaN and infinity, before anything is learned from it.

    Args:
        fragment: full.
        env_id: `[n]`.
        agents: of each env, whose rows are columns of it.
        spec: named in the error, and
        sampler: likewise.
    """
    obs, (final_obs, final_step, final_row) = fragment.obs, fragment.finals()
    assert isinstance(obs, Tensor)
    assert isinstance(final_obs, Tensor)
    bad_final = ~_finite(final_obs, 1) & (final_step < fragment.num_steps)
    # A sum has no room for NaN and infinity, and takes a tenth of the time of looking for them.
    if bool((obs[1:].sum() + fragment.reward.sum()).isfinite() & ~bad_final.any()):
        return
    bad = ~fragment.reward.isfinite() | ~_finite(obs[1:], 2)
    if not bool(bad.any() | bad_final.any()):  # no more than too large for a sum
        return
    if bad.any():
        t, row = bad.nonzero()[0].tolist()
        seen = obs[t + 1, row]
    else:
        place = int(bad_final.nonzero()[0])
        t, row, seen = int(final_step[place]), int(final_row[place]), final_obs[place]
    agent = f", agent {agents.first + row % agents.size}" if spec.num_agents > 1 else ""
    raise EnvError(
        f"The environment gave a reward ({fragment.reward[t, row].item()}) or observation "
        f"({seen.tolist()}) that is not finite\n"
        f"(step {t + 1} of the fragment, env {env_id[row // agents.size]} of {spec.id}{agent}, "
        f"sampler {sampler})."
    )


def _finite(tensor: Tensor, num_dims: int) -> Tensor:
    """Which of its rows are finite throughout: those of its first `num_dims` dimensions."""
    found = tensor.isfinite()
    return found.flatten(num_dims).all(-1) if found.dim() > num_dims else found
