"""From what a user calls an environment to something that makes it, in any process.

Left out: stepping (`gym.py`), and which ids a preset knows (`run/presets`).
"""

import contextlib
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np

from headrace.envs.api import env_error
from headrace.errors import EnvNotFoundError, MissingExtraError, UnsupportedSpaceError, UsageError
from headrace.spec import EnvSpec, Space

EnvLike = str | Callable[..., Any]
"""An id, `module:EnvId`, `module:callable`, or a callable that makes an environment."""

# (what an id begins with, package that registers it or None if Gymnasium does, our extra)
_FAMILIES: tuple[tuple[str, str | None, str], ...] = (
    ("ALE/", "ale_py", "atari"),
    ("MiniGrid-", "minigrid", "minigrid"),
    ("BabyAI-", "minigrid", "minigrid"),
    ("highway-", "highway_env", "highway"),
    ("merge-", "highway_env", "highway"),
    ("roundabout-", "highway_env", "highway"),
    ("parking-", "highway_env", "highway"),
    ("intersection-", "highway_env", "highway"),
    ("racetrack-", "highway_env", "highway"),
    *((name, None, "box2d") for name in ("LunarLander", "BipedalWalker", "CarRacing")),
    *(
        (name, None, "mujoco")
        for name in (
            "Ant-", "HalfCheetah-", "Hopper-", "Humanoid", "InvertedDoublePendulum-",
            "InvertedPendulum-", "Pusher-", "Reacher-", "Swimmer-", "Walker2d-",
        )
    ),
    *(
        (name, None, "classic-control")
        for name in ("Acrobot-", "CartPole-", "MountainCar", "Pendulum-")
    ),
)  # fmt: skip


@dataclass(frozen=True)
class EnvMaker:
    """Makes one environment per call; picklable, so that a worker can do it too.

    Attributes:
        env: see `EnvLike`.
        kwargs: passed to the id's constructor or to the callable.
    """

    env: EnvLike
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What to call it in messages and run directories."""
        name = self.env if isinstance(self.env, str) else getattr(self.env, "__name__", "env")
        return "env" if name == "<lambda>" else name

    @property
    def is_code(self) -> bool:
        """Whether making it imports or runs code that the user named (not a registered id)."""
        return not isinstance(self.env, str) or ":" in self.env

    def __call__(self, *, render_mode: str | None = None) -> Any:
        """Make one environment.

        Raises:
            EnvNotFoundError: there is no such id, module or callable.
            MissingExtraError: a package that it needs is not installed.
        """
        target = _resolve(self.env)
        if isinstance(target, str):
            return _make_registered(target, self.kwargs, render_mode)
        kwargs = dict(self.kwargs)
        if render_mode is not None and "render_mode" in inspect.signature(target).parameters:
            kwargs["render_mode"] = render_mode
        try:
            inspect.signature(target).bind(**kwargs)
        except TypeError as error:
            raise UsageError(f"{self.name} does not take env_kwargs={kwargs}: {error}") from None
        except ValueError:
            pass  # built-ins do not tell their signature
        try:
            env = target(**kwargs)
        except Exception as error:
            raise env_error(error, f"while making {self.name} with {kwargs}") from error
        for attribute in ("reset", "step", "close", "observation_space", "action_space"):
            if not hasattr(env, attribute):
                raise UsageError(
                    f"{self.name} made a {type(env).__name__}, which has no `{attribute}`.\n"
                    "Expected a gymnasium.Env: reset, step, close, observation_space, action_space."
                )
        return env


def _resolve(env: EnvLike) -> EnvLike:
    """`module:name` to the callable, or to the id that the module registered."""
    if not isinstance(env, str) or ":" not in env:
        return env
    module_name, _, name = env.partition(":")
    if os.getcwd() not in sys.path:  # the console script does not put the user's folder there
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            raise
        raise EnvNotFoundError(
            f"There is no module {module_name!r} (from {env!r}), looked for in {os.getcwd()} and "
            "on the Python path.\nExpected module:EnvId or module:callable, as you would import it."
        ) from None
    if callable(target := getattr(module, name, None)):
        return target  # type: ignore[no-any-return]
    if name in gymnasium.registry:
        return name
    offered = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    near = difflib.get_close_matches(name, offered, n=3, cutoff=0.4)
    raise EnvNotFoundError(
        f"The module {module_name!r} has no callable {name!r} and registers no such id."
        + (f"\nDid you mean {' or '.join(f'{module_name}:{n}' for n in near)}?" if near else "")
    )


def _make_registered(env_id: str, kwargs: dict[str, Any], render_mode: str | None) -> Any:
    family = next((f for f in _FAMILIES if env_id.startswith(f[0])), None)
    if family and family[1]:
        try:
            importlib.import_module(family[1])  # importing it registers its ids
        except ModuleNotFoundError as error:
            raise _missing(env_id, family[2], error) from None
    try:
        # The checker wraps every step for the sake of the first.
        modes = {"render_mode": render_mode} if render_mode else {}
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs | modes)
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv):
        raise EnvNotFoundError(_near_misses(env_id)) from None
    except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        raise _missing(env_id, family[2] if family else None, error) from None
    except Exception as error:
        if kwargs and isinstance(error, TypeError):
            raise UsageError(f"{env_id} does not take env_kwargs={kwargs}: {error}") from error
        raise env_error(error, f"while making {env_id} with {kwargs}") from error


def _missing(env_id: str, extra: str | None, error: Exception) -> MissingExtraError:
    remedy = f"pip install 'headrace[{extra}]'" if extra else "install the package that it names"
    return MissingExtraError(
        f"{env_id} needs a package that is not installed ({error}).\nTo install it: {remedy}"
    )


def _near_misses(env_id: str) -> str:
    known = sorted(gymnasium.registry)
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(env_id.lower(), lowered, n=3, cutoff=0.5)
    lines = [f"There is no environment {env_id!r}."]
    if near:
        lines.append("Did you mean " + " or ".join(lowered[name] for name in near) + "?")
    lines.append("One of your own: module:EnvId or module:callable.")
    return "\n".join(lines)


def make_all(maker: EnvMaker, count: int) -> list[Any]:
    """So many environments; if one cannot be made, those before it are closed."""
    with contextlib.ExitStack() as stack:
        envs = []
        for _ in range(count):
            envs.append(maker())
            stack.callback(envs[-1].close)
        stack.pop_all()
    return envs


def env_spec(maker: EnvMaker) -> EnvSpec:
    """Make one environment, read its spaces, and close it.

    Raises:
        UnsupportedSpaceError: naming the space and its key.
    """
    env = maker()
    try:
        spec = EnvSpec(
            id=maker.name,
            observation=_observation(env.observation_space),
            action=_action(env.action_space),
        )
    finally:
        try:
            env.close()
        except Exception as error:
            raise env_error(
                error, f"while closing {maker.name}, which was made for its spaces"
            ) from error
    return spec


def _observation(space: Any) -> Space:
    match space:
        case gymnasium.spaces.Box():
            # Floats are stored as float32 whatever they are declared as; integers as they are.
            dtype = "float32" if np.issubdtype(space.dtype, np.floating) else str(space.dtype)
            if dtype in ("uint16", "uint32", "uint64"):
                raise _unsupported("observation", space, f"dtype {dtype} has no equal in torch")
            return Space("box", space.shape, dtype)
        case gymnasium.spaces.Discrete():
            return _choices("discrete", (), [space.n], [space.start])
        case gymnasium.spaces.MultiDiscrete() if len(space.shape) == 1:
            return _choices("multi_discrete", space.shape, space.nvec, space.start)
    raise _unsupported(
        "observation", space, "supported: Box, Discrete, MultiDiscrete of one dimension"
    )


def _choices(
    kind: Literal["discrete", "multi_discrete"], shape: tuple[int, ...], nvec: Any, start: Any
) -> Space:
    return Space(
        kind, shape, "int64", nvec=tuple(int(n) for n in nvec), start=tuple(int(n) for n in start)
    )


def _action(space: Any) -> Space:
    match space:
        case gymnasium.spaces.Box() if np.issubdtype(space.dtype, np.floating):
            low = tuple(float(x) for x in space.low.ravel())
            high = tuple(float(x) for x in space.high.ravel())
            return Space("box", space.shape, str(space.dtype), low, high)
        case gymnasium.spaces.Discrete():
            return _choices("discrete", (), [space.n], [space.start])
        case gymnasium.spaces.MultiDiscrete() if len(space.shape) == 1:
            return _choices("multi_discrete", space.shape, space.nvec, space.start)
    raise _unsupported(
        "action", space, "supported: Box of floats, Discrete, MultiDiscrete of one dimension"
    )


def _unsupported(role: str, space: Any, why: str) -> UnsupportedSpaceError:
    keys = ""
    if isinstance(space, gymnasium.spaces.Dict):
        keys = " with the keys " + ", ".join(f"{key!r}: {part}" for key, part in space.items())
    return UnsupportedSpaceError(
        f"The {role} space cannot be used: {type(space).__name__}{keys or f' {space}'} ({why}).\n"
        "Wrap the environment so that it offers one of these, and pass it as module:callable."
    )
