"""`mpitrain data inspect` and `convert`: what prepared tokens hold, and the same for other trainers."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.cluster.rundir import RunDir, read_config, require_run
from mpitrain.commands.data.provenance import MOST_TEXT
from mpitrain.commands.output_file import refuse_file_of_a_run
from mpitrain.data.copies import copies_of
from mpitrain.data.statistics import CorpusStatistics, statistics_of
from mpitrain.data.token_export import write_tokens
from mpitrain.data.tokenizer import Tokenizer, load_tokenizer
from mpitrain.data.tokens import DESCRIPTION, Description, describe, is_whole, open_ends, open_tokens
from mpitrain.errors import DataError, counted
from mpitrain.inputs import is_there, os_errors_as, shown
from mpitrain.plan.declared.formatting import aligned
from mpitrain.training.corpora import PreparedCorpus, tokens_of_sources
from mpitrain.training.step_documents import order_of_run, tokenizer_of_run

GIVE = "give a run directory, or a folder of data.tokens"


def folder_of_tokens(path: str) -> Path:
    """Return the folder with prepared tokens that a path means. Raises DataError for none, or damage."""
    given = Path(path)
    found = [folder for folder in [given, given / "data"] if is_there(folder / DESCRIPTION)]
    if not found and given.is_dir():
        found = [folder for folder in sorted(given.iterdir()) if is_there(folder / DESCRIPTION)]
    if len(found) != 1:
        many = f"holds {len(found)} corpora: give one of them" if found else f"no {DESCRIPTION}: {GIVE}"
        raise DataError(f"{shown(given)}: {many}")
    (folder,) = found
    if not is_whole(folder, describe(folder), lambda what: None):
        raise DataError(
            f"{shown(folder)}: tokens or ends aren't those that {DESCRIPTION} describes; prepare them again"
        )
    return folder


def inspect(path: str, tokenizer_file: str | None, samples: int, as_json: bool) -> str:
    """Return what prepared tokens hold. Raises InputError."""
    folder = folder_of_tokens(path)
    description = describe(folder)
    tokens, ends = open_tokens(folder), np.asarray(open_ends(folder))
    if not ends.size:
        raise DataError(f"{shown(folder)}: tokens of an older version, without ends of documents")
    tokenizer = _tokenizer(folder, description, tokenizer_file)
    origin = description.origin
    with ProgressBar("mpitrain data inspect"):
        found = statistics_of(tokens, ends, origin.end_of_text, origin.begin_of_text)
    chosen = np.unique(np.linspace(0, len(ends) - 1, samples).astype(int)).tolist() if samples else []
    texts = {number: _text(tokens, ends, number, tokenizer) for number in chosen}
    copies = _copies_of_validation(folder, description, tokenizer)
    if as_json:
        facts = found._asdict() | {"held_out_copies": copies, "samples": texts}
        return json.dumps(facts | {"parts": description.tally.parts, "content": description.content})
    return "\n".join(_lines(folder, description, found, copies, texts))


def _tokenizer(folder: Path, description: Description, given: str | None) -> Tokenizer | None:
    """Return the tokenizer that decodes samples; None: they are shown as ids."""
    if given is not None:
        return load_tokenizer(given)
    if description.origin.tokenizer == "bytes":
        return load_tokenizer("bytes")
    copy = folder / "tokenizer.json"
    return load_tokenizer(copy) if is_there(copy) else None


def _copies_of_validation(folder: Path, description: Description, tokenizer: Tokenizer | None) -> int | None:
    """Return how many documents are copies of data.val_path's, or held-out ones; None: there are none."""
    if (number := description.tally.training) is not None:
        tokens, ends = open_tokens(folder), np.asarray(open_ends(folder))
        held_out = np.array([[ends[number - 1] if number else 0, ends[-1]]])
        return len(copies_of(tokens, ends, held_out, 0 if description.origin.end_of_text is None else 1))
    rundir = RunDir(folder.parent)
    if tokenizer is None or not is_there(rundir.config):
        return None
    require_run(rundir)
    config = read_config(rundir.config)
    own = tokenizer_of_run(rundir, config.data, None)
    prepared = PreparedCorpus(config, rundir.data, own, order_of_run(rundir, config))
    return len(prepared.find_copies())


def _text(tokens: np.ndarray, ends: np.ndarray, number: int, tokenizer: Tokenizer | None) -> str:
    begin = int(ends[number - 1]) if number else 0
    ids = tokens[begin : min(int(ends[number]), begin + MOST_TEXT)].tolist()
    return tokenizer.decode(ids)[:MOST_TEXT] if tokenizer else str(ids)


def _lines(
    folder: Path, description: Description, found: CorpusStatistics, copies: int | None, texts: dict[int, str]
) -> Iterator[str]:
    tally = description.tally
    yield f"{shown(folder)}: {tally.describe(description.count)}"
    yield f"content {description.content}, tokenizer {description.origin.tokenizer}"
    least, median, tenth, hundredth, longest = (f"{length:,}" for length in found.lengths)
    mean = found.tokens / found.documents
    yield (
        f"tokens per document: mean {mean:,.1f}, least {least}, median {median}, p90 {tenth}, "
        f"p99 {hundredth}, most {longest}"
    )
    if tally.parts:
        yield aligned([("source", "documents", "tokens", "share"), *_rows(description, folder)])
    share = found.duplicates / found.documents
    most = f"; document {found.example:,} occurs {found.most_copies:,} times" * (found.duplicates > 0)
    yield f"copies of an earlier document: {found.duplicates:,} ({share:.1%}){most}"
    if copies is not None:
        yield f"copies of held-out documents, left out of training: {copies:,}"
    yield f"documents with two begin-of-text tokens: {_counted(*found.double_begins)}"
    yield f"documents of which 90 % is one token: {_counted(*found.constant)}"
    for number, text in texts.items():
        yield f"document {number:,}: {json.dumps(text, ensure_ascii=False)}"


def _rows(description: Description, folder: Path) -> Iterator[tuple[str, ...]]:
    tally = description.tally
    places = tokens_of_sources(open_ends(folder), tally)
    for number, (documents, (begin, end)) in enumerate(zip(tally.parts, places, strict=True)):
        count = end - begin
        yield str(number), f"{documents:,}", f"{count:,}", f"{count / description.count:.1%}"


def _counted(count: int, first: int) -> str:
    return f"{count:,}, the first is document {first:,}" if count else "none"


def convert(path: str, target: str) -> str:
    """Write prepared tokens in the format of a file's suffix; return what was written."""
    with os_errors_as(DataError, f"--to {shown(target)} cannot be written"):
        refuse_file_of_a_run("--to", Path(target))
        folder = folder_of_tokens(path)
        files = write_tokens(folder, Path(target))
    return f"{counted(describe(folder).count, 'tokens', ',')} are written: {', '.join(map(shown, files))}"
