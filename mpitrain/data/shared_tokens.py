"""Tokens that runs share: data.tokens names a folder, which has one of each corpus and tokenizer.

    data.tokens/KEY/tokens.bin, ends.bin, tokens.json  KEY: a digest of all files and the tokenizer

Each run has its own name of the same files (a hard link), or a copy where that is another file
system: a run directory is whole. Runs that publish at once write the same bytes, each under its own
names first. `mpitrain data prepare` writes there directly.
"""

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import xxhash

from mpitrain.data.corpus_files import Listing, content_of, looks_of
from mpitrain.data.origin import OWN, Origin, write_struct
from mpitrain.data.tokens import DESCRIPTION, Description, note_intact
from mpitrain.data.verified import folder_from, note_from
from mpitrain.inputs import folder_of, kind_of, open_regular, remove, rename, replacing, shown


class SharedFolder:
    """The place of one corpus and tokenizer in data.tokens."""

    def __init__(
        self,
        folder: str | Path,
        origin: Origin,
        listing: Listing,
        each: Callable[[str], object],
        before: Callable[[], object],
    ):
        """before: called before files are read to be compared; raises what is wrong with them."""
        left_out = {reason: len(names) for reason, names in listing.left_out.items()}
        seen = msgspec.json.encode((of_content(origin), looks_of(listing), left_out), order="sorted")
        self._looks = xxhash.xxh3_128_hexdigest(seen)
        if known := folder_from(Path(folder), self._looks):
            self.path = known
            return
        before()
        what = msgspec.json.encode((of_content(origin), content_of(listing, each), left_out), order="sorted")
        self.path = Path(folder) / xxhash.xxh3_128_hexdigest(what)

    def is_there(self) -> bool:
        """Return whether anything was published: the description is the last file."""
        with suppress(OSError):
            return kind_of(self.path / DESCRIPTION) is not None
        return False

    def note(self) -> None:
        """Note that a corpus that looks so has these tokens: it isn't read for the comparison again."""
        note_from(self.path, self._looks)

    def publish(self, folder: Path, description: Description) -> str:
        """Give a run's files to others, the description after the rest; return what is wrong, or "".

        The description doesn't say where the corpus lay.
        """
        token = secrets.token_hex(8)
        *names, last = description.files
        drafts = {name: f"{name}.{token}" for name in description.files}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for name in names:
                link_or_copy(folder / name, self.path / drafts[name])
            about = msgspec.structs.replace(description, origin=of_content(description.origin))
            write_struct(self.path / drafts[last], about)
            for name, draft in drafts.items():
                rename(self.path / draft, name, OWN)
            note_intact(self.path, description)
            self.note()
        except OSError as error:
            for draft in drafts.values():
                with suppress(OSError):
                    remove(self.path / draft, OWN)
            found = f"data.tokens: {shown(self.path)} cannot be written: {error.strerror}"
            return f"{found}; this run keeps its tokens to itself"
        return ""


def of_content(origin: Origin) -> Origin:
    """Return an origin without what says where a corpus lies and when it was written."""
    return msgspec.structs.replace(origin, path="", files="")


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file another name, or copy it where that can't be. Raises OSError."""
    remove(target, OWN)
    try:
        with folder_of(source, OWN) as (before, name), folder_of(target, OWN) as (after, new):
            os.link(name, new, src_dir_fd=before, dst_dir_fd=after, follow_symlinks=False)
    except OSError:  # another file system, one without links, another's file
        with open(open_regular(source, own=OWN), "rb") as opened, replacing(target, OWN) as copy:
            shutil.copyfileobj(opened, copy, 1 << 20)
