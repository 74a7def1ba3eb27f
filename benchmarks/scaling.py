"""The tables of docs/scaling.md: what learners cost as measured, and as a model has it for GPUs.

    python -m benchmarks.scaling        # rewrites them, from results/learners.json and the model

Left out: measuring (`learners.py`). The model's constants are other people's figures; nothing
here was measured on more than one GPU.
"""

import json
from dataclasses import dataclass

from benchmarks.harness.machine import ROOT
from headrace.models import policy
from headrace.models.policy import Network
from headrace.spec import EnvSpec, Space

PAGE = ROOT / "docs/scaling.md"
RESULTS = ROOT / "benchmarks/results/learners.json"
SPANS = ("env_step", "infer", "learn", "allreduce", "ranks")
CARTPOLE = EnvSpec(
    "CartPole-v1",
    Space("box", (4,), "float32"),
    Space("discrete", (), "int64", nvec=(2,), start=(0,)),
)
BREAKOUT = EnvSpec(
    "ALE/Breakout-v5",
    Space("box", (4, 84, 84), "uint8"),
    Space("discrete", (), "int64", nvec=(4,), start=(0,)),
)


@dataclass(frozen=True)
class Link:
    """How GPUs reach each other.

    Attributes:
        name: in tables.
        gpus: how many.
        latency_us: of an all-reduce of a few bytes.
        bus_gb_per_s: NCCL's bus bandwidth of a large one, for each GPU.
    """

    name: str
    gpus: int
    latency_us: float
    bus_gb_per_s: float

    def allreduce_us(self, size: int) -> float:
        """For `size` bytes: latency + 2 (N - 1) / N x size / bandwidth."""
        moved = 2 * (self.gpus - 1) / self.gpus * size
        return self.latency_us + moved / (self.bus_gb_per_s * 1e3)


LINKS = (
    Link("8 GPUs, NVLink", 8, 30.0, 300.0),
    Link("8 nodes of 1 GPU, 25 Gb/s", 8, 630.0, 2.5),
    Link("32 GPUs, 4 nodes, InfiniBand", 32, 110.0, 40.0),
    Link("32 GPUs, 4 nodes, 100 Gb/s cloud network", 32, 320.0, 10.0),
)
MINIBATCH_MS = (2.0, 20.0)
"""What a minibatch takes on one GPU: bound by launches (small networks); a large image batch."""


def networks() -> dict[str, int]:
    """Name -> bytes of its gradients."""
    made = {
        "2 x 64, CartPole": policy.build(CARTPOLE, Network(), 0),
        "2 x 256, CartPole": policy.build(CARTPOLE, Network(hidden_sizes=(256, 256)), 0),
        "NatureCNN, Atari": policy.build(BREAKOUT, Network(), 0),
    }
    return {name: 4 * sum(p.numel() for p in of.parameters()) for name, of in made.items()}


def measured() -> str:
    """Of each table of results/learners.json: rates, their ratio, and where the seconds went."""
    found = json.loads(RESULTS.read_text())
    machine = found["machine"]
    turns = max(len(row["turns"]) for of in found["tables"].values() for row in of["contestants"])
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, commit {machine['git_commit'][:7]}, "
        f"{turns} turns; medians, with the least and most. Seconds are those of rank 0 in "
        "a typical turn.",
    ]
    for title, table in found["tables"].items():
        header = " | ".join(SPANS)
        lines += ["", f"**{title}**, {table['work']['env_steps']:,} env steps", ""]
        lines += [f"| | env steps/s | of 1 learner | {header} |"]
        lines += ["|---|---|---|" + "---|" * len(SPANS)]
        for row in table["contestants"]:
            order = sorted(range(len(row["turns"])), key=row["turns"].__getitem__)
            meter = row["meters"][order[len(order) // 2]]
            seconds = " | ".join(f"{meter.get(span, 0.0):.2f}" for span in SPANS)
            rates = f"{row['median']:,.0f} ({row['min']:,.0f} to {row['max']:,.0f})"
            ratio = row["of_best_peer"]
            lines += [f"| {row['name']} | {rates} | {ratio:.2f} | {seconds} |"]
    return "\n".join(lines)


def predicted() -> str:
    """What the model has for each network, link and time of a minibatch."""
    header = " | ".join(f"batch grows, {ms:g} ms | same batch, {ms:g} ms" for ms in MINIBATCH_MS)
    lines = [f"| gradients | link | all-reduce | {header} |"]
    lines += ["|---|---|---|" + "---|" * (2 * len(MINIBATCH_MS))]
    for name, size in networks().items():
        for link in LINKS:
            took = link.allreduce_us(size)
            cells = []
            for ms in MINIBATCH_MS:
                alone = 1e3 * ms
                fixed = min(1e3 * MINIBATCH_MS[0], alone)  # launches, however few the rows
                share = fixed + (alone - fixed) / link.gpus
                cells += [f"{alone / (alone + took):.0%}", f"{alone / (share + took):.1f} x"]
            lines += [
                f"| {name}: {size:,} B | {link.name} | {took:,.0f} µs | {' | '.join(cells)} |"
            ]
    return "\n".join(lines)


def rendered(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in (("measured", measured()), ("predicted", predicted())):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
    print(f"Written: {PAGE.relative_to(ROOT)}")
