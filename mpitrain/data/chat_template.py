"""The chat template of a Hugging Face tokenizer: messages as the text that a model answers.

    chat_template.jinja        the template, or else
    tokenizer_config.json      its chat_template, and the texts of special tokens
    generation_config.json     tokens that end an answer

It is a program in Jinja, maybe a stranger's, and runs in Jinja's sandbox, as transformers runs it.
That is a child's work, whose memory and time are limited: one operation can ask for all of both.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.data.limited import LimitedError, Limits, parts
from mpitrain.data.special_tokens import CONFIG, MOST_CONFIG_BYTES, text_of_token
from mpitrain.errors import DataError
from mpitrain.inputs import decoded, listed, read_file, shown

TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
MOST_TEMPLATE_BYTES = 1 << 18  # the longest published ones have 20 KB
SANDBOX = "mpitrain.data.chat_sandbox"
# of the child: published templates take 30 MB and milliseconds
MEMORY = 1 << 29
CPU_S = 5
TEXTS_PER_S = 100
WITHOUT_CHAT = "leave --chat out, or give --tokenizer FILE, a tokenizer.json that has one beside it"
SPECIAL = tuple(f"{each}_token" for each in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
Messages = Sequence[Mapping[str, Any]]
Stops = Sequence[int | None]  # messages before an answer that is to follow; None: all, and none follows
Read = Callable[[str, int], bytes]  # a file of the tokenizer's folder, of at most so many bytes


class Refusal(NamedTuple):
    """Why a template refuses messages, in its own words."""

    reason: str

    @property
    def problem(self) -> str:
        """What is wrong with a line of these messages."""
        return f"messages that the chat template refuses: {shown(self.reason)}"


class ChatTemplate:
    """A template that can be applied. Raises DataError for whatever is none.

    special: texts of special tokens by their names in a template, as bos_token.
    ends: numbers of tokens that end an answer, as generation_config.json has them.
    where: the files lie, for messages.
    """

    def __init__(self, source: str, special: Mapping[str, str], ends: Sequence[int], where: str):
        if len(source.encode(errors="replace")) > MOST_TEMPLATE_BYTES:
            large = f"a chat template of more than {MOST_TEMPLATE_BYTES:,} bytes"
            raise DataError(f"{where}: {large}; use another")
        self.source = source
        self.special = special
        self.ends = ends
        self._where = where

    def text(self, messages: Messages) -> str:
        """Return the text of messages (role, content), up to where the answer begins."""
        return self.texts([messages])[0]

    def texts(self, conversations: Sequence[Messages]) -> list[str]:
        """Return what one child makes of conversations of today, up to where the answer begins.

        Raises DataError, LibraryError.
        """
        found = list[str]()
        for text in self.written([(chat, [len(chat)]) for chat in conversations], today=True):
            if isinstance(text, Refusal):
                raise self._failure(text.reason)
            found.append(text)
        return found

    def written(
        self, asked: Sequence[tuple[Messages, Stops]], today: bool = False
    ) -> Iterator[str | Refusal]:
        """Yield texts of conversations, or why the template refuses one. Raises as texts() does.

        asked: messages, and the stops that there is a text for.
        today: a template's date is today's, as in transformers; else always the same.
        """
        given = "\n".join(map(json.dumps, [self.source, [self.special, today], *asked])).encode()
        limits = Limits(MEMORY, CPU_S + sum(len(stops) for _, stops in asked) // TEXTS_PER_S)
        try:
            for part in parts(SANDBOX, given, limits):
                text = json.loads(part)
                yield text if isinstance(text, str) else Refusal(text["error"])
        except LimitedError as error:
            raise self._failure(str(error)) from None

    def _failure(self, why: str) -> DataError:
        return DataError(f"{self._where}: the chat template fails: {shown(why)}; use another")


def read_template_folder(folder: Path, advice: str) -> ChatTemplate:
    """Return the template of a folder. Raises DataError."""
    return read_chat_template(lambda name, most: read_file(folder / name, most), shown(folder), advice)


def read_chat_template(read: Read, where: str, advice: str = WITHOUT_CHAT) -> ChatTemplate:
    """Return the template of a folder, whose files `read` gives. Raises DataError.

    where: the folder, for messages.  advice: what to do if there is none.
    """
    config = _object(read, CONFIG, where)
    source = _content(read, TEMPLATE, MOST_TEMPLATE_BYTES, where)
    if source is None:
        template = config.get("chat_template")
        if isinstance(template, list):  # several with names
            named = (each for each in template if isinstance(each, Mapping))
            template = next((each.get("template") for each in named if each.get("name") == "default"), None)
        if not isinstance(template, str):
            raise DataError(f"{where}: no chat template, neither {TEMPLATE} nor in {CONFIG}; {advice}")
    else:
        try:
            template = source.decode()
        except UnicodeDecodeError:
            raise DataError(f"{where}: {TEMPLATE} isn't UTF-8 text; use another") from None
    special = {name: text for name in SPECIAL if (text := text_of_token(config.get(name)))}
    found = _object(read, GENERATION, where).get("eos_token_id")
    ends = [each for each in (found if isinstance(found, list) else [found]) if type(each) is int]
    return ChatTemplate(template, special, ends, where)


def _object(read: Read, name: str, where: str) -> dict[str, Any]:
    """Return a file's object of JSON; an empty one for a file that isn't there."""
    content = _content(read, name, MOST_CONFIG_BYTES, where)
    if content is None:
        return {}
    try:
        return decoded(content, dict)
    except ValueError as error:
        raise DataError(f"{where}: {name} is no object of JSON: {error}") from None


def _content(read: Read, name: str, most_bytes: int, where: str) -> bytes | None:
    try:
        return read(name, most_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{where}: {name}: {error.strerror or 'unreadable'}; use another") from None


def messages_of(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return a conversation of one question."""
    said = [] if system is None else [{"role": "system", "content": system}]
    return [*said, {"role": "user", "content": prompt}]


def ids_of_ends(template: ChatTemplate, special: Mapping[str, int]) -> frozenset[int]:
    """Return the tokens that end an answer. special: numbers of special tokens by their texts.

    Raises DataError if there is none: the answer would continue with a question.
    """
    ends = {*template.ends}
    if (end := template.special.get("eos_token")) in special:
        ends.add(special[end])
    if not ends:
        raise DataError(
            f"chat template: neither eos_token_id of {GENERATION} nor eos_token of {CONFIG} says "
            f"which token ends an answer; the tokenizer has {listed(special)}; name it there"
        )
    return frozenset(ends)
