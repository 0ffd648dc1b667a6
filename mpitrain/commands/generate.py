"""`mpitrain generate`: prompts from the command line or a file, and text for a terminal."""

import codecs
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpitrain.commands.requests import GenerateRequest
from mpitrain.data.sources.jsonl import JSONL, text_of
from mpitrain.errors import DataError
from mpitrain.generation.sampling import SamplingRules
from mpitrain.generation.text_sampler import SamplingRequest, TextSampler, sample
from mpitrain.inputs import obeyed, os_errors_as, read_regular, shown

MOST_PROMPT_BYTES = 1 << 26  # of a file of prompts


def pieces(asked: GenerateRequest) -> Iterator[str]:
    """Yield what is printed: a prompt and its text, or an object for each prompt of a file."""
    rules = SamplingRules(asked.temperature, asked.top_k, asked.top_p, asked.min_p, asked.repetition_penalty)
    request = SamplingRequest(
        asked.tokens, asked.seed, rules, asked.tokenizer, asked.stop, asked.chat, asked.system
    )
    if asked.prompts is not None:
        for line in json_lines(asked.run_dir, read_prompts(asked.prompts), request):
            yield f"{line}\n"
        return
    for piece in sample(asked.run_dir, asked.prompt, request):
        yield visible(piece) if sys.stdout.isatty() else piece
    yield "\n"


def json_lines(run_dir: str, prompts: Sequence[str], request: SamplingRequest) -> Iterator[str]:
    """Yield an object with the text of each prompt, whose weights are read once."""
    sampler = TextSampler(run_dir, prompts, request)
    for number, prompt in enumerate(prompts):
        yield json.dumps({"prompt": prompt, "text": "".join(sampler.text(number))})


def read_prompts(path: str) -> list[str]:
    """Return the prompts of a file: its lines, or the "prompt" of each object of JSON lines.

    A line ends with a line feed, or with a carriage return and one. Blank lines are passed over.
    Raises DataError.
    """
    where = f"--prompts {shown(path)}"
    with os_errors_as(DataError, where, "give a file of prompts"):
        content = read_regular(Path(path), MOST_PROMPT_BYTES)
    as_json = path.lower().endswith(JSONL.suffixes)
    prompts = []
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not (line := line.removesuffix(b"\r")).strip():
            continue
        try:
            text = (text_of(line, "prompt") if as_json else line).decode()
        except ValueError as error:
            raise DataError(
                f"{where}, line {number}: {shown(error)}; needed UTF-8 lines, or in a file of JSON lines "
                'objects with a "prompt"'
            ) from None
        if not text:
            raise DataError(f"{where}, line {number}: an empty prompt; needed a text")
        prompts.append(text)
    if not prompts:
        raise DataError(f"{where}: no prompts; needed one on each line")
    return prompts


def visible(text: str) -> str:
    """Return text for a terminal, without what it would obey: a model can be taught to say that.

    Ordinary spaces and joiners stay.
    """
    return "".join("\ufffd" if obeyed(c) else c for c in text)
