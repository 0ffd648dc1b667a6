"""Which special tokens stand between documents and before each, as in a model's pretraining.

Only an added token that is special can be one: Gemma-3 has a `</s>` that is an HTML tag, Qwen3 one
in its plain vocabulary. What tokenizer_config.json calls eos_token is of a chat model the end of a
turn, and ended no document.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mpitrain.errors import DataError
from mpitrain.inputs import decoded, listed, read_file, shown

CONFIG = "tokenizer_config.json"
MOST_CONFIG_BYTES = 1 << 24  # those with most added tokens have 2 MB

# What well-known models call the token between two documents; the first that the file has as a
# special token is used.
END_OF_TEXT = (
    "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|end▁of▁sentence|>", "<end_of_sentence>",
    "<EOS_TOKEN>", "<seed:eos>", "<eos>", "<|eos|>", "[EOS]", "</s>", "<EOS>", "|ENDOFTEXT|", "[SEP]",
)  # fmt: skip
# Of tokens of form 1, special or not.
OLDER_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
END_OF_TURN = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|end|>", "<|call|>",
    "<|eot|>", "<|user|>", "<|END_OF_TURN_TOKEN|>", "<|assistant|>", "<|end_of_turn|>", "<|im_sep|>",
    "<|role_end|>", "<|message_end|>", "<|hy_eos|>",
}  # fmt: skip
BEGIN_OF_TEXT = (
    "<|begin_of_text|>", "<bos>", "<｜begin▁of▁sentence｜>", "<s>", "<BOS_TOKEN>", "<|startoftext|>",
    "<seed:bos>", "[BOS]", "<beginning_of_sentence>", "<|bos|>",
)  # fmt: skip


class Declared(NamedTuple):
    """What tokenizer_config.json says. adds_begin: None if it says nothing of it."""

    end: str = ""
    begin: str = ""
    adds_begin: bool | None = None

    def as_config(self) -> bytes:
        """Return a tokenizer_config.json that says the same."""
        return msgspec.json.encode(
            {"eos_token": self.end, "bos_token": self.begin, "add_bos_token": self.adds_begin}
        )


class Named(NamedTuple):
    """A token, and why it was taken."""

    id: int
    name: str
    why: str


def declared(tokenizer_file: Path) -> Declared:
    """Return what tokenizer_config.json beside a tokenizer's file says; nothing if it can't be read."""
    try:
        return declared_in(read_file(tokenizer_file.with_name(CONFIG), MOST_CONFIG_BYTES))
    except OSError:
        return Declared()


def declared_in(content: bytes) -> Declared:
    """Return what a tokenizer_config.json says; nothing if it can't be read."""
    try:
        found = decoded(content, dict)
    except ValueError:
        return Declared()
    adds = found.get("add_bos_token")
    end, begin = (text_of_token(found.get(name)) for name in ("eos_token", "bos_token"))
    return Declared(end, begin, adds if isinstance(adds, bool) else None)


def text_of_token(token: Any) -> str:
    """Return the text of a token, which is written as it is, or as an object that has it; "" for none."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def end_of_text(
    asked: str | None, special: Mapping[str, int], every: Mapping[str, int], says: Declared
) -> Named | None:
    """Return the token between two documents, or None. asked: data.end_of_text. Raises DataError."""
    if asked is not None:
        return _asked("data.end_of_text", asked, special, every)
    if says.end in END_OF_TEXT and says.end in special:
        return Named(special[says.end], says.end, f"eos_token of {CONFIG}")
    known = next((name for name in END_OF_TEXT if name in special), "")
    if known:
        return Named(special[known], known, "a special token known by its name")
    if says.end in special and says.end not in END_OF_TURN:
        return Named(special[says.end], says.end, f"eos_token of {CONFIG}")
    return None


def begin_of_text(
    asked: str | None, special: Mapping[str, int], every: Mapping[str, int], says: Declared, first: str
) -> Named | None:
    """Return the token before each document, or None. Raises DataError.

    asked: data.begin_of_text.  first: what the tokenizer itself puts in front of a text.
    """
    if asked is not None:
        return _asked("data.begin_of_text", asked, special, every)
    if says.adds_begin is False:
        return None
    if says.adds_begin and says.begin in special:
        return Named(special[says.begin], says.begin, f"add_bos_token of {CONFIG}")
    if first in special and (first == says.begin or first in BEGIN_OF_TEXT):
        return Named(special[first], first, "as the tokenizer has it")
    return None


def _asked(key: str, name: str, special: Mapping[str, int], every: Mapping[str, int]) -> Named | None:
    if not name:
        return None
    if name not in every:
        known = f"it has {listed(special)}" if special else "it has no special tokens"
        raise DataError(
            f'{key} = "{shown(name)}" is no token of data.tokenizer: {known}; name one, or "" for none'
        )
    return Named(every[name], name, key)
