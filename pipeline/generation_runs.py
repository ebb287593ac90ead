"""Read tasks that are answered in words, let stock transformers answer them, and compare a base's and a candidate's."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from ..calibrate.documents import read_rows
from ..calibrate.skeleton import Skeleton
from ..calibrate.tokens import render_questions
from ..checkpoint.errors import SutureError
from ..checkpoint.manifest import to_json
from ..checkpoint.staging import Staging, write_whole
from ..report.generation import Question, Scorer, compare_generations, cut, read_questions
from .recipe import GenerationSettings
from .scoring import Track
from .stock import load_stock
from .texts import TextModel


@dataclass(frozen=True)
class GenerationPlan:
    """One task, read and tokenized before any model runs."""

    name: str
    settings: GenerationSettings
    questions: tuple[Question, ...]
    ids: tuple[tuple[int, ...], ...]  # of each prompt, BOS included
    tokenizer: Any
    protocol: str
    warnings: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Of everything that the answers depend on beside the model."""
        asked = self.settings.model_dump(include={"samples", "temperature", "max_new_tokens", "stop", "seed"})
        return hashlib.sha256(json.dumps([asked, self.ids]).encode()).hexdigest()[:16]


def refuse_models_beyond_memory(models: Iterable[Skeleton]) -> None:
    """Stock transformers holds a whole model, packed weights dense."""
    available = psutil.virtual_memory().available
    for model in models:
        needed = 2 * sum(math.prod(shape) for shape in model.source.shapes.values())  # 16 bits each
        if needed > available:
            raise SutureError(
                f"report.generation: {model.source.source} needs {needed / 1e9:.1f} GB of memory in stock transformers, "
                f"{available / 1e9:.1f} are free",
                "remove generation from the report, or run where there is more memory",
            )


Texts = list[list[str]]  # per item, per sample


def plan_generation(settings: Sequence[GenerationSettings], model: TextModel) -> tuple[GenerationPlan, ...]:
    """Raises SutureError for a file that cannot be read, rows without prompt or answer, prompts that do not fit."""
    plans = []
    for wanted in settings:
        tokenizer = model.tokenizer
        if tokenizer is None:
            raise SutureError(model.missing)
        rows = read_rows(wanted.data)[: wanted.limit]
        questions = read_questions(rows, wanted.template, wanted.data, chat=wanted.chat, system=wanted.system)
        lead = [] if model.bos_id is None or wanted.chat else [model.bos_id]  # a template brings its own, or none
        texts = [question.prompt for question in questions]
        if wanted.chat:
            texts = render_questions([question.chat for question in questions], tokenizer, wanted.data)
        ids = [(*lead, *row) for row in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
        longest = max(map(len, ids))
        if model.max_positions is not None and longest + wanted.max_new_tokens > model.max_positions:
            raise SutureError(
                f"{wanted.data}: row {1 + [len(row) for row in ids].index(longest)}: a prompt of {longest} tokens and an "
                f"answer of {wanted.max_new_tokens} do not fit the model's context of {model.max_positions}",
                "shorten the prompt or set fewer max_new_tokens",
            )
        outside = [i for i, row in enumerate(ids) if max(row, default=0) >= model.vocabulary]
        if outside:
            raise SutureError(
                f"{wanted.data}: row {1 + outside[0]}: token {max(ids[outside[0]])} is outside the model's vocabulary of "
                f"{model.vocabulary}",
                "the tokenizer is another model's, or has grown",
            )
        if not all(ids):
            raise SutureError(f"{wanted.data}: row {1 + ids.index(())}: an empty prompt, and the model has no BOS")
        name = wanted.name or Path(wanted.data.split(":")[-1]).name.split(".")[0]
        how = "greedy" if wanted.temperature == 0 else f"{wanted.samples} samples at temperature {wanted.temperature:g}"
        scored = f"{wanted.match} match" + (f" of /{wanted.extract}/" if wanted.extract else "")
        bos = "chat template" if wanted.chat else "BOS before each prompt" if lead else "no BOS"
        protocol = (
            f"stock transformers, stored dtype, {how}, at most {wanted.max_new_tokens} tokens, {scored}, "
            f"{len(questions)} items, {bos}"
        )
        warnings = tuple(model.warn_without_bos(name, ids))
        plans.append(GenerationPlan(name, wanted, tuple(questions), tuple(ids), tokenizer, protocol, warnings))
    return tuple(plans)


def run_generation(
    plans: Sequence[GenerationPlan],
    base: Path,
    candidate: Path,
    device: torch.device,
    track: Track,
    *,
    level: float,
    staging: Staging | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of the report's `generation`, every answer with whether it is right). One whole model in memory at a time."""
    if not plans:
        return [], []
    answered = {
        name: _answers(plans, path, device, track, name, staging)
        for name, path in (("base", base), ("candidate", candidate))
    }
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for number, plan in enumerate(plans):
        scorer = Scorer(plan.settings.match, plan.settings.extract)
        right: dict[str, list[list[bool]]] = {}
        for model, texts in answered.items():
            right[model] = [
                [scorer.right(text, question.answers) for text in answers]
                for question, answers in zip(plan.questions, texts[number], strict=True)
            ]
        for i, question in enumerate(plan.questions):
            found = {m: {"texts": answered[m][number][i], "right": right[m][i]} for m in answered}
            about = {"task": plan.name, "item": i, "group": question.group}
            samples.append(about | {"prompt": question.prompt, "answers": list(question.answers), **found})
        rows += compare_generations(
            plan.name,
            plan.questions,
            right["base"],
            right["candidate"],
            ks=plan.settings.k,
            level=level,
            protocol=plan.protocol,
        )
    return rows, samples


def _answers(
    plans: Sequence[GenerationPlan], path: Path, device: torch.device, track: Track, name: str, staging: Staging | None
) -> list[Texts]:
    """Every plan's answers by one model, from the files of an interrupted run where they are there."""
    model = None
    found = []
    for plan in plans:
        unit = f"answers-{name}-{plan.digest}.json"
        saved = staging.work / unit if staging is not None else None
        if saved is not None and staging is not None and staging.find(unit=unit) is not None:
            found.append(json.loads(saved.read_bytes()))
            continue
        if model is None:
            model = _loaded(path, device)
        numbers = track(range(len(plan.ids)), len(plan.ids), f"answer {plan.name}: {name}")
        texts = [answer(model, plan, number, device) for number in numbers]
        found.append(texts)
        if saved is not None and staging is not None:
            write_whole(saved, to_json(texts))
            staging.record({"unit": unit})
    del model
    gc.collect()
    return found


def _loaded(path: Path, device: torch.device) -> Any:
    try:
        with contextlib.redirect_stderr(io.StringIO()), torch.no_grad():  # loaders' progress bars
            model = load_stock(path, device)
            model(torch.zeros((1, 1), dtype=torch.int64, device=device))  # packed weights become dense here
            return model
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SutureError(
            f"report.generation: stock transformers does not load {path}: {(str(error).splitlines() or ['no message'])[0]}",
            "install what its format needs, or remove generation from the report",
        ) from error


@torch.no_grad()
def answer(model: Any, plan: GenerationPlan, number: int, device: torch.device) -> list[str]:
    """The samples of one item. The draws depend on the seed and the item alone; nothing of the checkpoint's own
    generation settings is used but its end-of-text tokens."""
    from transformers import GenerationConfig, StoppingCriteriaList

    wanted, tokenizer = plan.settings, plan.tokenizer
    prompt = torch.tensor([plan.ids[number]], device=device)
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [int(ends)]
    start = prompt.shape[1]

    def text_of(row: Tensor) -> str:
        new = row[start:].tolist()
        last = min((new.index(end) for end in ends if end in new), default=len(new))
        return tokenizer.decode(new[:last], skip_special_tokens=True)

    def stopped(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([any(mark in text_of(row) for mark in wanted.stop) for row in ids], device=device)

    settings = {"do_sample": True, "temperature": wanted.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=wanted.max_new_tokens,
        num_return_sequences=wanted.samples,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **(settings if wanted.temperature > 0 else {"do_sample": False}),
    )
    kept, model.generation_config = model.generation_config, config  # generate fills gaps from the model's own
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(wanted.seed * 1_000_003 + number)
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([stopped]) if wanted.stop else None,
            )
    finally:
        model.generation_config = kept
    return [cut(text_of(row), wanted.stop) for row in out]
