"""Policies of every kind, untrained, in checkpoints: what `headrace export` covers.

`python -m tests.interop.export.cases` exports all of them, and writes the table of docs/export.md.
"""

import itertools
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import headrace
from benchmarks.harness.machine import ROOT, machine
from benchmarks.table import filled_in
from headrace.config.algorithms import ALGORITHMS
from headrace.envs.spaces.masks import MASK, space_of_masks
from headrace.interop.export.observations import random_observations
from headrace.models.critics.batch_norm import BatchNorm
from headrace.models.normalization import RunningMoments
from headrace.models.policy import Network, torch_seed
from headrace.spec import EnvSpec, Space
from headrace.storage import checkpoint

PAGE, RESULTS = ROOT / "docs/export.md", ROOT / "benchmarks/results/export_coverage.json"
INF = float("inf")

NUMBERS = Space("box", (4,), "float32")
NESTED = Space(
    "dict",
    parts=(
        ("camera", Space("box", (8, 8, 3), "uint8")),
        ("hand.0", Space("box", (2, 3), "float32")),
        ("hand.1", Space("discrete", (), "int64", nvec=(4,), start=(-2,))),
        ("lights", Space("multi_binary", (3,), "int8")),
    ),
    paths=(("camera",), ("hand", 0), ("hand", 1), ("lights",)),
)
OBSERVATIONS = {
    "Box of numbers": NUMBERS,
    "Box of integers": Space("box", (2, 2), "int16"),
    "Discrete": Space("discrete", (), "int64", nvec=(5,), start=(3,)),
    "MultiDiscrete": Space("multi_discrete", (2,), "int64", nvec=(3, 2), start=(0, -1)),
    "image, nature": Space("box", (4, 36, 36), "uint8"),
    "image, impala": Space("box", (16, 16, 3), "uint8"),
    "image, small": Space("box", (5, 5), "uint8"),
    "Dict with Tuple and image": NESTED,
}

CHOICE = Space("discrete", (), "int64", nvec=(3,), start=(-1,))
GRID = Space("multi_discrete", (2, 2), "int32", nvec=(2, 3, 4, 2), start=(0, 5, -1, 0))
BITS = Space("multi_discrete", (3,), "int64", nvec=(2, 2, 2), start=(0, 0, 0))
STEER = Space("box", (2,), "float32", (-2.0, 0.0), (2.0, 10.0))
HALF = Space("box", (1, 2), "float64", (-INF, 0.0), (1.0, INF))
PRODUCT = Space(
    "dict", (8,), "float64", nvec=(3, 2, 2, 2), start=(-1, 0, 0, 0),
    parts=(
        ("gears", Space(
            "tuple", (4,), "float64", nvec=(3, 2, 2, 2), start=(-1, 0, 0, 0),
            parts=(("0", CHOICE), ("1", BITS)),
        )),
        ("steer", STEER), ("wheel", HALF),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Head:
    """An algorithm's policy for a kind of actions."""

    algo: str
    action: Space
    settings: dict[str, Any] = field(default_factory=dict)
    masked: bool = False


C51 = {"distribution": "c51", "v_min": -3.0, "v_max": 9.0, "num_atoms": 7}
HEADS = {
    "PPO, Discrete": Head("ppo", CHOICE),
    "PPO, Box": Head("ppo", STEER),
    "DQN, Discrete": Head("dqn", CHOICE),
    "SAC, Box": Head("sac", STEER),
    "PPO, Discrete, masked": Head("ppo", CHOICE, masked=True),
    "PPO, Dict with Tuple, masked": Head("ppo", PRODUCT, masked=True),
    "TD3, Box": Head("td3", STEER),
    "PPO, MultiDiscrete": Head("ppo", GRID),
    "PPO, MultiDiscrete, masked": Head("ppo", GRID, masked=True),
    "PPO, MultiBinary": Head("ppo", BITS),
    "PPO, Box without bounds": Head("ppo", HALF),
    "A2C, Discrete": Head("a2c", CHOICE),
    "IMPALA, Discrete": Head("impala", CHOICE),
    "APPO, Box": Head("appo", STEER),
    "PQN, Discrete": Head("pqn", CHOICE),
    "DQN, Discrete, masked": Head("dqn", CHOICE, masked=True),
    "DQN, dueling": Head("dqn", CHOICE, {"dueling": True}),
    "DQN, noisy, C51": Head("dqn", CHOICE, {"noisy": True, **C51}),
    "DQN, quantiles": Head("dqn", CHOICE, {"distribution": "qr", "num_atoms": 5}),
    "Rainbow, masked": Head("rainbow", CHOICE, C51, masked=True),
    "SAC, Box without bounds": Head("sac", HALF),
    "SAC, Discrete": Head("sac", CHOICE),
    "SAC, Discrete, masked": Head("sac", CHOICE, masked=True),
    "TQC, Box": Head("tqc", STEER),
    "REDQ, Box": Head("redq", STEER),
    "DroQ, Box": Head("droq", STEER),
    "CrossQ, Box": Head("crossq", STEER),
    "DDPG, Box": Head("ddpg", STEER),
    "BC, Discrete": Head("bc", CHOICE),
    "BC, Box": Head("bc", STEER),
    "TD3+BC, Box": Head("td3bc", STEER),
    "CQL, Discrete": Head("cql", CHOICE),
    "IQL, Box": Head("iql", STEER),
}
CORES = ("none", "lstm", "gru")
Case = tuple[str, str, str]
"""A head, an observation, and a core, by their names."""
EACH = ("PPO, Discrete", "Box of numbers", "none")


SAME_NETWORK = {
    "A2C, Discrete", "IMPALA, Discrete", "APPO, Box", "BC, Discrete", "BC, Box", "TQC, Box",
    "REDQ, Box", "DroQ, Box", "DDPG, Box", "TD3+BC, Box", "CQL, Discrete", "IQL, Box",
}  # fmt: skip
"""Heads with the network of another head: tried with one kind of observation."""


def is_tried(head: str, observation: str, core: str) -> bool:
    has_core = core == "none" or ALGORITHMS[HEADS[head].algo].recurrent
    return has_core and (head not in SAME_NETWORK or observation == EACH[1])


SOME = [
    EACH,
    ("DQN, Discrete, masked", "image, nature", "none"),
    ("PPO, Dict with Tuple, masked", "Dict with Tuple and image", "lstm"),
    ("SAC, Box", "Box of numbers", "gru"),
    ("TD3, Box", "image, impala", "none"),
]


def cases() -> list[Case]:
    """All of them: `SOME`, then those in which two of the three names are the usual ones."""
    tried = [case for case in itertools.product(HEADS, OBSERVATIONS, CORES) if is_tried(*case)]

    def unusual(case: Case) -> int:
        return sum(name != usual for name, usual in zip(case, EACH, strict=True))

    return [*SOME, *sorted(set(tried) - set(SOME), key=lambda case: (unusual(case), case))]


def spec_of(head: Head, observation: Space) -> EnvSpec:
    if not head.masked:
        return EnvSpec("Case-v0", observation, head.action)
    parts = (*observation.leaves, (MASK, space_of_masks(head.action)))
    paths = (*observation.paths, (MASK,)) if observation.paths else ()
    return EnvSpec("Case-v0", Space("dict", parts=parts, paths=paths), head.action, MASK, True)


def save(folder: Path, case: Case, **more: Any) -> Path:
    """Write a checkpoint with a policy of random weights, and moments of normalizers."""
    head, observation, core = HEADS[case[0]], OBSERVATIONS[case[1]], case[2]
    return save_policy(folder, head, spec_of(head, observation), core=core, **more)


def save_policy(folder: Path, head: Head, spec: EnvSpec, model: Any = None, **network: Any) -> Path:
    algorithm = ALGORITHMS[head.algo]
    config = algorithm.Config(**head.settings)
    network = {"hidden_sizes": (16,), "core_size": 8, "normalize_obs": True} | network
    with torch_seed(0):
        policy = algorithm.build_policy(spec, Network(**network), config, model)
        _fill(policy)
    described = {
        "algo": head.algo, "algo_settings": asdict(config),
        "model": "tests:model" if model else "", "network": asdict(Network(**network)),
        "spec": spec.to_json(),
    }  # fmt: skip
    files = {"policy_default": policy.state_dict()}
    return checkpoint.write(folder, 4096, files, {"policies": {"default": described}})


@torch.no_grad()
def _fill(policy: torch.nn.Module) -> None:
    """Give an untrained policy what training gives."""
    for name, parameter in policy.named_parameters():
        parameter.add_(0.3 * torch.randn_like(parameter) / max(1, parameter[0].numel()) ** 0.5)
        if name.endswith("actor.weight"):
            parameter.mul_(5.0)
    for part in policy.modules():
        if isinstance(part, RunningMoments):
            part.mean.normal_(0.5, 1.0)
            part.var.uniform_(0.5, 4.0)
            part.count.fill_(100)
        if isinstance(part, BatchNorm):
            part.mean.normal_()
            part.var.uniform_(0.5, 4.0)
    for name, buffer in policy.named_buffers():
        if name.endswith("is_random"):
            buffer.fill_(0.0)
        if name.endswith("epsilon"):
            buffer.fill_(0.2)


def observations(policy: Any, count: int, seed: int = 1) -> Any:
    return random_observations(policy.spec, policy.module, count, seed)


def measured() -> dict[str, Any]:
    """Export every case, and return what the checks found, as plain data.

    Greedy, and with one kind of observation stochastic as well: noise and encoder never meet.
    """
    rows = []
    for case in cases():
        with tempfile.TemporaryDirectory() as folder:
            saved = save(Path(folder), case)
            for stochastic in (False, True)[: 1 + (case[1] == EACH[1])]:
                result = headrace.export_policy(saved, stochastic=stochastic)
                rows.append(
                    {
                        "case": list(case),
                        "stochastic": stochastic,
                        "checks": [check.to_json() for check in result.checks],
                    }
                )
                print(*case, result.checks[0].describe(), sep=", ", file=sys.stderr)
    return {"machine": machine(), "cases": rows}


def table(results: dict[str, Any]) -> str:
    """The table of docs/export.md: a row for each head, a column for each observation."""
    lines = ["| | " + " | ".join(OBSERVATIONS) + " |", "|---" * (len(OBSERVATIONS) + 1) + "|"]
    for head in HEADS:
        cells = []
        for observation in OBSERVATIONS:
            of = [row for row in results["cases"] if row["case"][:2] == [head, observation]]
            cores = [core for core in CORES if any(row["case"][2] == core for row in of)]
            names = ", ".join(core.upper() for core in cores if core != "none")
            cells.append(f"yes{f', {names}' if names else ''}" if cores else "no")
        lines.append(f"| {head} | " + " | ".join(cells) + " |")
    checks = [check for row in results["cases"] for check in row["checks"]]
    total = {
        name: sum(check[name] for check in checks)
        for name in ("rows", "identical", "within_rounding", "ties", "different")
    }
    largest = {
        name: max(check["largest_difference"].get(name, 0.0) for check in checks)
        for name in ("action", "params", "next_state")
    }
    lines += [
        "",
        f"{len(results['cases'])} files, greedy and stochastic, were compared with their policies on "
        f"{total['rows']:,} random observations: {total['identical']:,} actions were equal to the "
        f"bit, {total['within_rounding']:,} more (of numbers) within rounding, {total['ties']:,} "
        f"were ties that rounding decides, {total['different']:,} differed. The largest "
        f"|difference| was {largest['action']:.1e} of actions, {largest['params']:.1e} of "
        f"parameters, and {largest['next_state']:.1e} of recurrent states.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(measured(), indent=1) + "\n")
    PAGE.write_text(filled_in(PAGE.read_text(), table(json.loads(RESULTS.read_text())), "covered"))
