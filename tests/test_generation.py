"""Answers in words: extraction and scoring, what two models' answers say, and generation by stock transformers."""

import json
import math
import shutil
from pathlib import Path

import jsonschema
import kit
import numpy as np
import pytest
import torch
from scipy import stats

import suture
from suture.calibrate.tokens import load_tokenizer
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.recipe import make_recipe
from suture.report.generation import Question, Scorer, compare_generations, cut, read_questions

SCHEMA = json.loads((Path(suture.__file__).parent / "report/schema.json").read_text())


@pytest.mark.parametrize(
    ("scorer", "text", "answers", "right"),
    [
        (Scorer(), " Paris.\n", ["Lyon", "paris"], True),
        (Scorer(), "Paris, France", ["Paris"], False),
        (Scorer("contains"), "It is  Paris, I think", ["paris"], True),
        (Scorer(extract=r"#### (-?[\d,]+)"), "5 + 13 = 18 #### 1,018", ["because\n#### 1018"], True),
        (Scorer(extract=r"\d+"), "first 3, then 4", ["4"], True),  # the last match counts
        (Scorer(extract=r"\d+"), "none at all", ["none at all"], False),  # no answer is a wrong one
        (Scorer(), "", ["x"], False),
    ],
)
def test_an_answer_is_right_when_it_is_one_of_the_right_ones(scorer, text, answers, right):
    assert scorer.right(text, answers) is right


def test_questions_are_read_from_any_usual_columns():
    rows = [{"question": "Who?", "answer": "I"}, {"prompt": "A", "answers": ["b", "c"], "group": 7}]
    assert read_questions(rows) == [Question("Who?", ("I",)), Question("A", ("b", "c"), "7")]
    assert read_questions([{"q": "x{y}", "target": 3}], "Q: {q}\nA:") == [Question("Q: x{y}\nA:", ("3",))]
    for wrong, template, message in (
        ([], None, "no items"),
        ([{"question": "Who?"}], None, "row 1: no right answer"),
        ([{"answer": "I"}], None, "row 1: no prompt"),
        ([{"q": "x", "answer": "I"}], "{question}", "template: 'question' does not fit"),
    ):
        with pytest.raises(SutureError, match=message):
            read_questions(wrong, template)
    assert cut("one\ntwo Q: three", ["Q:", "\n"]) == "one" and cut("one", ["Q:"]) == "one"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 4}, "greedy answers are all the same"),
        ({"k": [5], "samples": 4, "temperature": 1}, "pass@5 needs at least as many samples"),
        ({"extract": "("}, "no regular expression"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    report = {"data": "builtin:holmes", "generation": [{"data": "x.jsonl", **settings}]}
    with pytest.raises(SutureError, match=message):
        make_recipe({"model": "builtin:tiny", "steps": [{"rtn": {}}], "output": "out", "report": report})


def rows_of(base, candidate, ks=(1,), groups=None):
    questions = [Question(str(i), ("x",), None if groups is None else groups[i]) for i in range(len(base))]
    return compare_generations("t", questions, base, candidate, ks=ks, level=0.95, protocol="p")


def test_samples_are_compared_item_by_item():
    """Chances from Beta(2, 1) and 8 answers each: pass@k, the split of the variance and the paired interval, by hand."""
    rng = np.random.default_rng(0)
    chance = rng.beta(2, 1, 60)
    x, y = (rng.random((60, 8)) < np.clip(chance - shift, 0, 1)[:, None] for shift in (0, 0.1))
    one, five = rows_of(x, y, (1, 5))
    d = y.mean(1) - x.mean(1)
    se = d.std(ddof=1) / math.sqrt(60)
    half = stats.t.ppf(0.975, 59) * se
    assert one["paired"]["difference"] == pytest.approx(d.mean())
    assert one["paired"]["ci"] == pytest.approx([d.mean() - half, d.mean() + half])
    assert one["paired"]["p"] == pytest.approx(stats.ttest_rel(y.mean(1), x.mean(1)).pvalue)
    assert one["paired"]["power"]["detectable"] == pytest.approx(2.8016 * se, rel=1e-3)
    split = one["variance"]["base"]
    within = np.mean(x.var(1, ddof=1) / 8) / 60
    assert split["se_samples"] ** 2 == pytest.approx(within)
    assert split["se"] ** 2 == pytest.approx(x.mean(1).var(ddof=1) / 60)
    counts = x.sum(1)
    expected = np.mean([1 - math.comb(8 - c, 5) / math.comb(8, 5) for c in counts])
    assert five["metric"] == "pass@5" and five["variance"] is None and five["base"]["value"] == pytest.approx(expected)
    grouped = rows_of(x, y, groups=[f"g{i // 6}" for i in range(60)])[0]
    assert grouped["n_groups"] == 10 and grouped["paired"]["method"] == "jackknife over 10 groups"


def test_one_answer_each_is_a_pair_of_right_and_wrong():
    base, new = np.array([[1], [1], [1], [0], [0], [1]] * 5), np.array([[1], [0], [1], [1], [0], [0]] * 5)
    (row,) = rows_of(base, new)
    assert (row["paired"]["method"], row["base"]["method"]) == ("Bonett-Price", "Wilson")
    assert row["paired"]["difference"] == pytest.approx(-1 / 6)
    assert row["variance"] == {"base": None, "candidate": None}


def test_where_nothing_varies_the_interval_is_not_a_point():
    """30 of 30 right, and no difference in any: Wilson's [88.6, 100] %, and a difference that is known within points."""
    right = np.ones((30, 4), dtype=bool)
    (row,) = rows_of(right, right)
    assert row["base"]["ci"] == pytest.approx([0.8865, 1.0], abs=1e-4)
    low, high = row["paired"]["ci"]
    assert row["paired"]["difference"] == 0 and low < -0.05 and high > 0.05 and row["paired"]["p"] == 1


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """(a model whose own generation settings would spoil everything, a file of questions, its greedy answers)."""
    home = tmp_path_factory.mktemp("generation")
    model = home / "model"
    shutil.copytree(open_checkpoint("builtin:tiny").path, model)
    stock = kit.stock(model)
    stock.save_pretrained(model)  # float32: in bfloat16 near ties fall either way
    spoiled = {"repetition_penalty": 9.0, "do_sample": True, "temperature": 0.01, "max_new_tokens": 1, "num_beams": 3}
    (model / "generation_config.json").write_text(json.dumps(spoiled | {"eos_token_id": 1, "bos_token_id": 0}))
    tokenizer = load_tokenizer(model)
    prompts = ["He went to the", "She looked at", "It was a long", "The old man said that", "In the morning", "Then"]
    greedy = []
    for prompt in prompts:
        ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        start = len(ids)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(stock(torch.tensor([ids])).logits[0, -1].argmax()))
        greedy.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
    rows = [
        {"prompt": prompt, "answer": text if i % 3 else "something else"}
        for i, (prompt, text) in enumerate(zip(prompts, greedy, strict=True))
    ]
    file = home / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return model, file, greedy


def test_greedy_answers_are_the_models_own(asked, tmp_path):
    """A model against itself and a recipe's output against its base, with every answer in report-samples.jsonl."""
    model, file, greedy = asked
    generation = [{"data": str(file), "max_new_tokens": 6}]
    report = suture.compare(
        model, model, "builtin:holmes", window=32, max_windows=6, fidelity=False, generation=generation, output=tmp_path
    )
    (row,) = report.content["generation"]
    assert [sample["base"]["texts"] for sample in report.samples] == [[text] for text in greedy]
    assert (row["base"]["value"], row["paired"]["difference"], row["n_items"]) == (pytest.approx(4 / 6), 0, 6)
    jsonschema.Draft202012Validator(SCHEMA).validate(report.content)
    lines = [json.loads(line) for line in (tmp_path / "report-samples.jsonl").read_text().splitlines()]
    assert lines == json.loads(json.dumps(report.samples)) and "Answers in words" in report.to_html()

    content = {"model": str(model), "output": str(tmp_path / "out"), "steps": [{"rtn": {"bits": 2, "group_size": 64}}]}
    content["report"] = {"data": "builtin:holmes", "window": 32, "max_windows": 6, "fidelity": False}
    run = kit.run(content | {"report": content["report"] | {"generation": generation, "tasks": []}})
    found = [json.loads(line) for line in (run.output / "report-samples.jsonl").read_text().splitlines()]
    assert [sample["base"] for sample in found] == [sample["base"] for sample in lines]
    assert any(sample["candidate"]["texts"] != sample["base"]["texts"] for sample in found)
    (written,) = json.loads((run.output / "report.json").read_text())["generation"]
    assert written["candidate"]["value"] == np.mean([sample["candidate"]["right"][0] for sample in found])
    with pytest.raises(SutureError, match="do not fit the model's context of 512"):
        long = {"data": str(file), "max_new_tokens": 600}
        kit.run(content | {"output": str(tmp_path / "b"), "report": content["report"] | {"generation": [long]}})


def test_samples_follow_the_models_distribution_and_the_seed(asked):
    """400 first tokens at temperature 0.7 against the softmax: chi-square; the same seed gives the same, another others."""
    from suture.pipeline.generation_runs import answer, plan_generation
    from suture.pipeline.recipe import GenerationSettings
    from suture.pipeline.texts import text_model

    model, file, _ = asked
    text = text_model(open_checkpoint(model), 4096, 512)
    stock, device = kit.stock(model), torch.device("cpu")

    def drawn(seed, **settings):
        wanted = GenerationSettings(
            data=str(file), samples=400, temperature=0.7, max_new_tokens=1, seed=seed, **settings
        )
        (plan,) = plan_generation([wanted], text)
        state = torch.random.get_rng_state()
        found = answer(stock, plan, 0, device)
        assert torch.equal(torch.random.get_rng_state(), state)
        return plan, found

    plan, found = drawn(0)
    with torch.no_grad():
        chances = torch.softmax(stock(torch.tensor([plan.ids[0]])).logits[0, -1].double() / 0.7, 0)
    by_text: dict[str, float] = {}
    for token, chance in enumerate(chances.tolist()):
        by_text.setdefault(plan.tokenizer.decode([token], skip_special_tokens=True), 0.0)
        by_text[plan.tokenizer.decode([token], skip_special_tokens=True)] += chance
    common = [word for word, chance in by_text.items() if 400 * chance >= 5]
    seen = [found.count(word) for word in common]
    seen.append(400 - sum(seen))
    expected = [400 * by_text[word] for word in common]
    expected.append(400 - sum(expected))
    assert len(common) > 5 and stats.chisquare(seen, expected).pvalue > 1e-3
    assert drawn(0)[1] == found and drawn(1)[1] != found


def test_an_answer_ends_at_a_stop_string(asked):
    model, file, greedy = asked
    mark = greedy[0].split()[1]
    report = suture.compare(
        model,
        model,
        "builtin:holmes",
        window=32,
        max_windows=6,
        fidelity=False,
        generation=[{"data": str(file), "max_new_tokens": 6, "stop": [mark], "limit": 1}],
    )
    assert report.samples[0]["base"]["texts"] == [greedy[0].split(mark)[0]]


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def test_a_chat_is_what_the_template_makes_of_it(tmp_path):
    """Bare prompts, conversations whose last word is the right answer, a system message; never a second BOS."""
    from suture.pipeline.generation_runs import plan_generation
    from suture.pipeline.recipe import GenerationSettings
    from suture.pipeline.texts import TextModel

    tokenizer = load_tokenizer(open_checkpoint("builtin:tiny").path)
    model = TextModel(8192, 512, tokenizer, bos_id=0)
    talk = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes"}]
    rows = [
        {"prompt": "Who?", "answer": "I"},
        {"messages": [*talk, {"role": "user", "content": "Two?"}], "answer": "No"},
    ]
    rows += [{"messages": talk}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def plan(**settings):
        return plan_generation([GenerationSettings(data=str(tmp_path / "chat.jsonl"), **settings)], model)[0]

    with pytest.raises(SutureError, match="no chat template"):
        plan(chat=True)
    with pytest.raises(SutureError, match="row 2: messages are a chat's; set chat: true"):
        plan()
    tokenizer.chat_template = CHAT_TEMPLATE
    found = plan(chat=True, system="Be brief")
    assert [tokenizer.decode(ids) for ids in found.ids] == [
        "<system>Be brief\n<user>Who?\n<bot>",
        "<system>Be brief\n<user>One?\n<assistant>Yes\n<user>Two?\n<bot>",
        "<system>Be brief\n<user>One?\n<bot>",
    ]
    assert [question.answers for question in found.questions] == [("I",), ("No",), ("Yes",)]
    assert found.protocol.endswith("3 items, chat template") and found.digest != plan(chat=True).digest
    with pytest.raises(ValueError, match="only a chat has a system message"):
        GenerationSettings(data="x", system="Be brief")
