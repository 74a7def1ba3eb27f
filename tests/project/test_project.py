"""The project itself: what it exports, what its wheel holds, what its docs claim."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[2]


def test_public_names_are_sorted_and_loadable_and_documented():
    assert headrace.__all__ == sorted(headrace.__all__)
    for name in headrace.__all__:
        assert getattr(headrace, name).__doc__, name
        assert name in dir(headrace)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        headrace.nothing  # noqa: B018


def test_importing_headrace_costs_nothing():
    code = "import sys, headrace; print(len([m for m in sys.modules if m in ('torch', 'numpy')]))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "0"


@pytest.mark.more
@pytest.mark.timeout(300)
def test_the_built_wheel_installs_and_trains(tmp_path):
    """Built, unpacked elsewhere, and run from there: what is not in the wheel is missed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("headrace-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    assert (site / "headrace/py.typed").exists()
    code = (
        "import headrace, sys; assert headrace.__file__.startswith(sys.argv[1]), headrace.__file__;"
        "run = headrace.train('CartPole-v1', total_env_steps=1024, num_workers=2, quiet=True);"
        "print(run.summary['env_steps'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(site)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "1024\n"), done.stderr


def markdown():
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "deploy/README.md")
    pages = [ROOT / name for name in names]
    return [*pages, *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", markdown(), ids=lambda p: str(p.relative_to(ROOT)))
def test_docs_name_files_that_exist_and_flags_that_do(path):
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link
    text = text.replace("docs/_build", "")  # where `make docs` writes
    for name in re.findall(
        r"`((?:src|tests|docs|examples|benchmarks)/[\w/.]+\w|[a-z_]+/[\w/]+\.py)`", text
    ):
        assert any((base / name).exists() for base in (ROOT, ROOT / "src/headrace")), name
    fields = {
        node.target.id
        for folder in ("headrace/cli", "headrace/config", "headrace/algos", "headrace/models")
        for path in (*(ROOT / "src" / folder).rglob("*.py"), ROOT / "examples/own_algorithm.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for line in text.splitlines():
        if "headrace " in line:  # before it: flags of another program
            for flag in re.findall(r"--([a-z][a-z_-]+)", line.partition("headrace ")[2]):
                name = flag.replace("-", "_").removeprefix("no_")
                assert name in fields | {"help", "version"}, f"{flag}: {line}"


@pytest.mark.parametrize("algo", [headrace.PPO(), headrace.A2C()], ids=["ppo", "a2c"])
def test_every_metric_is_defined_in_the_docs(tmp_path, algo):
    from headrace.meter import SPANS
    from tests.training.test_api import TINY

    seen = set()
    run = headrace.train(
        "CartPole-v1", algo=algo, total_env_steps=128, eval_every=64, run_dir=tmp_path / "run",
        on_update=lambda _, metrics: seen.update(metrics), **TINY,
    )  # fmt: skip
    text = (ROOT / "docs/ppo.md").read_text()
    for name in seen | set(run.summary) | set(SPANS):
        assert f"`{name}`" in text, f"{name} is not defined in docs/ppo.md"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "PASSIVE 2000"),
        ({"GOMP_SPINCOUNT": "5"}, "PASSIVE 5"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
    ],
    ids=["default", "spins", "policy"],
)
def test_threads_that_wait_soon_give_their_core_up_unless_the_user_says_otherwise(given, expected):
    code = "import headrace, os, sys; assert 'torch' not in sys.modules; "
    names = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
    code += f"print(*map(os.environ.get, {names}))"
    rest = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=rest | given, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == expected
