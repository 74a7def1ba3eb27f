"""The release: what is built, what is said of it, and which combinations are tried.

The environments themselves are made by `make release-check` alone.
"""

import datetime
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import headrace
from release import __main__ as release
from release import artifacts, environments, smoke

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source as it lies here, its wheel and its sdist."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    for name in ("src", "pyproject.toml", ".gitignore", *artifacts.BESIDE_THE_SOURCE):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, source / name)
    (source / "docs").mkdir()
    (source / "docs" / "README.md").write_text("Named as a file of the root.")
    wheel, sdist = artifacts.build(source, folder / "dist", "--no-isolation")
    return source, wheel, sdist


@pytest.mark.more
def test_wheel_and_sdist_hold_the_source_and_its_data_and_nothing_else(built):
    assert artifacts.problems(*built) == []
    names = {path.suffix for path in artifacts.package_files(built[0])}
    assert names == {".py", ".toml", ".css", ".js", ".html", ".json", ".typed"}


@pytest.mark.more
def test_what_is_missing_and_what_is_stray_is_named(built, tmp_path):
    source, wheel, sdist = built
    changed = shutil.copytree(source, tmp_path / "changed")
    (changed / "src/headrace/new.toml").write_text("")
    (changed / "src/headrace/py.typed").unlink()
    (changed / "README.md").write_text("Another one.")
    found = artifacts.problems(changed, wheel, sdist)
    assert f"{wheel.name} lacks headrace/new.toml" in found
    assert f"{wheel.name} has headrace/py.typed, which is not part of it" in found
    assert f"{sdist.name} lacks src/headrace/new.toml" in found
    assert [line for line in found if line.startswith("The metadata's description: ")]
    assert len(found) == 5


@pytest.mark.more
def test_a_wheel_that_the_sdist_does_not_make_is_refused(built, tmp_path):
    source = shutil.copytree(built[0], tmp_path / "source")
    text = (source / "pyproject.toml").read_text()
    cut = text.replace(
        'include = ["/src", ', 'exclude = ["/src/headrace/py.typed"]\ninclude = ["/src", '
    )
    assert cut != text
    (source / "pyproject.toml").write_text(cut)
    with pytest.raises(RuntimeError, match="built from the sdist, it differs"):
        artifacts.build(source, tmp_path / "dist", "--no-isolation")


def test_the_export_is_of_head_alone(tmp_path):
    source = artifacts.export(tmp_path / "source")
    listed = ["git", "ls-tree", "-r", "--name-only", "-z", "HEAD"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert there == set(names.strip("\0").split("\0"))


def test_one_version_is_in_the_package_the_changelog_and_the_citation():
    assert artifacts.version_of(ROOT) == headrace.__version__ == CITATION["version"]
    text = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    numbered = [title for title in titles if title != "Unreleased"]
    assert numbered[0].split()[0] == headrace.__version__
    assert "Unreleased" not in titles[1:]


def test_the_citation_has_what_the_format_requires():
    """The required keys, and the types of those that are here: the schema of CFF 1.2.0."""
    assert CITATION["cff-version"] == "1.2.0"
    for name in ("message", "title", "version"):
        assert isinstance(CITATION[name], str)
        assert CITATION[name]
    assert CITATION["authors"]
    assert all(set(author) == {"name"} and author["name"] for author in CITATION["authors"])
    assert CITATION["license"] == PROJECT["license"]
    assert [author["name"] for author in PROJECT["authors"]] == [
        author["name"] for author in CITATION["authors"]
    ]
    assert CITATION["type"] == "software"
    optional = {"type", "license", "keywords", "date-released", "repository-code", "url", "doi"}
    assert set(CITATION) <= optional | {"cff-version", "message", "title", "version", "authors"}
    assert isinstance(CITATION.get("date-released", datetime.date.today()), datetime.date)


def test_every_extra_is_used_or_left_out_with_a_reason():
    extras = set(PROJECT["optional-dependencies"])
    assert set(smoke.SMOKES) - {""} | set(smoke.LEFT_OUT) == extras
    assert not set(smoke.SMOKES) & set(smoke.LEFT_OUT)
    assert set(smoke.NEEDS) <= extras


def test_pythons_are_those_of_the_classifiers():
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert tuple(named) == environments.PYTHONS
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_each_python_is_tried_with_the_oldest_the_newest_and_the_pinned_versions():
    rows = release.combinations([])
    for python in environments.PYTHONS:
        assert {row.versions for row in rows if row.python == python} == {
            "pinned", "oldest", "newest",
        }  # fmt: skip
    alone = [row.extras for row in rows if len(row.extras) == 1 and row.versions == "pinned"]
    assert alone == [(extra,) for extra in release.ALL]
    assert [row.extras for row in rows if row.from_sdist] == [()]
    assert {row.versions for row in release.combinations(["oldest"])} == {"oldest"}


def test_this_python_is_found_and_one_that_is_not_here_is_said():
    minor = "{}.{}".format(*sys.version_info[:2])
    found = environments.interpreter(minor)
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"Python {minor}.")
    with pytest.raises(environments.NotHereError, match=r"no Python 3\.99 on this machine"):
        environments.interpreter("3.99")


@pytest.mark.parametrize(
    "said, result", [("No solution found", "not here: no CPU"), ("Failed to fetch", "FAILED: Fail")]
)
@pytest.mark.parametrize("versions", ["pinned", "newest"])
def test_an_index_that_does_not_answer_is_a_failure(said, result, versions, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise environments.InstallError(said)

    monkeypatch.setattr(environments.Installer, "uv", refuse)
    tried = release.Combination("{}.{}".format(*sys.version_info[:2]), versions)
    installer = environments.Installer(ROOT, tmp_path / "cache", False)
    row = release.try_out(installer, tried, tmp_path / "x.whl", "0")
    if versions == "pinned" or said != "No solution found":
        assert row["result"].startswith(result)


def test_the_table_has_a_line_for_each_row_and_what_is_missing():
    rows = release.combinations(["oldest"])
    tried = [row.labels() | {"result": "FAILED: a\nlong story"} for row in rows]
    lines = release.table(tried).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2] == (
        "| 3.11 | oldest, pinned torch | - | - | - | box2d | - | - | - | FAILED: a |"
    )
    assert "| all of these but box2d |" in lines[3]


@pytest.mark.parametrize(
    "problems, result, code",
    [
        ([], "passed", 0),
        ([], "FAILED: it", 1),
        (["x lacks y"], "passed", 1),
        ([], "not here: a", 0),
    ],
)
def test_the_exit_code_tells_of_a_failure(problems, result, code, monkeypatch):
    row = release.combinations(["oldest"])[0].labels() | {"result": result}
    found = {"problems": problems, "rows": [row], "left_to_do": []}
    monkeypatch.setattr(release, "check", lambda *_: found)
    monkeypatch.setattr(sys, "argv", ["release", "--only", "oldest"])  # no results file
    assert release.main() == code


@pytest.mark.parametrize("says", ["ready", "not installed"])
def test_an_extra_that_doctor_does_not_find_ready_is_a_failure(says, tmp_path):
    """Two scripts stand for an environment: its Python, and its `headrace`."""
    doctor = f"  {'plan':<16} {says}"
    scripts = {
        "python": f"echo {tmp_path}/headrace/__init__.py",
        "headrace": f"[ $1 != --version ] || echo headrace 1; [ $1 != doctor ] || echo '{doctor}'",
    }
    for name, line in scripts.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o700)
    python = tmp_path / "bin/python"
    if says == "ready":
        assert smoke.smoke(python, ("plan",), "1", tmp_path) >= 0
        return
    with pytest.raises(smoke.SmokeError, match="doctor does not find plan ready"):
        smoke.smoke(python, ("plan",), "1", tmp_path)


def test_smoke_refuses_a_headrace_that_is_not_the_installed_one(tmp_path):
    """This environment's is a link to the source."""
    with pytest.raises(smoke.SmokeError, match=r"headrace was imported from .*src/headrace"):
        smoke.smoke(Path(sys.executable), (), headrace.__version__, tmp_path)


def test_a_command_that_does_not_end_is_a_failure_of_its_row(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke, "LIMIT_S", 0.001)
    with pytest.raises(smoke.SmokeError, match=r"did not end within 0\.001 s"):
        smoke.smoke(Path(sys.executable), (), headrace.__version__, tmp_path)
