"""Settings that exclude each other. Left out: numbers that must divide (`checks.py`)."""

from typing import Any

from headrace.config.run_config import RunSettings
from headrace.errors import ConfigError

_OF_SEVERAL = ("worker_resources", "learner_resources")  # machines
_OF_CLUSTER = ("gpus_per_learner", "cpus_per_worker", *_OF_SEVERAL)
_DEFAULTS = RunSettings()


def without_cluster(cluster: str | None) -> dict[str, Any]:
    """Settings as they must be where a run leaves its cluster for this machine ("" or "local")."""
    names = _OF_CLUSTER if cluster == "" else _OF_SEVERAL if cluster == "local" else ()
    return {name: getattr(_DEFAULTS, name) for name in names}


def check_cluster(run: RunSettings) -> None:
    """Refuse what is of a cluster where there is none, and what cannot be there."""
    if not run.cluster:
        for name in _OF_CLUSTER:
            if getattr(run, name) != getattr(_DEFAULTS, name):
                raise ConfigError(
                    f"{name}={getattr(run, name)}, but this run is not on a cluster.\n"
                    "Use --cluster (local, auto, or an address), or leave it out."
                )
        return
    for name in _OF_SEVERAL:
        if run.cluster == "local" and getattr(run, name):
            raise ConfigError(
                f"{name}={getattr(run, name)}, but cluster='local' is this machine alone.\n"
                f"Leave --{name.replace('_', '-')} out, or use --cluster auto."
            )
    if run.inference == "learner":
        raise ConfigError(
            "inference='learner' needs memory that workers share with the learner, and those of a "
            "cluster may be on other machines.\nUse --inference sampler."
        )
    if run.backend == "mpi":
        raise ConfigError("backend='mpi' is started by mpirun; on a cluster use --backend auto.")
    if run.device == "cpu" and run.gpus_per_learner > 0:
        raise ConfigError(
            f"device='cpu' and gpus_per_learner={run.gpus_per_learner}: expected one of the two."
        )


def check_auto(run: RunSettings) -> None:
    """Refuse to count GPUs where they are not this machine's."""
    if run.cluster:
        raise ConfigError(
            "num_learners=-1 (auto) counts the GPUs of this machine, and on a cluster learners are "
            f"on others (cluster={run.cluster!r}).\nUse --num-learners N."
        )


def check_guards(run: RunSettings) -> None:
    """Refuse guards where they cannot be, or are switched off."""
    if run.vectorization == "native" and run.on_env_error == "restart":
        raise ConfigError(
            "on_env_error='restart', but one environment of a native vector cannot be made anew.\n"
            "Leave it out; or, where there is a Python form, use --vectorization python."
        )
    if run.env_timeout_s and not run.guards:
        raise ConfigError(
            f"env_timeout_s={run.env_timeout_s}, but with --no-guards nothing watches for silence."
            "\nLeave one of the two out."
        )
