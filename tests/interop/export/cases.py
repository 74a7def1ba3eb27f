"""Policies of every kind, untrained, in checkpoints: what `headrace export` covers.

`python -m tests.interop.export.cases` exports all of them, and writes the table of docs/export.md.
"""

import itertools
import json
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


def unusual(case: Case) -> int:
    """How many of the three names are not the usual ones."""
    return sum(name != usual for name, usual in zip(case, EACH, strict=True))


def cases() -> list[Case]:
    """All of them: `SOME`, then those in which two of the three names are the usual ones."""
    tried = [case for case in itertools.product(HEADS, OBSERVATIONS, CORES) if is_tried(*case)]
    return [*SOME, *sorted(set(tried) - set(SOME), key=lambda case: (unusual(case), case))]


def pairs() -> list[Case]:
    """Those in which one of the three names is the usual one: all pairs of the others."""
    return [case for case in cases() if unusual(case) < 3]


def spec_of(head: Head, observation: Space) -> EnvSpec:
    if not head.masked:
        return EnvSpec("Case-v0", observation, head.action)
    parts = (*observation.leaves, (MASK, space_of_masks(head.action)))
    paths = (*observation.paths, (MASK,)) if observation.paths else ()
    return EnvSpec("Case-v0", Space("dict", parts=parts, paths=paths), head.action, MASK, True)


def save(folder: Path, case: Case, **more: Any) -> Path:
    """Write a checkpoint, below `folder`, of a policy of random weights and normalizers."""
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
    return checkpoint.write(folder, 4096, files, {"policies": {"default": described}}).parent


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


def measure() -> None:
    """Export all pairs, and write what the checks find to RESULTS.

    Greedy, and with one kind of observation stochastic as well: noise and encoder never meet. Cases
    that the file has are left out, so that what was stopped goes on; remove it to begin anew.
    """
    results = {"machine": machine(), "cases": []}
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text())
    done = [tuple(row["case"]) for row in results["cases"]]
    for case in (case for case in pairs() if case not in done):
        with tempfile.TemporaryDirectory() as folder:
            saved = save(Path(folder), case)
            modes = (False, True) if case[1:] == EACH[1:] else (False,)
            for stochastic in modes:
                [check] = headrace.export_policy(saved, stochastic=stochastic).checks
                row = {"case": case, "stochastic": stochastic, "check": check.to_json()}
                results["cases"].append(row)
                print(*case, check.describe(), sep=", ")
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def table(results: dict[str, Any]) -> str:
    """The tables of docs/export.md: heads with observations, heads with cores, and the figures."""
    seen = {tuple(row["case"]) for row in results["cases"]}
    columns = [*OBSERVATIONS, *(core.upper() for core in CORES[1:])]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for head in HEADS:
        cells = [(head, observation, "none") in seen for observation in OBSERVATIONS]
        cells += [(head, EACH[1], core) in seen for core in CORES[1:]]
        same = head in SAME_NETWORK
        words = ["yes" if cell else "same" if same and i else "no" for i, cell in enumerate(cells)]
        words[-2:] = ["yes" if cell else "none" for cell in cells[-2:]]
        lines.append(f"| {head} | " + " | ".join(words) + " |")
    checks = [row["check"] for row in results["cases"]]
    total = {
        name: sum(check[name] for check in checks)
        for name in ("rows", "identical", "within_rounding", "ties", "different")
    }

    def largest(kind: str) -> str:
        found = [
            difference
            for check in checks
            for name, difference in check["largest_difference"].items()
            if name.startswith(kind)
        ]
        return f"{max(found):.1e}"

    return "\n".join(lines) + (
        f"\n\n{len(checks)} files were compared with their policies on {total['rows']:,} random "
        f"observations in all: {total['identical']:,} actions were equal to the bit,\n"
        f"{total['within_rounding']:,} more, of numbers, within rounding; {total['ties']:,} were "
        f"ties that rounding decides; {total['different']:,} differed.\nThe largest "
        f"|difference| was {largest('action')} of actions that are numbers, "
        f"{largest('params')} of parameters, and "
        f"{largest('next_state')} of recurrent states."
    )


if __name__ == "__main__":
    measure()
    PAGE.write_text(filled_in(PAGE.read_text(), table(json.loads(RESULTS.read_text())), "covered"))
