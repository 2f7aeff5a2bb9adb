"""File readers: one generator of rows per file type, each error naming file and line.

The standard library reads json, jsonl, csv and txt, because `datasets` and `pyarrow` report a broken line without its
number, and reject files whose rows differ in type. Parquet and Arrow are read by pyarrow.
"""

import codecs
import csv
import gzip
import itertools
import json
import lzma
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet
from fsspec.compression import compr

from lmmods.core.errors import UserError
from lmmods.core.redaction import redact
from lmmods.data.read.cells import DEEPEST, is_deeper_than, is_longer_than, without_fillers
from lmmods.recipe.source import check_regular, compression, file_type

DAMAGED_ARCHIVE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
DAMAGED_TABLE = (pa.ArrowException, MemoryError, OverflowError, ValueError)  # a length in it may be arbitrary
BROKEN_JSON = (ValueError, RecursionError)  # ValueError: also a number of more than 4300 digits, or a key twice
TEXT_PART = 1 << 14  # characters; longer documents are divided, which bounds memory and lets val_size choose
# Characters of a row: ten million tokens, the longest context of a model, have fewer. Without a limit, a compressed
# file of a few megabytes could expand to a row of gigabytes.
LONGEST = 64_000_000
LONG_PART = 1 << 20  # characters of the parts of a longer line of text
LONGEST_DOCUMENT = 512_000_000  # characters of a .json that is no array of records: it is parsed as a whole
TOO_LONG = f"a row of more than {LONGEST:,} characters, longer than any model could take"
READ_AT_ONCE = 1 << 20  # bytes
DOCUMENT_START = "-DOCSTART-"  # in CoNLL's files: a line of its own before each document
DocumentUnit = str  # "file", "paragraph", "line" or "conll"


class Row(NamedTuple):
    """One record as stored in a file.

    Args:
        line: Line number from 1 (row number in formats without lines).
        problem: Reason why the record was skipped during reading; its values are then empty.
    """

    file: str
    line: int
    values: dict[str, Any]
    problem: str | None = None


def read_file(path: str, documents: DocumentUnit = "file") -> Iterator[Row]:
    """Yield the rows of one file, read by its extension.

    Args:
        path: Local path or fsspec URL; secrets in a URL are removed from the rows' file name.
        documents: Unit of a document in a .txt file: the `file`, each `paragraph` (separated by blank lines) or `line`;
            `conll` if such files are sentences in CoNLL's form.

    Raises:
        UserError: The file is missing, damaged, in another encoding than UTF-8, or of an unknown type.
    """
    reader = READERS.get(file_type(path))
    if reader is None:
        raise UserError(f"{path}: unknown file type; supported are {', '.join(sorted(READERS))} and .gz of these")
    codec = compression(path)
    if codec not in compr:
        raise UserError(f"{path}: reading {codec} needs the package zstandard. Install it")
    is_local = "://" not in path
    if is_local:
        check_regular(path)
    try:
        with fsspec.open(path, "rb", compression=codec) as file:
            yield from reader(file, redact(path), documents)
    except UserError:
        raise
    except DAMAGED_ARCHIVE as error:
        raise UserError(f"{path}: the compressed file is damaged or truncated ({error}); download it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except Exception as error:
        if is_local and codec != "zstd":
            raise
        # other file systems, and zstandard, raise exceptions of their own
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {redact(str(error))[:300]})") from error


class Part(NamedTuple):
    """A part of a line of more than LONGEST characters; `ends` is True for the last one."""

    text: str
    ends: bool


def _decode(file: BinaryIO, path: str) -> Iterator[str]:
    """Yield the text in chunks, decoded strictly, without a leading byte order mark."""
    start, line, undecoded, is_last = 0, 1, b"", False  # start: offset of the bytes not decoded yet
    while not is_last:
        block = file.read(READ_AT_ONCE)
        is_last = not block
        data = undecoded + block
        # Decode up to the first NUL. A character split by the end of the chunk stays in `data[num_bytes:]`; at the end
        # of the file it is an error.
        bad, is_nul = data.find(0), True
        try:
            text, num_bytes = codecs.utf_8_decode(data if bad < 0 else data[:bad], "strict", is_last and bad < 0)
        except UnicodeDecodeError as error:
            bad, is_nul = error.start, False
            text, num_bytes = codecs.utf_8_decode(data[:bad], "strict", False)
        text = text[1:] if start == 0 and text.startswith("\ufeff") else text
        if bad >= 0:
            # Whole lines before the bad one are still read, so that the first error of a file is the one reported.
            yield text[: text.rfind("\n") + 1]
            line += data.count(b"\n", 0, bad)
            if is_nul:
                raise UserError(f"{path}:{line}: NUL byte at byte {start + bad}; this is not UTF-8 text (UTF-16 or "
                                "binary?). Convert it, for example with `iconv -t UTF-8`")
            raise UserError(f"{path}:{line}: byte {start + bad} ({data[bad]:#04x}) is not UTF-8; convert the file, "
                            "for example with `iconv -t UTF-8`")
        yield text
        start, line, undecoded = start + num_bytes, line + text.count("\n"), data[num_bytes:]


def _lines(texts: Iterable[str], first: int = 1) -> Iterator[tuple[int, str | Part]]:
    """Yield lines with their number and line end. A line of more than LONGEST characters comes in parts."""
    parts: list[str] = []
    line_number, size, is_parted = first, 0, False
    for text in texts:
        # `parts` collects an incomplete line; `is_parted` is True once parts of it have been yielded.
        *complete, last = text.split("\n")
        for line in complete:
            if parts or is_parted:
                line = "".join((*parts, line))
            yield line_number, Part(line + "\n", True) if is_parted or len(line) > LONGEST else line + "\n"
            line_number, parts, size, is_parted = line_number + 1, [], 0, False
        if last:
            parts.append(last)
            size += len(last)
        # Too long for memory: yield it in parts.
        if size > LONGEST or is_parted and parts:
            yield line_number, Part("".join(parts), False)
            parts, size, is_parted = [], 0, True
    if parts or is_parted:
        yield line_number, Part("".join(parts), True) if is_parted else "".join(parts)


def _read_jsonl(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    return _jsonl_rows(_lines(_decode(file, path)), path)


def _jsonl_rows(lines: Iterable[tuple[int, str | Part]], path: str) -> Iterator[Row]:
    for line_number, line in lines:
        if isinstance(line, Part):
            if line.ends:
                yield Row(path, line_number, {}, TOO_LONG)
            continue
        if not line.strip():
            continue
        try:
            values = DECODER.decode(line)
        except BROKEN_JSON as error:
            raise UserError(f"{path}:{line_number}: broken JSON ({_why(error)}). Repair or remove the line") from error
        yield Row(path, line_number, _as_object(values, path, line_number))


def _read_json(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    """Yield rows of an array of records, an object with one array inside (`{"data": [...]}`), or JSON Lines in a .json
    file."""
    texts = _decode(file, path)
    window = _Window(texts)
    position = window.skip_space(0)
    if window.text[position : position + 1] == "[":
        yield from _json_array(window, position, path)
        return
    # Not an array: a line that is an object, with more text after it, is the first of JSON Lines.
    window.read(position)
    end = window.line_end()
    if window.text[end:].strip() and _is_record(window.text[:end]):
        yield from _jsonl_rows(_lines(itertools.chain((window.text,), texts), window.first_line), path)
        return
    # One document over several lines, which can only be parsed as a whole.
    while not window.has_ended:
        if len(window.text) > LONGEST_DOCUMENT:
            raise UserError(f"{path}: a JSON document of more than {LONGEST_DOCUMENT:,} characters that is not an "
                            "array of records would be read as a whole. Write it as an array or as JSON Lines")
        window.read(0)
    try:
        values = DECODER.decode(window.text)
    except BROKEN_JSON as error:
        line = window.first_line - 1 + getattr(error, "lineno", 1)
        raise UserError(f"{path}:{line}: broken JSON ({_why(error)})") from error
    arrays = [value for value in values.values() if isinstance(value, list)] if isinstance(values, dict) else []
    # An array named data contains the records; without one, the only array does, whatever its name.
    if "data" in (values if isinstance(values, dict) else ()) and isinstance(values["data"], list):
        arrays = [values["data"]]
    has_records = len(arrays) == 1 and all(isinstance(item, dict) or _is_conversation(item) for item in arrays[0])
    rows = arrays[0] if has_records else [values]
    for index, item in enumerate(rows, 1):
        values = _as_object(item, path, index)
        is_too_long = len(window.text) > LONGEST and is_longer_than(values, LONGEST)
        yield Row(path, index, {}, TOO_LONG) if is_too_long else Row(path, index, values)


def _is_record(text: str) -> bool:
    try:
        return isinstance(DECODER.decode(text), dict)
    except BROKEN_JSON:
        return False


class _Window:
    """The buffered part of a JSON text that is read in chunks; positions count from the start of the window."""

    def __init__(self, texts: Iterator[str]) -> None:
        self.text, self.has_ended = "", False
        self.first_line = 1  # line in which the window starts
        self._texts, self._line, self._num_counted = texts, 1, 0

    def read(self, position: int) -> int:
        """Discard the text before a position and double the rest by reading on; return the position's new value."""
        self.first_line = self.line(position)
        texts, size = [self.text[position:]], 0
        # Doubling: a value is parsed again after each reading, which stays linear in its length this way.
        while size <= len(texts[0]) and not self.has_ended:
            text = next(self._texts, None)
            self.has_ended = text is None
            texts.append(text or "")
            size += len(texts[-1])
        self.text, self._num_counted = "".join(texts), 0
        return 0

    def line(self, position: int) -> int:
        """Return the line number of a position, which must not precede the last call's."""
        self._line += self.text.count("\n", self._num_counted, position)
        self._num_counted = position
        return self._line

    def skip_space(self, position: int) -> int:
        """Return the position of the next character that is not a space, or the end."""
        while True:
            end = SPACE.match(self.text, position).end()  # type: ignore[union-attr]  # it matches no space, too
            if end < len(self.text) or self.has_ended:
                return end
            position = self.read(end)

    def line_end(self) -> int:
        """Return the end of the first line once text follows it; else the end of the text or the largest document."""
        while True:
            end = self.text.find("\n")
            if end >= 0 and self.text[end:].strip() or self.has_ended or len(self.text) > LONGEST_DOCUMENT:
                return len(self.text) if end < 0 else end
            self.read(0)

    def value(self, position: int) -> tuple[Any, int]:
        """Parse the value at a position; return it (TOO_LONG if it has more than LONGEST characters) and its end.

        Raises:
            _Broken: It is not valid JSON, with the line.
        """
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, position)
                # A number may continue beyond the end of the window; a list or an object has its closing bracket.
                if end < len(self.text) or self.has_ended or isinstance(value, dict | list):
                    return (TOO_LONG if end - position > LONGEST else value), end
            except BROKEN_JSON as error:
                # Broken, or only split by the end of the window: reading on decides.
                is_cut = isinstance(error, json.JSONDecodeError) and not self.has_ended
                line = self.first_line - 1 + error.lineno if isinstance(error, json.JSONDecodeError) else None
                broken = _Broken(line, error.msg if isinstance(error, json.JSONDecodeError) else _why(error))
                if not is_cut:
                    raise broken from error
                # Find the end without parsing, so that memory stays bounded.
                if len(self.text) - position > LONGEST:
                    end, size = self._skip(position, broken)
                    # Complete, and still not valid.
                    if size <= LONGEST:
                        raise broken from error
                    return TOO_LONG, end
            position = self.read(position)

    def _skip(self, position: int, broken: Exception) -> tuple[int, int]:
        """Skip a list, an object or a string; return its end and its length in characters."""
        depth, is_text, size = 0, False, 0
        while True:
            start = position
            match = (REST_OF_TEXT.match if is_text else BRACKET.search)(self.text, position)
            if match:
                position = match.end()
                # Brackets inside of strings do not count; a quote starts or ends a string.
                opens = {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
                depth, is_text = depth + opens, match[0] == '"' and not is_text
            elif self.has_ended:
                raise broken
            else:
                position = len(self.text.rstrip("\\")) if is_text else len(self.text)  # an escaped character may follow
                position = max(position, start)
            size += position - start
            if match and depth <= 0 and not is_text:
                return position, size
            if not match:
                position = self.read(position)


class _Broken(Exception):
    """Broken JSON: _Broken(line or None, why)."""


def _json_array(window: _Window, start: int, path: str) -> Iterator[Row]:
    """Parse elements one by one, so that each has its line and only one is in memory as objects."""
    position, separator = window.skip_space(start + 1), ","
    if window.text[position : position + 1] == "]":
        separator, position = "]", position + 1
    while separator == ",":
        position = window.skip_space(position)
        line = window.line(position)
        try:
            values, position = window.value(position)
        except _Broken as error:
            error_line, why = error.args
            raise UserError(f"{path}:{error_line or line}: broken JSON ({why}) in the record that starts in line {line}"
                            ) from error.__cause__
        yield Row(path, line, {}, TOO_LONG) if values is TOO_LONG else Row(path, line, _as_object(values, path, line))
        position = window.skip_space(position)
        separator, position = window.text[position : position + 1], position + 1
    line = window.line(min(position, len(window.text)))
    next_position = window.skip_space(position) if separator else position
    unexpected = separator if separator != "]" else window.text[next_position : next_position + 1]
    if unexpected or not separator:
        wrong = f"unexpected {unexpected!r}" if unexpected else "the file ends inside the array"
        raise UserError(f"{path}:{line}: broken JSON: {wrong}; expected ',' or ']' after the record")


def _is_conversation(value: Any) -> bool:
    """Return True if a value is a record that is a bare list of turns."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _as_object(values: Any, path: str, line: int) -> dict[str, Any]:
    if _is_conversation(values):
        values = {"messages": values}
    if not isinstance(values, dict):
        raise UserError(f"{path}:{line}: a record must be a JSON object with named fields, or a list of them, "
                        f"not {type(values).__name__}: {reprlib.repr(values)}")
    if is_deeper_than(values, DEEPEST):
        raise UserError(f"{path}:{line}: lists and objects are nested more than {DEEPEST} deep. Remove this record")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object and reject duplicate keys: Python would silently keep the last of two values."""
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


def _why(error: Exception) -> str:
    """Return Python's message for broken JSON, reworded for Python's own limits."""
    is_limit = isinstance(error, ValueError) and "int_max_str_digits" in str(error)
    return "a number of more than 4300 digits" if is_limit else str(error)


DECODER = json.JSONDecoder(object_pairs_hook=_unique)
SPACE = re.compile(r"[ \t\r\n]*")
BRACKET = re.compile(r'["\[\]{}]')
REST_OF_TEXT = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)  # to the closing quote, without backtracking


def _read_csv(file: BinaryIO, path: str, documents: DocumentUnit, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(LONGEST)
    left_out: list[Row] = []
    line = size = 0  # of the current record: its first line, and its characters so far

    def lines() -> Iterator[str]:
        nonlocal line, size
        quotes = 0
        for line_number, text in _lines(_decode(file, path)):
            if isinstance(text, Part):
                quotes += text.text.count('"')
                # It can be dropped alone only if it is a complete record: none is open, and its quotes are balanced.
                is_lost = size > 0 or header is None or text.ends and quotes % 2 == 1
            else:
                is_lost = size + len(text) > LONGEST
            if is_lost:
                raise UserError(f"{path}:{line if size else line_number}: the record that starts here has more than "
                                f"{LONGEST:,} characters, and its end cannot be found; is a quote unbalanced?")
            if not isinstance(text, Part):
                line = line if size else line_number
                size += len(text)
                yield text
            elif text.ends:
                left_out.append(Row(path, line_number, {}, TOO_LONG))
                quotes = 0

    header: list[str] | None = None
    reader = csv.reader(lines(), delimiter=delimiter, strict=True)
    while True:
        # `lines` sets `line` and `size` while the reader takes as many lines as the record has.
        size = 0
        try:
            fields = next(reader, None)
        except csv.Error as error:
            hint = "is a quote unbalanced? A quote inside a quoted field is written twice"
            raise UserError(f"{path}:{line}: broken CSV in the record that starts here ({error}); {hint}") from error
        yield from left_out
        left_out.clear()
        if fields is None:
            return
        if header is None:
            header = _csv_header(fields, path)
        elif fields:
            if len(fields) != len(header):
                raise UserError(f"{path}:{line}: {len(fields)} fields, but the header names {len(header)} "
                                f"({', '.join(header)}); is a quote unbalanced or a {delimiter!r} unquoted?")
            yield Row(path, line, dict(zip(header, fields, strict=True)))


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
    """Yield documents as rows {"text", "starts", "ends"}.

    A long document is divided at line ends; `starts` is True for its first part and `ends` for its last. A line of
    more than LONGEST characters is itself divided, before spaces if it has some.
    """
    if documents == "conll":
        yield from _read_conll(file, path, documents)
        return
    lines: list[str] = []
    size, first, starts = 0, 1, True
    for line_number, line in _lines(_decode(file, path)):
        blank = isinstance(line, str) and not line.strip()
        # A document ends with this line; at the end of a file the last one ends anyway.
        closes = documents == "line" or (documents == "paragraph" and blank)
        if isinstance(line, Part):
            # A line too long for memory: yield its parts, and keep the last for what follows.
            *parts, tail = _split_text("".join((*lines, line.text)))
            for part in parts:
                yield _make_part(path, first, [part], starts, False)
                first, starts = line_number, False
            lines, size, closes = [tail], len(tail), closes and line.ends
        # A long document is divided before this line; before a blank one only if it is much longer.
        elif size > (LONG_PART if blank else TEXT_PART) and documents != "line":
            yield _make_part(path, first, lines, starts, False)
            lines, size, first, starts = [], 0, line_number, False
        if isinstance(line, str) and not (blank and closes):
            lines.append(line)
            size += len(line)
        if closes and lines:
            yield _make_part(path, first, lines, starts, True)
        if closes:
            lines, size, first, starts = [], 0, line_number + 1, True
    if "".join(lines).strip():
        yield _make_part(path, first, lines, starts, True)


def _split_text(text: str) -> Iterator[str]:
    """Divide a text into parts of up to LONG_PIECE characters, before spaces if there are some."""
    start = 0
    while len(text) - start > LONG_PART:
        end = text.rfind(" ", start + 1, start + LONG_PART + 1)
        end = end if end > start else start + LONG_PART
        yield text[start:end]
        start = end
    yield text[start:]


def _make_part(path: str, line: int, lines: list[str], starts: bool, ends: bool) -> Row:
    text = "".join(lines)
    return Row(path, line, {"text": text.rstrip("\r\n") if ends else text, "starts": starts, "ends": ends})


def _read_conll(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    """Yield sentences as rows {"tokens", "tags"}: the first and the last column of lines; blank lines separate them.

    Columns are separated by tabs, in lines without a tab by spaces. Sentences of a single column have no tags. A
    -DOCSTART- line is a row with a problem, so that it is counted.
    """
    sentence: list[list[str]] = []
    first = size = 0
    # The line 0 at the end closes the last sentence.
    for line_number, line in itertools.chain(_lines(_decode(file, path)), [(0, "")]):
        text = (line.text if isinstance(line, Part) else line).strip(" \t\r\n")
        is_start = text.startswith(DOCUMENT_START)
        if text and not is_start:
            first, size = first or line_number, size + len(text)
            if size > LONGEST:
                sentence.clear()  # counted on, but not held
            else:
                # Not str.split(): it would part words at no-break spaces, too.
                sentence.append(re.split("\t" if "\t" in text else " +", text))
            continue
        if first:
            yield Row(path, first, {}, TOO_LONG) if size > LONGEST else _read_tagged(path, first, sentence)
        if is_start:
            yield Row(path, line_number, {}, f"a {DOCUMENT_START} line, which is not a sentence")
        sentence, first, size = [], 0, 0


def _read_tagged(path: str, line: int, sentence: list[list[str]]) -> Row:
    """Return a row of CoNLL's lines, split into columns."""
    if len({len(fields) for fields in sentence}) > 1:
        has_comment = any(fields[0].startswith("#") for fields in sentence)
        return Row(path, line, {}, "a comment line (#), which is read as a word: remove such lines" if has_comment else
                   "lines of a sentence differ in their number of columns")
    tokens = [fields[0] for fields in sentence]
    is_bare = len(sentence[0]) == 1
    return Row(path, line, {"tokens": tokens} if is_bare else {"tokens": tokens, "tags": [row[-1] for row in sentence]})


def _read_parquet(file: BinaryIO, path: str, documents: DocumentUnit) -> Iterator[Row]:
    try:
        table = pa.parquet.ParquetFile(file, page_checksum_verification=True)
        groups = [table.metadata.row_group(group) for group in range(table.num_row_groups)]
        # so few rows at a time that their text is no longer than the longest row may be
        sizes = [max(1, min(1000, LONGEST * group.num_rows // max(group.total_byte_size, 1))) for group in groups]
        batches = itertools.chain.from_iterable(table.iter_batches(size, row_groups=[group])
                                                for group, size in enumerate(sizes))
        yield from _batches_to_rows(batches if groups else table.iter_batches(), path)
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
    row_number = 0
    for batch in batches:
        batch.validate(full=True)  # offsets in a damaged file could point anywhere in memory
        _check_names(batch.schema.names, path)
        is_nested = any(pa.types.is_nested(column.type) for column in batch.schema)
        # in these types many rows may share the same bytes
        is_shared = any(SHARED.search(str(column.type)) for column in batch.schema)
        # A small batch contains no long row, so that only the rows of others are measured one by one.
        is_small = batch.nbytes * (batch.num_rows if is_shared else 1) <= LONGEST
        for part in [batch] if is_small else (batch.slice(offset, 1) for offset in range(batch.num_rows)):
            is_too_long = not is_small and not is_shared and part.nbytes > LONGEST
            for values in [{}] if is_too_long else part.to_pylist():
                row_number += 1
                if is_too_long or not is_small and is_longer_than(values, LONGEST):
                    yield Row(path, row_number, {}, TOO_LONG)
                else:
                    yield Row(path, row_number, without_fillers(values) if is_nested else values)


SHARED = re.compile("dictionary|run_end|view")  # Arrow types whose rows can share values


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
    ".conll": _read_conll,
    ".bio": _read_conll,
    ".iob": _read_conll,
}


def table_features(path: str) -> dict[str, Any]:
    """Types of the columns as `datasets` writes them into the metadata of Parquet and Arrow files; {} if it did not.

    Args:
        path: Local path or fsspec URL.
    """
    if file_type(path) not in (".parquet", ".arrow", ".feather"):
        return {}
    try:
        with fsspec.open(path, "rb", compression=compression(path)) as file:
            schema = pa.parquet.read_schema(file) if file_type(path) == ".parquet" else _arrow_schema(file)
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (KeyError, TypeError, RecursionError, *DAMAGED_TABLE, OSError):
        return {}  # a damaged file is reported where its rows are read
    return features if isinstance(features, dict) else {}


def _arrow_schema(file: BinaryIO) -> pa.Schema:
    is_file_format = file.read(6) == b"ARROW1"
    file.seek(0)
    return (pa.ipc.open_file if is_file_format else pa.ipc.open_stream)(file).schema
