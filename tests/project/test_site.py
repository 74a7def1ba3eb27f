"""The documentation site: its navigation, its reference, and its pages as they are built."""

import contextlib
import html.parser
import importlib.util
import io
import re
import subprocess
import sys
from dataclasses import fields
from urllib.parse import unquote, urlsplit

import pytest

import headrace
from headrace.algos.critics.shared import WithCritics
from headrace.cli import flags as cli_flags
from headrace.cli.main import VERBS, flags_of
from headrace.config.algorithms import ALGORITHMS
from headrace.config.run_config import RunConfig
from headrace.models.policy import Network
from tests.project.blocks import ROOT, pages
from tests.tools.report import browser

SITE = ROOT / "docs/site"
NAVIGATION = re.findall(r"^[\w/-]+$", (SITE / "index.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of the pages that are made from the code."""
    folder = tmp_path_factory.mktemp("made") / "reference"
    spec = importlib.util.spec_from_file_location("reference", SITE / "reference.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "reference", module)  # where its dataclass looks for types
        spec.loader.exec_module(module)
        module.write(folder)
    return folder


def sections(page):
    """Text by the heading above it."""
    _, *parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("path", pages()[1:], ids=lambda path: path.name)
def test_every_page_of_docs_is_in_the_navigation(path):
    name = str(path.relative_to(ROOT).with_suffix(""))
    assert NAVIGATION.count(name) == 1, f"put a line with {name} into docs/site/index.md"


def test_each_verb_is_in_the_reference_with_the_flags_of_its_help(reference):
    found = sections(reference / "commands.md")
    assert list(found) == list(VERBS)
    elsewhere = (reference / "settings.md").read_text() + (reference / "algorithms.md").read_text()
    for verb, text in found.items():
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            cli_flags.parse(verb, VERBS[verb], flags_of(verb), ["--help"])
        shown = re.findall(r"^[│ ] ?(?:-h, )?--([a-z][a-z-]+)", said.getvalue(), re.MULTILINE)
        assert len(shown) > 1, said.getvalue()
        takes_settings = "[settings](settings.md)" in text
        for flag in set(shown) - {"help"}:
            known = f"`--{flag}`" in text or f"`--no-{flag}`" in text
            if takes_settings:
                known = known or f"`{flag.replace('-', '_')}`" in elsewhere
            assert known, f"{verb} --{flag}"


def test_each_setting_is_in_the_reference_with_its_default_and_its_meaning(reference):
    by_page = {
        "settings": {"": RunConfig, "network": Network},
        "algorithms": {name: algorithm.Config for name, algorithm in ALGORITHMS.items()},
    }
    for page, configs in by_page.items():
        found = sections(reference / f"{page}.md")
        for name, config in configs.items():
            text = "".join(of for title, of in found.items() if not name or title.lower() == name)
            rows = dict(re.findall(r"^\* - `(\w+)`\n((?:  - ?.*\n)+)", text, re.MULTILINE))
            for field in fields(config):
                default, values, meaning = re.findall(r"^  - ?(.*)$", rows[field.name], re.M)
                assert values and meaning, field.name
                if isinstance(field.default, float):
                    assert default == f"`{field.default}`", field.name


def test_each_public_name_is_in_the_reference(reference):
    text = (reference / "python.md").read_text()
    for name in headrace.__all__:
        assert re.search(rf"headrace\.{name}\b", text), name


def test_the_page_on_algorithms_has_all_of_them_and_says_which_take_a_core():
    page = (ROOT / "docs/choose.md").read_text().partition("What each takes:")[2]
    said = {}
    for names, actions, core, _ in re.findall(
        r"^\| (.*`.*) \| (.*) \| (.*) \| (.*) \|$", page, re.M
    ):
        said |= dict.fromkeys(re.findall(r"`(\w+)`", names), (actions, core != "-"))
    assert {name: core for name, (_, core) in said.items()} == {
        name: algorithm.recurrent for name, algorithm in ALGORITHMS.items()
    }
    choices = {name for name, (actions, _) in said.items() if actions != "bounded Box"}
    of_critics = {name: of for name, of in ALGORITHMS.items() if isinstance(of, WithCritics)}
    assert {name for name in of_critics if name in choices} == {
        name for name, of in of_critics.items() if of.takes_choices
    }


class Links(html.parser.HTMLParser):
    """What a page of the site has: ids, links, and what the browser loads for it."""

    def __init__(self, page):
        super().__init__()
        self.ids, self.links, self.loaded = set(), set(), set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.update(filter(None, (found.get("id"), found.get("name"))))
        if tag == "a":
            self.links.add(found.get("href") or "")
        else:
            self.loaded.update(filter(None, (found.get("src"), found.get("href"))))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the site, built as `make docs` does."""
    to = tmp_path_factory.mktemp("site")
    (to / "source").mkdir()
    (to / "source/mine").touch()  # of the user's
    command = [sys.executable, SITE / "build.py", "--to", to]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return to / "html"


@pytest.mark.more
@pytest.mark.timeout(300)
def test_the_site_builds_without_warnings_and_no_link_of_it_is_broken(built):
    assert [path.name for path in (built.parent / "source").iterdir()] == ["mine"]
    found = {path: Links(path) for path in built.rglob("*.html")}
    assert len(found) > len(pages())
    for path, page in found.items():
        for link in page.links | page.loaded:
            to = urlsplit(link)
            if to.scheme in ("http", "https", "mailto"):
                assert link in page.links, f"{path} loads {link}"
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            assert target.exists(), f"{path}: {link}"
            if to.fragment and target in found:
                assert unquote(to.fragment) in found[target].ids, f"{path}: {link}"
        # A link that MyST could not resolve would lead to an id that is its own target.
        assert not re.search(r'href="#[^"]*\.md', path.read_text()), path


@pytest.mark.more
@pytest.mark.timeout(300)
@pytest.mark.skipif(browser.found() is None, reason="no Chromium: make browser")
def test_pages_fit_a_wide_and_a_narrow_screen_and_load_nothing_from_elsewhere(built, tmp_path):
    names = ("index", "docs/start", "docs/ppo", "docs/presets", "benchmarks/README")
    made = ("commands", "settings", "algorithms", "python")
    with browser.browser(browser.found(), tmp_path) as page:
        for name in (*names, *(f"reference/{name}" for name in made)):
            for width in (400, 1000, 1400):
                page.open(built / f"{name}.html", width=width, dark=width == 400)
                root = "document.documentElement"
                over = page.value(f"{root}.scrollWidth - {root}.clientWidth")
                assert over <= 0, f"{name} is {over} px wider than a screen of {width}"
    assert page.said == []
    own = (built.as_uri(), "data:", "about:")
    assert [address for address in page.asked if not address.startswith(own)] == []
