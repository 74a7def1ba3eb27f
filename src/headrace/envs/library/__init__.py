"""The kernel environments that come with Headrace, and their ids: importing this registers them."""

from headrace.envs.kernel_env import KernelEnv
from headrace.envs.kernel_ids import register, registered
from headrace.envs.library.cartpole import CartPole

IDS: dict[str, type[KernelEnv]] = {
    "headrace/CartPole-v1": CartPole,
}
"""Of these, in Gymnasium's registry and for `headrace train`."""

for _env_id, _kernel_env in IDS.items():
    if registered(_env_id) is None:  # not if this module is loaded again
        register(_env_id, _kernel_env)
