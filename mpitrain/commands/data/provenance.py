"""`mpitrain data show`: which documents a step of a run has read."""

import json
from collections.abc import Iterator
from typing import Any

from mpitrain.inputs import shown
from mpitrain.training.step_documents import DocumentPart, StepDocuments

MOST_TEXT = 160  # characters of a document that are printed


def show(run_dir: str, step: int, rank: int | None, as_json: bool) -> str:
    """Return what a step has read, as lines or as one JSON object. Raises InputError."""
    read = StepDocuments(run_dir, step, rank)
    if as_json:
        return json.dumps(_object(read, step, rank))
    return "\n".join(_lines(read, step, rank))


def _lines(read: StepDocuments, step: int, rank: int | None) -> Iterator[str]:
    who = "" if rank is None else f", rank {rank}"
    first, last = read.slots[0], read.slots[-1]
    part = "" if rank is None else f"{read.num_sequences:,} of the "
    where = f"{part}sequences {first:,} to {last:,} of the order"
    yield f"step {step} of {shown(read.rundir.path)}{who}: {where}"
    reads = num_bytes = 0
    for sequence in read.sequences():
        reads += sequence.reads
        num_bytes += sequence.num_bytes
        here = "" if sequence.positions is None else f", positions {_ranges(sequence.positions.tolist())}"
        yield f"sequence {sequence.place:,}{here}"
        yield from (f"  {_line(part)}" for part in sequence.parts)
    yield f"read from tokens.bin: {num_bytes:,} bytes in {reads:,} pieces"


def _line(part: DocumentPart) -> str:
    number = "" if part.document is None else f", document {part.document:,}"
    count = len(part.tokens)
    where = f"{shown(part.source)}{number}, tokens {part.offset:,} to {part.offset + count - 1:,}"
    text = part.text
    cut = len(text) > MOST_TEXT
    return f"{where}: {json.dumps(text[:MOST_TEXT], ensure_ascii=False)}{' ...' * cut}"


def _ranges(numbers: list[int]) -> str:
    """Return ascending runs of numbers, as `0 to 7, 24 to 31`."""
    begins = [i for i, number in enumerate(numbers) if not i or number != numbers[i - 1] + 1]
    ends = [*begins[1:], len(numbers)]
    return ", ".join(f"{numbers[a]} to {numbers[b - 1]}" for a, b in zip(begins, ends, strict=True))


def _object(read: StepDocuments, step: int, rank: int | None) -> dict[str, Any]:
    found = [*read.sequences()]
    sequences = [
        {
            "sequence": one.place,
            "positions": None if one.positions is None else one.positions.tolist(),
            "parts": [part._asdict() for part in one.parts],
        }
        for one in found
    ]
    of_disk = {"reads": sum(one.reads for one in found), "bytes": sum(one.num_bytes for one in found)}
    return {"step": step, "rank": rank, **of_disk, "sequences": sequences}
