"""The protocols of other tools, against their own algorithms written out plainly, and what each is warned of."""

import json
import math
import re

import kit
import numpy as np
import pytest
import torch

import suture
from suture.calibrate.tokens import load_tokenizer
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.generation_runs import plan_generation
from suture.pipeline.recipe import GenerationSettings, TaskSettings, make_recipe
from suture.pipeline.task_runs import plan_tasks
from suture.pipeline.texts import TextModel, evaluation_text
from suture.report.detokenize import count_words, wikitext
from suture.report.windows import FIRST_HALF, TAIL, llamacpp_windows, rolling_windows

TINY = "builtin:tiny"


def test_llamacpp_chunks():
    """Chunks of the sequence, BOS over each one's first token, positions 256 to 510 of 512 predict."""
    ids = np.arange(1000, 1000 + 1300)
    plan = llamacpp_windows(ids, bos_id=7, n_bytes=2600.0)
    assert plan.protocol_id == "llamacpp-512" and plan.n_windows == 2 and plan.n_scored == 2 * 255
    for number, chunk in enumerate(plan.ids):
        assert chunk[0] == 7 and (chunk[1:] == ids[512 * number + 1 : 512 * (number + 1)]).all()
    assert plan.score_from.tolist() == [257, 257]
    assert plan.token[:255].tolist() == list(range(257, 512)) and plan.token[255] == 512 + 257
    assert plan.n_unscored == {FIRST_HALF: 2 * 257, TAIL: 1300 - 1024}
    protocol = plan.protocol()
    assert (protocol["first_scored"], protocol["min_context"], protocol["add_bos"]) == (257, 256, "per_window")
    assert plan.n_bytes == pytest.approx(2600 * 510 / 1300)
    assert (llamacpp_windows(ids).ids[0] == ids[:512]).all()


def harness(tokens, prefix, length):
    """lm-evaluation-harness: get_rolling_token_windows(context_len=1) and make_disjoint_window, as pairs."""
    pairs, done = [], min(length, len(tokens))
    pairs.append(([prefix, *tokens[: done - 1]], tokens[:done]))
    while done < len(tokens):
        n = min(len(tokens) - done, length)
        end = done + n
        pairs.append((tokens[end - length - 1 : end - 1], tokens[end - n : end]))
        done += n
    return [(context[: len(context) - (len(target) - 1)], target) for context, target in pairs]


@pytest.mark.parametrize("n", [1, 5, 8, 9, 16, 17, 27])
def test_lm_eval_windows_are_the_harness_s(n):
    tokens = list(range(100, 100 + n))
    plan = rolling_windows([tokens], protocol="lm-eval", window=8, bos_id=0, n_bytes=[40.0], n_words=[9.0])
    found = [(ids[:start].tolist(), ids[start:].tolist()) for ids, start in zip(plan.ids, plan.score_from, strict=True)]
    assert found == harness(tokens, 0, 8) and plan.n_scored == n
    assert max(ids.size for ids in plan.ids) <= 9 and (plan.n_bytes, plan.n_words) == (40.0, 9.0)
    with pytest.raises(SutureError, match="prefix token"):
        rolling_windows([tokens], protocol="lm-eval", window=8)


def test_wikitext_is_detokenized_as_lm_eval_does():
    page = ' = Title = \n The 1 @,@ 000 m ( 3 @.@ 3 ft ) dog \'s " good day " , he said ; well @-@ known . \n'
    assert wikitext(page) == ' = Title =\nThe 1,000 m (3.3 ft) dog\'s "good day", he said; well-known.\n'
    assert count_words(" a b\nc ") == 5


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Six short documents as rows."""
    path = tmp_path_factory.mktemp("pages") / "pages.jsonl"
    texts = [f"The old man , who had {i} dogs , sat by the fire and read . " * (i + 2) for i in range(6)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path, texts


def test_word_and_byte_perplexity_are_those_of_the_original_text(pages):
    """H7: exp of the summed loss of the detokenized text over words and bytes of the text as given."""
    path, texts = pages
    settings = {"protocol": "lm-eval", "window": 64, "detokenize": "wikitext", "fidelity": False}
    report = suture.compare(TINY, TINY, str(path), **settings)
    from transformers import AutoTokenizer

    source = open_checkpoint(TINY).path
    tokenizer, model = AutoTokenizer.from_pretrained(source), kit.stock(source)
    total = 0.0
    for text in texts:
        ids = tokenizer(wikitext(text), add_special_tokens=False)["input_ids"]
        for context, target in harness(ids, tokenizer.bos_token_id, 64):
            row = torch.tensor([*context, *target])
            with torch.no_grad():
                log = torch.log_softmax(model(row[None, :-1]).logits[0].double(), 1)
            total -= float(log[len(context) - 1 :].gather(1, torch.tensor(target)[:, None]).sum())
    words, size = sum(len(re.split(r"\s+", text)) for text in texts), sum(len(text.encode()) for text in texts)
    rows = {(row["name"], row.get("model")): row for row in report.content["metrics"]}
    assert rows["word_ppl", "base"]["value"] == pytest.approx(math.exp(total / words), rel=1e-4)
    assert rows["byte_ppl", "base"]["value"] == pytest.approx(math.exp(total / size), rel=1e-4)
    assert rows["byte_ppl", "base"]["ci"] == pytest.approx([2**x for x in rows["bits_per_byte", "base"]["ci"]])
    low, high = rows["word_ppl", "base"]["ci"]
    assert low < rows["word_ppl", "base"]["value"] < high
    assert report.content["protocol"]["add_bos"] == "per_document" and report.content["protocol"]["detokenize"]
    import jsonschema
    from test_report import SCHEMA

    jsonschema.Draft202012Validator(SCHEMA).validate(report.content)


def test_text_without_documents_is_clustered_by_blocks(tmp_path):
    plan = rolling_windows([np.arange(2048 * 6 + 100) % 50], window=512, n_bytes=[5000.0])
    assert plan.cluster == "block" and plan.n_bytes == 5000.0 * plan.n_scored / (2048 * 6 + 100)
    assert np.unique(plan.document, return_counts=True)[1].tolist() == [2047, *[2048] * 4, 2148]
    path = tmp_path / "one.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 40)
    report = suture.compare(TINY, TINY, str(path), window=64, max_windows=3, fidelity=False)
    assert report.content["protocol"]["cluster"] == "block" and report.content["verdict"]["word"] == "inconclusive"
    assert any("no documents are known" in warning for warning in report.content["warnings"])


@pytest.mark.parametrize(("protocol", "bos", "warned"), [("doc-rolling", 2, False), ("doc-rolling", None, True)])
def test_a_gemma_without_bos_is_warned_of(tmp_path, protocol, bos, warned):
    """H1."""
    path = kit.ids_file(tmp_path / "ids.jsonl", rows=6)
    settings = make_recipe(
        {"model": TINY, "output": "x", "steps": [{"rtn": {}}], "report": {"data": str(path), "window": 16}}
    ).report
    assert settings is not None
    found = evaluation_text(settings.all_sets()[0], TextModel(400, 64, None, "", bos, "gemma2"))
    assert any("lost without it" in warning for warning in found.warnings) == warned
    other = evaluation_text(settings.all_sets()[0], TextModel(400, 64, None, "", bos, "llama"))
    assert not other.warnings


@pytest.mark.parametrize(("bos", "family", "warned"), [(True, "gemma2", 0), (False, "gemma2", 2), (False, "llama", 0)])
def test_a_gemma_asked_without_bos_is_warned_of(tmp_path, bos, family, warned):
    """H1, for tasks: multiple choice and answers in words."""
    tokenizer = load_tokenizer(open_checkpoint(TINY).path)
    model = TextModel(1 << 16, 512, tokenizer, "", tokenizer.bos_token_id if bos else None, family)
    path = tmp_path / "items.jsonl"
    rows = [{"query": f"The number {i}", "choices": ["one.", "two."], "gold": 0, "answer": "one"} for i in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    plans = [*plan_tasks([TaskSettings(data=str(path))], model)]
    plans += plan_generation([GenerationSettings(data=str(path))], model)
    found = [warning for plan in plans for warning in plan.warnings]
    assert len(found) == warned
    if warned:
        assert "items: 6 prompts without BOS" in found[0] and "items: 3 prompts without BOS" in found[1]


def test_several_texts_are_rows_with_the_settings_of_the_first(pages, tmp_path):
    path, _ = pages
    more = kit.ids_file(tmp_path / "ids.jsonl", rows=6)
    for report in (
        {
            "data": str(path),
            "window": 32,
            "sets": [{"data": str(more), "name": "ids"}, {"data": str(path), "protocol": "gptq-2048"}],
        },
        [
            {"data": str(path), "window": 32},
            {"data": str(more), "name": "ids", "window": 32},
            {"data": str(path), "protocol": "gptq-2048", "window": 32},
        ],
    ):
        recipe = make_recipe({"model": TINY, "output": "x", "steps": [{"rtn": {}}], "report": report})
        sets = recipe.report.all_sets()
        assert [(s.protocol, s.window, s.name) for s in sets] == [
            ("doc-rolling", 32, None),
            ("doc-rolling", 32, "ids"),
            ("gptq-2048", 32, None),
        ]
        assert (
            recipe.report.fidelity
            and make_recipe(recipe.model_dump()).report.all_sets() == sets
            and make_recipe(recipe.model_dump()).report == recipe.report
        )
    for wrong, message in (
        (
            {"data": str(path), "sets": [{"dat": 1}]},
            r"report\.sets\[0\]\.dat: unknown key \(did you mean 'data'\?\); known keys: data",
        ),
        ({"sets": []}, r"report\.data: missing"),
        ({"data": "a", "detokenize": "wikitext"}, "detokenize belongs to the protocol lm-eval"),
        ({"data": "a", "protocol": "llamacpp-512", "stride": 3}, "belong to doc-rolling; llamacpp-512 has neither"),
    ):
        with pytest.raises(SutureError, match=message):
            make_recipe({"model": TINY, "output": "x", "steps": [{"rtn": {}}], "report": wrong})
