"""What the site's search finds by the glossary's words: index entries on the pages that its rows lead to."""

import posixpath
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import index
from sphinx.transforms import SphinxTransform

GLOSSARY = "reference/glossary"
LINK = re.compile(r"\[[^]]*\]\(([^)#\s]+)\.md(?:#([^)\s]+))?\)")


@cache
def words(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Return {page: [(word, anchor)]} of a glossary; an anchor is "" for the whole page."""
    places: dict[str, list[tuple[str, str]]] = {}
    for line in path.read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) != 3 or cells[0] == "you search":
            continue
        for target, anchor in LINK.findall(cells[2]):
            page = posixpath.normpath(posixpath.join(posixpath.dirname(GLOSSARY), target))
            named = (word.replace("`", "") for word in cells[0].split(", "))
            places.setdefault(page, []).extend((word, anchor) for word in named)
    return places


class GlossaryIndex(SphinxTransform):
    """Gives a page index entries for the words of the glossary whose rows lead to it."""

    default_priority = 500  # before entries are collected

    def apply(self, **options) -> None:
        glossary = Path(self.env.doc2path(GLOSSARY))
        self.env.note_dependency(glossary)
        page = next(self.document.findall(nodes.section), None)
        ids = self.document.nameids  # of a key's target: an id has no dots and underscores
        entries = [
            ("single", word, ids.get(anchor) or anchor or page["ids"][0], "main", None)
            for word, anchor in words(glossary).get(self.env.docname, [])
        ]
        if entries:
            page.insert(1, index(entries=entries))
