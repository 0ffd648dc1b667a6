"""Conversations as tokens, of which answers alone carry loss (fine-tuning).

    {"prompt": ..., "completion": ...}     tokens of both, and the token that ends a text; the
                                           completion and that token carry loss
    {"messages": [{"role": ..., ...}]}     the text that the tokenizer's chat template makes; what an
                                           assistant says carries loss, up to the token that ends it

Where an answer begins, the template says itself: a text up to the answer is what `generate --chat` gives
a model.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import xxhash

from mpitrain.data.chat_template import ChatTemplate, Refusal, ids_of_ends, read_template_folder
from mpitrain.data.token_dtype import dtype_for
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import DataError
from mpitrain.inputs import listed, shown

ASSISTANT = "assistant"
PAIR = ("prompt", "completion")
HALF = "half of a character that JSON writes as two"
ADVICE = 'leave data.source = "chat" out, or give data.tokenizer a tokenizer.json that has one beside it'


class Answered(NamedTuple):
    """ids: of a conversation. scored: whether each carries loss as a target."""

    ids: np.ndarray
    scored: np.ndarray


class Conversations:
    """Makes tokens of conversations. The template is read when the first one asks for it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    @property
    def identity(self) -> str:
        """Return what differs where a template, or what it is given, differs."""
        try:
            template = self._template
        except DataError:
            return "none"
        decides = json.dumps([template.source, template.special, template.ends])
        return xxhash.xxh3_64_hexdigest(decides.encode())

    def tokens(self, lines: Sequence[Any]) -> Iterator[Answered | str]:
        """Yield the tokens of each line, or what is wrong with it. Raises DataError, LibraryError.

        lines: what their JSON holds, or why it can't be read.
        """
        problems = [_problem(line) for line in lines]
        whole = [line for line, problem in zip(lines, problems, strict=True) if not problem]
        of_chats = self._of_chats([line["messages"] for line in whole if "messages" in line])
        for line, problem in zip(lines, problems, strict=True):
            if problem:
                yield problem
            elif "messages" in line:
                yield next(of_chats)
            else:
                yield self._of_pair(line)

    def _of_pair(self, line: Mapping[str, str]) -> Answered | str:
        tokenizer = self._tokenizer
        if tokenizer.end_of_text is None:
            raise DataError(
                'data.source = "chat": the tokenizer has no token that ends a completion; name one by '
                "data.end_of_text"
            )
        try:
            prompt, text = line["prompt"].encode(), (line["prompt"] + line["completion"]).encode()
        except UnicodeEncodeError:
            return HALF
        before = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
        whole = [*before, *tokenizer.encode(text).tolist(), tokenizer.end_of_text]
        begin = _common(whole, [*before, *tokenizer.encode(prompt).tolist()])
        return self._answered(whole, [(begin, len(whole))])

    def _of_chats(self, chats: Sequence[list[dict[str, Any]]]) -> Iterator[Answered | str]:
        """Yield the tokens of chats; one child writes all of them."""
        if not chats:
            return
        template = self._template
        special: dict[str, int] = self._tokenizer.special  # type: ignore[attr-defined]
        numbers = ids_of_ends(template, special)
        ends = [text for text, number in special.items() if number in numbers]
        asked = [(chat, [None, *_answers(chat)]) for chat in chats]
        texts = template.written(asked)
        for chat, stops in asked:
            own = islice(texts, len(stops))
            if spelled := [end for end in ends for message in chat if _spells(message, end)]:
                found = f"a message that spells {shown(spelled[0])}, which ends an answer"
            else:
                found = self._of_texts(own, ends)
            deque(own, 0)  # what wasn't looked at
            yield found

    def _of_texts(self, texts: Iterator[str | Refusal], ends: Sequence[str]) -> Answered | str:
        """Return the tokens of a chat, or what is wrong with it. texts: the whole, and up to each answer."""
        encode = self._tokenizer.encode_with_special  # type: ignore[attr-defined]
        whole = next(texts)
        if isinstance(whole, Refusal):
            return whole.problem
        try:
            whole.encode()
        except UnicodeEncodeError:
            return HALF
        ids = encode(whole)
        places = []
        for prompt in texts:
            if isinstance(prompt, Refusal):
                return prompt.problem
            if not whole.startswith(prompt):
                return "an answer before which the chat template writes what a model isn't given"
            after = [place + len(end) for end in ends if (place := whole.find(end, len(prompt))) >= 0]
            if not after:
                return "an answer that the chat template ends without eos_token"
            last = len(ids) if min(after) == len(whole) else _common(ids, encode(whole[: min(after)]))
            places.append((_common(ids, encode(prompt)), last))
        return self._answered(ids, places)

    def _answered(self, ids: Sequence[int], places: Sequence[tuple[int, int]]) -> Answered:
        scored = np.zeros(len(ids), bool)
        for begin, end in places:
            scored[begin:end] = True
        scored[:1] = False  # nothing predicts it
        return Answered(np.array(ids, dtype_for(self._tokenizer.vocab)), scored)

    @cached_property
    def _template(self) -> ChatTemplate:
        file = getattr(self._tokenizer, "file", None)
        if file is None:
            raise DataError(f"data.tokenizer: bytes have no chat template; {ADVICE}")
        return read_template_folder(file.parent, ADVICE)


def _common(whole: Sequence[int], part: Sequence[int]) -> int:
    """Return how many tokens two texts begin with alike: tokens may go over the end of the shorter."""
    pairs = zip(whole, part, strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), len(part))


def _spells(message: Mapping[str, Any], end: str) -> bool:
    """Return whether the end of an answer stands in a message's content, or in anything else of it."""
    return json.dumps(end)[1:-1] in json.dumps(message)


def _answers(chat: Sequence[Mapping[str, Any]]) -> list[int]:
    return [place for place, message in enumerate(chat) if message["role"] == ASSISTANT]


def _problem(line: Any) -> str:
    """Return what a line lacks of a conversation; "": nothing."""
    if isinstance(line, ValueError):
        return line.args[0]
    if not isinstance(line, dict):
        return "no object"
    if line.get("tools"):
        return '"tools", which the chat template would need; leave them out'
    if "messages" in line:
        return _problem_of_messages(line["messages"])
    if missing := [key for key in PAIR if key not in line]:
        others = f", but {listed(line)}" if line else ""
        return f'an object without "messages" and without "{missing[0]}"{others}'
    if wrong := [key for key in PAIR if not isinstance(line[key], str)]:
        return f'no text under the key "{wrong[0]}"'
    return "" if line["completion"].strip() else 'an empty answer under the key "completion"'


def _problem_of_messages(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        return 'no list of messages under the key "messages"'
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f'message {number} without a "role"'
        if not isinstance(message.get("content"), str):
            return f'message {number} without a text under the key "content"'
        if message["role"] == ASSISTANT and not message["content"].strip():
            return f"an empty answer, message {number}"
    return "" if _answers(messages) else f'no message of the role "{ASSISTANT}"'
