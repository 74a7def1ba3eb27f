"""A vector of environments of any kind.

Left out: stepping it (`python_vector.py`, `native_vector.py`, `vector.py`).
"""

from headrace.envs.api import GUARDS, Guards, VectorEnv
from headrace.envs.factory import EnvMaker, make_all
from headrace.envs.gym.native_vector import NativeVector
from headrace.envs.gym.python_vector import GymVector
from headrace.envs.kernels.vector import KernelVector
from headrace.errors import UsageError
from headrace.meter import Meter
from headrace.spec import Array, EnvSpec


def make_vector(
    maker: EnvMaker,
    spec: EnvSpec,
    env_id: Array,
    seed: int,
    meter: Meter,
    *,
    num_threads: int,
    role: str = "env",
    reseed: bool = True,
    replay_limit_s: float = 30.0,
    sampler: str = "inline",
    guards: Guards = GUARDS,
) -> VectorEnv:
    """Make the environments `env_id` and step them in the form that `maker` says.

    Args are those of `GymVector` and `EnvMaker.vector`.

    Raises:
        EnvError: an environment could not be made.
        UsageError: it is a kernel environment of several agents.
        MissingExtraError: it needs a package that is not installed.
    """
    if (kernel := maker.kernel()) is not None:
        if kernel.agents:
            raise UsageError(
                f"{maker.name} is a game of several agents ({', '.join(kernel.agents)}); expected "
                "one agent in each environment of a vector."
            )
        return KernelVector(
            kernel, spec, env_id, seed, meter,
            num_threads=num_threads, role=role, sampler=sampler, guards=guards,
        )  # fmt: skip
    if maker.native:
        native = maker.vector(len(env_id), num_threads)
        return NativeVector(
            native, spec, env_id, seed, meter, role=role, sampler=sampler, guards=guards
        )
    return GymVector(
        make_all(maker, len(env_id)),
        spec,
        env_id,
        seed,
        meter,
        role=role,
        reseed=reseed,
        replay_limit_s=replay_limit_s,
        sampler=sampler,
        guards=guards,
        remake=maker,
    )
