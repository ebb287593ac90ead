"""Reading documents: what people really hand over, and what must be said when it cannot be used."""

import json
import sys
from pathlib import Path

import pytest

from suture.calibrate import documents as d
from suture.calibrate.documents import WIKITEXT_ARTICLES, DataSpec, Documents, read_documents
from suture.checkpoint.errors import SutureError


def read(data, **settings) -> Documents:
    return read_documents(DataSpec(str(data), **settings))


def jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(("name", "count"), [("novels", 12), ("holmes", 36)])
def test_builtin_texts_are_there_with_titles(name, count):
    documents = read(f"builtin:{name}")
    assert len(documents) == len(documents.titles) == count
    assert documents.kind == "texts" and documents.n_skipped == 0
    assert all(documents.titles) and all(len(text) > 1000 for text in documents.texts)
    assert documents.source == f"builtin:{name}, column text"


def test_an_unknown_builtin_is_refused_with_a_suggestion():
    with pytest.raises(SutureError, match=r"did you mean 'novels'.*builtin:holmes"):
        read("builtin:novel")


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "notes.md"
    path.write_bytes("\ufeffÄ line\r\nand another\n".encode())
    documents = read(path)
    assert documents.texts == ("Ä line\nand another\n",)
    assert documents.titles == ("notes",)


def test_split_starts_a_document_at_each_wikitext_article(tmp_path):
    text = " \n = Robert Boulter = \n \n He acts . \n \n = = Career = = \n \n 2000 \n \n = Du Fu = \n \n A poet . \n"
    path = tmp_path / "wiki.test.raw"
    path.write_text(text, encoding="utf-8")
    documents = read(path, split=WIKITEXT_ARTICLES)
    assert documents.titles == ("Robert Boulter", "Du Fu")
    assert "Career" in documents.texts[0] and "A poet" in documents.texts[1]
    assert "".join(documents.texts) in text
    with_head = tmp_path / "head.txt"
    with_head.write_text("preface\n# One\na\n# Two\nb\n", encoding="utf-8")
    assert read(with_head, split="^# ").texts == ("preface\n", "# One\na\n", "# Two\nb\n")


def test_split_that_cannot_work_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text", encoding="utf-8")
    with pytest.raises(SutureError, match="matches nothing"):
        read(path, split="^Chapter")
    with pytest.raises(SutureError, match="not a regular expression"):
        read(path, split="(")
    with pytest.raises(SutureError, match="is a table"):
        read("builtin:holmes", split="^Chapter")
    with pytest.raises(SutureError, match="is a text file"):
        read(path, column="text")


def test_not_utf8_is_an_error_with_the_offset(tmp_path):
    for name in ("latin.txt", "latin.jsonl"):
        path = tmp_path / name
        path.write_bytes(b'{"text": "caf\xe9"}\n')
        with pytest.raises(SutureError, match=rf"{name} is not UTF-8: byte 0xe9 at offset 13"):
            read(path)


def test_g2_empty_documents_are_skipped_and_counted(tmp_path):
    rows = [{"text": ""}, {"text": "  \n"}, {"text": None}, {"other": 1}, {"text": "a"}]
    documents = read(jsonl(tmp_path / "x.jsonl", rows))
    assert documents.texts == ("a",)
    assert documents.skipped == {d.EMPTY: 2, d.NO_VALUE: 2}
    assert documents.n_skipped == 4


def test_g2_no_documents_at_all_is_an_error_that_counts_the_reasons(tmp_path):
    with pytest.raises(SutureError, match=r"no documents in column 'text': 1 empty.*, 2 no value"):
        read(jsonl(tmp_path / "x.jsonl", [{"text": " "}, {"text": None}, {"text": None}]))
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(SutureError, match="has no text"):
        read(tmp_path / "empty.txt")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(SutureError, match="it has: none"):
        read(tmp_path / "empty.jsonl")


def test_g6_without_a_known_column_the_error_lists_them_and_the_setting(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "p", "response": "r"}])
    with pytest.raises(SutureError, match=r"it has: prompt, response.*column: NAME"):
        read(path)
    assert read(path, column="response").texts == ("r",)
    with pytest.raises(SutureError, match=r"no column 'respons' \(did you mean 'response'\?\).*prompt, response"):
        read(path, column="respons")


def test_g6_columns_are_tried_in_a_fixed_order(tmp_path):
    row = {"title": "T", "input_ids": [1, 2], "content": "c", "messages": CHAT, "text": "t"}
    for column, items in (("text", ("t",)), ("messages", (CHAT,)), ("content", ("c",)), ("input_ids", ([1, 2],))):
        documents = read(jsonl(tmp_path / "x.jsonl", [row]))
        assert documents.items == items and documents.titles == ("T",)
        del row[column]


def test_g6_chat_messages_are_kept_for_the_template(tmp_path):
    documents = read(jsonl(tmp_path / "x.jsonl", [{"messages": CHAT}, {"messages": []}]))
    assert documents.chats == (CHAT,)
    assert documents.skipped == {d.EMPTY: 1}
    with pytest.raises(SutureError, match="messages with 'role'"):
        read(jsonl(tmp_path / "y.jsonl", [{"messages": [{"from": "human", "value": "Hi"}]}]))


def test_g9_token_ids_are_accepted_and_padding_removed(tmp_path):
    rows = [
        {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]},
        {"input_ids": [8]},
        {"input_ids": [0, 0], "attention_mask": [0, 0]},
    ]
    documents = read(jsonl(tmp_path / "x.jsonl", rows))
    assert documents.ids == ([5, 6, 7], [8])
    assert documents.skipped == {d.PADDING_ONLY: 1}
    assert read(jsonl(tmp_path / "y.jsonl", [{"tokens": [1, 2]}]), column="tokens").ids == ([1, 2],)
    with pytest.raises(SutureError, match="2 input_ids but 1 values"):
        read(jsonl(tmp_path / "z.jsonl", [{"input_ids": [1, 2], "attention_mask": [1]}]))


@pytest.mark.parametrize("value", [3, True, {"a": 1}, [1.5], [True], [[1]], ["a"]])
def test_g9_other_values_are_refused_with_their_place(tmp_path, value):
    with pytest.raises(SutureError, match=r"x\.jsonl:2: column 'text' holds"):
        read(jsonl(tmp_path / "x.jsonl", [{"text": None}, {"text": value}]))


def test_rows_of_different_kinds_are_refused(tmp_path):
    with pytest.raises(SutureError, match=r"x\.jsonl:2: column 'text' holds ids, the rows before hold texts"):
        read(jsonl(tmp_path / "x.jsonl", [{"text": "a"}, {"text": [1]}]))


def test_a_broken_json_line_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n\n{"text": "b"\n', encoding="utf-8")
    with pytest.raises(SutureError, match=r"x\.jsonl:3: not valid JSON"):
        read(path)
    path.write_text('{"text": "a"}\n"b"\n', encoding="utf-8")
    with pytest.raises(SutureError, match=r"x\.jsonl:2: expected a JSON object, found str"):
        read(path)
    path.write_text('{"text": "\\ud83d"}\n', encoding="utf-8")
    with pytest.raises(SutureError, match="surrogate"):
        read(path)


def test_line_separators_inside_json_strings_do_not_split_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\r\n{"text": "d"}', encoding="utf-8")
    assert read(path).texts == ("a\u2028b\x85c", "d")


def test_a_json_file_may_be_one_list(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('[\n {"text": "a"},\n {"text": "b"}\n]\n', encoding="utf-8")
    assert read(path).texts == ("a", "b")
    path.write_text('[{"text": "a"},\n oops]', encoding="utf-8")
    with pytest.raises(SutureError, match=r"x\.json: not valid JSON.*line 2"):
        read(path)
    jsonl(path, [{"text": "lines"}])
    assert read(path).texts == ("lines",)


def test_max_documents_takes_the_first(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"text": t} for t in ("", "a", "b", "c")])
    documents = read(path, max_documents=2)
    assert documents.texts == ("a", "b")
    assert "first 2" in documents.source
    with pytest.raises(SutureError, match="max_documents = 0"):
        DataSpec("x", max_documents=0)


def test_content_hash_does_not_depend_on_the_container(tmp_path):
    texts = ["One.", "Two\nlines."]
    as_lines = read(jsonl(tmp_path / "x.jsonl", [{"text": t} for t in texts]))
    as_list = jsonl(tmp_path / "y.json", [])
    as_list.write_text(json.dumps([{"content": t, "title": "T"} for t in texts]), encoding="utf-8")
    assert as_lines.sha256 == read(as_list).sha256
    assert as_lines.sha256 != read(jsonl(tmp_path / "z.jsonl", [{"text": t} for t in reversed(texts)])).sha256
    assert len(set(as_lines.hashes)) == 2


def test_parquet_reads_the_needed_columns(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"id": [1, 2, 3], "text": ["a", None, "b"], "title": ["A", "N", "B"]})
    parquet.write_table(table, tmp_path / "x.parquet")
    documents = read(tmp_path / "x.parquet")
    assert documents.texts == ("a", "b") and documents.titles == ("A", "B")
    assert documents.sha256 == read(jsonl(tmp_path / "x.jsonl", [{"text": "a"}, {"text": "b"}])).sha256
    parquet.write_table(
        pa.table({"input_ids": [[1, 2], [3]], "messages": [[CHAT[0]], [CHAT[1]]]}), tmp_path / "y.parquet"
    )
    assert read(tmp_path / "y.parquet", column="input_ids").ids == ([1, 2], [3])
    assert read(tmp_path / "y.parquet").chats == ([CHAT[0]], [CHAT[1]])
    with pytest.raises(SutureError, match=r"row 1: column 'id'|column 'id' holds int"):
        read(tmp_path / "x.parquet", column="id")
    (tmp_path / "z.parquet").write_text("not parquet", encoding="utf-8")
    with pytest.raises(SutureError, match="not a readable Parquet file"):
        read(tmp_path / "z.parquet")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SutureError, match=r"needs the package pyarrow; pip install \"suture\[data\]\""):
        read(tmp_path / "x.parquet")


def test_a_directory_saved_by_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    test = datasets.Dataset.from_dict({"content": ["a", " ", "b"], "title": ["A", "", None]})
    test.save_to_disk(tmp_path / "one")
    documents = read(tmp_path / "one")
    assert documents.texts == ("a", "b") and documents.titles == ("A", None)
    train = datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).with_format("numpy")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "two" / "train").ids == ([1, 2],)
    with pytest.raises(SutureError, match=r"holds the splits train, test; give one of .*two/train"):
        read(tmp_path / "two")
    datasets.DatasetDict(test=test).save_to_disk(tmp_path / "three")
    assert read(tmp_path / "three").texts == ("a", "b")
    with pytest.raises(SutureError, match=r"no state\.json"):
        read(tmp_path)


def test_g7_a_name_alone_never_reaches_the_network(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("network"))
    for name in ("c4", "wikitext2", "allenai/c4"):
        with pytest.raises(SutureError, match=r"neither a file nor a directory; .*hf:OWNER/NAME"):
            read(name)
    for name in ("hf:allenai/c4", "hf:", "hf:a/b/c/d:train", "hf:a//b:train", "hf:a/b:"):
        with pytest.raises(SutureError, match=r"does not name a data set and a split; write hf:OWNER/NAME"):
            read(name)


def test_g7_a_failed_download_is_one_clear_message(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub\nlong trace")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(
        SutureError, match=r"'hf:allenai/c4/en:train' could not be loaded: ConnectionError: Couldn't"
    ) as e:
        read("hf:allenai/c4/en:train")
    assert "local file" in e.value.hint and "long trace" not in str(e.value)


def test_hub_reference_is_passed_on_and_streamed_when_limited(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load(name, config, *, split, streaming):
        calls.append((name, config, split, streaming))
        table = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
        return table.to_iterable_dataset() if streaming else table

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("hf:Salesforce/wikitext/wikitext-2-raw-v1:test").texts == ("a", "b", "c")
    assert read("hf:o/n:train[:10]", max_documents=2).texts == ("a", "b")
    assert calls == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", False),
        ("o/n", None, "train[:10]", True),
    ]


def test_a_download_that_breaks_while_streaming_is_one_clear_message(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def rows():
        yield {"text": "a"}
        raise TimeoutError("read timed out")

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: datasets.IterableDataset.from_generator(rows))
    with pytest.raises(SutureError, match=r"hf:o/n:train: row 1 could not be read: TimeoutError: read timed out"):
        read("hf:o/n:train", max_documents=5)


def test_reading_needs_no_heavy_import():
    import subprocess

    code = (
        "import sys; from suture.calibrate.documents import DataSpec, read_documents; import suture.calibrate.tokens; "
        "import suture.report.windows, suture.report.clusters; read_documents(DataSpec('builtin:holmes')); "
        "print({'torch', 'transformers', 'datasets', 'pyarrow', 'scipy'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert out.stdout.strip() == "set()"
