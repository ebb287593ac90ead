"""From documents to calibration blocks: nothing dropped for its length, one BOS, the same blocks for the same seed."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import suture
from suture.calibrate.documents import DataSpec, Documents, read_documents
from suture.calibrate.overlap import leakage_warnings, ngram_overlap, shared_documents
from suture.calibrate.tokens import (
    document_bytes,
    doubled_bos,
    encode_documents,
    load_tokenizer,
    pack_calibration,
    prefix_id,
    render_chats,
    wants_bos,
)
from suture.checkpoint.errors import SutureError

TINY = Path(suture.__file__).parent / "builtin" / "tiny"
BOS = 0
VOCAB = 4096
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def holmes():
    return read_documents(DataSpec("builtin:holmes"))


def texts(*strings):
    return Documents("test", texts=strings, titles=(None,) * len(strings))


def ids_of(*lists, titles=()):
    return Documents("ids.jsonl, column input_ids", ids=lists, titles=titles)


def numbered(*lengths, start=1):
    """Documents of distinct ids, so that each token of a block tells where it comes from."""
    starts = np.cumsum([start, *lengths])
    return [list(range(a, a + n)) for a, n in zip(starts, lengths, strict=False)]


def test_the_tiny_tokenizer_wants_bos(tokenizer):
    assert wants_bos(tokenizer)
    assert prefix_id(tokenizer) == BOS


def test_a_tokenizer_that_adds_no_bos_wants_none(tmp_path):
    shutil.copytree(TINY, tmp_path / "t", ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((tmp_path / "t" / "tokenizer.json").read_text(encoding="utf-8"))
    content["post_processor"] = None
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    plain = load_tokenizer(tmp_path / "t")
    assert plain.bos_token_id == BOS and not wants_bos(plain)
    # BOS stays where the template puts it: nothing else will add it
    plain.chat_template = TEMPLATE
    assert encode_documents(Documents("c", chats=(CHAT,)), plain, VOCAB)[0][0] == BOS


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "gpt2", "gpt_neox"])
def test_a_missing_tokenizer_is_an_error_that_offers_token_ids(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
    with pytest.raises(SutureError, match=r"has no tokenizer.*token ids already \(column input_ids\)"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_is_an_error(tmp_path):
    shutil.copy(TINY / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{oops", encoding="utf-8")
    with pytest.raises(SutureError, match="does not load: JSONDecodeError"):
        load_tokenizer(tmp_path)


def test_encoding_adds_no_special_tokens_and_reverses(tokenizer):
    documents = texts("It was the best of times.", "It was the worst of times.")
    encoded = encode_documents(documents, tokenizer, VOCAB)
    assert [tokenizer.decode(ids) for ids in encoded] == list(documents.texts)
    assert all(BOS not in ids for ids in encoded)
    assert document_bytes(documents) == [25, 26]
    assert document_bytes(texts("é")) == [2]


def test_g4_a_chat_template_does_not_double_bos(tokenizer, tmp_path):
    shutil.copytree(TINY, tmp_path / "t", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "t" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    chatty = load_tokenizer(tmp_path / "t")
    chats = Documents("chats.jsonl, column messages", chats=(CHAT, CHAT[:1]))
    assert render_chats(chats, chatty)[0].startswith("<|endoftext|>[user] Hi\n")
    encoded = encode_documents(chats, chatty, VOCAB)
    assert tokenizer.decode(encoded[0]) == "[user] Hi\n[assistant] Hello\n"
    blocks = pack_calibration(encoded, samples=2, length=8, bos_id=prefix_id(chatty))
    assert (blocks.ids[:, 0] == BOS).all() and (blocks.ids[:, 1:] != BOS).all()
    assert document_bytes(chats, chatty) == [len(t) for t in render_chats(chats, chatty)]


def test_g4_chats_without_a_template_or_refused_by_it_are_errors(tokenizer, tmp_path):
    chats = Documents("chats.jsonl, column messages", chats=(CHAT,), titles=("greeting",))
    with pytest.raises(SutureError, match="no chat template"):
        encode_documents(chats, tokenizer, VOCAB)
    shutil.copytree(TINY, tmp_path / "t", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "t" / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}", encoding="utf-8")
    with pytest.raises(SutureError, match=r"document 0 \('greeting'\): the chat template refuses it: no system role"):
        encode_documents(chats, load_tokenizer(tmp_path / "t"), VOCAB)


def test_g4_doubled_bos_in_token_ids_is_detected_and_removed():
    raw = [[BOS, BOS, 5, 6], [BOS, 7, 8], [9, 10]]
    assert doubled_bos(raw, BOS) == [0]
    assert doubled_bos(raw, None) == []
    assert encode_documents(ids_of(*raw), None, VOCAB, bos_id=BOS) == [[5, 6], [7, 8], [9, 10]]
    blocks = pack_calibration(raw, samples=9, length=3, bos_id=BOS)
    assert sorted(map(tuple, blocks.ids.tolist())) == [(BOS, 5, 6), (BOS, 7, 8), (BOS, 9, 10)]
    assert any("2 documents began with BOS (1 of them doubled)" in note for note in blocks.notes)
    assert (blocks.n_tokens_kept, blocks.n_tokens_dropped) == (6, 3)


def test_g9_token_ids_need_no_tokenizer():
    assert encode_documents(ids_of([1, 2], [3]), None, VOCAB) == [[1, 2], [3]]
    assert document_bytes(ids_of([1, 2])) is None
    with pytest.raises(SutureError, match="holds texts, and the model has no tokenizer"):
        encode_documents(texts("a"), None, VOCAB)


@pytest.mark.parametrize("bad", [4096, -1])
def test_g9_an_id_outside_the_vocabulary_names_document_and_id(bad):
    documents = ids_of([1], [2, bad, 3], titles=("one", "two"))
    with pytest.raises(SutureError, match=rf"document 1 \('two'\) has the token id {bad}.* 0 to 4095"):
        encode_documents(documents, None, VOCAB)


def test_g9_a_tokenizer_larger_than_the_model_is_noticed(tokenizer):
    with pytest.raises(SutureError, match="vocabulary is 0 to 63"):
        encode_documents(texts("Elementary"), tokenizer, 64)


def test_g10_long_documents_are_encoded_whole_and_without_noise(holmes):
    fresh, seen = load_tokenizer(TINY), []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    try:
        encoded = encode_documents(holmes, fresh, VOCAB)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert max(map(len, encoded)) > fresh.model_max_length == 512
    assert seen == []
    assert fresh.decode(encoded[0]) == holmes.texts[0]


def test_g1_long_texts_are_cut_and_not_dropped():
    documents = numbered(*[600] * 20)
    blocks = pack_calibration(documents, samples=100, length=512, bos_id=None, seed=3)
    assert blocks.ids.shape == (20 * 600 // 512, 512)
    assert blocks.n_tokens_kept == blocks.ids.size
    assert blocks.n_tokens_kept + blocks.n_tokens_dropped == 20 * 600
    assert blocks.n_tokens_dropped < 512
    assert blocks.n_documents_used == 20
    assert "20 of 20 documents are longer than a block and were cut into pieces" in blocks.notes
    assert any("23 blocks instead of 100" in note for note in blocks.notes)


def test_g2_too_few_tokens_is_an_error_with_both_numbers():
    with pytest.raises(
        SutureError, match=r"has 30 tokens in 2 documents; one block of length 64 needs 63.* at most 31"
    ):
        pack_calibration(numbered(10, 20), samples=4, length=64, bos_id=BOS)
    with pytest.raises(SutureError, match="has 0 tokens in 0 documents"):
        pack_calibration([], samples=4, length=64, bos_id=None)
    assert pack_calibration(numbered(10, 20), samples=4, length=31, bos_id=BOS).ids.shape == (1, 31)


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    length=st.integers(2, 16),
    samples=st.integers(1, 30),
    bos=st.booleans(),
    order=st.sampled_from(["shuffled", "sequential"]),
    seed=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_blocks_hold_each_token_at_most_once_and_all_are_counted(lengths, length, samples, bos, order, seed):
    documents, body = numbered(*lengths), length - bos
    if sum(lengths) < body:
        return
    blocks = pack_calibration(
        documents, samples=samples, length=length, bos_id=BOS if bos else None, seed=seed, order=order
    )
    assert blocks.ids.dtype == np.int64
    assert blocks.ids.shape == (min(samples, sum(lengths) // body), length)
    assert not bos or ((blocks.ids[:, 0] == BOS).all() and (blocks.ids[:, 1:] != BOS).all())
    tokens = blocks.ids[:, bos:].ravel().tolist()
    assert len(set(tokens)) == len(tokens) == blocks.n_tokens_kept
    assert blocks.n_tokens_kept + blocks.n_tokens_dropped == sum(lengths)
    assert blocks.tokens_per_document.tolist() == [len(set(d) & set(tokens)) for d in documents]
    if order == "sequential":
        assert tokens == [i for d in documents for i in d][: len(tokens)]


def test_every_document_gets_a_block_before_any_gets_two():
    documents = numbered(*[100] * 8)
    blocks = pack_calibration(documents, samples=8, length=10, bos_id=None, seed=1)
    assert blocks.tokens_per_document.tolist() == [10] * 8
    assert (np.diff(blocks.ids, axis=1) == 1).all()  # each block is one contiguous stretch of one document
    starts = {int(row[0] - 1) % 100 for row in blocks.ids}
    assert len(starts) > 2  # from anywhere in the documents, not only from their beginnings


def test_short_documents_are_joined_without_padding():
    blocks = pack_calibration(numbered(*[3] * 10), samples=5, length=7, bos_id=BOS)
    assert blocks.ids.shape == (5, 7)
    assert blocks.n_documents_used == 10


def test_the_same_seed_gives_the_same_blocks_and_another_seed_others(tokenizer, holmes):
    encoded = encode_documents(holmes, tokenizer, VOCAB)
    one, two, other = (pack_calibration(encoded, samples=16, length=128, bos_id=BOS, seed=s) for s in (0, 0, 1))
    assert (one.ids == two.ids).all() and one.sha256 == two.sha256
    assert one.sha256 != other.sha256
    assert one.n_documents_used == 16 and one.notes


def test_blocks_are_the_same_on_every_machine():
    blocks = pack_calibration(numbered(40, 5, 23), samples=4, length=8, bos_id=BOS, seed=7)
    assert blocks.sha256[:16] == "44d98d11b4074be4"


def test_sequential_order_is_the_beginning_of_the_concatenation():
    documents = numbered(5, 0, 30, 9)
    blocks = pack_calibration(documents, samples=3, length=8, bos_id=None, order="sequential")
    assert blocks.ids.tolist() == np.arange(1, 25).reshape(3, 8).tolist()
    with_bos = pack_calibration(documents, samples=3, length=8, bos_id=BOS, order="sequential")
    assert with_bos.ids[:, 1:].ravel().tolist() == list(range(1, 22))


def test_h13_blocks_longer_than_the_context_are_refused():
    with pytest.raises(SutureError, match="length = 80 is longer than the model's context of 64"):
        pack_calibration(numbered(500), samples=1, length=80, bos_id=None, max_positions=64)
    assert pack_calibration(numbered(500), samples=1, length=64, bos_id=None, max_positions=64).ids.shape == (1, 64)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"samples": 0}, "samples = 0"), ({"length": 1}, "length = 1"), ({"order": "random"}, "order = 'random'")],
)
def test_settings_out_of_range_are_refused(changed, message):
    with pytest.raises(SutureError, match=message):
        pack_calibration(numbered(50), **{"samples": 1, "length": 8, "bos_id": None, **changed})


def test_g11_ngrams_of_evaluation_found_in_calibration_are_counted():
    calibration = np.arange(200).reshape(4, 50)
    evaluation = [list(range(10, 40)), list(range(1000, 1030)), list(range(40, 60)), [1, 2]]
    overlap = ngram_overlap(calibration, evaluation)
    # inside one row: 18 n-grams; new text: 18, none shared; across two rows: 8 n-grams, none whole; too short: none
    assert (overlap.n, overlap.n_evaluation, overlap.n_shared) == (13, 44, 18)
    assert ngram_overlap(calibration, evaluation, n=2).n_shared == 29 + 18 + 1
    assert ngram_overlap(calibration, []).share == 0
    assert ngram_overlap(calibration, [[5] * 40, list(range(30))[::-1]]).n_shared == 0


def test_g11_ngram_counts_agree_with_counting_tuples():
    rng = np.random.default_rng(0)
    calibration, evaluation = rng.integers(0, 3, (20, 30)), rng.integers(0, 3, (10, 40))
    known = {tuple(row[i : i + 5]) for row in calibration for i in range(26)}
    shared = sum(tuple(row[i : i + 5]) in known for row in evaluation for i in range(36))
    overlap = ngram_overlap(calibration, evaluation, n=5)
    assert (overlap.n_evaluation, overlap.n_shared) == (360, shared)


def test_g11_the_same_or_shared_text_is_a_warning(tokenizer, holmes):
    novels = read_documents(DataSpec("builtin:novels"))
    assert shared_documents(novels, holmes) == 0
    assert "the same text" in leakage_warnings(holmes, read_documents(DataSpec("builtin:holmes")))[0]
    mixed = texts(*novels.texts, *holmes.texts[:3])
    assert leakage_warnings(mixed, holmes) == ("3 of 36 evaluation documents are also in the calibration data",)

    evaluation = encode_documents(holmes, tokenizer, VOCAB)
    apart, leaked = (
        ngram_overlap(pack_calibration(ids, samples=200, length=256, bos_id=BOS).ids, evaluation)
        for ids in (encode_documents(novels, tokenizer, VOCAB), evaluation)
    )
    assert apart.share < 0.001 and leaked.share > 0.3
    assert leakage_warnings(novels, holmes, apart) == ()
    assert "13-grams occur in the calibration blocks" in leakage_warnings(novels, holmes, leaked)[0]
