"""Chooses who runs the parts of a study: this machine, or its cluster."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from headrace.distributed import child_process
from headrace.machine.limits import cpu_cores
from headrace.tuning.plan import Plan
from headrace.tuning.runners.api import Runner
from headrace.tuning.runners.local import LocalRunner
from headrace.tuning.runners.part import run_part


def connected(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Connect to the study's cluster, if it has one, within a `with`.

    Raises:
        ConfigError: it cannot be reached.
        MissingExtraError: Ray is missing.
    """
    if not plan.cluster:
        return contextlib.nullcontext()
    from headrace.training.ray import connect  # Ray is an extra

    return connect.to_cluster(plan.cluster, max(cpu_cores(), (plan.parallel or 1) * plan.cores))


def make_runner(plan: Plan, folder: Path, say: Callable[[str], None]) -> Runner:
    """Make the runner of a study's parts; RunDirError if the directory cannot be written."""
    if plan.cluster:
        from headrace.tuning.runners.cluster import ClusterRunner  # Ray is an extra

        return ClusterRunner(plan.parallel, plan.cores, folder, say)
    child_process.warm_up(run_part.__module__)
    return LocalRunner(plan.parallel or cpu_cores())
