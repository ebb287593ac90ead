"""lm-evaluation-harness in an environment of its own as the oracle: the same accuracies and the same word perplexity.

Its packages pin versions that ours do not, so this runs only where variables say:

    SUTURE_LM_EVAL_PYTHON   the interpreter that has lm-eval; its own tasks' prompts are compared on builtin:tiny

and, for the accuracies and the word perplexity of a real model:

    SUTURE_LM_EVAL_MODEL    a checkpoint's directory, tokenizer included
    SUTURE_LM_EVAL_TASKS    files of items with query, choices and gold, between colons
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from suture.calibrate.documents import DataSpec, read_documents
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline.progress import Silent
from suture.pipeline.recipe import SetSettings, TaskSettings
from suture.pipeline.task_runs import plan_tasks
from suture.pipeline.texts import evaluation_text, text_model
from suture.quant.decode import open_decoded
from suture.report.score import compare_tokens, score
from suture.report.tasks import answers, log_likelihoods

PYTHON, MODEL, TASKS = (os.environ.get(f"SUTURE_LM_EVAL_{name}", "") for name in ("PYTHON", "MODEL", "TASKS"))
LIMIT = 200
DOCUMENTS, CHARACTERS = 6, 2500

pytestmark = pytest.mark.lm_eval

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: '{file}'}}}}
test_split: test
output_type: {kind}
doc_to_text: {text}
doc_to_target: {target}
{more}
"""
CHOICES = 'doc_to_choice: choices\ntarget_delimiter: " "\nmetric_list: [{metric: acc}, {metric: acc_norm}]'
ROLLING = "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]"

DRIVER = """
import json, sys, lm_eval
from lm_eval.tasks import TaskManager
model, directory, names, limit = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="hf", model_args={"pretrained": model, "dtype": "float32"}, tasks=names.split(","), limit=int(limit),
    task_manager=TaskManager(include_path=directory, include_defaults=False), batch_size=4, device="cpu", bootstrap_iters=0,
)
samples = {
    name: [{key: one[key] for key in ("doc_id", "doc", "target", "arguments", "resps")} for one in rows]
    for name, rows in found["samples"].items()
}
print(json.dumps({"results": found["results"], "samples": samples}))
"""


def asked_of_lm_eval(directory, model, names):
    """lm-eval's results and samples of tasks whose definitions lie in a directory."""
    asked = [str(model), str(directory), ",".join(names), str(LIMIT)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(directory / "home")}
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, "-c", DRIVER, *asked], capture_output=True, text=True, env=kept | offline, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


OWN = {  # form of items here -> lm-eval's own definition, below its folder of tasks
    "arc": "arc/arc_easy.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "mmlu": "mmlu/default/mmlu_high_school_mathematics.yaml",
}


def rows_of(form):
    """Twelve items in a data set's own columns, made of sentences, with what goes wrong easily: spaces, brackets, capitals."""
    story = read_documents(DataSpec("builtin:holmes")).texts[3].replace("\n", " ")
    sentences = [one.strip() for one in story.split(". ") if 40 < len(one) < 160][:60]
    for i in range(12):
        a, b, c, d, e = sentences[5 * i : 5 * i + 5]
        letters = {"label": ["A", "B", "C", "D"], "text": [b, c, d, e]}
        yield {
            "arc": {"id": str(i), "question": f"{a}?", "choices": letters, "answerKey": "ABCD"[i % 4]},
            "piqa": {"goal": a, "sol1": b, "sol2": c, "label": i % 2},
            "winogrande": {
                "sentence": f"{a} because _ {b.lower()}.",
                "option1": "Holmes",
                "option2": "the old man",
                "answer": str(1 + i % 2),
            },
            "boolq": {"passage": f"{a}. {b}.", "question": c.lower(), "label": i % 2, "idx": i},
            "lambada": {"text": f"{a}. {b}"},
            "hellaswag": {
                "activity_label": "Cleaning [title] windows",
                "ctx_a": f"[header] {a}  [step] now.",
                "ctx_b": b.lower(),
                "endings": [b, f"{c} [substeps] {d}", d, f" {e}"],
                "label": str(i % 4),
            },
            "openbookqa": {"id": str(i), "question_stem": a, "choices": letters, "answerKey": " D" if i % 2 else "A"},
            "mmlu": {
                "question": f" {a} ",
                "choices": [b, c, d, e],
                "answer": i % 4,
                "subject": "high_school_mathematics",
            },
        }[form]


@pytest.mark.skipif(not PYTHON, reason="SUTURE_LM_EVAL_PYTHON is not set")
def test_prompts_are_those_of_lm_evals_own_tasks(tmp_path):
    """Its definitions on local rows: every log-likelihood of every choice, the answers, and its log read as items."""
    where = subprocess.run(
        [PYTHON, "-c", "import lm_eval.tasks as t; print(t.__path__[0])"], capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    for form, own in OWN.items():
        file = tmp_path / f"{form}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows_of(form))))
        lines = [f"include: {where}/{own}", f"task: suture_{form}", "dataset_path: json", "dataset_name: null"]
        lines += [
            f"dataset_kwargs: {{data_files: {{test: '{file}'}}}}",
            "training_split: null",
            "validation_split: null",
        ]
        lines += ["test_split: test", "fewshot_split: null", "num_fewshot: 0", "tag: null"]
        (tmp_path / f"{form}.yaml").write_text("\n".join(lines))
    model = open_checkpoint("builtin:tiny").path
    theirs = asked_of_lm_eval(tmp_path, model, [f"suture_{form}" for form in OWN])

    checkpoint = open_checkpoint(model)
    skeleton = open_decoded(checkpoint)
    text = text_model(checkpoint, skeleton.source.shapes[skeleton.layout.embedding][0], None)
    for form in OWN:
        samples = theirs["samples"][f"suture_{form}"]
        logged = tmp_path / f"samples_{form}.jsonl"
        logged.write_text("\n".join(map(json.dumps, samples)))
        given = [TaskSettings(name=form, data=str(file)) for file in (tmp_path / f"{form}.jsonl", logged)]
        plan, again = plan_tasks(given, text)
        assert again.items == tuple(replace(item, group=None) for item in plan.items), form
        tokens = compare_tokens(skeleton, skeleton, plan.windows, Silent().track, "")
        sums = log_likelihoods(plan.windows, tokens["nll_base"])
        expected = [float(answer[0][0]) for sample in samples for answer in sample["resps"]]
        np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-3, err_msg=form)
        right = answers(plan.items, plan.windows, tokens["nll_base"], tokens["right_base"])
        found = theirs["results"][f"suture_{form}"]
        assert right.right.mean() == pytest.approx(found["acc,none"]), form
        if "acc_norm,none" in found:
            assert right.right_norm.mean() == pytest.approx(found["acc_norm,none"]), form


@pytest.mark.skipif(not (PYTHON and MODEL and TASKS), reason="SUTURE_LM_EVAL_PYTHON, _MODEL and _TASKS are not set")
def test_accuracies_and_word_perplexity_are_lm_evals(tmp_path, capsys):
    files = [Path(file) for file in TASKS.split(":")]
    names = [f"suture_{i}" for i in range(len(files))]
    for name, file in zip(names, files, strict=True):
        kept = "".join(file.read_text().splitlines(keepends=True)[:LIMIT])  # columns must be of one type all along
        (tmp_path / f"{name}.jsonl").write_text(kept)
        task = TASK.format(
            name=name,
            file=tmp_path / f"{name}.jsonl",
            kind="multiple_choice",
            text="query",
            target="gold",
            more=CHOICES,
        )
        (tmp_path / f"{name}.yaml").write_text(task)
    texts = [text[:CHARACTERS].strip() for text in read_documents(DataSpec("builtin:holmes")).texts[:DOCUMENTS]]
    pages = tmp_path / "pages.jsonl"
    pages.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    words = TASK.format(
        name="suture_words", file=pages, kind="loglikelihood_rolling", text="''", target="text", more=ROLLING
    )
    (tmp_path / "suture_words.yaml").write_text(words)

    theirs = asked_of_lm_eval(tmp_path, MODEL, [*names, "suture_words"])["results"]

    checkpoint = open_checkpoint(MODEL)
    skeleton = open_decoded(checkpoint)
    vocabulary = skeleton.source.shapes[skeleton.layout.embedding][0]
    text = text_model(checkpoint, vocabulary, skeleton.hf_config.max_position_embeddings)
    found: dict[str, tuple[float, float]] = {}  # ours, theirs
    tasks = [TaskSettings(name=name, data=str(tmp_path / f"{name}.jsonl")) for name in names]
    for plan, file in zip(plan_tasks(tasks, text), files, strict=True):
        tokens = compare_tokens(skeleton, skeleton, plan.windows, Silent().track, "")
        right = answers(plan.items, plan.windows, tokens["nll_base"], tokens["right_base"])
        for metric, ours in (("acc", right.right.mean()), ("acc_norm", right.right_norm.mean())):
            found[f"{file.stem} {metric}"] = (float(ours), theirs[plan.name][f"{metric},none"])
    windows = evaluation_text(SetSettings(data=str(pages), protocol="lm-eval"), text).windows
    total = score(skeleton, windows, Silent().track, "").sum()
    for metric, units in (("word_perplexity", windows.n_words), ("byte_perplexity", windows.n_bytes)):
        found[metric] = (float(np.exp(total / np.sum(units))), theirs["suture_words"][f"{metric},none"])
    with capsys.disabled():
        print(*(f"\n{name}: ours {ours:.6f}, lm-eval's {other:.6f}" for name, (ours, other) in found.items()))
    for name, (ours, other) in found.items():
        assert ours == pytest.approx(other, rel=1e-4 if "perplexity" in name else 1e-9), name
