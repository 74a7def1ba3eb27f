"""Headrace: reinforcement learning that keeps the learner fed.

    import headrace
    run = headrace.train("CartPole-v1", algo=headrace.PPO(lr=3e-4), total_env_steps=100_000, seed=1)
    print(run.evaluate(episodes=20).returns)

The public names are loaded when they are first used, so that `import headrace` costs nothing.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# Threads of a math library that wait for each other spin for some tens of microseconds, and then
# give their core up. Without spinning, each product would begin by waking a thread: with small
# networks two cores are then no faster than one. The longer they spin, the slower two cores are
# where another process has a core as well (benchmarks/waiting.py). The library reads this when
# torch loads it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

if TYPE_CHECKING:
    from headrace.algos.a2c import A2C as A2C
    from headrace.algos.action_values.dqn import DQN as DQN
    from headrace.algos.action_values.dqn import Rainbow as Rainbow
    from headrace.algos.action_values.pqn import PQN as PQN
    from headrace.algos.appo import APPO as APPO
    from headrace.algos.critics.crossq import CROSSQ as CROSSQ
    from headrace.algos.critics.sac import DROQ as DROQ
    from headrace.algos.critics.sac import REDQ as REDQ
    from headrace.algos.critics.sac import SAC as SAC
    from headrace.algos.critics.sac import TQC as TQC
    from headrace.algos.critics.td3 import DDPG as DDPG
    from headrace.algos.critics.td3 import TD3 as TD3
    from headrace.algos.impala import IMPALA as IMPALA
    from headrace.algos.offline.bc import BC as BC
    from headrace.algos.offline.cql import CQL as CQL
    from headrace.algos.offline.iql import IQL as IQL
    from headrace.algos.offline.td3_bc import TD3BC as TD3BC
    from headrace.algos.ppo import PPO as PPO
    from headrace.envs.changes import call_envs as call_envs
    from headrace.envs.changes import set_envs as set_envs
    from headrace.envs.check.checker import check_env as check_env
    from headrace.envs.kernels.env import KernelEnv as KernelEnv
    from headrace.envs.kernels.env import uniform as uniform
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.evaluation.trained_policies import load_policy as load_policy
    from headrace.interop.export.api import export_policy as export_policy
    from headrace.models.custom import num_params as num_params
    from headrace.models.policy import Network as Network
    from headrace.spec import EnvSpec as EnvSpec
    from headrace.tools.autoscale.autoscale import autoscale as autoscale
    from headrace.tools.profile.profiler import profile as profile
    from headrace.tools.runs.records import load_runs as load_runs
    from headrace.training.api import Run as Run
    from headrace.training.api import resume as resume
    from headrace.training.api import train as train
    from headrace.tuning.api import Study as Study
    from headrace.tuning.api import sweep as sweep
    from headrace.tuning.api import tune as tune

__version__ = "0.1.0"

_HOME = {
    "A2C": "headrace.algos.a2c",
    "APPO": "headrace.algos.appo",
    "BC": "headrace.algos.offline.bc",
    "CQL": "headrace.algos.offline.cql",
    "CROSSQ": "headrace.algos.critics.crossq",
    "DDPG": "headrace.algos.critics.td3",
    "DQN": "headrace.algos.action_values.dqn",
    "DROQ": "headrace.algos.critics.sac",
    "EnvSpec": "headrace.spec",
    "HeadraceError": "headrace.errors",
    "IMPALA": "headrace.algos.impala",
    "IQL": "headrace.algos.offline.iql",
    "KernelEnv": "headrace.envs.kernels.env",
    "Network": "headrace.models.policy",
    "PPO": "headrace.algos.ppo",
    "PQN": "headrace.algos.action_values.pqn",
    "REDQ": "headrace.algos.critics.sac",
    "Rainbow": "headrace.algos.action_values.dqn",
    "Run": "headrace.training.api",
    "SAC": "headrace.algos.critics.sac",
    "Study": "headrace.tuning.api",
    "TD3": "headrace.algos.critics.td3",
    "TD3BC": "headrace.algos.offline.td3_bc",
    "TQC": "headrace.algos.critics.sac",
    "autoscale": "headrace.tools.autoscale.autoscale",
    "call_envs": "headrace.envs.changes",
    "check_env": "headrace.envs.check.checker",
    "export_policy": "headrace.interop.export.api",
    "load_policy": "headrace.evaluation.trained_policies",
    "load_runs": "headrace.tools.runs.records",
    "num_params": "headrace.models.custom",
    "profile": "headrace.tools.profile.profiler",
    "resume": "headrace.training.api",
    "set_envs": "headrace.envs.changes",
    "sweep": "headrace.tuning.api",
    "train": "headrace.training.api",
    "tune": "headrace.tuning.api",
    "uniform": "headrace.envs.kernels.env",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Load a public name (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
