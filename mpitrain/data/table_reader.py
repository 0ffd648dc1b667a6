"""Read a table of Parquet or Arrow with pyarrow: the child of data/sources/parquet.py.

python -P -m mpitrain.data.table_reader LIMITS      TableRequest on stdin; lists of TableRow on stdout
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from mpitrain.data.limited import grouped, serve
from mpitrain.errors import LibraryError
from mpitrain.inputs import listed, shown

SCORED = ("loss_mask", "assistant_masks", "completion_mask")  # columns of 0 and 1, one for each id
ROWS = 64  # read at once
PART_BYTES = 1 << 24
MOST_TEXT_BYTES = 1 << 26  # as of a line of JSON
FILE, PARQUET = b"ARROW1", b"PAR1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class TableRequest(msgspec.Struct):
    path: str
    column: str
    first: int


class Ids(msgspec.Struct):
    """dtype: of NumPy."""

    dtype: str
    content: bytes


class TableRow(msgspec.Struct):
    """damage: why there is neither text nor ids.  scored: a byte for each id."""

    text: bytes = b""
    ids: Ids | None = None
    scored: bytes | None = None
    damage: str = ""


def answer(given: bytes) -> Iterator[bytes]:
    """Yield the rows of a table, from one on."""
    try:
        import pyarrow as pa
        from pyarrow import ipc, parquet
    except ImportError:
        raise LibraryError("tables are read by pyarrow: pip install 'mpitrain[data]' installs it") from None
    pa.set_memory_pool(pa.system_memory_pool())
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    request = msgspec.msgpack.decode(given, type=TableRequest)
    with pa.OSFile(request.path) as file:
        head = file.read(6)
        file.seek(0)
        if head.startswith(PARQUET):
            batches = _of_parquet(parquet.ParquetFile(file), request)
        else:
            if head.startswith(END_OF_STREAM[:4]):
                _require_end(file)
            reader = ipc.open_file(file) if head == FILE else ipc.open_stream(file)
            _require(request.column, reader.schema.names)
            every = map(reader.get_batch, range(reader.num_record_batches)) if head == FILE else reader
            batches = _after(every, request.first)
        rows = (row for batch in batches for row in _rows(batch, request))
        yield from map(msgspec.msgpack.encode, grouped(rows, _size, PART_BYTES))


def _require_end(file: Any) -> None:
    """Raise ValueError for a stream without its mark of the end: a cut one is read as a shorter one."""
    file.seek(max(0, file.size() - len(END_OF_STREAM)))
    if file.read(len(END_OF_STREAM)) != END_OF_STREAM:
        raise ValueError("it has no mark of its end: it was cut")
    file.seek(0)


def _of_parquet(table: Any, request: TableRequest) -> Iterator[Any]:
    """Yield batches from a row on; groups of rows before it aren't read."""
    names = table.schema_arrow.names
    _require(request.column, names)
    columns = [name for name in names if name in (request.column, *SCORED)]
    group, first = 0, request.first
    while group < table.num_row_groups and table.metadata.row_group(group).num_rows <= first:
        first -= table.metadata.row_group(group).num_rows
        group += 1
    groups = range(group, table.num_row_groups)
    batches = table.iter_batches(ROWS, row_groups=list(groups), columns=columns, use_threads=False)
    yield from _after(batches, first)


def _after(batches: Iterable[Any], first: int) -> Iterator[Any]:
    """Yield the rows after the first ones, in slices of ROWS."""
    for batch in batches:
        skipped = min(first, batch.num_rows)
        first -= skipped
        for begin in range(skipped, batch.num_rows, ROWS):
            yield batch.slice(begin, ROWS)


def _require(column: str, names: list[str]) -> None:
    if column not in names:
        raise ValueError(f'no column "{shown(column)}", but {listed(names)}: data.text_key says which one')


def _size(row: TableRow) -> int:
    return len(row.text) + (len(row.ids.content) if row.ids else 0) + 64


def _rows(batch: Any, request: TableRequest) -> Iterator[TableRow]:
    import pyarrow as pa

    batch.validate(full=True)
    column = batch.column(request.column)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    is_text = str(kind) in ("string", "large_string", "string_view")
    is_ids = _is_list_of(kind, pa.types.is_integer)
    if not is_text and not is_ids:
        found = f'column "{shown(request.column)}" has {shown(str(kind))}'
        raise ValueError(f"{found}, needed strings or lists of integers")
    masks = _masks(batch) if is_ids else None
    for number, value in enumerate(column):
        if not value.is_valid:
            yield TableRow(damage="found null")
        elif is_text:
            yield _text(value)
        else:
            yield _ids(value, None if masks is None else masks[number])


def _masks(batch: Any) -> Any:
    """Return the column of a loss mask; None: there is none."""
    import pyarrow as pa

    name = next((name for name in SCORED if name in batch.schema.names), None)
    kind = pa.null() if name is None else batch.column(name).type
    if pa.types.is_null(kind):
        return None
    if not _is_list_of(kind, pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating):
        raise ValueError(f'column "{name}" has {shown(str(kind))}, needed lists of 0 and 1')
    return batch.column(name)


def _is_list_of(kind: Any, *numbers: Callable[[Any], bool]) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and any(are(kind.value_type) for are in numbers)


def _text(value: Any) -> TableRow:
    if value.as_buffer().size > MOST_TEXT_BYTES:
        return TableRow(damage=f"found a text of more than {MOST_TEXT_BYTES:,} bytes")
    content = value.as_buffer().to_pybytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return TableRow(damage=f"found not UTF-8 (byte {error.start:,} of the text)")
    return TableRow(content)


def _ids(value: Any, mask: Any) -> TableRow:
    found = value.values
    if found.null_count:
        return TableRow(damage="found null among its ids")
    ids = found.to_numpy(zero_copy_only=False)
    if mask is None or not mask.is_valid:
        return TableRow(ids=Ids(ids.dtype.str, ids.tobytes()))
    if mask.values.null_count:
        return TableRow(damage="found null in its loss mask")
    scored = mask.values.to_numpy(zero_copy_only=False)
    if len(scored) != len(ids):
        return TableRow(damage=f"found {len(scored):,} numbers in the loss mask for {len(ids):,} ids")
    return TableRow(ids=Ids(ids.dtype.str, ids.tobytes()), scored=(scored != 0).tobytes())


if __name__ == "__main__":
    serve(answer)
