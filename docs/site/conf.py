"""Settings of Sphinx, which makes the site from what `build.py` has laid out.

The names are Sphinx's own. Left out: the pages' contents, and the navigation (`index.md`).
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

import headrace

ROOT = Path(__file__).parents[2]

project = "Headrace"
release = headrace.__version__
html_title = f"Headrace {release}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = html_show_sphinx = html_copy_source = False
highlight_language = "none"  # of blocks that name none
smartquotes = False  # `--` begins a flag
default_role = "literal"  # docstrings have single backticks, as Markdown has
myst_heading_anchors = 4  # by GitHub's rules
exclude_patterns = ["README.md"]  # `index.md` includes it
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
python_maximum_signature_line_length = 120
linkcheck_timeout = 20
linkcheck_workers = 2


class LinksToSource(SphinxPostTransform):
    """Turns links to the repository's files that are not on the site into plain text.

    Those that lead nowhere stay, and MyST warns of them.
    """

    default_priority = 8  # before MyST resolves links

    def run(self, **_: Any) -> None:
        """Replace the links of one page."""
        folder = (ROOT / self.env.docname).parent
        for link in [*self.document.findall(addnodes.pending_xref)]:
            if link["reftype"] == "myst" and not link["refdomain"]:
                path, *_ = link["reftarget"].partition("#")
                if path and (folder / path).exists():
                    link.replace_self([*link.children] or nodes.literal(path, path))


class Titles(SphinxPostTransform):
    """Gives links whose text is a page's file name the page's title as their text."""

    default_priority = 8

    def run(self, **_: Any) -> None:
        """Replace these texts on one page."""
        for link in [*self.document.findall(addnodes.pending_xref)]:
            target = str(link["reftarget"])
            if link["refdomain"] == "doc" and link.astext().endswith(".md"):
                title = nodes.inline("", self.env.titles[target].astext())
                link.replace(link[0], title)


class Colons(SphinxPostTransform):
    """Puts a colon between an argument and its meaning, where Sphinx has two hyphens."""

    default_priority = 8

    def run(self, **_: Any) -> None:
        """Replace them on one page."""
        for text in [*self.document.findall(nodes.Text)]:
            if text == " -- ":
                text.parent.replace(text, nodes.Text(": "))


def show_code(*event: Any) -> None:
    """Mark the indented code of a docstring, ahead of its sections, as code."""
    lines: list[str] = event[-1]
    for k, line in enumerate(lines):
        if line.endswith(":") and not line.startswith(" "):
            return
        if line.startswith("    ") and k and not lines[k - 1]:
            lines[k:k] = ["::", ""]
            return


def setup(app: Sphinx) -> None:
    """Let Sphinx know of the above."""
    app.add_post_transform(LinksToSource)
    app.add_post_transform(Titles)
    app.add_post_transform(Colons)
    app.connect("autodoc-process-docstring", show_code, priority=400)  # before napoleon
