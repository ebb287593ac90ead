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
from suture.report.tasks import answers

PYTHON, MODEL, TASKS = (os.environ.get(f"SUTURE_LM_EVAL_{name}", "") for name in ("PYTHON", "MODEL", "TASKS"))
LIMIT = 200
DOCUMENTS, CHARACTERS = 6, 2500

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
