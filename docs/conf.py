"""Sphinx builds these pages: pip install -e '.[docs]' && sphinx-build -W docs docs/_build.

Pages under docs/generated are written here from the source before Sphinx reads anything.
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = str(HERE), str(HERE.parent)  # this tree, whatever else is installed

from sphinx.errors import ConfigError  # noqa: E402

import mpitrain  # noqa: E402
from mpitrain.comm.base import mpi  # noqa: E402

if Path(mpitrain.__file__).resolve().parents[1] != HERE.parent:
    raise ConfigError(
        f"mpitrain was imported from {Path(mpitrain.__file__).parent}, needed that of {HERE.parent}: "
        "pip install -e '.[docs]' there, or set PYTHONPATH to it"
    )


class NoLibrary:
    """Stands in for mpi4py's module MPI: docstrings and types are read without an MPI library."""

    def __getattr__(self, name: str) -> type:
        return type(name, (), {"__module__": "mpi4py.MPI"})


mpi.MPI = NoLibrary()  # before anything imports it from there

import search_words  # noqa: E402
from building import reference  # noqa: E402
from docutils.nodes import SkipNode, math_block  # noqa: E402
from docutils.utils.math.latex2mathml import tex2mathml  # noqa: E402

project = "mpitrain"
copyright = "the mpitrain contributors"
release = version = mpitrain.__version__
extensions = ["myst_parser", "sphinx_click", "sphinx.ext.autodoc"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
myst_fence_as_directive = ["math"]  # ```math, which GitHub shows, too
html_math_renderer = "mathml"
exclude_patterns = ["_build", "generated", "course/measured", "**/README.md"]
html_theme = "furo"
html_search_scorer = str(HERE / "search_scorer.js")
html_title = "mpitrain"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "undoc-members": False}
default_role = "literal"  # one backtick, in docstrings
smartquotes = False  # "" is an empty text

OWNER = re.compile(r"\A---\nowner: (?P<owner>.+)\nnumbers: (?P<numbers>.+)\n---\n")


def add_owner(app, page: str, source: list[str]) -> None:
    """Add the line that says which room a page is about, and where its numbers are from."""
    if found := OWNER.match(source[0]):
        numbers = f" Numbers: {found['numbers']}." if found["numbers"] != "none" else ""
        source[0] += (
            f"\n\n---\n\n*This page is about `{found['owner']}`, mpitrain {mpitrain.__version__}.{numbers}*\n"
        )


ENTRY = re.compile(r"([a-z_*][\w*, ]*): +(\S.*)")


def as_restructured_text(app, what: str, name: str, obj, options, lines: list[str]) -> None:
    """Turn a docstring, which is plain text, into what Sphinx reads: entries, and indented blocks."""
    found = []
    in_block = False
    for line in lines:
        if line.startswith("    ") and not in_block:
            found += ["", "::", ""]
            in_block = True
        elif line and not line.startswith(" "):
            found += [""] * in_block
            in_block = False
            if entry := ENTRY.fullmatch(line):
                line = f"**{entry[1]}**: {entry[2]}"
                found.append("")
        found.append(line)
    lines[:] = found


def keep_columns(app, context, lines: list[str]) -> None:
    """Show the lines of a command's help that keep their places as they are typed."""
    found = []
    for line in lines:
        in_block = line.startswith("| ")
        if in_block and (not found or not found[-1].startswith("   ")):
            found += ["", "::", ""]
        found.append(f"   {line[2:]}" if in_block else line)
    lines[:] = found


def add_mathml(self, node) -> None:
    """Write a formula as MathML, which browsers draw by themselves: nothing is fetched from the net."""
    is_block = isinstance(node, math_block)
    tag = "div" if is_block else "span"
    self.body.append(f'<{tag} class="math">{tex2mathml(node.astext(), as_block=is_block)}</{tag}>')
    raise SkipNode


def setup(app) -> None:
    """Write the generated pages, and add owners to the others."""
    reference.write(HERE / "generated")
    app.add_transform(search_words.GlossaryIndex)
    app.add_html_math_renderer("mathml", (add_mathml, None), (add_mathml, None))
    app.connect("source-read", add_owner)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("sphinx-click-process-description", keep_columns)
