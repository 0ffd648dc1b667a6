"""Read a stranger's tokenizer.json in a child first, and encode a short text with it.

Such a file holds regular expressions, replacements and trees, any of which may take a machine's memory
or hours, or crash the library. The text has what makes them grow: runs of one character, and each kind.
Afterwards the file is read here, and texts are encoded without a child: a corpus has gigabytes.
"""

import string
from collections.abc import Iterator

from mpitrain.data.limited import LimitedError, Limits, parts, serve
from mpitrain.errors import DataError
from mpitrain.inputs import shown

# of one file: the largest published ones, of 33 MB, take 0.6 GB and 3 s
MEMORY = 1 << 30
MEMORY_PER_BYTE = 40
CPU_S = 20
BYTES_PER_S = 1 << 20
SAMPLE = "".join(
    (
        *(character * 48 + "! " for character in "aA1 .\n_é日"),
        *(string.printable, " the quick brown fox, and 1234567890 others' dogs\n" * 8),
        *("😀\u200d\ufeff\u0301 \t\r\n" * 4, "x" * 500),
    )
)


def require_harmless(content: bytes, where: str) -> None:
    """Raise DataError unless a child can read a tokenizer.json, and encode a text, within its limits.

    An error that the library raises is raised again where the file is used.
    """
    limits = Limits(MEMORY + MEMORY_PER_BYTE * len(content), CPU_S + len(content) // BYTES_PER_S)
    try:
        for _ in parts(__spec__.name, content, limits):
            pass
    except LimitedError as error:
        raise DataError(f'{where}: {shown(error)}; use the tokenizer.json of a model, or "bytes"') from None


def reply(content: bytes) -> Iterator[bytes]:
    """Encode the sample; the answer is empty."""
    import tokenizers  # by the child alone

    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_batch_fast([SAMPLE], add_special_tokens=False)
    except BaseException as error:
        if isinstance(error, MemoryError):
            raise
    yield b""


if __name__ == "__main__":
    serve(reply)
