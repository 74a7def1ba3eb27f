"""The state of samplers, for vectors of another size: another number of learners shares them out.

Left out: what the state is (the vectors'), and who restores it (`rollout.py`).
"""

import re
from collections import defaultdict

import numpy as np

from headrace.spec import Array

_OF_ONE_ENV = re.compile(r"env(\d+)\.(.+)")


def regroup(state: dict[str, Array], num_envs: int, envs_per_vector: int) -> dict[str, Array]:
    """The same environments under way, in vectors of another size.

    Args:
        state: of all samplers of a run.
        num_envs: of the run.
        envs_per_vector: as it is to be. A vector of which an environment has no state has none.
    """
    envs: dict[int, dict[str, Array]] = defaultdict(dict)
    rest: dict[str, Array] = {}
    for name, array in state.items():
        vector, dot, column = name.partition(".")
        if not dot:
            rest[name] = array
            continue
        count = len(state[f"{vector}.episode"])
        first = int(vector.removeprefix("vector")) * count
        if own := _OF_ONE_ENV.fullmatch(column):
            envs[first + int(own[1])][f"env.{own[2]}"] = array
        else:
            for i in range(count):
                envs[first + i][column] = array[i]
    for v in range(num_envs // envs_per_vector):
        members = [envs.get(v * envs_per_vector + i) for i in range(envs_per_vector)]
        if None in members:
            continue
        for i, member in enumerate(members):
            assert member is not None
            for column, array in member.items():
                if column.startswith("env."):
                    rest[f"vector{v}.env{i}.{column.removeprefix('env.')}"] = array
        for column in members[0] or {}:
            if not column.startswith("env."):
                rest[f"vector{v}.{column}"] = np.stack([m[column] for m in members if m])
    return rest
