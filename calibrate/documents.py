"""Documents for calibration and evaluation, from wherever they are, without a download that nobody asked for.

`data` is one of

    builtin:novels, builtin:holmes   texts that come with suture
    notes.txt, README.md, ...        a UTF-8 text file: one document; or with `split` (a regular expression, multiline)
                                     a new document at each match, e.g. for WikiText articles ^ = [^=].*[^=] = $
    rows.jsonl, rows.json            one JSON object a line; a .json file may also be one list of objects
    rows.parquet                     one document a row
    a directory                      written by `datasets.Dataset.save_to_disk`
    hf:OWNER/NAME[/CONFIG]:SPLIT     a data set of the Hub, e.g. hf:Salesforce/wikitext/wikitext-2-raw-v1:test

Tables need a column: `column`, or else the first of `text`, `messages`, `content`, `input_ids` that exists. Its values
are strings (texts), lists of messages with a `role` (chats, rendered by the model's own template later) or lists of
integers (token ids; an `attention_mask` beside `input_ids` removes padding). Empty values are skipped and counted.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ..checkpoint.errors import SutureError, did_you_mean

BUILTIN = ("novels", "holmes")
DEFAULT_COLUMNS = ("text", "messages", "content", "input_ids")
WIKITEXT_ARTICLES = r"^ = [^=](?:.*[^=])? = $"

NO_VALUE = "no value"
EMPTY = "empty or only whitespace"
PADDING_ONLY = "only padding"

Conversation = list[dict[str, Any]]  # chat messages, each with at least a role
Item = str | Conversation | list[int]
Row = tuple[str, Mapping[str, Any]]  # where it stands, for messages, and its values


@dataclass(frozen=True)
class DataSpec:
    """Where documents come from; the module's docstring lists the forms of `data`."""

    data: str
    column: str | None = None  # of a table; None: text, messages, content or input_ids
    split: str | None = None  # regular expression that starts a document in a text file
    max_documents: int | None = None  # read only so many; from the Hub they are then streamed, not downloaded whole

    def __post_init__(self) -> None:
        if self.max_documents is not None and self.max_documents < 1:
            raise SutureError(f"max_documents = {self.max_documents}: expected at least 1", "leave it out to read all")


@dataclass(frozen=True)
class Documents:
    """Documents of one kind: exactly one of `texts`, `chats` and `ids` is filled."""

    source: str
    texts: tuple[str, ...] = ()
    chats: tuple[Conversation, ...] = ()
    ids: tuple[list[int], ...] = ()
    titles: tuple[str | None, ...] = ()
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> rows

    @property
    def kind(self) -> Literal["texts", "chats", "ids"]:
        return "texts" if self.texts else "chats" if self.chats else "ids"

    @property
    def items(self) -> tuple[str, ...] | tuple[Conversation, ...] | tuple[list[int], ...]:
        return self.texts or self.chats or self.ids

    @property
    def n_skipped(self) -> int:
        return sum(self.skipped.values())

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """SHA-256 of each document's content, whatever file it came from."""
        return tuple(hashlib.sha256(_content(item)).hexdigest() for item in self.items)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the documents' content in order: the same texts hash alike as JSONL and as Parquet."""
        return hashlib.sha256("\n".join((self.kind, *self.hashes)).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        """`document 3 ('The Red-Headed League')`, for messages."""
        title = self.titles[index] if index < len(self.titles) else None
        return f"document {index} ({title!r})" if title else f"document {index}"


@dataclass(frozen=True)
class _Table:
    """A source with columns, read only as far as asked."""

    name: str
    columns: Sequence[str]
    read: Callable[[Sequence[str]], Iterable[Row]]  # wanted columns -> rows; a row may lack some


def read_documents(spec: DataSpec) -> Documents:
    """Read the documents that `spec` names; a relative path is relative to the working directory.

    Raises SutureError: no such source, bytes that are not UTF-8, a broken JSON line (file:line), an unknown column, a
    value of another kind than the first one, a `split` that matches nothing, a failed download, no documents at all.
    """
    table = _table(spec.data, streaming=spec.max_documents is not None)
    if table is None:
        return _text_file(Path(spec.data), spec)
    if spec.split is not None:
        raise SutureError(f"split is set, but {table.name} is a table", "split is for text files; leave it out")
    return _from_table(table, spec)


def read_rows(data: str) -> list[Mapping[str, Any]]:
    """Whole rows of a table, in the forms that `read_documents` reads; `.gz` after a JSON name too.

    Raises SutureError as `read_documents`; and for a text file, which has no rows.
    """
    table = _table(data, streaming=False)
    if table is None:
        raise SutureError(f"{data} is a text file", "give a table: .jsonl, .jsonl.gz, .json, .parquet, or hf:...")
    return [row for _, row in table.read(table.columns)]


def _table(data: str, *, streaming: bool) -> _Table | None:
    """The table that `data` names; None for a text file."""
    if data.startswith("builtin:"):
        return _builtin(data)
    if data.startswith("hf:"):
        return _hub(data, streaming=streaming)
    path = _existing(data)
    if path.is_dir():
        return _saved(path)
    packed = path.suffix.lower() == ".gz"
    suffix = path.with_suffix("").suffix.lower() if packed else path.suffix.lower()
    if suffix in {".jsonl", ".json", ".ndjson"}:
        content = _unpacked(path) if packed else path.read_bytes()
        return _json(content, str(path), may_be_list=suffix == ".json")
    return _parquet(path) if suffix in {".parquet", ".pq"} else None


def _unpacked(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise SutureError(f"{path} is not a readable gzip file: {_first_line(error)}", "write it again") from error


def _existing(data: str) -> Path:
    path = Path(data)
    if not path.exists():
        raise SutureError(
            f"data: '{data}' is neither a file nor a directory",
            "give a path, builtin:novels, builtin:holmes, or hf:OWNER/NAME[/CONFIG]:SPLIT for a download from the Hub",
        )
    return path


# Text files


def _text_file(path: Path, spec: DataSpec) -> Documents:
    if spec.column is not None:
        raise SutureError(f"column '{spec.column}' is set, but {path} is a text file", "leave column out")
    text = _decode(path.read_bytes(), str(path)).replace("\r\n", "\n")
    pieces = [(path.stem, text)] if spec.split is None else list(_pieces(text, spec.split, path))
    kept = [(title, piece) for title, piece in pieces if piece.strip()][: spec.max_documents]
    blank = sum(not piece.strip() for _, piece in pieces)
    if not kept:
        raise SutureError(f"{path} has no text", "give a file with at least one document")
    return Documents(
        source=f"{path}, split at {spec.split}" if spec.split is not None else str(path),
        texts=tuple(piece for _, piece in kept),
        titles=tuple(title for title, _ in kept),
        skipped={EMPTY: blank} if blank else {},
    )


def _pieces(text: str, split: str, path: Path) -> Iterator[tuple[str | None, str]]:
    """(title, document) pairs that join to the text again.

    What stands before the first match is a document of its own, or when it is blank the beginning of the first one.
    """
    try:
        matches = list(re.finditer(split, text, flags=re.MULTILINE))
    except re.error as error:
        raise SutureError(
            f"split = {split!r} is not a regular expression: {error}", "see Python's re module"
        ) from error
    if not matches:
        raise SutureError(f"split = {split!r} matches nothing in {path}", f"for WikiText articles: {WIKITEXT_ARTICLES}")
    starts = [match.start() for match in matches]
    if text[: starts[0]].strip():
        yield None, text[: starts[0]]
    else:
        starts[0] = 0
    for match, start, end in zip(matches, starts, [*starts[1:], len(text)], strict=True):
        yield match.group().strip(" =#\n\t") or None, text[start:end]


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SutureError(
            f"{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}",
            "convert it (iconv -f ENCODING -t UTF-8), or give .txt, .jsonl, .json or .parquet",
        ) from error


# Tables


def _builtin(data: str) -> _Table:
    name = data.removeprefix("builtin:")
    if name not in BUILTIN:
        raise SutureError(
            f"data: there is no builtin text '{name}'{did_you_mean(name, BUILTIN)}",
            f"builtin texts: {', '.join(f'builtin:{known}' for known in BUILTIN)}",
        )
    return _json((resources.files("suture") / "builtin" / f"{name}.jsonl").read_bytes(), data, may_be_list=False)


def _json(content: bytes, name: str, *, may_be_list: bool) -> _Table:
    """JSON Lines; or, if `may_be_list`, a file that is one JSON list."""
    if may_be_list and content.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        records = _json_value(_decode(content, name), name)
        rows = [(f"{name}, record {i}", record) for i, record in enumerate(records)]
    else:
        lines = _decode(content, name).split(
            "\n"
        )  # splitlines would also cut at U+2028, which JSON strings may contain
        rows = [(f"{name}:{i}", _json_value(s, f"{name}:{i}")) for i, s in enumerate(lines, 1) if s.strip()]
    for where, record in rows:
        if not isinstance(record, dict):
            raise SutureError(f"{where}: expected a JSON object, found {type(record).__name__}", 'write {"text": ...}')
    columns = list(dict.fromkeys(key for _, record in rows for key in record))
    return _Table(name, columns, lambda wanted: rows)


def _json_value(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise SutureError(f"{where}: not valid JSON: {error.msg} at {place}", "one complete object a line") from error


def _parquet(path: Path) -> _Table:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise _missing_extra(str(path), "pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise SutureError(f"{path} is not a readable Parquet file: {_first_line(error)}", "write it again") from error

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        count = itertools.count()
        for batch in file.iter_batches(columns=list(wanted)):
            for record in batch.to_pylist():
                yield f"{path}, row {next(count)}", record

    return _Table(str(path), file.schema_arrow.names, read)


def _saved(path: Path) -> _Table:
    """A directory written by `save_to_disk`; of a dictionary of splits only if it holds exactly one."""
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        if len(splits) != 1:
            choices = ", ".join(str(path / name) for name in splits)
            raise SutureError(f"{path} holds the splits {', '.join(splits)}", f"give one of {choices}")
        path = path / splits[0]
    if not (path / "state.json").is_file():
        raise SutureError(
            f"{path} is not a data set written by datasets.save_to_disk (no state.json)",
            "give a file (.txt, .jsonl, .json, .parquet) or such a directory",
        )
    datasets = _datasets(str(path))
    try:
        return _dataset_table(str(path), datasets.load_from_disk(str(path)))
    except (OSError, ValueError, KeyError) as error:
        raise SutureError(f"{path} cannot be read: {_first_line(error)}", "save the data set again") from error


def _hub(data: str, *, streaming: bool) -> _Table:
    """hf:OWNER/NAME[/CONFIG]:SPLIT through the `datasets` package."""
    reference, _, split = data.removeprefix("hf:").partition(":")
    parts = reference.split("/")
    if not split or len(parts) > 3 or not all(parts):
        raise SutureError(
            f"data: '{data}' does not name a data set and a split",
            "write hf:OWNER/NAME[/CONFIG]:SPLIT, e.g. hf:Salesforce/wikitext/wikitext-2-raw-v1:test",
        )
    config = parts[2] if len(parts) == 3 else None
    datasets = _datasets(data)
    try:
        loaded = datasets.load_dataset("/".join(parts[:2]), config, split=split, streaming=streaming)
        return _dataset_table(data, loaded)
    except Exception as error:  # network, missing, gated, loading scripts: each has its own exception class
        raise SutureError(
            f"data: '{data}' could not be loaded: {type(error).__name__}: {_first_line(error)}",
            "check name, config, split and network; a local file (.txt, .jsonl, .parquet) needs none of them",
        ) from error


def _dataset_table(name: str, dataset: Any) -> _Table:
    """A `datasets.Dataset` or `IterableDataset`."""
    dataset = dataset.with_format(None)  # plain Python values, whatever format was saved
    columns = dataset.column_names or list(next(iter(dataset), {}))

    def read(wanted: Sequence[str]) -> Iterator[Row]:
        count = itertools.count()
        try:
            for record in dataset.select_columns(list(wanted)):
                yield f"{name}, row {next(count)}", record
        except Exception as error:  # a streamed data set meets the network here
            raise SutureError(
                f"{name}: row {next(count)} could not be read: {type(error).__name__}: {_first_line(error)}",
                "check the network, or save the data set to a local file and give that",
            ) from error

    return _Table(name, columns, read)


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise _missing_extra(name, "datasets") from error
    return datasets


def _missing_extra(name: str, package: str) -> SutureError:
    return SutureError(f"reading {name} needs the package {package}", 'pip install "suture[data]"')


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# From rows to documents


def _from_table(table: _Table, spec: DataSpec) -> Documents:
    column = _choose_column(table, spec.column)
    extra = ("title", "attention_mask") if column == "input_ids" else ("title",)
    wanted = [column, *(name for name in extra if name in table.columns and name != column)]
    items: list[Item] = []
    titles: list[str | None] = []
    skipped: Counter[str] = Counter()
    kind = ""
    for where, record in table.read(wanted):
        found, item = _item(record, column, where)
        if item is None:
            skipped[found] += 1
            continue
        if kind and found != kind:
            raise SutureError(
                f"{where}: column '{column}' holds {found}, the rows before hold {kind}", "use one kind for all rows"
            )
        kind = found
        items.append(item)
        title = record.get("title")
        titles.append(title if isinstance(title, str) else None)
        if len(items) == spec.max_documents:
            break
    if not items:
        counts = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no rows"
        raise SutureError(f"{table.name} has no documents in column '{column}': {counts}", "give rows with text")
    filled: dict[str, Any] = {kind: tuple(items)}
    source = f"{table.name}, column {column}" + (f", first {spec.max_documents}" if spec.max_documents else "")
    return Documents(source=source, titles=tuple(titles), skipped=dict(skipped), **filled)


def _choose_column(table: _Table, column: str | None) -> str:
    available = ", ".join(table.columns) or "none"
    if column is not None:
        if column not in table.columns:
            near = did_you_mean(column, table.columns)
            raise SutureError(f"{table.name} has no column '{column}'{near}", f"columns: {available}")
        return column
    for name in DEFAULT_COLUMNS:
        if name in table.columns:
            return name
    raise SutureError(
        f"{table.name} has none of the columns {', '.join(DEFAULT_COLUMNS)}; it has: {available}",
        "name the one to use with the setting column: NAME (suture does not join columns such as prompt and response)",
    )


def _item(record: Mapping[str, Any], column: str, where: str) -> tuple[str, Item | None]:
    """(kind, value) of a row, or (reason to skip it, None)."""
    value = record.get(column)
    if value is None:
        return NO_VALUE, None
    if isinstance(value, str):
        _check_encodable(value, column, where)
        return ("texts", value) if value.strip() else (EMPTY, None)
    if not isinstance(value, (list, tuple)):
        raise _wrong_kind(value, column, where)
    if len(value) == 0:
        return EMPTY, None
    if all(type(token) is int for token in value):
        kept = _without_padding(list(value), record.get("attention_mask"), where)
        return ("ids", kept) if kept else (PADDING_ONLY, None)
    if all(isinstance(message, dict) and "role" in message for message in value):
        return "chats", list(value)
    raise _wrong_kind(value[0], column, where, "a list whose first element is ")


def _wrong_kind(value: Any, column: str, where: str, prefix: str = "") -> SutureError:
    shown = f"{prefix}{type(value).__name__} {str(value)[:40]!r}"
    return SutureError(
        f"{where}: column '{column}' holds {shown}",
        "expected a string, a list of messages with 'role' and 'content', or a list of token ids",
    )


def _check_encodable(text: str, column: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SutureError(
            f"{where}: column '{column}' holds half of a surrogate pair at character {error.start}",
            "the text was cut inside a \\uD83D\\uDE00 escape; write it again as UTF-8",
        ) from error


def _without_padding(ids: list[int], mask: Any, where: str) -> list[int]:
    """The ids whose mask is not 0."""
    if mask is None:
        return ids
    if len(mask) != len(ids):
        raise SutureError(f"{where}: {len(ids)} input_ids but {len(mask)} values of attention_mask", "make them agree")
    return [token for token, real in zip(ids, mask, strict=True) if real]


def _content(item: Item) -> bytes:
    """Bytes that identify a document for hashing."""
    if isinstance(item, str):
        return item.encode()
    return json.dumps(item, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
