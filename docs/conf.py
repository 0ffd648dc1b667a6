"""Sphinx builds these pages: pip install -e '.[docs]' && sphinx-build -W docs docs/_build.

Pages under docs/generated are written here from the source before Sphinx reads anything.
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import made_pages  # noqa: E402

from mpitrain import __version__  # noqa: E402

project = "mpitrain"
copyright = "the mpitrain contributors"
release = version = __version__
extensions = ["myst_parser", "sphinx_click", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "generated", "**/README.md"]
html_theme = "furo"
html_title = "mpitrain"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_default_options = {"members": True, "undoc-members": False}
smartquotes = False  # "" is an empty text
HAS_COURSE = (HERE / "course" / "index.md").exists()

OWNER = re.compile(r"\A---\nowner: (?P<owner>.+)\nnumbers: (?P<numbers>.+)\n---\n")


def add_owner(app, page: str, source: list[str]) -> None:
    """Add the line that says which room a page is about, and where its numbers are from."""
    if not HAS_COURSE:  # a checkout without it has no links to it
        source[0] = re.sub(r"^course/index\n", "", source[0], flags=re.MULTILINE)
        source[0] = re.sub(r"\[([^]]+)\]\((\.\./)?course/[^)]*\)", r"\1", source[0])
    if found := OWNER.match(source[0]):
        numbers = f" Numbers: {found['numbers']}." if found["numbers"] != "none" else ""
        source[0] += f"\n\n---\n\n*This page is about `{found['owner']}`, mpitrain {__version__}.{numbers}*\n"


def setup(app) -> None:
    """Write the generated pages, and add owners to the others."""
    made_pages.write(HERE / "generated")
    app.connect("source-read", add_owner)
