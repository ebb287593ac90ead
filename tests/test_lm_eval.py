"""lm-evaluation-harness in an environment of its own as the oracle: the same accuracies and the same word perplexity.

Its packages pin versions that ours do not, and its model is a real one, so this runs only where three variables say:

    SUTURE_LM_EVAL_PYTHON   the interpreter that has lm-eval
    SUTURE_LM_EVAL_MODEL    a checkpoint's directory, tokenizer included
    SUTURE_LM_EVAL_TASKS    files of items with query, choices and gold, between colons
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

import suture
from suture.calibrate.documents import DataSpec, read_documents

PYTHON, MODEL, TASKS = (os.environ.get(f"SUTURE_LM_EVAL_{name}", "") for name in ("PYTHON", "MODEL", "TASKS"))
LIMIT = 200
DOCUMENTS, CHARACTERS = 8, 4000

pytestmark = [
    pytest.mark.lm_eval,
    pytest.mark.skipif(not (PYTHON and MODEL and TASKS), reason="SUTURE_LM_EVAL_PYTHON, _MODEL and _TASKS are not set"),
]

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
print(json.dumps(found["results"]))
"""


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

    asked = [MODEL, str(tmp_path), ",".join([*names, "suture_words"]), str(LIMIT)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, "-c", DRIVER, *asked], capture_output=True, text=True, env=kept | offline, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])

    tasks = [{"name": name, "data": str(tmp_path / f"{name}.jsonl")} for name in names]
    report = suture.compare(MODEL, MODEL, str(pages), protocol="lm-eval", fidelity=False, tasks=tasks)
    ours = {(row["name"], row["metric"]): row["base"] for row in report.content["tasks"]}
    with capsys.disabled():
        for name, file in zip(names, files, strict=True):
            for metric in ("acc", "acc_norm"):
                print(
                    f"\n{file.name} {metric}: ours {ours[name, metric]['value']}, theirs {theirs[name][f'{metric},none']}"
                )
    for name in names:
        for metric in ("acc", "acc_norm"):
            assert ours[name, metric]["value"] == pytest.approx(theirs[name][f"{metric},none"], abs=1e-9)
    found = {row["name"]: row["value"] for row in report.content["metrics"] if row.get("model") == "base"}
    for name, metric in (
        ("word_ppl", "word_perplexity"),
        ("byte_ppl", "byte_perplexity"),
        ("bits_per_byte", "bits_per_byte"),
    ):
        with capsys.disabled():
            print(f"{name}: ours {found[name]:.6f}, theirs {theirs['suture_words'][f'{metric},none']:.6f}")
        assert found[name] == pytest.approx(theirs["suture_words"][f"{metric},none"], rel=1e-4)
