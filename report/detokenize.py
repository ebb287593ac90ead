"""WikiText's spacing undone, as lm-evaluation-harness does before it scores (`tasks/wikitext/preprocess_wikitext.py`).

WikiText was published with its punctuation set apart (`1 @,@ 000`, `word , word`). Figures under the `lm-eval` protocol
are of the text with that undone, over the words and bytes of the text as published.
"""

from __future__ import annotations

import re

# in this order; a later one works on what an earlier one left
_FIRST = (("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))
_PUNCTUATION = tuple((f" {mark} ", f"{mark} ") for mark in ":;.!?,")
_INSIDE = (
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
)
_LAST = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def wikitext(page: str) -> str:
    """The page with ordinary spacing."""
    for old, new in (*_FIRST, *_PUNCTUATION):
        page = page.replace(old, new)
    for pattern, new in _INSIDE:
        page = re.sub(pattern, new, page)
    for old, new in _LAST:
        page = page.replace(old, new)
    return page


def count_words(page: str) -> int:
    """Words as lm-eval counts them: pieces between white space, empty ones at the ends included."""
    return len(re.split(r"\s+", page))
