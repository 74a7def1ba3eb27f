"""Five small environments that nobody has tuned an algorithm for: what a new user brings.

    headrace train benchmarks.own_envs:Ferry

They need NumPy and Gymnasium only, so that every trainer can be given them. Each docstring has
the mean return of random actions and of a scripted player, as `python -m benchmarks.own_players`
measures them. Only House observes the time.
"""

import math

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete


def _bounds(*limits):
    """A Box of float32 with one pair of bounds for each number."""
    return Box(*np.array(limits, np.float32).T)


class Ferry(gym.Env):
    """Continuous actions: a boat crosses a river with a current and holds at a jetty.

    Returns: random actions -1.2, scripted player 152. 200 steps of a second.

    Observation `[8]`: metres to the jetty along and across the river; cosine and sine of the
    heading (0 is downstream); speed through the water (m/s); turn rate (rad/s); speed of the
    current here (m/s); engine (rpm). Action `[2]`: throttle and rudder in -1 .. 1.
    Reward: exp(-distance / 10 m), plus 0.01 for each metre nearer, minus 0.01 times the squared
    action.
    The episode ends early aground on a bank, or 160 m up or down the river.
    """

    WIDTH, JETTY, REACH = 120.0, 110.0, 160.0
    observation_space = _bounds(
        (-161, 161), (-12, 112), (-1, 1), (-1, 1), (-5, 5), (-1, 1), (0, 2), (-3000, 3000)
    )
    action_space = Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.heading, self.strongest = self.np_random.uniform((-60, 0.6, 0.5), (60, 2.5, 2))
        self.y, self.speed, self.turn, self.rpm, self.steps = 15.0, 0.0, 0.0, 0.0, 0
        return self._observe(), {}

    def current(self):
        """Metres a second downstream: none at the banks, the strongest in the middle."""
        share = min(max(self.y / self.WIDTH, 0.0), 1.0)
        return self.strongest * 4 * share * (1 - share)

    def distance(self):
        return math.hypot(self.x, self.JETTY - self.y)

    def step(self, action):
        throttle, rudder = min(max(float(action[0]), -1), 1), min(max(float(action[1]), -1), 1)
        before = self.distance()
        self.rpm += 0.4 * (3000 * throttle - self.rpm)
        self.speed += 0.6 * self.rpm / 3000 - 0.15 * self.speed
        self.turn += 0.5 * (0.35 * rudder * self.speed / 4 - self.turn)
        self.heading += self.turn
        self.x += self.speed * math.cos(self.heading) + self.current()
        self.y += self.speed * math.sin(self.heading)
        self.steps += 1
        now = self.distance()
        reward = math.exp(-now / 10) + 0.01 * (before - now - throttle**2 - rudder**2)
        lost = not 2 < self.y < self.WIDTH - 2 or abs(self.x) > self.REACH
        return self._observe(), reward, lost, self.steps >= 200, {}

    def _observe(self):
        seen = (
            min(max(-self.x, -161.0), 161.0), self.JETTY - self.y,
            math.cos(self.heading), math.sin(self.heading),
            self.speed, self.turn, self.current(), self.rpm,
        )  # fmt: skip
        return np.array(seen, np.float32)


class House(gym.Env):
    """Discrete actions: one boiler keeps four rooms warm on a winter's day.

    Returns: random actions -132, scripted player -46. 144 steps of ten minutes.

    Observation `[12]`: four rooms and what each should have at least (°C); outdoors (°C); the
    boiler's water (°C); price (EUR/kWh); minute of the day. Action: 0 boiler off, 1 to 4 all its
    heat into that room, 5 shared by all rooms.
    Reward: minus 0.1 for each degree that a room is too cold, minus the price of a kWh if the
    boiler runs.
    """

    observation_space = _bounds(
        *[(-20, 70)] * 4, *[(0, 30)] * 4, (-30, 30), (0, 100), (0, 1), (0, 1440)
    )
    action_space = Discrete(6)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.rooms = self.np_random.uniform(15, 20, 4).tolist()
        self.wakes = self.np_random.uniform(5, 10, 4).tolist()
        self.sleeps = self.np_random.uniform(17, 23, 4).tolist()
        self.mean_outdoors, self.dearest = self.np_random.uniform((-6, 17), (6, 21)).tolist()
        self.water, self.steps = 20.0, 0
        return self._observe(), {}

    def wanted(self):
        """What each room should have at this hour (°C): 21 while somebody is awake in it."""
        hour = self.steps / 6
        pairs = zip(self.wakes, self.sleeps, strict=True)
        return [21.0 if wakes <= hour < sleeps else 16.0 for wakes, sleeps in pairs]

    def outdoors(self):
        return self.mean_outdoors - 4 * math.cos(2 * math.pi * (self.steps / 144 - 0.12))

    def price(self):
        return 0.25 + 0.15 * math.cos(math.pi * (self.steps / 6 - self.dearest) / 12)

    def step(self, action):
        runs, outdoors, price = action > 0, self.outdoors(), self.price()
        self.water += 0.3 * ((70.0 if runs else 20.0) - self.water)
        mean = sum(self.rooms) / 4
        reward = -price if runs else 0.0
        for i, (room, least) in enumerate(zip(self.rooms, self.wanted(), strict=True)):
            share = 1.0 if action == i + 1 else 0.25 if action == 5 else 0.0
            leaves = 0.02 * (room - outdoors) + 0.01 * (room - mean)
            room += 0.04 * share * (self.water - room) - leaves
            self.rooms[i] = room
            reward -= 0.1 * max(0.0, least - room)
        self.steps += 1
        return self._observe(), reward, False, self.steps >= 144, {}

    def _observe(self):
        seen = (
            *self.rooms, *self.wanted(), self.outdoors(), self.water, self.price(), 10 * self.steps,
        )  # fmt: skip
        return np.array(seen, np.float32)


class Orchard(gym.Env):
    """Images: a basket catches red apples and lets gray stones fall.

    Returns: random actions 0.0, scripted player 6.2. 150 steps.

    Observation: uint8 `[48, 48, 3]`. Every ten steps an apple or a stone starts to fall, two pixels
    a step. Action: 0 stay, 1 left, 2 right, by three pixels. Reward: 1 for an apple in the basket,
    -1 for a stone.
    """

    SIZE, BASKET, THING, SPEED = 48, 10, 4, 3
    observation_space = Box(0, 255, (SIZE, SIZE, 3), np.uint8)
    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(self.SIZE - self.BASKET + 1))
        self.things, self.steps = [], 0
        """`[row, column, is_apple]` of each."""
        self._drop()
        return self._observe(), {}

    def _drop(self):
        column = int(self.np_random.integers(self.SIZE - self.THING + 1))
        self.things.append([0, column, bool(self.np_random.integers(2))])

    def step(self, action):
        move = (0, -self.SPEED, self.SPEED)[action]
        self.left = min(max(self.left + move, 0), self.SIZE - self.BASKET)
        for thing in self.things:
            thing[0] += 2
        reward = 0.0
        if self.things[0][0] >= self.SIZE - self.THING:
            _, column, is_apple = self.things.pop(0)
            if self.left - self.THING < column < self.left + self.BASKET:
                reward = 1.0 if is_apple else -1.0
        self.steps += 1
        if self.steps % 10 == 0:
            self._drop()
        return self._observe(), reward, False, self.steps >= 150, {}

    def _observe(self):
        image = np.zeros((self.SIZE, self.SIZE, 3), np.uint8)
        for row, column, is_apple in self.things:
            color = (220, 40, 30) if is_apple else 120
            image[row : row + self.THING, column : column + self.THING] = color
        image[-3:, self.left : self.left + self.BASKET] = (200, 160, 60)
        return image


class Courier(gym.Env):
    """A Dict: a van fetches parcels at the depot in the middle and takes each to a customer.

    Returns: random actions 0.6, scripted player 20.8. 100 steps.

    Observation: `van` float32 `[3]`, metres from the west and from the south, and what is left of
    the battery (Wh); `cargo`, 0 empty, 1 loaded; `map` uint8 `[36, 36, 3]`, town of 9 × 9 blocks
    with the customer in red, the van in green, the depot in blue. Action: 0 wait, 1 to 4 drive a
    block north, east, south, west. Reward: 1 for each parcel fetched, and for each delivered.
    The episode ends early with an empty battery: 10 Wh a block, of 800 to 1,200.
    """

    BLOCKS, PIXELS, METRES = 9, 4, 100.0
    DEPOT = (4, 4)
    MOVES = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))
    observation_space = Dict(
        van=_bounds((0, 900), (0, 900), (0, 1200)),
        cargo=Discrete(2),
        map=Box(0, 255, (36, 36, 3), np.uint8),
    )
    action_space = Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.y = self.np_random.integers(self.BLOCKS, size=2).tolist()
        self.battery = float(self.np_random.uniform(800, 1200))
        self.is_loaded, self.steps = False, 0
        self._call()
        return self._observe(), {}

    def _call(self):
        """Another customer, not at the depot."""
        self.customer = self.DEPOT
        while self.customer == self.DEPOT:
            self.customer = tuple(self.np_random.integers(self.BLOCKS, size=2).tolist())

    def step(self, action):
        east, north = self.MOVES[action]
        self.x = min(max(self.x + east, 0), self.BLOCKS - 1)
        self.y = min(max(self.y + north, 0), self.BLOCKS - 1)
        self.battery = max(0.0, self.battery - (10 if action else 0))
        reward = 0.0
        if (self.x, self.y) == (self.customer if self.is_loaded else self.DEPOT):
            reward = 1.0
            if self.is_loaded:
                self._call()
            self.is_loaded = not self.is_loaded
        self.steps += 1
        return self._observe(), reward, self.battery == 0.0, self.steps >= 100, {}

    def _observe(self):
        town = np.zeros((36, 36, 3), np.uint8)
        places = (self.customer, (self.x, self.y), self.DEPOT)
        for color, (x, y) in enumerate(places):
            row, column = (self.BLOCKS - 1 - y) * self.PIXELS, x * self.PIXELS
            town[row : row + self.PIXELS, column : column + self.PIXELS, color] = 255
        van = np.array((self.x * self.METRES, self.y * self.METRES, self.battery), np.float32)
        return {"van": van, "cargo": np.int64(self.is_loaded), "map": town}


class Crane(gym.Env):
    """Sparse reward: a crane brings a swinging load to rest above a truck.

    Returns: random actions 0.03, scripted player 1.0. At most 200 steps of a quarter second.

    Observation `[5]`: metres from the trolley to the truck (3 to 15 at first); speed of the trolley
    (m/s); angle of the rope (rad) and its rate (rad/s); its length (m). Action: 0 back, 1 coast,
    2 forth, by 0.5 m/s². Reward: 1 once the load hangs within 0.5 m of the truck, almost at rest,
    which ends the episode; 0 before.
    """

    RAIL, FASTEST, PUSH, DT = 20.0, 2.0, 0.5, 0.25
    observation_space = _bounds((-40, 40), (-2, 2), (-4, 4), (-10, 10), (0, 20))
    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, away, self.rope = self.np_random.uniform((-15, 3, 6), (15, 15, 10)).tolist()
        self.truck = self.x - math.copysign(away, self.x)  # towards the middle of the rail
        self.speed, self.angle, self.rate, self.steps = 0.0, 0.0, 0.0, 0
        return self._observe(), {}

    def offset(self):
        """Metres from the load to the truck."""
        return self.truck - self.x - self.rope * math.sin(self.angle)

    def step(self, action):
        before = self.speed
        self.speed += self.PUSH * self.DT * (int(action) - 1)
        self.speed = min(max(self.speed, -self.FASTEST), self.FASTEST)
        self.x += self.speed * self.DT
        if abs(self.x) > self.RAIL:
            self.x, self.speed = math.copysign(self.RAIL, self.x), 0.0
        pushed = (self.speed - before) / self.DT
        pull = 9.81 * math.sin(self.angle) + pushed * math.cos(self.angle)
        self.rate += self.DT * (-pull / self.rope - 0.02 * self.rate)
        self.angle += self.DT * self.rate
        self.steps += 1
        is_there = abs(self.offset()) < 0.5 and abs(self.speed) < 0.3
        done = is_there and abs(self.angle) < 0.05 and abs(self.rate) < 0.05
        return self._observe(), float(done), done, self.steps >= 200, {}

    def _observe(self):
        seen = (self.truck - self.x, self.speed, self.angle, self.rate, self.rope)
        return np.array(seen, np.float32)


ALL = (Ferry, House, Orchard, Courier, Crane)
