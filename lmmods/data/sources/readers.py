"""Files to rows: one generator per file type, each error naming file and line.

The standard library reads json, jsonl, csv and txt because `datasets` and `pyarrow` report a broken line without its
number, and refuse files whose rows differ in type. Parquet and Arrow go through pyarrow.
"""

import csv
import gzip
import io
import json
import lzma
import reprlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet
from fsspec.compression import compr

from lmmods.core.errors import UserError
from lmmods.core.redaction import redact
from lmmods.data.sources.cells import DEEPEST, is_deeper_than, without_fillers
from lmmods.data.sources.paths import check_regular, compression, file_type

DAMAGED_ARCHIVE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
DAMAGED_TABLE = (pa.ArrowException, MemoryError, OverflowError, ValueError)  # a length in it may be any number
BROKEN_JSON = (ValueError, RecursionError)  # ValueError: also a number of more than 4300 digits, or a key twice
TEXT_PIECE = 1 << 14  # characters: longer documents come in pieces, so that memory stays flat and val_size can choose
DocumentUnit = str  # "file", "paragraph" or "line"


class Row(NamedTuple):
    """One record as it stands in the file. `line` counts from 1 (row number in formats without lines)."""

    file: str
    line: int
    values: dict[str, Any]


def read_file(path: str, documents: DocumentUnit = "file") -> Iterator[Row]:
    """Rows of one file, by its extension.

    Args:
        path: Local path or fsspec URL; passwords and tokens of a URL are left out of what the rows are known by.
        documents: What a document of a .txt file is: the `file`, each `paragraph` (blank lines part them) or `line`.

    Raises:
        UserError: The file is missing, damaged, in another encoding than UTF-8, or of an unknown type.
    """
    reader = READERS.get(file_type(path))
    if reader is None:
        raise UserError(f"{path}: unknown file type; readable are {', '.join(sorted(READERS))} and .gz of these")
    codec = compression(path)
    if codec not in compr:
        raise UserError(f"{path}: reading {codec} needs the package zstandard, which is not installed")
    is_local = "://" not in path
    if is_local:
        check_regular(path)
    try:
        with fsspec.open(path, "rb", compression=codec) as file:
            yield from reader(file, redact(path), documents)
    except UserError:
        raise
    except DAMAGED_ARCHIVE as error:
        raise UserError(f"{path}: the compressed file is damaged or cut off ({error}); fetch it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except Exception as error:
        if is_local and codec != "zstd":
            raise
        # file systems of others, and zstandard, raise kinds of their own
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {redact(str(error))[:300]})") from error


def _decoded_lines(file: BinaryIO, path: str) -> Iterator[str]:
    """Lines with their ends, decoded strictly; a leading byte order mark is dropped."""
    start = 0
    for number, line in enumerate(file, 1):
        if b"\x00" in line:
            raise UserError(f"{path}:{number}: NUL byte at byte {start + line.index(0)}; this is not UTF-8 text "
                            "(UTF-16 or binary?). Convert it, for example with `iconv -t UTF-8`")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}:{number}: byte {start + error.start} ({line[error.start]:#04x}) is not UTF-8; "
                            "convert the file, for example with `iconv -t UTF-8`") from error
        start += len(line)
        yield text


def _read_jsonl(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    for number, line in enumerate(_decoded_lines(file, path), 1):
        if not line.strip():
            continue
        try:
            values = DECODER.decode(line)
        except BROKEN_JSON as error:
            raise UserError(f"{path}:{number}: broken JSON ({_why(error)}). Repair or remove the line") from error
        yield Row(path, number, _as_object(values, path, number))


def _read_json(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    """An array of records, an object with one array inside (`{"data": [...]}`), or JSON Lines under a .json name."""
    text = "".join(_decoded_lines(file, path))
    start = _skip_space(text, 0)
    if text[start : start + 1] == "[":
        yield from _json_array(text, start, path)
        return
    try:
        values = DECODER.decode(text)
    except BROKEN_JSON as error:
        yield from _json_lines_or_error(text, path, error)
        return
    arrays = [value for value in values.values() if isinstance(value, list)] if isinstance(values, dict) else []
    if "data" in (values if isinstance(values, dict) else ()) and isinstance(values["data"], list):
        arrays = [values["data"]]
    has_records = len(arrays) == 1 and all(isinstance(item, dict) or _is_conversation(item) for item in arrays[0])
    rows = arrays[0] if has_records else [values]
    for number, item in enumerate(rows, 1):
        yield Row(path, number, _as_object(item, path, number))


def _json_array(text: str, start: int, path: str) -> Iterator[Row]:
    """Elements one by one, so that each knows its line and only one is held as objects."""
    at, line, counted = _skip_space(text, start + 1), 1, 0
    separator = ","
    if text[at : at + 1] == "]":
        separator, at = "]", at + 1
    while separator == ",":
        at = _skip_space(text, at)
        line, counted = line + text.count("\n", counted, at), at
        try:
            values, at = DECODER.raw_decode(text, at)
        except BROKEN_JSON as error:
            where = getattr(error, "lineno", line)
            raise UserError(f"{path}:{where}: broken JSON ({_why(error)}) in the record that starts in line {line}"
                            ) from error
        yield Row(path, line, _as_object(values, path, line))
        at = _skip_space(text, at)
        separator, at = text[at : at + 1], at + 1
    rest = _skip_space(text, at)
    if separator != "]" or rest < len(text):
        line = 1 + text.count("\n", 0, at)
        wrong = f"unexpected {text[at - 1 if separator != ']' else rest]!r}" if separator else (
            "the file ends inside the array")
        raise UserError(f"{path}:{line}: broken JSON: {wrong}; expected ',' or ']' after the record")


def _json_lines_or_error(text: str, path: str, error: Exception) -> Iterator[Row]:
    lines = text.split("\n")
    try:
        first = DECODER.decode(next((line for line in lines if line.strip()), ""))
    except BROKEN_JSON:
        first = None
    if not isinstance(first, dict):
        raise UserError(f"{path}:{getattr(error, 'lineno', 1)}: broken JSON ({_why(error)})") from error
    yield from _read_jsonl(io.BytesIO(text.encode()), path, "file")


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _is_conversation(value: Any) -> bool:
    """Whether a value is a record that is a bare list of turns."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _as_object(values: Any, path: str, line: int) -> dict[str, Any]:
    if _is_conversation(values):
        values = {"messages": values}
    if not isinstance(values, dict):
        raise UserError(f"{path}:{line}: a record must be a JSON object with named fields, or a list of them, "
                        f"found {type(values).__name__}: {reprlib.repr(values)}")
    if is_deeper_than(values, DEEPEST):
        raise UserError(f"{path}:{line}: lists and objects stand in each other more than {DEEPEST} deep; such a record "
                        "is no data. Remove it")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. JSON's own rule, that the last of two values counts, would lose one in silence."""
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} comes twice")
    return values


def _why(error: Exception) -> str:
    """Python's words for broken JSON, but for those that speak of Python's own limits."""
    is_limit = isinstance(error, ValueError) and "int_max_str_digits" in str(error)
    return "a number of more than 4300 digits" if is_limit else str(error)


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _read_csv(file: BinaryIO, path: str, documents: DocumentUnit, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(_decoded_lines(file, path), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            hint = "is a quote unbalanced? A quote inside a quoted field is written twice"
            raise UserError(f"{path}:{line}: broken CSV in the record that starts here ({error}); {hint}") from error
        if fields is None:
            return
        if header is None:
            header = _csv_header(fields, path)
        elif fields:
            if len(fields) != len(header):
                raise UserError(f"{path}:{line}: {len(fields)} fields, but the header names {len(header)} "
                                f"({', '.join(header)}); is a quote unbalanced or a {delimiter!r} unquoted?")
            yield Row(path, line, dict(zip(header, fields, strict=True)))
        line = reader.line_num + 1


def _check_names(names: list[str], path: str) -> None:
    if len(set(names)) != len(names):
        raise UserError(f"{path}: the schema must name each column once, found {names}")


def _csv_header(fields: list[str], path: str) -> list[str]:
    names = [name.strip() for name in fields]
    if len(set(names)) != len(names) or not all(names):
        raise UserError(f"{path}:1: the header must name each column once, found {names}")
    return names


def _read_tsv(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    return _read_csv(file, path, documents, delimiter="\t")


def _read_txt(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    """Documents as rows {"text", "starts", "ends"}.

    A long document comes in pieces, parted at line ends; `starts` holds for its first piece and `ends` for its last.
    """
    piece: list[str] = []
    size, first, starts = 0, 1, True
    for number, line in enumerate(_decoded_lines(file, path), 1):
        blank = not line.strip()
        closes = documents == "line" or (documents == "paragraph" and blank)
        if size > TEXT_PIECE and not blank and documents != "line":
            yield _piece(path, first, piece, starts, False)
            piece, size, first, starts = [], 0, number, False
        if not (blank and closes):
            piece.append(line)
            size += len(line)
        if closes and piece:
            yield _piece(path, first, piece, starts, True)
        if closes:
            piece, size, first, starts = [], 0, number + 1, True
    if "".join(piece).strip():
        yield _piece(path, first, piece, starts, True)


def _piece(path: str, line: int, lines: list[str], starts: bool, ends: bool) -> Row:
    text = "".join(lines)
    return Row(path, line, {"text": text.rstrip("\r\n") if ends else text, "starts": starts, "ends": ends})


def _read_parquet(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    try:
        table = pa.parquet.ParquetFile(file, page_checksum_verification=True)
        yield from _batches_to_rows(table.iter_batches(1000), path)
    except DAMAGED_TABLE as error:
        raise UserError(f"{path}: damaged Parquet file ({str(error)[:200]})") from error


def _read_arrow(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    try:
        is_file_format = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file_format:
            reader = pa.ipc.open_file(file)
            yield from _batches_to_rows((reader.get_batch(i) for i in range(reader.num_record_batches)), path)
        else:
            yield from _batches_to_rows(pa.ipc.open_stream(file), path)
    except DAMAGED_TABLE as error:
        raise UserError(f"{path}: damaged Arrow file ({str(error)[:200]})") from error


def _batches_to_rows(batches: Any, path: str) -> Iterator[Row]:
    number = 0
    for batch in batches:
        batch.validate(full=True)  # offsets of a damaged file would lead anywhere in memory
        _check_names(batch.schema.names, path)
        is_nested = any(pa.types.is_nested(column.type) for column in batch.schema)
        for values in batch.to_pylist():
            number += 1
            yield Row(path, number, without_fillers(values) if is_nested else values)


READERS: dict[str, Callable[[BinaryIO, str, DocumentUnit], Iterator[Row]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".txt": _read_txt,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
