"""`check_env`: what is wrong with an environment, before anything is trained on it.

Kernel environments are compared interpreted, compiled for the CPU and on a GPU, and looked at for
what breaks there (`kernel_checks.py`, `episodes.py`, `equivalence.py`); all others are played
(`vector.py`), and those of Gymnasium's form handed to its own checker.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from gymnasium.utils import env_checker

from headrace.envs.check import equivalence
from headrace.envs.check import kernel_checks as episodes
from headrace.envs.check import kernel_checks as play
from headrace.envs.check.report import Check, Report
from headrace.envs.check.vector_checks import vector_checks
from headrace.envs.factory import EnvLike, EnvMaker, env_spec
from headrace.envs.kernels.env import KernelEnv
from headrace.envs.spaces import is_parallel
from headrace.errors import EnvError, UnsupportedSpaceError, UsageError

_LATER = (
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
    """Check an environment: a kernel environment by all that it must hold, others by less.

        report = headrace.check_env(MyKernelEnv)
        assert report.ok, report

    Args:
        env: an id, `module:Class`, a class, a function that makes one, or a kernel environment.
        env_kwargs: passed to what makes it.
        num_steps: steps of each of up to 32 environments; 0: twice the time limit of a kernel
            environment, else 200.
        seed: of the plays and actions.
        say: is told of each check as it is done; default: nobody.

    Returns:
        A line for each check; `ok` is false if something is wrong.

    Raises:
        EnvNotFoundError: there is no such environment.
        MissingExtraError: a package that it needs (Numba) is not installed.
        UsageError: it does not take `env_kwargs`, or `num_steps` is negative.
        EnvError: making it raised.
    """
    if num_steps < 0:
        raise UsageError(f"num_steps={num_steps}: expected 1 or more, or 0 for what the env needs.")
    if isinstance(env, KernelEnv):
        if env_kwargs:
            raise UsageError(f"env_kwargs={env_kwargs}, but env is made already: {env!r}.")
        name, made = type(env).__name__, kernel_checks(env, num_steps, seed)
    else:
        maker = EnvMaker(env, env_kwargs or {}, native=True)
        kernel, name = maker.kernel(), maker.name
        made = (
            kernel_checks(kernel, num_steps, seed) if kernel else _of_others(maker, num_steps, seed)
        )
    checks = []
    for check in made:
        checks.append(check)
        if say is not None:
            say(str(check))
    return Report(name, tuple(checks))


def kernel_checks(env: KernelEnv, num_steps: int = 0, seed: int = 0) -> Iterator[Check]:
    """All checks of a kernel environment, each made as it is asked for; see `check_env`.

    Those that make no sense yet, because of what an earlier one found, say so.
    """
    yield (of_class := play.check_class(env))
    if of_class.wrong:
        yield from _left_out(_LATER, "the class is to be mended first")
        return
    case = play.case(env, num_steps, seed)
    yield play.check_python(case)
    if case.watched is None:
        yield from _left_out(_LATER[1:], "plain Python fails")
        return
    yield (types := play.check_types(case))
    if types.wrong and not types.done:
        yield from _left_out(("play",), "it does not compile")
    else:
        yield play.check_play(case)
    if case.on_cpu is None:
        yield from _left_out(("states",), _NO_CPU)
    else:
        yield play.check_states(case)
    yield play.check_resets(case)
    yield play.check_agents(case)
    yield (chance := episodes.check_randomness(case))
    if case.on_cpu is None:
        yield from _left_out(("ends", "cpu", "gpu"), _NO_CPU)
        return
    yield episodes.check_ends(case)
    if chance.wrong or case.expected is None:
        why = "the same seed must give the same first" if chance.wrong else "plain Python fails"
        yield from _left_out(("cpu", "gpu"), why)
        return
    yield equivalence.check_cpu(case)
    yield equivalence.check_gpu(case)


def _left_out(names: tuple[str, ...], why: str) -> Iterator[Check]:
    return (Check(name, missing=why) for name in names)


def _of_others(maker: EnvMaker, num_steps: int, seed: int) -> Iterator[Check]:
    maker = replace(maker, native=False)
    try:
        spec = env_spec(maker)
    except (UnsupportedSpaceError, EnvError) as error:
        yield Check("spaces", wrong=(str(error),))
        is_vector = maker.steps_tensors or is_parallel(maker())
    else:
        seen, acts = spec.observation.describe(), spec.action.describe()
        yield Check("spaces", f"policies see {seen}, and act {acts}", notes=spec.notes)
        is_vector = spec.kind in ("tensor", "parallel")
        if spec.mask_key:
            yield from _left_out(("play", "randomness"), "random actions do not keep to masks")
        else:
            yield from vector_checks(maker, spec, num_steps, seed)
    if not is_vector:
        yield _of_gymnasiums(maker().unwrapped)


def _of_gymnasiums(env: Any) -> Check:
    """Gymnasium's checker, of what has no wrappers, as it asks for; the environment is closed."""
    wrong: tuple[str, ...] = ()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            env_checker.check_env(env, skip_render_check=True)
        except Exception as error:  # most are assertions; an environment may raise anything
            wrong = (f"{type(error).__name__}: {error}",)
        finally:
            env.close()
    plain = dict.fromkeys(re.sub(r"\x1b\[[0-9;]*m", "", str(of.message)) for of in told)
    done = f"Gymnasium's checker was given {type(env).__name__}; nothing was rendered"
    return Check("gymnasium", done, wrong=wrong, warnings=tuple(plain))
