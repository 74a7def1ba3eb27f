"""deploy/: the clusters, their commands and their costs agree with Ray, Headrace and each other.

Left out: a cloud. What was tried by hand instead is in deploy/README.md.
"""

import importlib.util
import itertools
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from headrace.cli.commands import FLAGS
from headrace.cli.flags import explicit, parse
from headrace.cli.main import flags_of
from headrace.config.derive import derive
from headrace.config.resolve import read_settings, resolve
from headrace.config.run_config import demands
from headrace.envs.factory import EnvMaker, env_spec
from release import artifacts
from tests.faults.cluster_support import HEALTH_CHECKS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
README = (DEPLOY / "README.md").read_text()
AWS = yaml.safe_load((DEPLOY / "aws.yaml").read_text())
VOLUME, CLUSTER = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
PINNED = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
COMMANDS = [
    *itertools.chain(*(AWS[name] for name in AWS if name.endswith("_commands"))),
    *AWS["available_node_types"]["worker"]["worker_setup_commands"],
]


def blocks():
    """README's commands, as they stand."""
    return re.findall(r"```bash\n(.*?)```", README, re.S)


def training():
    """The settings of README's `headrace train`, as the command itself would have them."""
    (command,) = [b for b in blocks() if b.startswith("headrace train")]
    argv = shlex.split(command.replace("\\\n", " "))[2:]
    flags = parse("train", "", FLAGS["train"], argv)
    return resolve(explicit(argv, flags))


def aws_machines():
    """Kind, CPUs and GPUs of each."""
    types = AWS["available_node_types"]
    return [
        (types[name]["labels"], types[name]["resources"])
        for name in types
        for _ in range(types[name]["min_workers"] + (name == AWS["head_node_type"]))
    ]


def kubernetes_machines():
    """As Ray sees the pods."""
    head = CLUSTER["spec"]["headGroupSpec"]
    machines = []
    for group in (head, *CLUSTER["spec"]["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        has = {
            "CPU": int(group["rayStartParams"]["num-cpus"]),
            "GPU": container["resources"]["limits"].get("nvidia.com/gpu", 0),
        }
        machines += [(group["labels"], has)] * group.get("replicas", 1)
    return machines


# KubeRay 1.6's RayCluster (ray.io/v1), as far as kuberay.yaml has it. Its CRD has 900 kB; the file
# was held against the whole of it by hand.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
AMOUNTS = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}


def only(required, **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


CONTAINER = only(
    ["name", "image"],
    name={"type": "string"},
    image={"type": "string"},
    env={"type": "array", "items": only(["name"], name={}, value={"type": "string"})},
    resources=only([], requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts={"type": "array", "items": only(["name", "mountPath"], name={}, mountPath={})},
)
POD = only(
    ["containers"],
    nodeSelector=TEXTS,
    tolerations={"type": "array", "items": only([], key={}, operator={}, effect={})},
    securityContext={"type": "object", "additionalProperties": {"type": "integer"}},
    containers={"type": "array", "items": CONTAINER, "minItems": 1},
    volumes={
        "type": "array",
        "items": only(["name"], name={}, persistentVolumeClaim=only(["claimName"], claimName={})),
    },
)
GROUP = {"rayStartParams": TEXTS, "labels": TEXTS, "template": only(["spec"], spec=POD)}
COUNT = {"type": "integer", "minimum": 0}
RAY_CLUSTER = only(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=only(["name"], name={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}),
    spec=only(
        ["headGroupSpec"],
        rayVersion={"type": "string"},
        authOptions=only([], mode={"enum": ["disabled", "token"]}, secretName={"type": "string"}),
        headGroupSpec=only(["template"], **GROUP),
        workerGroupSpecs={
            "type": "array",
            "items": only(
                ["groupName", "minReplicas", "maxReplicas", "template"],
                groupName={"type": "string"},
                replicas=COUNT,
                minReplicas=COUNT,
                maxReplicas=COUNT,
                **GROUP,
            ),
        },
    ),
)

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def container_pip(*build_args):
    """What the container file gives to pip, as a shell splits it: defaults, then `--build-arg`s."""
    defaults = re.findall(r"^ARG (\w+=.+)$", DOCKERFILE, re.M)
    (command,) = re.findall(r"^RUN (pip .+(?:\n    .+)*)", DOCKERFILE, re.M)
    shell = "\n".join([*defaults, *build_args, 'pip() { printf "%s\\n" "$@"; }', command])
    done = subprocess.run(["bash", "-ec", shell], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_container_has_the_cpu_build_of_torch_or_the_one_for_a_gpu():
    """With the index of CPU builds at hand, pip takes 2.13.0+cpu for torch==2.13.0, as newer."""
    (for_gpu,) = set(re.findall(r"--build-arg (\S+)", README + DOCKERFILE))
    index = "https://download.pytorch.org/whl/cpu"
    cpu, gpu = container_pip(), container_pip(for_gpu)
    assert f"torch=={PINNED['torch']}+cpu" in cpu
    assert cpu[cpu.index("--extra-index-url") + 1] == index
    assert "torch" in gpu
    assert not [word for word in gpu if "index" in word or "+cpu" in word]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for words in (cpu, gpu):
        (ours,) = [word for word in words if word.startswith("/headrace[")]
        assert set(ours.partition("[")[2].strip("]").split(",")) <= set(
            known["optional-dependencies"]
        )
    assert container_pip("EXTRAS=mujoco")[-1] == "/headrace[mujoco]"


@pytest.mark.more
def test_what_the_container_file_copies_is_enough_to_install(tmp_path):
    root = tmp_path / "image"
    (root / "headrace").mkdir(parents=True)
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M):
        *names, to = line.split()
        for name in names:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, root / to.strip("/"))
    words = container_pip()
    assert (root / words[words.index("-c") + 1].strip("/")).read_text()
    artifacts.build_wheel(root / "headrace", tmp_path / "dist", "--no-isolation")
    assert len(list((tmp_path / "dist").glob("*.whl"))) == 1


def test_what_the_container_is_run_with_is_a_command_of_headrace():
    commands = re.findall(r"^#   docker run .+ headrace:\w+ headrace (.+)$", DOCKERFILE, re.M)
    assert len(commands) == 2
    for verb, *argv in map(shlex.split, commands):
        parse(verb, "", flags_of(verb), argv)


def test_ray_takes_the_aws_file():
    """In a process of its own: importing Ray reads variables for good."""
    code = (
        "import sys, json; from ray.autoscaler._private import util;"
        "config = util.prepare_config(json.load(sys.stdin)); util.validate_config(config);"
        "print(json.dumps(config['available_node_types']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(AWS), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == AWS["available_node_types"]


def test_the_aws_cluster_is_closed_and_of_a_fixed_size():
    workers = [t for n, t in AWS["available_node_types"].items() if n != AWS["head_node_type"]]
    assert all(t["min_workers"] == t["max_workers"] for t in workers)
    assert AWS["max_workers"] == sum(t["max_workers"] for t in workers)
    checks = " ".join(f"{name}={value}" for name, value in HEALTH_CHECKS.items())
    for start, more in ("head_start_ray_commands", f" {checks}"), ("worker_start_ray_commands", ""):
        set_before = f"export RAY_AUTH_MODE=token RAY_worker_niceness=0{more}; ray start"
        assert set_before in AWS[start][-1].replace("\n", " ")
    assert "--include-dashboard=false" in AWS["head_start_ray_commands"][-1]
    assert AWS["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert AWS["provider"]["cache_stopped_nodes"] is False


def test_what_aws_machines_install_is_sent_to_them():
    sent = {Path(here).as_posix() for here in AWS["file_mounts"].values()}
    needed = {"src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert sent == needed | {"~/.ray/auth_token"}
    assert all((ROOT / name).exists() for name in needed)
    assert set(re.search(r"COPY (.*) /headrace/\n", DOCKERFILE)[1].split()) == needed - {"src"}


def test_kuberay_takes_the_kubernetes_file():
    jsonschema.validate(CLUSTER, RAY_CLUSTER)
    assert (VOLUME["apiVersion"], VOLUME["kind"]) == ("v1", "PersistentVolumeClaim")
    assert VOLUME["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in CLUSTER["spec"]["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]


def test_the_kubernetes_cluster_is_closed_and_learners_see_the_runs():
    spec = CLUSTER["spec"]
    head = spec["headGroupSpec"]
    assert spec["authOptions"]["mode"] == "token"
    assert head["rayStartParams"]["include-dashboard"] == "false"
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    for group in (head, *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        mounts = [(m["name"], m["mountPath"]) for m in container.get("volumeMounts", ())]
        volumes = [
            (v["name"], v["persistentVolumeClaim"]["claimName"])
            for v in group["template"]["spec"].get("volumes", ())
        ]
        learns = group["labels"]["kind"] == "learner"
        assert mounts == ([("runs", "/shared")] if learns else [])
        assert volumes == ([("runs", VOLUME["metadata"]["name"])] if learns else [])
        assert container["image"].endswith("gpu" if learns else "cpu")


@pytest.mark.parametrize("machines", [aws_machines(), kubernetes_machines()], ids=["aws", "k8s"])
def test_the_run_fits_the_machines_and_uses_all(machines):
    run = training().run
    _, of_learners = demands(run.learner_resources)
    _, of_workers = demands(run.worker_resources)
    learn = [has for labels, has in machines if labels == of_learners]
    sample = [has for labels, has in machines if labels == of_workers]
    assert (len(learn), len(sample), len(machines)) == (8, 4, 12)
    for has in learn:  # one learner on each
        assert has["CPU"] >= run.learner_threads
        assert has["GPU"] == run.gpus_per_learner == 1
    assert len(learn) == run.num_learners
    room = sum(math.floor(has["CPU"] / run.cpus_per_worker) for has in sample)
    assert room == run.num_workers
    assert all(has.get("GPU", 0) == 0 for has in sample)


def test_the_run_is_what_the_readme_says_it_is():
    settings = training()
    run, algo = settings.run, settings.algo
    assert run.num_envs * run.num_steps // run.num_learners == 1024
    assert run.num_envs * run.num_steps // run.num_learners // algo.num_minibatches == 256
    assert run.num_vectors == run.num_workers
    assert run.envs_per_vector == 8
    settings = read_settings({"env": run.env}, spec=env_spec(EnvMaker(run.env)))
    preset = derive(settings).algo
    for name in ("clip_coef", "ent_coef", "lr_schedule", "num_epochs", "num_minibatches"):
        assert getattr(algo, name) == getattr(preset, name), name
    assert algo.lr == pytest.approx(preset.lr * math.sqrt(run.num_learners))


def test_versions_are_those_of_the_constraints():
    assert CLUSTER["spec"]["rayVersion"] == PINNED["ray"]
    texts = [README, (DEPLOY / "Dockerfile").read_text(), (DEPLOY / "aws.yaml").read_text()]
    found = re.findall(r"(ray|torch)(?:\[\w+\])?==([\d.]+)", " ".join(texts))
    assert set(found) == {("ray", PINNED["ray"]), ("torch", PINNED["torch"])}


@pytest.mark.parametrize("script", [*COMMANDS, *blocks()], ids=lambda s: s.split("\n")[0][:30])
def test_commands_are_shell(script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_fills_in_every_word_that_is_the_user_s():
    text = (DEPLOY / "aws.yaml").read_text()
    (line,) = [line for line in README.splitlines() if line.startswith("sed ")]
    filled = dict(re.findall(r"-e s/(\w+)/\$(\w+)/", line))
    for word, variable in filled.items():
        assert f"\n{variable}=" in README
        assert word in text
        text = text.replace(word, "filled")
    assert not re.search(r"[A-Z]+_(AMI|SYSTEM|ID)\b", text)


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda p: p.name)
def test_no_secret_and_no_tag_is_in_the_files(path):
    text = path.read_text()
    secrets = r"AKIA\w{16}|[0-9a-fA-F]{32}|PRIVATE KEY|RAY_AUTH_TOKEN\W+[\w$]|kind: Secret"
    assert not re.search(secrets, text)
    if path.suffix == ".yaml":
        assert not [t for t in yaml.scan(text) if isinstance(t, yaml.TagToken)]


def test_the_costs_are_those_of_the_script_and_of_these_clusters():
    spec = importlib.util.spec_from_file_location("costs", DEPLOY / "costs.py")
    costs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(costs)
    assert README.split(costs.BEGIN)[1].split(costs.END)[0] == costs.tables()
    on_aws, on_kubernetes = {}, {}
    for name, of in AWS["available_node_types"].items():
        kind = of["node_config"]["InstanceType"]
        count = of["min_workers"] + (name == AWS["head_node_type"])
        on_aws[kind] = on_aws.get(kind, 0) + count
        assert of["resources"]["CPU"] == costs.MACHINES[kind][1]
    for group in (CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]):
        kind = group["template"]["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"]
        on_kubernetes[kind] = on_kubernetes.get(kind, 0) + group.get("replicas", 1)
    assert on_aws == on_kubernetes == costs.CLUSTER
