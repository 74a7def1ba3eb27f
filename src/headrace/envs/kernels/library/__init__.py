"""The kernel environments that come with Headrace. Importing this registers their ids."""

from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.library.arm import Reacher
from headrace.envs.kernels.library.classic_control import (
    Acrobot,
    CartPole,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
)
from headrace.envs.kernels.library.matrix_games import RockPaperScissors
from headrace.envs.kernels.library.tag_continuous import TagContinuous
from headrace.envs.kernels.library.tag_gridworld import TagGridWorld
from headrace.envs.kernels.registry import register, registered_class

IDS: dict[str, type[KernelEnv]] = {
    "headrace/Acrobot-v1": Acrobot,
    "headrace/CartPole-v1": CartPole,
    "headrace/MountainCar-v0": MountainCar,
    "headrace/MountainCarContinuous-v0": MountainCarContinuous,
    "headrace/Pendulum-v1": Pendulum,
    "headrace/Reacher-v0": Reacher,
    "headrace/RockPaperScissors-v0": RockPaperScissors,
    "headrace/TagContinuous-v0": TagContinuous,
    "headrace/TagGridWorld-v0": TagGridWorld,
}
"""Ids for Gymnasium's registry and for `headrace train`."""

for _env_id, _kernel_env in IDS.items():
    if registered_class(_env_id) is None:  # unless this module is imported again
        register(_env_id, _kernel_env)
