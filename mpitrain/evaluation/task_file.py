"""Tasks: a file of JSON lines, each an example, all of one kind.

    multiple choice  {"text": "Q: 2 + 2?\\nA:", "choices": ["3", "4"], "target": 1}
    cloze            {"text": "The sky is", "target": " blue"}
    generation       {"text": "Q: 2 + 2?\\nA:", "target": "4", "until": "\\n", "tokens": 8}

Names are those of lm-evaluation-harness: what its doc_to_text, doc_to_choice and doc_to_target return.
"""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from mpitrain.errors import DataError, counted
from mpitrain.inputs import read_file, shown

MOST_BYTES = 1 << 28
DELIMITER = " "  # between a text and a choice
BETWEEN_SHOTS = "\n\n"
NEW_TOKENS = 64
ADVICE = "see docs/guides/evaluation.md for the three kinds of lines"


class Example(msgspec.Struct, frozen=True):
    """A line. Further keys are ignored."""

    text: str
    target: int | str | tuple[str, ...]  # number or text of the right choice; what continues; answers
    choices: tuple[str, ...] = ()
    until: str | tuple[str, ...] = ()  # what is generated ends here, or after so many tokens
    tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None

    @property
    def kind(self) -> str:
        if self.choices:
            return "multiple choice"
        return "generation" if self.until or self.tokens or isinstance(self.target, tuple) else "cloze"

    @property
    def right(self) -> int:
        """Return the number of the right choice."""
        return self.choices.index(self.target) if isinstance(self.target, str) else self.target

    @property
    def answers(self) -> tuple[str, ...]:
        return (self.target,) if isinstance(self.target, str) else self.target

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.until,) if isinstance(self.until, str) else self.until))

    @property
    def solved(self) -> str:
        """Return the text with the right answer after it, as an example of few-shot contexts."""
        if self.kind == "cloze":
            return self.text + self.target
        return self.text + DELIMITER + (self.choices[self.right] if self.choices else self.answers[0])

    def damage(self) -> str:
        """Return what is wrong with it; "": nothing."""
        numbered = isinstance(self.target, int)
        texts = (self.text, *self.choices, *self.stops, *(() if numbered else self.answers))
        if any("\ud800" <= c <= "\udfff" for text in texts for c in text):
            return "half of a character that JSON writes as two"
        if self.choices:
            return self._damage_of_choices()
        if numbered:
            return f'target {self.target} without "choices"; needed a text'
        return "" if self.answers and all(self.answers) else 'an empty "target"'

    def _damage_of_choices(self) -> str:
        if len(self.choices) < 2 or not all(self.choices):
            return "needed two choices or more, none of them empty"
        if isinstance(self.target, tuple):
            return 'needed one "target": the number of the right choice, or its text'
        if isinstance(self.target, str):
            known = self.target in self.choices
            return "" if known else f"target {shown(repr(self.target))} is none of the choices"
        if not 0 <= self.target < len(self.choices):
            return f"target {self.target}; needed a number from 0 to {len(self.choices) - 1}"
        return ""


def read_examples(name: str, where: str) -> list[Example]:
    """Read a task file. Raises DataError with the line that is wrong. where: in messages."""
    try:
        content = read_file(Path(name), MOST_BYTES)
    except OSError as error:
        raise DataError(f"{where}: {error.strerror or shown(error)}; give a file of JSON lines") from None
    examples: list[Example] = []
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not line.strip():
            continue
        example, damage = _read(line)
        if not damage and examples and example.kind != examples[0].kind:
            damage = f"{example.kind}, and lines before it are {examples[0].kind}; one file has one kind"
        if damage:
            raise DataError(f"{where}, line {number}: {damage}; {ADVICE}")
        examples.append(example)
    if not examples:
        raise DataError(f"{where}: no examples; {ADVICE}")
    return examples


def _read(line: bytes) -> tuple[Any, str]:
    try:
        example = msgspec.json.decode(line, type=Example)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return None, shown(error)
    return example, example.damage()


def with_shots(examples: Sequence[Example], shots: int, where: str) -> tuple[str, list[Example]]:
    """Return what stands before each text, and the examples that are left to be judged."""
    if shots >= len(examples):
        lines = counted(len(examples), "lines")
        fault = f"{lines}, of which the first {shots} are shown solved: none is left to judge"
        raise DataError(f"{where}: {fault}; give fewer shots")
    before = "".join(example.solved + BETWEEN_SHOTS for example in examples[:shots])
    return before, list(examples[shots:])
