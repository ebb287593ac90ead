"""p-values adjusted for how many comparisons a page makes: Holm's method over all of its candidates.

Two families: the perplexity ratios of every text of every candidate, and the differences of every task, answered by
log-likelihood or in words. A page of ten candidates on which one seems better at p = 0.03 says little; adjusted, it says
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .pairs import holm

Content = Mapping[str, Any]
Row = dict[str, Any]


def adjusted(contents: Sequence[Content]) -> list[dict[str, Any]]:
    """report.json's contents with `p_holm` over all of them, and `multiplicity`: what the families hold."""
    made = [_copied(content) for content in contents]
    ratios = [_ratio(one) for content in made for one in (content, *content["sets"])]
    pairs = [row["paired"] for content in made for row in (*content["tasks"], *content["generation"])]
    for rows, key in ((ratios, "p_value"), (pairs, "p")):
        for row, p in zip(rows, holm([row[key] for row in rows]), strict=True):
            row["p_holm"] = p
    counted = {
        "method": "Holm",
        "candidates": len(made),
        "texts": sum(row["p_value"] is not None for row in ratios),
        "tasks": sum(row["p"] is not None for row in pairs),
    }
    return [content | {"multiplicity": counted} for content in made]


def _copied(content: Content) -> Row:
    """The content with rows of its own wherever an adjusted p-value goes."""
    return {
        **content,
        "metrics": [dict(row) for row in content["metrics"]],
        "sets": [dict(one) | {"metrics": [dict(row) for row in one["metrics"]]} for one in content["sets"]],
        "tasks": [dict(row) | {"paired": dict(row["paired"])} for row in content["tasks"]],
        "generation": [dict(row) | {"paired": dict(row["paired"])} for row in content["generation"]],
    }


def _ratio(scored: Content) -> Row:
    return next(row for row in scored["metrics"] if row["name"] == "ppl_ratio")
