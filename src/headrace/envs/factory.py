"""Makes environments from an id or a callable, in any process, and reads their spec."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import gymnasium

from headrace import importing
from headrace.envs import registry
from headrace.envs.api import check_fields, close_all, env_error, explain_errors
from headrace.envs.games import names
from headrace.envs.gym import atari, mujoco
from headrace.envs.kernels import registry as kernel_registry
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.kernels.gym_adapter import KernelGymEnv
from headrace.envs.spaces import game_state, gym_spaces, specs
from headrace.errors import ConfigError, UsageError
from headrace.spec import EnvSpec

EnvLike = str | Callable[..., Any]
"""An id (of Gymnasium, or of PettingZoo, as `classic/rps-v2`), `module:EnvId`, `module:callable`,
or a callable that makes an environment, such as a kernel environment's class. If it takes
`num_envs` and `device`, it makes a vector of tensors."""

WrapperLike = str | Callable[[Any], Any]
"""`module:callable`, or a callable: takes an environment and returns it wrapped."""


@dataclass(frozen=True)
class EnvMaker:
    """Makes environments; picklable, so that a worker can do it too.

    Registrations travel with it, since the user's script may have made some.

    Attributes:
        wrappers: put around each environment, the first one innermost.
        native: whether the environment's own vector form is stepped (a kernel environment
            compiled), and not its Python form.
        shared_critic: whether critics see the state of the game (`spaces/game_state.py`).
        agent_ids: whether agents see their index.
    """

    env: EnvLike
    kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: tuple[WrapperLike, ...] = ()
    native: bool = False
    drop_obs_keys: tuple[str, ...] = ()
    action_mask: str = "auto"
    shared_critic: bool = False
    agent_ids: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"registrations": registry.pickled_registrations(self.env)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        registry.add_registrations(state.pop("registrations"))
        self.__dict__.update(state)

    @property
    def name(self) -> str:
        """The environment's name in messages and run directories."""
        name = self.env if isinstance(self.env, str) else getattr(self.env, "__name__", "env")
        return "env" if name == "<lambda>" else name

    @property
    def is_code(self) -> bool:
        """True if making the environment runs code that the user named, and not a registered id."""
        return not isinstance(self.env, str) or ":" in self.env

    @property
    def steps_tensors(self) -> bool:
        """True if the code makes many environments at a time that step tensors."""
        target = registry.resolve(self.env)
        if isinstance(target, str) or not callable(target):
            return False
        try:
            return {"num_envs", "device"} <= inspect.signature(target).parameters.keys()
        except ValueError:  # built-ins have no signature
            return False

    def __call__(self, *, render_mode: str | None = None) -> Any:
        """Make one environment in its Python form, wrapped.

        Raises:
            EnvNotFoundError: there is no such id, module or callable.
            MissingExtraError: a package that it needs is not installed.
            UsageError: what was made is no environment, or has not the form that is needed.
            EnvError: making or wrapping it raised.
        """
        return self.make_wrapped(self.make_raw(render_mode=render_mode))

    def make_raw(self, *, render_mode: str | None = None) -> Any:
        """Make one environment as the id or callable gives it, which may be a `KernelEnv`."""
        if self.steps_tensors:
            raise UsageError(
                f"{self.name} makes many environments that step tensors as one: there is no single "
                "one to be stepped in Python.\nLeave --vectorization python out."
            )
        target = self._target()
        if not isinstance(target, str):
            return self._call(target, render_mode)
        kwargs = self.kwargs | ({"render_mode": render_mode} if render_mode else {})
        make: Callable[..., Any]
        if names.is_game(target):
            make = names.make
        else:
            make = atari.make if target.startswith("ALE/") else gymnasium.make
            # Gymnasium's checker wraps every step, and checks the first.
            kwargs["disable_env_checker"] = True
        return registry.make_registered(target, self.kwargs, partial(make, target, **kwargs))

    def make_wrapped(self, env: Any) -> Any:
        """Turn what `make_raw` made into its Python form, wrapped."""
        if isinstance(env, KernelEnv):
            if env.agents:
                raise UsageError(
                    f"{self.name} is a game of several agents ({', '.join(env.agents)}): it is "
                    "trained on compiled, and without wrappers.\nLeave --vectorization python and "
                    "--wrapper out; to debug it, "
                    "headrace.envs.kernels.pettingzoo_adapter.KernelParallelEnv is interpreted."
                )
            env = KernelGymEnv(env)
        if specs.game_form(env):
            if self.wrappers:
                raise UsageError(
                    f"{self.name} is a game in PettingZoo's form, and is not wrapped here.\nLeave "
                    "--wrapper out, and let a callable of your own make it and wrap it."
                )
            return env
        _check_is_env(env, self.name)
        for wrapper in self.wrappers:
            wrap, name = wrapper, getattr(wrapper, "__name__", wrapper)
            if isinstance(wrap, str):
                wrap = importing.load_callable(wrap, ConfigError)
            with explain_errors(f"while {name} wrapped {self.name}"):
                env = wrap(env)
            _check_is_env(env, name)
        return env

    def _target(self) -> str | Callable[..., Any]:
        """Return what makes one environment: a callable, or an id of no kernel environment."""
        target = registry.resolve(self.env)
        if not isinstance(target, str):
            return target
        registry.load(target)
        return kernel_registry.registered_class(target) or target

    def _call(self, target: Callable[..., Any], render_mode: str | None, **more: Any) -> Any:
        if not callable(target):
            raise UsageError(
                f"env is an instance of {type(target).__name__}: expected what makes one, for "
                "there will be several: an id, a class, or `lambda: ...`."
            )
        if isinstance(target, type) and issubclass(target, KernelEnv):
            target = partial(kernel_registry.build, target)
        kwargs = self.kwargs | more
        if render_mode is not None and _takes(target, "render_mode"):
            kwargs["render_mode"] = render_mode
        kernel_registry.check_kwargs(self.name, target, kwargs)
        try:
            return target(**kwargs)
        except UsageError:
            raise
        except Exception as error:
            given = f" with {kwargs}" if kwargs else ""
            raise env_error(error, f"while making {self.name}{given}") from error

    def kernel(self) -> KernelEnv | None:
        """Make the kernel environment that is stepped compiled; None if it is not one."""
        if not self.native or self.wrappers or self.steps_tensors:
            return None
        if isinstance(self._target(), str):
            return None
        env = self.make_raw()
        if isinstance(env, KernelEnv):
            return env
        _check_is_env(env, self.name)
        close_all([env], lambda _: f"{self.name}, which was made to see of which kind it is")
        return None

    def tensors(self, num_envs: int, device: str) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        """Make environments that step tensors on torch's `device`, all as one."""
        if self.wrappers:
            raise UsageError(
                f"{self.name} makes many environments that step tensors as one, and these are not "
                "wrapped here.\nLeave --wrapper out, and let a callable of your own wrap them."
            )
        if reserved := {"num_envs", "device"} & self.kwargs.keys():
            raise UsageError(
                f"env_kwargs={self.kwargs}: {self.name} gets {' and '.join(sorted(reserved))} from "
                "--num-envs and --device. Leave it out there."
            )
        target = registry.resolve(self.env)
        assert callable(target), self.name
        vector = self._call(target, None, num_envs=num_envs, device=device)
        if not isinstance(vector, gymnasium.vector.VectorEnv):
            raise UsageError(
                f"{self.name} takes num_envs and device, as what makes environments that step "
                f"tensors, and made an object of class {type(vector).__name__}.\n"
                "Expected a gymnasium.vector.VectorEnv of so many."
            )
        return vector

    def vector(self, num_envs: int, num_threads: int) -> Any:
        """Make the environment's own vector form; ConfigError if it has none, or has wrappers."""
        target = registry.resolve(self.env)
        if not isinstance(target, str) or self.wrappers:
            reason = "wrapped" if self.wrappers else "made by a callable"
            raise ConfigError(
                f"vectorization='native', but {self.name} is {reason}: only a registered id, or a "
                "kernel environment, can have a vector form of its own.\n"
                "Use --vectorization python (or auto)."
            )
        registry.load(target)
        registered = gymnasium.registry.get(target)
        if names.is_game(target) or (registered and not registered.vector_entry_point):
            raise ConfigError(
                f"vectorization='native', but {target} registers no vector_entry_point.\n"
                "Use --vectorization python (or auto)."
            )
        kwargs = self.kwargs
        if target.startswith("ALE/"):
            kwargs = atari.vector_kwargs(num_threads) | kwargs
        make = partial(gymnasium.make_vec, target, num_envs, "vector_entry_point", **kwargs)
        return registry.make_registered(target, self.kwargs, make)


def _takes(target: Callable[..., Any], name: str) -> bool:
    """Return whether a callable takes an argument of this name, or of any."""
    given = inspect.signature(target).parameters
    return name in given or any(each.kind is each.VAR_KEYWORD for each in given.values())


def _check_is_env(env: Any, maker: Any) -> None:
    for attribute in ("reset", "step", "close", "observation_space", "action_space"):
        if not hasattr(env, attribute):
            raise UsageError(
                f"{maker} made an object of class {type(env).__name__}, which has no "
                f"`{attribute}`.\n"
                "Expected a gymnasium.Env: reset, step, close, observation_space, action_space."
            )


def make_all(maker: EnvMaker, count: int) -> list[Any]:
    """Make so many environments; if one cannot be made, those before it are closed."""
    with contextlib.ExitStack() as stack, mujoco.mute_warnings():
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
    options = {name: getattr(maker, name) for name in ("drop_obs_keys", "action_mask")}
    added = {name: getattr(maker, name) for name in ("shared_critic", "agent_ids")}
    env: Any = maker.tensors(1, "cpu") if maker.steps_tensors else maker.kernel()
    if env is None:
        env = maker.vector(1, num_threads=1) if maker.native else maker.make_raw()
    if isinstance(env, KernelEnv) and not maker.wrappers:
        return game_state.add(specs.read_kernel(maker.name, env, **options), env, **added)
    is_vector = maker.native or maker.steps_tensors
    if not is_vector:
        env = maker.make_wrapped(env)
    try:
        if (form := specs.game_form(env)) is not None:
            actions = map(env.action_space, env.possible_agents)
            info = _first_info(maker, env, actions, in_turns=form == "turns")
            return game_state.add(specs.read_game(maker.name, env, info, **options), env, **added)
        single = "single_" if is_vector else ""
        observation = getattr(env, f"{single}observation_space")
        action = getattr(env, f"{single}action_space")
        read = specs.read_tensors if maker.steps_tensors else specs.read
        info = _first_info(maker, env, [action])
        spec = read(maker.name, observation, action, info, **options)
        spec = replace(spec, num_frames=specs.num_frames(env, observation))
        return game_state.add(spec, env, **added)
    finally:
        close_all([env], lambda _: f"{maker.name}, which was made for its spaces")


def _first_info(
    maker: EnvMaker, env: Any, actions: Iterable[Any], *, in_turns: bool = False
) -> Mapping[str, Any]:
    """Return the info of a reset, if there may be an action mask in it; of games by agent."""
    if not any(map(gym_spaces.has_choices, actions)) or maker.action_mask not in ("auto", "info"):
        return {}
    position = f"env 0 of {maker.name}, episode 0, to see what it offers: reset(seed=0)"
    with explain_errors(f"in reset of {position}"):
        result = env.reset(seed=0)
    if in_turns:
        infos: Mapping[str, Any] = env.infos
        return infos
    check_fields("reset", result, lambda: position)
    info: Mapping[str, Any] = result[1]
    return info
