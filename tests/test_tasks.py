"""Tasks by log-likelihood: every form of item, scores against stock transformers, and what two models' answers say."""

import gzip
import json
import math

import kit
import numpy as np
import pytest
import torch

import suture
from suture.calibrate.tokens import load_tokenizer
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.report.task_forms import Item, read_items
from suture.report.tasks import Answers, answers, compare_answers, request_windows

FORMS = {
    "hellaswag": (
        {
            "activity_label": "Cooking",
            "ctx_a": "A man  stirs.",
            "ctx_b": "he",
            "endings": ["eats [x] it.", "[step] runs."],
            "label": "1",
        },
        (("Cooking: A man stirs. He", " eats it."), ("Cooking: A man stirs. He", "  runs.")),
        1,
    ),
    "arc": (
        {"question": "What?", "choices": {"text": ["one", "two"], "label": ["A", "B"]}, "answerKey": "B"},
        (("Question: What?\nAnswer:", " one"), ("Question: What?\nAnswer:", " two")),
        1,
    ),
    "openbookqa": (
        {"question_stem": "Birds", "choices": {"text": ["fly", "dig"], "label": ["A", "B"]}, "answerKey": "A"},
        (("Birds", " fly"), ("Birds", " dig")),
        0,
    ),
    "piqa": (
        {"goal": "Open it", "sol1": "Pull.", "sol2": "Push.", "label": 0},
        (("Question: Open it\nAnswer:", " Pull."), ("Question: Open it\nAnswer:", " Push.")),
        0,
    ),
    "winogrande": (
        {"sentence": "Ann met Eve and _ smiled.", "option1": "Ann", "option2": "Eve", "answer": "2"},
        (("Ann met Eve and Ann", " smiled."), ("Ann met Eve and Eve", " smiled.")),
        1,
    ),
    "boolq": (
        {"passage": "Snow is cold.", "question": "is snow cold", "answer": True},
        tuple(("Snow is cold.\nQuestion: is snow cold?\nAnswer:", text) for text in (" no", " yes")),
        1,
    ),
    "lambada": ({"text": "He opened the door"}, (("He opened the", " door"),), 0),
    "mmlu": (
        {"question": " Why? ", "choices": ["a", "b"], "answer": "B", "subject": "high_school_law"},
        tuple(
            (
                "The following are multiple choice questions (with answers) about high school law.\n\n"
                "Why?\nA. a\nB. b\nAnswer:",
                text,
            )
            for text in (" A", " B")
        ),
        1,
    ),
    "query": ({"query": "So\n", "choices": ["x", "y"], "gold": 1}, (("So\n", " x"), ("So\n", " y")), 1),
    "options": (
        {"context_options": ["A", "B"], "continuation": "ran.", "gold": 0},
        (("A", " ran."), ("B", " ran.")),
        0,
    ),
    "cloze": ({"context": "In the", "continuation": "end"}, (("In the", " end"),), 0),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_known_by_its_columns(name):
    row, requests, gold = FORMS[name]
    (item,) = read_items([row])
    assert (item.requests, item.gold) == (requests, gold)


def test_requests_of_one_item_come_together_whatever_their_lines():
    """lm-eval's log of samples (both of its shapes) and OLMo's requests, whose unconditional ones are left out."""
    olmo = [
        {"doc_id": 0, "idx": 1, "label": 1, "request": {"context": "Q", "continuation": " b"}},
        {"doc_id": 0, "idx": 0, "label": 1, "request": {"context": "Q", "continuation": " a"}},
        {"doc_id": 1_000_000, "idx": 0, "label": 1, "request": {"context": "Answer:", "continuation": " a"}},
        {"doc_id": 1, "idx": 0, "label": 0, "request": {"context": "R", "continuation": " c"}},
        {"doc_id": 1, "idx": 1, "label": 0, "request": {"context": "R", "continuation": " d"}},
    ]
    expected = [Item((("Q", " a"), ("Q", " b")), 1), Item((("R", " c"), ("R", " d")), 0)]
    assert read_items(olmo) == expected
    logged = [
        {"doc_id": 0, "target": "1", "arguments": [["Q", " a"], ["Q", " b"]]},
        {
            "doc_id": 1,
            "target": "c",
            "arguments": {"gen_args_0": {"arg_0": "R", "arg_1": " c"}, "gen_args_1": {"arg_0": "R", "arg_1": " d"}},
        },
    ]
    assert read_items(logged) == expected


def test_what_is_right_is_asked_once_an_item_is_whole():
    """A text that names a choice further down; WinoGrande's continuation that both names share; a cloze with a number."""
    lines = [{"doc_id": 0, "target": "c", "request": {"context": "Q", "continuation": f" {x}"}} for x in "abc"]
    assert read_items(lines) == [Item((("Q", " a"), ("Q", " b"), ("Q", " c")), 2)]
    shared = {
        "doc": {"answer": "2"},
        "target": "was nicer.",
        "arguments": [["Ann", " was nicer."], ["Bob", " was nicer."]],
    }
    assert read_items([{"doc_id": 0, **shared}]) == [Item((("Ann", " was nicer."), ("Bob", " was nicer.")), 1)]
    assert read_items([{"doc_id": 0, "target": 1, "arguments": [["Q", " a"]]}]) == [Item((("Q", " a"),), 0)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no items"),
        ([{"foo": 1}], "no known task has the columns foo"),
        ([FORMS["arc"][0] | {"answerKey": "E"}], "row 1 is not of the form arc"),
        ([{"query": "So", "choices": ["x"], "gold": 3}], "row 1: answer 3 of 1 choices"),
        ([{"doc_id": 0, "arguments": [["only"]]}], "no context and continuation"),
        ([{"doc_id": 0, "arguments": None}], "line 1: no context and continuation"),
        ([{"doc_id": 0, "request": "abc"}], "line 1: no context and continuation"),
        ([{"doc_id": 0, "target": "7", "arguments": [["Q", " a"], ["Q", " b"]]}], "is '7', of 2 choices"),
        ([{"doc_id": 0, "target": -1, "arguments": [["Q", " a"], ["Q", " b"]]}], "is -1, of 2 choices"),
        ([{"doc_id": 0, "target": "a", "arguments": [["Q", " a"], ["R", " a"]]}], "'a', which 2 of its continuations"),
        ([{"doc_id": 0, "arguments": [["Q", " a"]]}, {"arguments": [["Q", " a"]]}], "line 2: its doc_id is None"),
        ([{"doc_id": [0], "arguments": [["Q", " a"]]}], r"its doc_id is \[0\]"),
    ],
)
def test_a_file_that_is_no_task_is_refused(rows, message):
    with pytest.raises(SutureError, match=message):
        read_items(rows)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(open_checkpoint("builtin:tiny").path)


ITEMS = [
    Item((("He went to the", " door."), ("He went to the", " sea again and again."), ("He went to the ", "room.")), 0),
    Item((("She looked at him", " and said nothing at all"), ("She looked at him", " xqz")), 0),
    Item((("It was a long", " time"),), 0),
    Item(((("All the long evening he sat and read. " * 60), " Then he slept."), ("Short", " Then he slept.")), 1),
]


@pytest.fixture(scope="module")
def scored(tokenizer, tmp_path_factory):
    """The report of three identical models' two comparisons is not needed: scores of builtin:tiny, and its reference."""
    model = kit.stock(open_checkpoint("builtin:tiny").path)
    bos = tokenizer.bos_token_id
    reference = []
    for item in ITEMS:
        for context, continuation in item.requests:
            whole = tokenizer(context + continuation, add_special_tokens=False)["input_ids"]
            n = len(whole) - len(tokenizer(context.rstrip(), add_special_tokens=False)["input_ids"])
            row = torch.tensor([bos, *whole[-(511):]])[None]
            with torch.no_grad():
                log = torch.log_softmax(model(row).logits[0].double(), 1)
            targets = row[0, -n:]
            at = log[-n - 1 : -1]
            greedy = bool((at.argmax(1) == targets).all())
            reference.append((float(at.gather(1, targets[:, None]).sum()), greedy))
    return reference


def test_scores_are_those_of_stock_transformers(tokenizer, scored):
    from suture.calibrate.skeleton import open_skeleton
    from suture.pipeline.progress import Silent
    from suture.report.score import compare_tokens

    windows = request_windows(ITEMS, tokenizer, window=512, bos_id=tokenizer.bos_token_id)
    assert windows.n_windows == 8 and max(ids.size for ids in windows.ids) == 512
    skeleton = open_skeleton(open_checkpoint("builtin:tiny"))
    tokens = compare_tokens(skeleton, skeleton, windows, Silent().track, "")
    sums = [-part.sum() for part in windows.by_document(tokens["nll_base"])]
    np.testing.assert_allclose(sums, [total for total, _ in scored], rtol=1e-4, atol=1e-4)
    for batch in (1, 8 * 512):  # H6
        again = compare_tokens(skeleton, skeleton, windows, Silent().track, "", batch_tokens=batch)
        np.testing.assert_allclose(again["nll_base"], tokens["nll_base"], atol=1e-5)
    padded_either_side_alike(windows, tokens["nll_base"])
    found = answers(ITEMS, windows, tokens["nll_base"], tokens["right_base"])
    start = 0
    for i, item in enumerate(ITEMS):
        totals = np.array([total for total, _ in scored[start : start + len(item.requests)]])
        if item.cloze:
            assert found.right[i] == scored[start][1] and found.margin[i] == pytest.approx(totals[0], rel=1e-3)
        else:
            lengths = [len(continuation.lstrip()) for _, continuation in item.requests]
            assert found.choice[i] == totals.argmax() and found.right[i] == (totals.argmax() == item.gold)
            assert found.right_norm[i] == ((totals / lengths).argmax() == item.gold)
            other = np.delete(totals, item.gold).max()
            assert found.margin[i] == pytest.approx(totals[item.gold] - other, rel=1e-3, abs=1e-3)
        start += len(item.requests)


def padded_either_side_alike(windows, nll):
    """H6: one batch of all requests in stock transformers, padded left or right, gives what is scored without padding."""
    model = kit.stock(open_checkpoint("builtin:tiny").path)
    width = max(ids.size for ids in windows.ids)
    for left in (True, False):
        pads = [width - ids.size for ids in windows.ids]
        rows = [np.pad(ids, (pad, 0) if left else (0, pad)) for ids, pad in zip(windows.ids, pads, strict=True)]
        masks = [
            np.pad(np.ones_like(ids), (pad, 0) if left else (0, pad))
            for ids, pad in zip(windows.ids, pads, strict=True)
        ]
        rows, mask = torch.from_numpy(np.stack(rows)), torch.from_numpy(np.stack(masks))
        with torch.no_grad():
            logits = model(rows, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        losses = -torch.log_softmax(logits[:, :-1].double(), 2).gather(2, rows[:, 1:, None])[..., 0].numpy()
        found = []
        for row, ids, start, pad in zip(losses, windows.ids, windows.score_from, pads, strict=True):
            first = pad if left else 0
            found.append(row[first + start - 1 : first + ids.size - 1])
        np.testing.assert_allclose(np.concatenate(found), nll, atol=1e-5)


def test_two_models_answers_are_compared_item_by_item():
    items = [Item((("", " a"), ("", " b")), 0, group=f"passage {i // 4}") for i in range(40)]
    rng = np.random.default_rng(0)
    base = rng.random(40) < 0.7
    new = np.where(rng.random(40) < 0.2, ~base, base)

    def model(right):
        chosen = np.where(right, 0, 1)
        return Answers(right, right, np.where(right, 1.0, -1.0), chosen, chosen)

    acc, norm = compare_answers("t", items, model(base), model(new), level=0.95, protocol="p")
    assert (acc["metric"], norm["metric"], acc["n_items"], acc["n_groups"]) == ("acc", "acc_norm", 40, 10)
    pair = acc["paired"]
    assert pair["difference"] == pytest.approx(new.mean() - base.mean())
    assert pair["flips"]["value"] == pytest.approx((base != new).mean()) == pair["changed"]
    assert pair["method"] == "jackknife over 10 groups" and pair["ci"][0] <= pair["difference"] <= pair["ci"][1]
    assert acc["margin_drift"]["value"] == pytest.approx(2 * (new.mean() - base.mean()))
    alone = compare_answers(
        "t", [Item(item.requests, 0) for item in items], model(base), model(new), level=0.95, protocol="p"
    )[0]
    assert alone["paired"]["method"] == "Bonett-Price" and alone["n_groups"] is None


def test_a_task_of_a_recipe_is_in_the_report(tmp_path):
    rows = [{"query": f"The number {i}", "choices": ["one.", "two men came in."], "gold": i % 2} for i in range(12)]
    packed = tmp_path / "choices.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    cloze = tmp_path / "cloze.jsonl"
    cloze.write_text("\n".join(json.dumps({"text": f"he said that {i} men were at the door"}) for i in range(7)))
    report = suture.compare(
        "builtin:tiny",
        "builtin:tiny",
        "builtin:holmes",
        window=32,
        max_windows=6,
        fidelity=False,
        tasks=[{"data": str(packed)}, {"data": str(cloze), "name": "last word", "limit": 5}],
    )
    tasks = report.content["tasks"]
    assert [(t["name"], t["metric"], t["n_items"]) for t in tasks] == [
        ("choices", "acc", 12),
        ("choices", "acc_norm", 12),
        ("last word", "acc", 5),
    ]
    for task in tasks:
        assert task["paired"]["p_holm"] == 1.0 and task["paired"]["flips"]["value"] == 0
        assert task["base"] == task["candidate"] and task["margin_drift"]["value"] == 0
    assert "last word" in report.to_html() and math.isfinite(tasks[0]["base"]["value"])
    with pytest.raises(SutureError, match="is a text file"):
        suture.compare("builtin:tiny", "builtin:tiny", "builtin:holmes", tasks=[{"data": __file__}])
