"""What is told of a full fragment where the environments are on a device: episodes, and bad values.

Here the host waits for the device, once. Left out: who writes the accounts (`kernel_vector.py`,
`tensor.py`).
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from headrace.batch import Fragment
from headrace.envs.api import Episode
from headrace.errors import EnvError
from headrace.spec import Array, EnvSpec


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


def check_finite(fragment: Fragment, env_id: Array, spec: EnvSpec, sampler: str) -> None:
    """EnvError for NaN and infinity, before anything is learned from it."""
    assert isinstance(fragment.obs, Tensor)
    # A sum has no room for NaN and infinity, and takes a tenth of the time of looking for them.
    if bool((fragment.obs[1:].sum() + fragment.reward.sum()).isfinite()):
        return
    bad = ~fragment.reward.isfinite()
    if fragment.obs.is_floating_point():
        bad |= ~fragment.obs[1:].isfinite().flatten(2).all(-1)
    if not bool(bad.any()):
        return
    t, row = bad.nonzero()[0].tolist()
    agents = fragment.num_envs // len(env_id)
    agent = f", agent {row % agents}" if agents > 1 else ""
    raise EnvError(
        f"The environment gave a reward ({fragment.reward[t, row].item()}) or observation "
        f"({fragment.obs[t + 1, row].tolist()}) that is not finite\n"
        f"(step {t + 1} of the fragment, env {env_id[row // agents]} of {spec.id}{agent}, "
        f"sampler {sampler})."
    )
