"""Vocabularies trimmed, extended and padded: the tokenizer, the rows and every id stay consistent."""

import json

import pytest
import torch
from kit import edit, make, read, run, stock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from suture.checkpoint.errors import SutureError
from suture.surgery.vocabulary import pieces_of

TEXT = (
    "the surgeon sutured the wound; the patient, a sailor, slept. when the sailor awoke the surgeon was gone. "
    "there were seven stitches, and the seventh was silver. "
)
OTHER = "a zebra quizzed the xenial judge about jazz, 1234 times: déjà vu!"


def bpe(style="bytes"):
    """A byte-pair tokenizer of some 300 tokens: byte-level, or characters with byte fallback."""
    if style == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        alphabet = []
    special = ["<unk>", "<s>", "</s>", *([f"<0x{i:02X}>" for i in range(256)] if style != "bytes" else [])]
    size = 310 if style == "bytes" else 318
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, min_frequency=1)
    tokenizer.train_from_iterator([TEXT * 3, OTHER * 2], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # bytes are plain tokens of the vocabulary
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture
def dressed(tmp_path):
    """dressed("L1") -> a kit model with a tokenizer and the files around it."""

    def go(name, style="bytes", **changes):
        directory = make(name, tmp_path / f"model-{name}", "float32", **changes)
        tokenizer = bpe(style)
        tokenizer.save(str(directory / "tokenizer.json"))
        vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
        (directory / "vocab.json").write_text(json.dumps(vocabulary))
        (directory / "tokenizer.model").write_bytes(b"sentencepiece")
        decoder = {"1": {"content": "<s>", "special": True, "lstrip": False, "rstrip": False, "single_word": False}}
        decoder["1"]["normalized"] = False
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"added_tokens_decoder": decoder}))
        edit(directory, bos_token_id=1, eos_token_id=[2, 300], pad_token_id=0)
        generation = {"bos_token_id": 1, "eos_token_id": [2, 300], "suppress_tokens": [305, 309], "temperature": 0.9}
        (directory / "generation_config.json").write_text(json.dumps(generation))
        (tmp_path / "text.txt").write_text(TEXT)
        return directory, tmp_path / "text.txt"

    return go


def apply(model, output, settings, *more, **recipe):
    return run({"model": str(model), "output": str(output), "steps": [{"vocabulary": settings}, *more], **recipe})


def tables(name):
    return ["transformer.wte.weight"] if name == "GP" else ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize(("name", "style"), [("L1", "bytes"), ("L2", "bytes"), ("GP", "bytes"), ("L1", "characters")])
def test_a_trimmed_model_says_the_same_about_the_tokens_it_kept(dressed, tmp_path, name, style):
    model, text = dressed(name, style)
    done = apply(model, tmp_path / "out", {"trim": [str(text)]})
    old, new = (Tokenizer.from_file(str(d / "tokenizer.json")) for d in (model, done.output))
    tokens = old.get_vocab()
    kept = dict(new.get_vocab().items())
    mapped = {tokens[token]: i for token, i in kept.items()}
    assert set(old.encode(TEXT).ids) <= set(mapped) and len(kept) < len(tokens)
    for piece in (TEXT, "the silver surgeon", "seven sailors slept"):
        same = [mapped.get(i) for i in old.encode(piece).ids]
        assert piece != TEXT or None not in same
        assert None in same or new.encode(piece).ids == same
        assert new.decode(new.encode(piece).ids) == old.decode(old.encode(piece).ids)
    if style == "bytes":
        assert new.decode(new.encode(OTHER).ids) == OTHER  # nothing has become unknown
    assert new.encode("a").ids[0] == mapped[1] and new.token_to_id("<s>") == mapped[1]
    before, after = read(model), read(done.output)
    order = sorted(mapped)
    extra = [i for i in (300,) if i not in mapped]  # named by the configs alone
    for table in tables(name):
        if table in before:
            rows = before[table][sorted([*order, *extra])]
            assert torch.equal(after[table], rows)
    ids = torch.tensor([old.encode(TEXT).ids[:40]])
    with torch.no_grad():
        a = stock(model)(ids).logits[..., order]
        b = stock(done.output)(torch.tensor([[mapped[i] for i in ids[0].tolist()]])).logits
        b = b[..., [mapped[i] for i in order]]
    assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)
    assert done.manifest["receipts"][-1]["exact"]


def test_every_file_and_config_that_names_an_id_follows(dressed, tmp_path):
    model, text = dressed("L1")
    done = apply(model, tmp_path / "out", {"trim": [str(text)], "pad_to_multiple": 16})
    config = json.loads((done.output / "config.json").read_text())
    generation = json.loads((done.output / "generation_config.json").read_text())
    old = Tokenizer.from_file(str(model / "tokenizer.json"))
    new = Tokenizer.from_file(str(done.output / "tokenizer.json"))
    named = new.token_to_id(old.id_to_token(300))
    assert config["eos_token_id"] == generation["eos_token_id"] == [new.token_to_id("</s>"), named]
    assert config["bos_token_id"] == new.token_to_id("<s>") and config["pad_token_id"] == new.token_to_id("<unk>")
    assert generation["temperature"] == 0.9
    kept = [new.token_to_id(old.id_to_token(i)) for i in (305, 309)]
    assert generation["suppress_tokens"] == [i for i in kept if i is not None]
    assert config["vocab_size"] % 16 == 0 and config["vocab_size"] - new.get_vocab_size() < 16
    assert json.loads((done.output / "vocab.json").read_text()) == {
        token: i for token, i in new.get_vocab().items() if token in old.get_vocab()
    }
    assert not (done.output / "tokenizer.model").exists()
    assert done.manifest["side_file_edits"]["tokenizer.model"] == "left out by vocabulary"
    decoder = json.loads((done.output / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {entry["content"]: int(i) for i, entry in decoder.items()} == {
        token: new.token_to_id(token) for token in ("<unk>", "<s>", "</s>")
    }
    loaded = AutoTokenizer.from_pretrained(done.output)
    assert loaded.bos_token_id == config["bos_token_id"] and loaded(TEXT)["input_ids"] == new.encode(TEXT).ids


@pytest.mark.parametrize("initial", ["mean", "pieces"])
@pytest.mark.parametrize("name", ["L1", "L2"])
def test_new_tokens_begin_as_means_and_leave_the_others_alone(dressed, tmp_path, name, initial):
    model, _ = dressed(name)
    settings = {"extend": ["<|scalpel|>", "sutured the"], "initial": initial, "pad_to_multiple": 64}
    done = apply(model, tmp_path / "out", settings)
    old = Tokenizer.from_file(str(model / "tokenizer.json"))
    new = AutoTokenizer.from_pretrained(done.output)
    first = old.get_vocab_size()
    assert new("<|scalpel|>", add_special_tokens=False)["input_ids"] == [first]
    assert new("he sutured the", add_special_tokens=False)["input_ids"][-1] == first + 1
    before, after = read(model), read(done.output)
    for table in tables(name):
        if table in before:
            assert after[table].shape[0] == 320  # the rows were there already, as padding
            wanted = before[table][:first].double().mean(0)
            if initial == "pieces":
                wanted = before[table][old.encode("sutured the", add_special_tokens=False).ids].double().mean(0)
            assert torch.allclose(after[table][first + 1].double(), wanted, atol=1e-6)
            assert torch.equal(after[table][:first], before[table][:first])
    assert done.manifest["receipts"][-1]["added"] == {"<|scalpel|>": first, "sutured the": first + 1}


@pytest.mark.parametrize("name", ["L2", "NX", "PH", "FA", "FA-new", "MX", "W-gemma3-new"])
def test_padding_needs_no_tokenizer(tmp_path, name):
    model = make(name, tmp_path / "m", "float32")
    done = apply(model, tmp_path / "out", {"pad_to_multiple": 128})
    config = json.loads((done.output / "config.json").read_text())
    assert config.get("text_config", config)["vocab_size"] == 384
    receipt = done.manifest["receipts"][-1]
    assert receipt["exact"] and receipt["rows"] == {"before": 320, "after": 384}
    before, after = read(model), read(done.output)
    grown = [key for key in after if after[key].shape != before[key].shape]
    assert grown and all(torch.equal(after[key][:320], before[key]) for key in grown)
    assert all(torch.allclose(after[key][320], before[key].double().mean(0).float(), atol=1e-6) for key in grown)


def test_steps_and_report_after_a_trim_get_its_tokens(dressed, tmp_path):
    """Calibration and scoring speak the new ids; on an exact trim the score changes only by what no longer competes."""
    model, text = dressed("L1")
    calibration = {"data": str(text), "samples": 2, "length": 16}
    report = {"data": str(text), "window": 16}
    quantized = {"gptq": {"bits": 8, "group_size": 16}}
    done = apply(model, tmp_path / "a", {"trim": [str(text)]}, quantized, calibration=calibration, report=report)
    assert len(done.manifest["modules"]) == 14
    alone = apply(model, tmp_path / "b", {"trim": [str(text)]}, report=report)
    ratio = alone.report.perplexity.ratio if hasattr(alone.report, "perplexity") else None
    assert ratio is None or ratio <= 1
    with pytest.raises(SutureError, match=r"report: the report needs this text, and \d+ of its \d+ distinct tokens"):
        (tmp_path / "other.txt").write_text(OTHER * 3)
        apply(model, tmp_path / "c", {"trim": [str(text)]}, report={"data": str(tmp_path / "other.txt"), "window": 16})


def test_a_trim_of_the_builtin_model_keeps_its_sentences(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    done = apply("builtin:tiny", tmp_path / "out", {"trim": [str(tmp_path / "text.txt")]})
    receipt = done.manifest["receipts"][-1]
    assert receipt["exact"] and receipt["kept"] < 600 and receipt["rows"]["before"] == 4096
    assert AutoTokenizer.from_pretrained(done.output)(TEXT)["input_ids"][0] == 0


def test_what_a_token_is_made_of():
    ranks = {("a", "b"): 0, ("c", "d"): 1, ("ab", "cd"): 2, ("b", "c"): 3}
    assert pieces_of("abcd", ranks) == {"a", "b", "c", "d", "ab", "cd", "abcd"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give trim, extend or pad_to_multiple"),
        ({"extend": ["the"]}, "'the' is token"),
        ({"extend": ["x", "x"]}, "must be distinct"),
        ({"pad_to_multiple": 64}, "320 rows are what the settings ask for already"),
        ({"pad_to_multiple": 7, "special": True}, "special and initial belong to extend"),
    ],
)
def test_empty_and_contradictory_settings_are_refused(dressed, tmp_path, settings, message):
    model, _ = dressed("L1")
    if settings == {"extend": ["the"]}:
        settings = {
            "extend": [next(t for t in json.loads(bpe().to_str())["model"]["vocab"] if t.isalpha() and len(t) > 1)]
        }
        message = "already"
    with pytest.raises(SutureError, match=message):
        apply(model, tmp_path / "out", settings)


def test_tokenizers_other_than_bpe_are_refused(dressed, tmp_path):
    model, text = dressed("L1")
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"] = {"type": "WordPiece", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(SutureError, match=r"holds a WordPiece model; only byte-pair encodings \(BPE\) are supported"):
        apply(model, tmp_path / "out", {"trim": [str(text)]})
    (model / "tokenizer.json").unlink()
    with pytest.raises(SutureError, match=r"has no tokenizer\.json"):
        apply(model, tmp_path / "out", {"extend": ["x"]})
