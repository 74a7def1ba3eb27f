"""What the clusters of this folder cost an hour, and one machine that has as many GPUs.

`python deploy/costs.py` prints the tables of deploy/README.md; --write puts them there. Left out:
disks, the shared file system, traffic out of the zone, taxes, discounts, and how long a run takes.
"""

import sys
from pathlib import Path

# On demand, Linux, us-east-1, in US dollars an hour: AWS's price list of 2026-07-20, as
# github.com/aws/karpenter-provider-aws has it (pkg/providers/pricing/zz_generated.pricing_aws.go at
# commit 1d92708). Name -> GPUs, vCPUs, price. The first two are from AWS's pages of these types.
MACHINES = {
    "g4dn.xlarge": ("1 T4", 4, 0.526),
    "g5.xlarge": ("1 A10G", 4, 1.006),
    "c5.2xlarge": ("", 8, 0.340),
    "c6a.2xlarge": ("", 8, 0.306),
    "g4dn.metal": ("8 T4", 96, 7.824),
    "g5.48xlarge": ("8 A10G", 192, 16.288),
    "p3.16xlarge": ("8 V100", 64, 24.480),
}
CLUSTER = {"g4dn.xlarge": 8, "c5.2xlarge": 4}
"""As in aws.yaml and kuberay.yaml."""
COMPARED = [
    (CLUSTER, "g4dn.metal"),
    (CLUSTER, "p3.16xlarge"),
    ({"g5.xlarge": 8, "c5.2xlarge": 4}, "g5.48xlarge"),
    ({"g5.xlarge": 8, "c6a.2xlarge": 4}, "g5.48xlarge"),
]
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- costs -->\n", "<!-- end of costs -->\n"


def per_hour(machines: dict[str, int]) -> float:
    """Dollars an hour of so many of each."""
    return sum(count * MACHINES[name][2] for name, count in machines.items())


def tables() -> str:
    """Each machine's price; each cluster beside one big machine."""
    lines = ["| machine | GPUs | vCPUs | $ an hour |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {gpus} | {cpus} | {p:.3f} |" for name, (gpus, cpus, p) in MACHINES.items()
    ]
    lines += [
        "",
        "| cluster | vCPUs | $ an hour | one machine | vCPUs | $ an hour | times as dear |",
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for cluster, big in COMPARED:
        words = " + ".join(f"{count} {name}" for name, count in cluster.items())
        cpus = sum(count * MACHINES[name][1] for name, count in cluster.items())
        ours, theirs = per_hour(cluster), MACHINES[big][2]
        lines.append(
            f"| {words} | {cpus} | {ours:.2f} | {big} | {MACHINES[big][1]} | {theirs:.2f} "
            f"| {theirs / ours:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(tables(), end="")
    if "--write" in sys.argv:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(before + BEGIN + tables() + END + rest.split(END)[1])
