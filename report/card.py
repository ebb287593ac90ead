"""The model card: `README.md` with the Hub's metadata, made from report.json and what the run knows.

The input's own card is not lost: its licence, language and base model are carried over, and its text is kept beside this
one as README.base.md. A card that suture wrote for an earlier output is replaced, as its report is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from .figures import bytes_text, figure_text, finite
from .markdown import task_lines
from .page import metric, protocol_text

MARK = "<!-- written by suture -->"
KEPT = "README.base.md"
_HUB_ID = re.compile(r"^(?!builtin:)[\w.-]+/[\w.-]+$")
_INHERITED = ("license", "license_name", "license_link", "language")


def is_ours(text: str) -> bool:
    """Whether a README.md was written by suture."""
    return MARK in text


def front_matter(text: str) -> dict[str, Any]:
    """The YAML at the top of a model card; empty when there is none or it is not a mapping."""
    found = re.match(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", text, flags=re.DOTALL)
    if found is None:
        return {}
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe", pure=True).load(found[1])
    except (YAMLError, ValueError):
        return {}
    return dict(content) if isinstance(content, Mapping) else {}


def card(
    *,
    source: str,
    on_hub: bool,
    config: Mapping[str, Any],
    steps: Sequence[tuple[str, Mapping[str, Any]]],
    relation: Literal["quantized", "finetune"],
    content: Mapping[str, Any] | None,
    earlier: str | None,
    verification: Mapping[str, Any],
    kept: str | None,
) -> str:
    """README.md.

    on_hub: `source` is a Hub id, not a place. content: report.json, None without a report. earlier: the input's
    README.md. kept: the file beside this one that holds the base's.
    """
    inherited = front_matter(earlier or "")
    base = source if on_hub else _named_base(config, inherited)
    name = f"{(base or source).rstrip('/').rsplit('/', 1)[-1].removeprefix('builtin:')}-{'-'.join(n for n, _ in steps)}"
    directory = re.sub(r"[^\w.-]", "-", source.rstrip("/").rsplit("/", 1)[-1])
    lines = [_metadata(name, base or directory, relation, steps, config, content, inherited), MARK, "", f"# {name}", ""]
    made = " → ".join(f"`{step}`" for step, _ in steps)
    lines += [
        f"Made from {f'[{base}](https://huggingface.co/{base})' if base else f'`{source}`'} by suture: {made}.",
        "",
    ]
    if base is None:
        lines += [
            f"The base lay in a directory: `base_model: {directory}` above is its name, to be replaced by its Hub id.",
            "",
        ]
    if content is not None:
        lines += _results(content)
    lines += _loading(config, verification)
    lines += ["## How it was made", ""]
    lines += [f"- `{step}`: `{dict(settings)}`" for step, settings in steps]
    lines += ["", "Every tensor is accounted for in `suture.json`; `suture check DIR` verifies this directory."]
    if kept is not None:
        lines += ["", f"The card of the model this was made from: [{kept}]({kept})."]
    return "\n".join(lines) + "\n"


def _named_base(config: Mapping[str, Any], inherited: Mapping[str, Any]) -> str | None:
    """A Hub id of the base when it lies in a directory: what its config or its card says."""
    for value in (config.get("_name_or_path"), inherited.get("base_model")):
        if isinstance(value, str) and _HUB_ID.match(value):
            return value
    return None


def _metadata(
    name: str,
    base: str,
    relation: str,
    steps: Sequence[tuple[str, Mapping[str, Any]]],
    config: Mapping[str, Any],
    content: Mapping[str, Any] | None,
    inherited: Mapping[str, Any],
) -> str:
    from huggingface_hub import ModelCardData

    carried = {key: inherited[key] for key in _INHERITED if key in inherited}
    quantization = config.get("quantization_config")
    method = [str(quantization.get("quant_method"))] if isinstance(quantization, Mapping) else []
    tags = list(dict.fromkeys(["suture", *(step for step, _ in steps), *method]))
    data = ModelCardData(
        base_model=base,
        base_model_relation=relation,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
        model_name=name if content is not None else None,
        eval_results=_eval_results(content) if content is not None else None,
        **carried,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _eval_results(content: Mapping[str, Any]) -> list[Any]:
    """Perplexity and its ratio per text, KL, and accuracy per task, the intervals beside the values."""
    from huggingface_hub import EvalResult

    found = []
    for scored in (content, *content["sets"]):
        fidelity = scored["fidelity"]
        rows = [
            ("perplexity", metric(scored["metrics"], "ppl", "candidate")),
            ("perplexity ratio to the base", metric(scored["metrics"], "ppl_ratio")),
            ("KL divergence from the base", metric(fidelity["metrics"], "kl") if fidelity is not None else None),
        ]
        name = scored["name"] or scored["protocol"]["data"]
        for title, row in rows:
            if row is None or finite(row["value"]) is None:
                continue
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=str(name).rsplit("/", 1)[-1],
                    dataset_name=str(name).rsplit("/", 1)[-1],
                    metric_type=title.split()[0].lower(),
                    metric_name=f"{title} ({scored['protocol']['id']}-{scored['protocol']['window']})",
                    metric_value=round(float(row["value"]), 6),
                    metric_args=_interval(row),
                )
            )
    for task in [*content["tasks"], *content["generation"]]:
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=task["name"],
                dataset_name=task["name"],
                metric_type=task["metric"],
                metric_name=f"{task['metric']} ({task['n_items']} items)",
                metric_value=round(task["candidate"]["value"], 6),
                metric_args={"interval": task["candidate"]["ci"], "level": task["level"]},
            )
        )
    return found


def _interval(row: Mapping[str, Any]) -> dict[str, Any]:
    bounds = None if row["ci"] is None else [x if isinstance(x, str) else round(x, 6) for x in row["ci"]]
    return {
        "interval": bounds,
        "level": row["level"],
        "tokens": row["n_tokens"],
        f"{row['cluster']}s": row["n_clusters"],
    }


def _results(content: Mapping[str, Any]) -> list[str]:
    sizes = content["sizes"]
    lines = [
        "## Measured",
        "",
        "| text | perplexity, base | this model | ratio, paired | KL from the base | verdict | protocol |",
        "|---|---|---|---|---|---|---|",
    ]
    for scored in (content, *content["sets"]):
        rows, fidelity = scored["metrics"], scored["fidelity"]
        kl = figure_text(metric(fidelity["metrics"], "kl")) if fidelity is not None else "—"
        cells = [
            figure_text(metric(rows, *key)) for key in (("ppl", "base"), ("ppl", "candidate"), ("ppl_ratio", None))
        ]
        name = str(scored["name"] or scored["protocol"]["data"]).rsplit("/", 1)[-1]
        cells += [kl, scored["verdict"]["word"], protocol_text(scored["protocol"])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += task_lines(content)
    level = metric(content["metrics"], "ppl_ratio")
    assert level is not None
    lines += [
        "",
        f"Intervals at {100 * level['level']:g} %, of texts from whole {level['cluster']}s. Verdict: against a margin of "
        f"{100 * content['verdict']['margin']:g} %.",
        "",
        f"Weights: {bytes_text(sizes['bytes_base'])} → {bytes_text(sizes['bytes_candidate'])}, "
        f"{sizes['bits_per_parameter']:g} bits per parameter over all tensors.",
        "",
        "All figures with their protocols: `report.html`, made from `report.json`.",
        "",
    ]
    if content["warnings"]:
        lines += [*(f"- {warning}" for warning in content["warnings"]), ""]
    return lines


def _loading(config: Mapping[str, Any], verification: Mapping[str, Any]) -> list[str]:
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    needs = {
        "compressed-tensors": "compressed-tensors",
        "bitsandbytes": "bitsandbytes",
        "gptq": "gptqmodel",
        "awq": "autoawq",
    }
    packages = " ".join(["transformers", "torch", *([needs[method]] if method in needs else [])])
    blocks = f"{verification['blocks']} of {verification['of_blocks']} blocks"
    return [
        "## How to load it",
        "",
        "```python",
        f"# pip install {packages}",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("PATH_OR_ID", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")',
        "```",
        "",
        f"After writing it was reloaded with stock transformers as `{verification['loaded_as']}` ({blocks}); logits differed "
        f"by at most {verification['max_difference']} from those in memory.",
        "",
    ]
