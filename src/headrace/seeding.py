"""All random numbers come from one root seed, addressed by their purpose.

An environment's seed belongs to the *logical* env (its index over the whole run) and its episode.
Action noise and minibatch order belong to the env and its step. So any process makes the same
batch, any part of it can be made again from its address, and there is no generator state to save.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import UsageError

ROLES = {
    "env": 0,
    "eval": 1,
    "model": 2,
    "action": 3,
    "minibatch": 4,
    "run": 5,
    "replay": 6,
    "noise": 7,
    "sample": 8,
    "modules": 9,
    "goal": 10,
    "league": 11,
}


U64 = NDArray[np.uint64]


def derive(seed: int, role: str, *path: int) -> int:
    """Return a 31-bit seed for `role`, at `path` below it: `derive(7, "env", env, episode)`.

    NumPy's SeedSequence mixes the address, so that neighbours are unrelated (unlike `seed + i`).
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(ROLES[role], *path))
    return int(sequence.generate_state(1)[0]) >> 1


def check_seed(seed: int) -> None:
    """Raise UsageError if a root seed is negative."""
    if seed < 0:
        raise UsageError(f"seed={seed}: expected 0 or more.")


PHILOX = (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF, 32)
"""Two multipliers, two summands of the keys, the mask of 32 bits, and their number."""
_UINT64 = tuple(np.uint64(constant) for constant in PHILOX)
_LOW32, _32 = _UINT64[4:]


def philox(
    key: tuple[Any, Any],
    counter: tuple[Any, Any, Any, Any],
    constants: tuple[Any, ...] = _UINT64,
) -> tuple[Any, Any, Any, Any]:
    """Return four 32-bit words, held in 64 bits, for each key and counter (Philox4x32-10).

    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    The words of key and counter are uint64 numbers, or arrays of them that broadcast against each
    other. `constants` is `PHILOX`, of the same type.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    multiplier0, multiplier1, weyl0, weyl1, low32, half = constants
    for _ in range(10):
        product0, product1 = c0 * multiplier0, c2 * multiplier1
        c0, c1, c2, c3 = (
            # With signed 64-bit numbers, a shift brings the sign in.
            (product1 >> half) & low32 ^ c1 ^ k0,
            product1 & low32,
            (product0 >> half) & low32 ^ c3 ^ k1,
            product0 & low32,
        )
        k0, k1 = (k0 + weyl0) & low32, (k1 + weyl1) & low32
    return c0, c1, c2, c3


def _address(seed: int, role: str, env_id: NDArray[np.int64]) -> tuple[U64, U64]:
    """Return the Philox key of each env: the run's seed for this role, and the env's index."""
    return np.asarray(derive(seed, role), dtype=np.uint64), env_id.astype(np.uint64)


def action_noise(
    seed: int, env_id: NDArray[np.int64], first_step: int, num_steps: int, num_draws: int
) -> NDArray[np.float32]:
    """Return uniform noise for the actions of one fragment of T steps, from `first_step` on.

    It is `[T, n, num_draws]` float32, strictly inside (0, 1), on a grid of 2^-23.
    """
    first, end = first_step * num_draws, (first_step + num_steps) * num_draws
    four = np.arange(first // 4, -(-end // 4), dtype=np.uint64)[:, None]
    counter = (four & _LOW32, four >> _32, np.uint64(0), np.uint64(0))
    words = np.stack(philox(_address(seed, "action", env_id), counter), 1)
    bits = words.reshape(-1, len(env_id))[first % 4 :][: end - first]
    bits = bits.reshape(num_steps, num_draws, len(env_id)).swapaxes(1, 2)
    # The upper 23 bits and half a step are exact in float32, and never reach 0 or 1.
    return ((bits >> np.uint64(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def league_draws(
    seed: int, env_id: NDArray[np.int64], episode: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return four uniform numbers of [0, 1) for an episode of each env: `[4, n]` float64."""
    number = episode.astype(np.uint64)
    counter = (np.uint64(0), np.uint64(0), number & _LOW32, number >> _32)
    words = philox(_address(seed, "league", env_id), counter)
    return np.stack(np.broadcast_arrays(*words)).astype(np.float64) * 2.0**-32


def permutations(
    seed: int, env_id: NDArray[np.int64], update: int, num_epochs: int, num_steps: int
) -> NDArray[np.int64]:
    """Return orders of the T steps of a batch, for each env and each of E epochs.

    Each column of the result, `[E, T, n]`, is a permutation of `0..T-1`.
    """
    step = np.arange(num_steps, dtype=np.uint64)[:, None]
    four = np.arange(-(-num_epochs // 4), dtype=np.uint64)[:, None, None]
    counter = (step, four, np.uint64(update) & _LOW32, np.uint64(update) >> _32)
    words = np.stack(philox(_address(seed, "minibatch", env_id), counter), 1)
    # With the step below its word, no two keys are equal, and sorted keys hold the order.
    keys = words.reshape(-1, num_steps, len(env_id))[:num_epochs] << _32 | step
    keys.sort(axis=1)
    return (keys & _LOW32).astype(np.int64)


def env_orders(seed: int, num_envs: int, update: int, num_epochs: int) -> NDArray[np.int64]:
    """Return orders of all N envs of a run, for each of E epochs, to share out whole runs.

    The result, `[E, N]`, has the position of each env: each row is a permutation of `0..N-1`.
    """
    env = np.arange(num_envs)
    four = np.arange(-(-num_epochs // 4), dtype=np.uint64)[:, None]
    counter = (np.uint64(0), four, np.uint64(update) & _LOW32, np.uint64(update) >> _32)
    words = np.stack(philox(_address(seed, "run", env), counter), 1)
    keys = words.reshape(-1, num_envs)[:num_epochs] << _32 | env.astype(np.uint64)
    return keys.argsort(1).argsort(1)
