"""The files of a corpus, in the same order on every machine; what is left out, and what is wrong with files.

A folder is read with all that is in it, linked folders too: the files with a suffix of the source.
A file that is named, or matched by a pattern, is read whatever its suffix. Of files with the same
content the first one is read.
"""

import glob
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from mpitrain.data.source import SOURCES, File, Source
from mpitrain.errors import DataError
from mpitrain.inputs import PIECE, is_there, listed, open_file, os_errors_as, read_text, require_file, shown

OTHER_SUFFIXES = {  # what files in a folder of JSON lines are instead
    **{".json": "JSON that is no lines of JSON", ".parquet": "Parquet", ".arrow": "Arrow"},
    **{".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz", ".zip": "zip"},
}
MOST_COMPARED_BYTES = 1 << 60
SAMPLE_BYTES = 1 << 16  # of files of equal size that are compared first
MOST_LIST_BYTES = 1 << 26  # of a file with names of files
HIDDEN = "hidden"
SUFFIX = "of another suffix"
EMPTY = "empty"
NO_FILE = "no files"
AGAIN = "duplicates of an earlier file"
FOLDER = "folders that a pattern matches beside files"
LISTED = "listed by its folder"
IN_VALIDATION = "in data.val_path, too"

Paths = str | Path | Sequence[str] | None


class Listing(NamedTuple):
    """The files of a corpus. left_out: the names of others, by reason."""

    files: list[File]
    left_out: dict[str, list[str]]

    @property
    def members(self) -> list[File]:
        """All files that are read: each, and those that belong to it, with its name."""
        return [file._replace(path=path) for file in self.files for path in (file.path, *file.companions)]


def check_source(named: str, path: Paths, key: str = "data.path") -> None:
    """Raise DataError unless the corpus exists, may be read and is not empty.

    named: data.source. Opens no file and writes nothing.
    """
    source = SOURCES.find(named)
    problems = []
    size = 0
    for file in list_files(source, path, key).files:
        try:
            size += _stat(file.path).st_size
            require_file(file.path, source.most_bytes)
            if not os.access(file.path, os.R_OK):
                problems.append(f"{shown(file.path)} cannot be read: permission denied")
        except OSError as error:
            problems.append(f"{shown(file.path)} cannot be read: {error.strerror}")
        except DataError as error:
            problems.append(error.args[0].removeprefix("data.path: ").partition(";")[0])
    if problems:
        raise refused(problems, f"change {key} or the file", key)
    if not size:
        raise no_text(source, path, key=key)


def list_files(source: Source, path: Paths, key: str = "data.path") -> Listing:
    """Return every file of the corpus that isn't hidden, those of each folder sorted by name."""
    left_out = defaultdict[str, list[str]](list)
    roots = _roots(source, path, key, left_out)
    files: list[File] = []
    for root in roots:
        if not root.is_dir():
            files.append(File(root.name, root, True, _companions(source, root)))
            continue
        prefix = f"{root.name}/" if len(roots) > 1 else ""
        found = _in_folder(source, root, left_out)
        files += (File(prefix + name, file, False, _companions(source, file)) for name, file in found)
    belonging = {path for file in files for path in file.companions}
    files = [file for file in files if file.path not in belonging]
    if not files:
        raise no_text(source, path, left_out, key)
    return Listing(files, left_out)


def _companions(source: Source, path: Path) -> tuple[Path, ...]:
    return tuple(found for found in source.companions(path) if found.exists())


def _in_folder(source: Source, root: Path, left_out: dict[str, list[str]]) -> list[tuple[str, Path]]:
    """Return name and path of the files below a folder, sorted by name; note what else is there.

    Those of a folder that lists its files itself keep its order.
    """
    found = []
    places = dict[Path, tuple[str, int]]()
    try:
        for file, reason in _walk(root, source):
            name = file.relative_to(root).as_posix()
            if reason == LISTED:
                places[file] = f"{file.parent.relative_to(root).as_posix()}/", len(places)
                reason = ""
            elif not reason and not name.lower().endswith(source.suffixes):
                reason = OTHER_SUFFIXES.get(file.suffix.lower(), SUFFIX)
            if reason:
                left_out[reason].append(name)
            else:
                found.append((name, file))
    except RecursionError:  # os.walk, before Python 3.12
        raise unreadable(root, "folders within folders, too deep") from None
    if source.bundled:
        left_out.clear()  # nobody has put anything there to be read
    belonging = {path.relative_to(root).as_posix() for _, file in found for path in source.companions(file)}
    for reason, names in list(left_out.items()):
        left_out[reason] = [name for name in names if name not in belonging]
        if not left_out[reason]:
            del left_out[reason]
    return sorted(found, key=lambda one: places.get(one[1], (one[0], 0)))


def list_unique(
    source: Source, path: Paths, key: str = "data.path", each: Callable[[str], object] = lambda what: None
) -> Listing:
    """Return list_files() without copies, of which a bundled corpus has none. each: called meanwhile."""
    listing = list_files(source, path, key)
    return listing if source.bundled else unique(listing, each)


def unique(listing: Listing, each: Callable[[str], object] = lambda what: None) -> Listing:
    """Leave out empty files, and those with the content of another: a link or a copy.

    Files of equal size are read for it; whole only if they begin alike. Of a text that is read
    twice, what is held out would be trained on as well.
    """
    left_out = defaultdict(list, listing.left_out)
    stats = [_stat(file.path) for file in listing.files]
    sizes = defaultdict(int)
    for stat in {(stat.st_dev, stat.st_ino): stat for stat in stats}.values():
        sizes[stat.st_size] += 1
    begins = {
        (stat.st_dev, stat.st_ino): (stat.st_size, _digest(file, each, SAMPLE_BYTES))
        for file, stat in zip(listing.files, stats, strict=True)
        if stat.st_size and sizes[stat.st_size] > 1
    }
    alike = Counter(begins.values())
    files = []
    places = set()
    contents = dict[tuple[int, str], Path]()
    for file, stat in zip(listing.files, stats, strict=True):
        place = (stat.st_dev, stat.st_ino)
        same = None
        if place not in places and alike[begins.get(place)] > 1:
            same = contents.setdefault((stat.st_size, _digest(file, each)), file.path)
        if not stat.st_size:
            left_out[EMPTY].append(file.name)
        elif place in places or same not in (None, file.path):
            left_out[AGAIN].append(file.name)
        else:
            files.append(file)
        places.add(place)
    return Listing(files, left_out)


def with_validation(training: Listing, validation: Listing) -> Listing:
    """Return training files, without those of data.val_path and their copies, and then these.

    Raises DataError if none is left to train on.
    """
    both = unique(Listing([*validation.files, *training.files], {}))
    kept = {file.path for file in both.files} - {file.path for file in validation.files}
    left_out = left_out_of([training, validation])
    left_out[IN_VALIDATION] += [file.name for file in training.files if file.path not in kept]
    files = [file for file in training.files if file.path in kept]
    if training.files and not files:
        raise DataError(
            f"data.path: nothing is left to train on: {listed(left_out[IN_VALIDATION], 3)} is also "
            "in data.val_path, whose texts aren't trained on; give another text for one of them, or "
            "leave data.val_path out: data.val_fraction of the text is held out then"
        )
    return Listing(
        [*files, *validation.files], {reason: names for reason, names in left_out.items() if names}
    )


def left_out_of(listings: Sequence[Listing]) -> defaultdict[str, list[str]]:
    """Return what is left out of several listings, by reason."""
    found = defaultdict[str, list[str]](list)
    for listing in listings:
        for reason, names in listing.left_out.items():
            found[reason] += names
    return found


def _digest(file: File, each: Callable[[str], object], most: int = MOST_COMPARED_BYTES) -> str:
    """Return the digest of a file, or of its first `most` bytes."""
    digest = xxhash.xxh3_128()
    try:
        with open(open_file(file.path, MOST_COMPARED_BYTES), "rb", buffering=0) as opened:
            while most and (piece := opened.read(min(PIECE, most))):
                each(f"comparing the content of {file.name}")
                digest.update(piece)
                most -= len(piece)
    except OSError as error:
        raise unreadable(file.path, error.strerror) from error
    return digest.hexdigest()


def content_of(listing: Listing, each: Callable[[str], object]) -> str:
    """Digest the content of all files, in their order, wherever they lie and whatever they are called."""
    digests = (_digest(file, each) for file in listing.members)
    return xxhash.xxh3_128_hexdigest("".join(digests).encode())


def looks_of(listing: Listing) -> str:
    """Digest what tells without reading whether files are the same ones, unchanged."""
    digest = xxhash.xxh3_128()
    for file in listing.members:
        stat = _stat(file.path)
        looks = stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        digest.update(os.fsencode(f"{os.path.abspath(file.path)}\0{looks}\0"))
    return digest.hexdigest()


def stamps_of(listing: Listing) -> dict[Path, tuple[int, int]]:
    """Return size and time of each file, which change where it is written to."""
    stats = {file.path: _stat(file.path) for file in listing.members}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def newest_of(listing: Listing) -> int:
    """Return when the newest of the files was written, in nanoseconds."""
    return max(time for _, time in stamps_of(listing).values())


def sizes_of(listing: Listing) -> list[int]:
    """Return the bytes of each file."""
    return [_stat(file.path).st_size for file in listing.files]


def fingerprint(listing: Listing) -> str:
    """Digest the names, sizes and times of the files, none of which is read for it."""
    digest = xxhash.xxh3_128()
    for file in listing.members:
        stat = _stat(file.path)
        digest.update(os.fsencode(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0"))
    return digest.hexdigest()


def refused(problems: Sequence[str], advice: str, key: str = "data.path") -> DataError:
    """Return the error that names all that can't be read."""
    many = f"{len(problems):,} files can't be read: " if len(problems) > 1 else ""
    more = f" and {len(problems) - 8:,} more" * (len(problems) > 8)
    return DataError(f"{key}: {many}{'; '.join(problems[:8])}{more}; {advice}")


def unreadable(file: str | Path, reason: str, key: str = "data.path") -> DataError:
    return DataError(f"{key}: {shown(file)} cannot be read: {reason}; change {key} or the file")


def no_text(
    source: Source, path: Paths, left_out: dict[str, list[str]] | None = None, key: str = "data.path"
) -> DataError:
    if source.bundled:
        return DataError(f"{source.bundled.root()} holds no text: {source.bundled.if_absent}")
    others = "; ".join(f"{reason}: {listed(names, 4)}" for reason, names in (left_out or {}).items())
    found = f" ({others})" if others else ""
    advice = f"put {source.wanted} there or change {key}"
    return DataError(f'{key} = "{named(path)}" holds no text{found}; {advice}')


def named(path: Paths) -> str:
    """Return the setting for a message, and for what is written of a corpus."""
    return shown(path or "") if isinstance(path, (str, Path)) or path is None else listed(path)


def _roots(source: Source, path: Paths, key: str, left_out: dict[str, list[str]]) -> list[Path]:
    """Return the files and folders that a setting means. left_out: takes folders that patterns match."""
    if source.bundled:
        if path:
            found = f'{key} = "{named(path)}"'
            raise DataError(
                f'{found} has no use with data.source = "{source.name}"; use data.source = "text" or "jsonl"'
            )
        return [source.bundled.root()]
    if not path:
        raise DataError(f'data.source = "{source.name}" needs {key}; set it to a file or a folder')
    names = [path] if isinstance(path, (str, Path)) else path
    roots = [
        source.main(root) for name in _listed_names(names, key) for root in _matches(name, key, left_out)
    ]
    for root in roots:
        _stat(root, key)
        if not root.is_file() and not root.is_dir():
            raise DataError(f'{key} = "{shown(root)}" is neither a file nor a folder; set it to one')
    return roots


def _listed_names(names: Sequence[str | Path], key: str) -> Iterator[str | Path]:
    """Yield the names; in place of `@file`, those that stand in this file, one a line."""
    for name in names:
        text = str(name)
        if not text.startswith("@") or is_there(text):
            yield name
            continue
        with os_errors_as(DataError, f"{key} = {shown(text)}: the list cannot be read"):
            lines = read_text(text[1:], MOST_LIST_BYTES).splitlines()
        yield from (line.strip() for line in lines if line.strip())


def _matches(name: str | Path, key: str, left_out: dict[str, list[str]]) -> list[Path]:
    """Return what a path or a pattern means, sorted."""
    text = str(name)
    if not glob.has_magic(text) or is_there(text):
        return [Path(text)]
    found = [Path(each) for each in sorted(glob.glob(text, recursive=True))]
    if files := [each for each in found if not each.is_dir()]:
        # a/** matches folders besides what is in them
        within = {folder for file in files for folder in file.parents}
        if others := [each.name for each in found if each.is_dir() and each not in within]:
            left_out[FOLDER] += others
        found = files
    if not found:
        raise DataError(f'{key} = "{shown(text)}" matches nothing; change the pattern')
    return found


def _walk(root: Path, source: Source) -> Iterator[tuple[Path, str]]:
    """Yield what is below `root`, and why it is left out, if it is; LISTED: its folder lists its files.

    Broken links are not left out, so that reading them gives an error.
    """

    def refuse(error: OSError):
        raise unreadable(error.filename, error.strerror) from error

    seen = {_identity(root)}
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=source.bundled is None):
        if source.files_in and (listed_there := source.files_in(Path(folder))) is not None:
            yield from ((file, LISTED) for file in listed_there)
            folders.clear()
            continue
        for name in sorted(folders):
            inside = Path(folder, name)
            reason = HIDDEN if source.excludes(name) else AGAIN if _identity(inside) in seen else ""
            if reason:
                folders.remove(name)  # os.walk goes only where this list still says
                yield inside, reason
            seen.add(_identity(inside))
        folders.sort()
        for name in sorted(names):
            file = os.path.join(folder, name)
            regular = os.path.isfile(file) or not os.path.exists(file)
            yield Path(file), HIDDEN if source.excludes(name) else "" if regular else NO_FILE


def _identity(folder: Path) -> tuple[int, int]:
    found = _stat(folder)
    return found.st_dev, found.st_ino


def _stat(file: Path, key: str = "data.path") -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise unreadable(file, error.strerror, key) from error
    except ValueError:  # NUL
        raise unreadable(file, "no file can have this name", key) from None
