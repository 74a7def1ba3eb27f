"""Tianshou's SubprocVectorEnv alone: a step returns as soon as `--wait-num` environments are ready.

As its asynchronous collector does it: those that are ready get their next action, and those whose
episode has ended are reset first, which is waited for while the others go on with the step that
they are at.
"""

import numpy as np
from tianshou.env import SubprocVectorEnv

from benchmarks.peers import sampling


def main():
    parser = sampling.parser(__doc__)
    parser.add_argument("--wait-num", type=int, required=True)
    args = parser.parse_args()
    env = SubprocVectorEnv([sampling.maker(args)] * args.num_envs, wait_num=args.wait_num)
    num_actions, rng = env.action_space[0].n, np.random.default_rng(0)
    env.reset()
    ready = np.arange(args.num_envs)

    def step():
        nonlocal ready
        actions = rng.integers(0, num_actions, len(ready))
        _, _, terminated, truncated, infos = env.step(actions, ready)
        ready = np.array([info["env_id"] for info in infos])
        if (ended := terminated | truncated).any():
            env.reset(ready[ended])
        return len(ready)

    sampling.sample(step, args.seconds)
    env.close()


if __name__ == "__main__":
    main()
