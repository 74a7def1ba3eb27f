"""`check_env`: checks an environment before anything is trained on it."""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gymnasium
from gymnasium.utils import env_checker

from headrace.envs.api import close_all
from headrace.envs.check import equivalence, kernel_checks
from headrace.envs.check.report import Check, Report
from headrace.envs.check.vector_checks import vector_checks
from headrace.envs.factory import EnvLike, EnvMaker, env_spec
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.spaces.specs import game_form
from headrace.errors import EnvError, UnsupportedSpaceError, UsageError
from headrace.seeding import check_seed
from headrace.spec import GAMES

_AFTER_CLASS = (
    "python", "types", "play", "states", "resets", "agents", "randomness", "ends", "cpu", "gpu",
)  # fmt: skip
_NO_CPU = "it does not run on the CPU"


def check_env(
    env: EnvLike | KernelEnv,
    env_kwargs: dict[str, Any] | None = None,
    *,
    num_steps: int = 0,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Report:
    """Check an environment. Kernel environments are checked for more than others.

        report = headrace.check_env(MyKernelEnv)
        assert report.ok, report

    Args:
        env: an id, `module:Class`, a class, a function that makes one, or a kernel environment.
        num_steps: steps of each of up to 32 environments; 0: for a kernel environment twice its
            time limit, at least 200 (2,000 without a limit); for others 200.
        seed: of episodes and actions.
        say: called with the text of each check as it ends.

    Returns:
        A line for each check; `ok` is false if something is wrong.

    Raises:
        EnvNotFoundError: there is no such environment.
        MissingExtraError: a package that it needs (Numba) is not installed.
        UsageError: it does not take `env_kwargs`, or `num_steps` or `seed` is negative.
    """
    if num_steps < 0:
        raise UsageError(f"num_steps={num_steps}: expected 1 or more, or 0 for the default.")
    check_seed(seed)
    if isinstance(env, KernelEnv):
        if env_kwargs:
            raise UsageError(f"env_kwargs={env_kwargs}, but env is an object already: {env!r}.")
        name, running = type(env).__name__, check_kernel(env, num_steps, seed)
    else:
        maker = EnvMaker(env, env_kwargs or {}, native=True)
        name, running = maker.name, _check_made(maker, num_steps, seed)
    checks = []
    for check in running:
        checks.append(check)
        if say is not None:
            say(str(check))
    return Report(name, tuple(checks))


def _check_made(maker: EnvMaker, num_steps: int, seed: int) -> Iterator[Check]:
    try:
        kernel = maker.kernel()
    except EnvError as error:
        yield Check("making", wrong=(str(error),))
        return
    if kernel:
        yield from check_kernel(kernel, num_steps, seed)
    else:
        yield from _check_other(maker, num_steps, seed)


def check_kernel(env: KernelEnv, num_steps: int = 0, seed: int = 0) -> Iterator[Check]:
    """Yield all checks of a kernel environment, each as it ends; see `check_env`."""
    yield (of_class := kernel_checks.check_class(env))
    if of_class.wrong:
        yield from _not_checked(_AFTER_CLASS, "correct the class first")
        return
    case = kernel_checks.make_case(env, num_steps, seed)
    yield kernel_checks.check_python(case)
    if case.traced is None:
        yield from _not_checked(_AFTER_CLASS[1:], "plain Python fails")
        return
    yield (types := kernel_checks.check_types(case))
    if types.wrong and not types.done:
        yield from _not_checked(("play",), "it does not compile")
    else:
        yield kernel_checks.check_play(case)
    if case.on_cpu is None:
        yield from _not_checked(("states",), _NO_CPU)
    else:
        yield kernel_checks.check_states(case)
    yield kernel_checks.check_resets(case)
    yield kernel_checks.check_agents(case)
    yield (randomness := kernel_checks.check_randomness(case))
    if case.on_cpu is None:
        yield from _not_checked(("ends", "cpu", "gpu"), _NO_CPU)
        return
    yield kernel_checks.check_ends(case)
    if randomness.wrong or case.expected is None:
        reason = "the same seed must give the same" if randomness.wrong else "plain Python fails"
        yield from _not_checked(("cpu", "gpu"), reason)
        return
    yield equivalence.check_cpu(case)
    yield equivalence.check_gpu(case)


def _not_checked(names: tuple[str, ...], reason: str) -> Iterator[Check]:
    return (Check(name, missing=reason) for name in names)


def _check_other(maker: EnvMaker, num_steps: int, seed: int) -> Iterator[Check]:
    maker = replace(maker, native=False)
    try:
        spec = env_spec(maker)
    except (UnsupportedSpaceError, EnvError) as error:
        yield Check("spaces", wrong=(str(error),))
        is_vector, is_masked = maker.steps_tensors, False
    else:
        is_masked = bool(spec.mask_key)
        obs, action = spec.observation.describe(), spec.action.describe()
        yield Check("spaces", f"observations are {obs}, actions are {action}", notes=spec.notes)
        is_vector = spec.interface in ("tensor", *GAMES)
        yield from vector_checks(maker, spec, num_steps, seed)
    if not is_vector:
        yield from _check_with_gymnasium(maker, is_masked=is_masked)


def _check_with_gymnasium(maker: EnvMaker, *, is_masked: bool) -> Iterator[Check]:
    """Run Gymnasium's checker, which takes no wrappers, unless it is a game of PettingZoo's.

    It knows no action masks: an environment that has one may refuse what it plays.
    """
    try:
        env = maker()
    except EnvError as error:
        yield Check("gymnasium", wrong=(str(error),))
        return
    is_game, is_env, wrong = game_form(env) is not None, isinstance(env, gymnasium.Env), []
    missing = ""
    name = type(env.unwrapped if is_env else env).__name__
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if is_env:
            try:
                env_checker.check_env(env.unwrapped, skip_render_check=True)
            except Exception as error:  # most are assertions; an environment may raise anything
                wrong.append(f"{type(error).__name__}: {error}")
                if is_masked:
                    missing = f"it plays forbidden actions, and the environment says: {wrong.pop()}"
        try:
            close_all([env], lambda _: f"{maker.name}, after Gymnasium's checker")
        except EnvError as error:
            wrong.append(str(error))
    if is_game:
        return
    if not is_env:
        missing = f"{name} is no subclass of gymnasium.Env, which Gymnasium's checker expects"
        yield Check("gymnasium", missing=missing, wrong=tuple(wrong))
        return
    texts = dict.fromkeys(re.sub(r"\x1b\[[0-9;]*m", "", str(w.message)) for w in caught)
    done = f"Gymnasium's checker got {name}; nothing was rendered"
    yield Check("gymnasium", done, wrong=tuple(wrong), warnings=tuple(texts), missing=missing)
