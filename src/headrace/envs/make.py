"""From what a user calls an environment to something that makes it, in any process.

A kernel environment is made as it is where its own vector form is stepped, and in Gymnasium's form
where it is interpreted or wrapped. Left out: stepping (`gym.py`, `native.py`, `kernel_vector.py`),
and which ids a preset knows (`run/presets`).
"""

import contextlib
import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium

from headrace import named
from headrace.envs import atari, kernel_ids, mujoco, spaces
from headrace.envs.api import check_fields, env_error
from headrace.envs.kernel_env import KernelEnv
from headrace.envs.kernel_gym import KernelGymEnv
from headrace.errors import ConfigError, EnvNotFoundError, MissingExtraError, UsageError
from headrace.spec import EnvSpec

EnvLike = str | Callable[..., Any]
"""An id, `module:EnvId`, `module:callable`, or a callable that makes an environment; a kernel
environment's class is one."""

WrapperLike = str | Callable[[Any], Any]
"""`module:callable`, or a callable: gets an environment and gives it back, wrapped."""

# (what an id begins with, package that registers it or None if Gymnasium does, our extra)
_FAMILIES: tuple[tuple[str, str | None, str], ...] = (
    ("headrace/", "headrace.envs.library", "kernels"),
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
    """Makes environments; picklable, so that a worker can do it too.

    Attributes:
        env: see `EnvLike`.
        kwargs: passed to the id's constructor or to the callable.
        wrappers: put around each environment, the first one innermost.
        native: whether the environment's own vector form is stepped (a kernel environment
            compiled), and not its Python form.
        drop_obs_keys, action_mask: see `spaces.read`.
    """

    env: EnvLike
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: tuple[WrapperLike, ...] = ()
    native: bool = False
    drop_obs_keys: tuple[str, ...] = ()
    action_mask: str = "auto"

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
        """Make one environment in its Python form, wrapped.

        Raises:
            EnvNotFoundError: there is no such id, module or callable.
            MissingExtraError: a package that it needs is not installed.
            UsageError: what was made is no environment.
            EnvError: making or wrapping it raised.
        """
        return self.python_form(self.made(render_mode=render_mode))

    def made(self, *, render_mode: str | None = None) -> Any:
        """One environment as the id or callable gives it, which may be a `KernelEnv`.

        Raises:
            UsageError, EnvError: as when called.
        """
        target = _resolve(self.env)
        if not isinstance(target, str):
            return self._call(target, render_mode)
        _import_family(target)
        if (kernel := kernel_ids.registered(target)) is not None:
            return self._call(kernel, render_mode)
        make = atari.make if target.startswith("ALE/") else gymnasium.make
        # The checker wraps every step for the sake of the first.
        more = {"disable_env_checker": True} | ({"render_mode": render_mode} if render_mode else {})
        return _registered(target, self.kwargs, lambda: make(target, **self.kwargs | more))

    def python_form(self, env: Any) -> Any:
        """What `made` gave, in its Python form, wrapped.

        Raises:
            UsageError: it is no environment, or a kernel environment of several agents.
            EnvError: wrapping it raised.
        """
        if isinstance(env, KernelEnv):
            if env.agents:
                raise UsageError(
                    f"{self.name} is a game of several agents ({', '.join(env.agents)}): it is "
                    "trained on compiled, and without wrappers.\nLeave --vectorization python and "
                    "--wrapper out; to debug it, headrace.envs.pettingzoo.KernelParallelEnv is "
                    "interpreted."
                )
            env = KernelGymEnv(env)
        _check_is_env(env, self.name)
        for wrapper in self.wrappers:
            wrap = (
                named.load_callable(wrapper, ConfigError) if isinstance(wrapper, str) else wrapper
            )
            try:
                env = wrap(env)
            except Exception as error:
                name = wrapper if isinstance(wrapper, str) else getattr(wrap, "__name__", "wrapper")
                raise env_error(error, f"while {name} wrapped {self.name}") from error
            _check_is_env(env, getattr(wrapper, "__name__", wrapper))
        return env

    def _call(self, target: Callable[..., Any], render_mode: str | None) -> Any:
        if not callable(target):
            raise UsageError(
                f"env is an instance of {type(target).__name__}: expected what makes one, for "
                "there will be several: an id, a class, or `lambda: ...`."
            )
        if isinstance(target, type) and issubclass(target, KernelEnv):
            target = partial(kernel_ids.build, target)
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
            return target(**kwargs)
        except UsageError:
            raise
        except Exception as error:
            raise env_error(error, f"while making {self.name} with {kwargs}") from error

    def kernel(self) -> KernelEnv | None:
        """The kernel environment that is to be stepped compiled; None if there is none.

        Raises:
            UsageError, EnvError: as when one is made.
        """
        if not self.native or self.wrappers:
            return None
        target = _resolve(self.env)
        if isinstance(target, str):
            _import_family(target)
            if kernel_ids.registered(target) is None:
                return None
        env = self.made()
        if isinstance(env, KernelEnv):
            return env
        _check_is_env(env, self.name)
        env.close()
        return None

    def vector(self, num_envs: int, num_threads: int) -> Any:
        """Make the environment's own vector form, a `gymnasium.vector.VectorEnv`.

        Args:
            num_envs: how many environments it holds.
            num_threads: how many threads it may use, where it can be told.

        Raises:
            ConfigError: it has no such form, or is to be wrapped.
            EnvNotFoundError, MissingExtraError, EnvError: as for one environment.
        """
        target = _resolve(self.env)
        if not isinstance(target, str) or self.wrappers:
            what = "wrapped" if self.wrappers else "made by a callable"
            raise ConfigError(
                f"vectorization='native', but {self.name} is {what}: only a registered id, or a "
                "kernel environment, can have a vector form of its own.\n"
                "Use --vectorization python (or auto)."
            )
        _import_family(target)
        if target in gymnasium.registry and not gymnasium.registry[target].vector_entry_point:
            raise ConfigError(
                f"vectorization='native', but {target} registers no vector_entry_point.\n"
                "Use --vectorization python (or auto)."
            )
        kwargs = self.kwargs
        if target.startswith("ALE/"):
            kwargs = atari.vector_kwargs(num_threads) | kwargs
        return _registered(
            target,
            self.kwargs,
            lambda: gymnasium.make_vec(target, num_envs, "vector_entry_point", **kwargs),
        )


def _check_is_env(env: Any, maker: Any) -> None:
    for attribute in ("reset", "step", "close", "observation_space", "action_space"):
        if not hasattr(env, attribute):
            raise UsageError(
                f"{maker} made a {type(env).__name__}, which has no `{attribute}`.\n"
                "Expected a gymnasium.Env: reset, step, close, observation_space, action_space."
            )


def _resolve(env: EnvLike) -> EnvLike:
    """`module:name` to the callable, or to the id that the module registered."""
    if not isinstance(env, str) or ":" not in env:
        return env
    module, name, target = named.load(env, EnvNotFoundError)
    if target is not None:
        return target
    if name in gymnasium.registry:
        return name
    raise EnvNotFoundError(
        f"The module {module.__name__!r} has no callable {name!r} and registers no such id."
        + named.near(module, name)
    )


def _import_family(env_id: str) -> tuple[str, str | None, str] | None:
    """Import the package that registers the id, if we know it."""
    family = next((f for f in _FAMILIES if env_id.startswith(f[0])), None)
    if family and family[1]:
        try:
            importlib.import_module(family[1])  # importing it registers its ids
        except ModuleNotFoundError as error:
            raise _missing(env_id, family[2], error) from None
    return family


def _registered(env_id: str, kwargs: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Call `make`, with the errors that registered ids can have."""
    family = _import_family(env_id)
    try:
        if family and family[2] == "mujoco":
            mujoco.listen()
        return make()
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
    with contextlib.ExitStack() as stack, mujoco.muted():
        envs = []
        for _ in range(count):
            envs.append(maker())
            stack.callback(envs[-1].close)
        stack.pop_all()
    return envs


def env_spec(maker: EnvMaker) -> EnvSpec:
    """Make one environment (or vector of one), read its spaces, and close it.

    Raises:
        UnsupportedSpaceError: naming the space and its key.
        EnvError: it failed.
    """
    env: Any = maker.kernel()
    if env is None:
        env = maker.vector(1, num_threads=1) if maker.native else maker.made()
    if isinstance(env, KernelEnv) and not maker.wrappers:
        return spaces.of_kernel(
            maker.name, env, drop_obs_keys=maker.drop_obs_keys, action_mask=maker.action_mask
        )
    if not maker.native:
        env = maker.python_form(env)
    single = "single_" if maker.native else ""
    try:
        with_choices = isinstance(
            action := getattr(env, f"{single}action_space"),
            gymnasium.spaces.Discrete
            | gymnasium.spaces.MultiDiscrete
            | gymnasium.spaces.MultiBinary,
        )
        info = {}
        if with_choices and maker.action_mask in ("auto", "info"):
            where = f"env 0 of {maker.name}, episode 0, to see what it offers: reset(seed=0)"
            try:
                result = env.reset(seed=0)
            except Exception as error:
                raise env_error(error, f"in reset of {where}") from error
            check_fields("reset", result, where)
            info = result[1]
        spec = spaces.read(
            maker.name,
            getattr(env, f"{single}observation_space"),
            action,
            info,
            drop_obs_keys=maker.drop_obs_keys,
            action_mask=maker.action_mask,
        )
    finally:
        try:
            env.close()
        except Exception as error:
            raise env_error(
                error, f"while closing {maker.name}, which was made for its spaces"
            ) from error
    return spec
