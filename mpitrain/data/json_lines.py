"""The text in a line of a JSONL file.

What nobody reads of it may be anything that Python's json writes: NaN, halves of characters.
"""

import codecs
import json
from functools import cache
from typing import Any

import msgspec

from mpitrain.inputs import listed, shown

KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "true or false",
    float: "a number",
    type(None): "null",
}
MARK = codecs.BOM_UTF8.decode()


def text_of(line: bytes, key: str) -> bytes:
    """Return the text under a key, in UTF-8. Raises ValueError that says what is there instead."""
    try:
        text = msgspec.json.decode(line, type=_record(key)).text
    except (msgspec.MsgspecError, ValueError, RecursionError):
        text = _slowly(line, key)
    try:
        return text.removeprefix(MARK).encode()
    except UnicodeEncodeError as error:
        half = shown(text[error.start])
        raise ValueError(
            f'half of a character that JSON writes as two ({half}) under the key "{shown(key)}"'
        ) from None


@cache
def _record(key: str) -> type[msgspec.Struct]:
    """Return the type of a line; other keys are allowed and ignored."""
    return msgspec.defstruct("Record", [("text", str)], rename={"text": key})


def _slowly(line: bytes, key: str) -> str:
    """Return the text of a line that msgspec doesn't take."""
    try:
        found: Any = json.loads(line, parse_int=float)  # not int: it refuses 5,000 digits
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start:,} of the line)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({shown(error.msg)}, character {error.pos:,})") from None
    except RecursionError:
        raise ValueError("brackets within brackets, too deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"{KINDS[type(found)]}, not an object")
    if key not in found:
        others = f", but {listed(found)}: data.text_key says which one has the text" if found else ""
        raise ValueError(f'an object without "{shown(key)}"{others}')
    if not isinstance(found[key], str):
        raise ValueError(f'{KINDS[type(found[key])]} under the key "{shown(key)}"')
    return found[key]
