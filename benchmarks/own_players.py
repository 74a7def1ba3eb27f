"""How well random actions and a scripted player do in each of `own_envs.py`.

    python -m benchmarks.own_players         # a table: returns, lengths, env steps/s

A player sees all of the environment, also what its observation leaves out. Its return is a
landmark, not a bound. The figures stand in the docstrings of `own_envs.py`;
`tests/project/test_own_envs.py` holds them to this file.
"""

import math
import statistics
import time

from benchmarks.own_envs import ALL, Courier, Crane, Ferry, House, Orchard


def ferry(env):
    """Steer for the jetty, up the current as far as it carries the boat; slow down near it."""
    share = min(3.5 / (env.distance() + 1e-6), 0.1)  # of the way, in a second
    along, across = -share * env.x - env.current(), share * (env.JETTY - env.y)
    error = math.remainder(math.atan2(across, along) - env.heading, 2 * math.pi)
    wanted = math.hypot(along, across) * max(0.0, math.cos(error)) if abs(error) < 1.5 else 0.6
    throttle = 0.25 * wanted + 0.6 * (wanted - env.speed)
    rudder = (1.2 * error - 3 * env.turn) * 2 / max(env.speed, 0.5)
    return [min(max(throttle, -1), 1), min(max(rudder, -1), 1)]


def house(env):
    """Heat the room that lacks most; all of them if three are cold."""
    lacks = [least - room for least, room in zip(env.wanted(), env.rooms, strict=True)]
    if sum(each > 0.5 for each in lacks) >= 3:
        return 5
    return 1 + lacks.index(max(lacks)) if max(lacks) > -0.3 else 0


def orchard(env):
    """Stand under the next apple; out of the way of a stone that comes first."""
    row, column, is_apple = env.things[0]
    middle, target = env.left + env.BASKET // 2, column + env.THING // 2
    if not is_apple:
        after = [other for other in env.things[1:] if other[2]]
        hits = env.left - env.THING < column < env.left + env.BASKET
        if hits:
            return 2 if (middle >= target or env.left < 3) and env.left < 38 else 1
        if not after or row > 30:
            return 0
        target = after[0][1] + env.THING // 2
    if abs(target - middle) <= 2:
        return 0
    return 2 if target > middle else 1


def courier(env):
    """The shortest way, east and west first."""
    x, y = env.customer if env.is_loaded else env.DEPOT
    if (x, y) == (env.x, env.y):
        return 1 if y < 4 else 3
    if x != env.x:
        return 2 if x > env.x else 4
    return 1 if y > env.y else 3


def crane(env):
    """Feedback on the load's offset, and on the swing."""
    wanted = min(max(0.2 * env.offset(), -1.0), 1.0)
    push = wanted - env.speed + 4 * env.rate
    return 1 if abs(push) < 0.25 else 2 if push > 0 else 0


PLAYERS = {Ferry: ferry, House: house, Orchard: orchard, Courier: courier, Crane: crane}


def play(env, act, episodes, seed=0):
    """Returns of whole episodes, and the env steps of all of them."""
    returns, steps = [], 0
    env.action_space.seed(seed)
    for episode in range(episodes):
        env.reset(seed=seed + episode)
        total, ended = 0.0, False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(act(env))
            total, steps, ended = total + float(reward), steps + 1, terminated or truncated
        returns.append(total)
    return returns, steps


def at_random(env):
    return env.action_space.sample()


def main():
    for kind in ALL:
        for act in (at_random, PLAYERS[kind]):
            began = time.perf_counter()
            returns, steps = play(kind(), act, 500)
            rate = steps / (time.perf_counter() - began)
            print(
                f"{kind.__name__:8} {act.__name__:10} return {statistics.mean(returns):8.2f} "
                f"(deviation {statistics.stdev(returns):.2f}), {steps / 500:.0f} steps an episode, "
                f"{rate:,.0f} env steps/s"
            )


if __name__ == "__main__":
    main()
