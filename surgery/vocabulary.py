"""Trim a vocabulary to the tokens that texts use, extend it with new ones, pad it: tokenizer and ids stay consistent.

Byte-pair encoding applies, again and again, the merge of lowest rank that some pair of neighbours allows. A vocabulary
that keeps every merge which was applied to a text therefore encodes that text as before: fewer merges compete, and none
that won is missing. Which merges a token took can be read off the token alone, since no merge ever crossed its borders.
So trimming keeps: the tokens that were used, all pieces on the way to them, single bytes, added tokens, and ids that
the configs name; and of the merges those whose two pieces and result are kept. Any text can still be encoded; one that
needs dropped tokens takes smaller pieces. Logits of kept tokens stay what they were.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..checkpoint.errors import SutureError

TOKENIZER = "tokenizer.json"
OTHER_VOCABULARIES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "vocab.txt")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_ID_KEYS = ("_token_id", "_token_ids", "_token_index")
_ID_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_UNMAPPED = ("bad_words_ids", "sequence_bias", "forced_decoder_ids")


class VocabularySettings(BaseModel):
    """Any of trim, extend and pad_to_multiple, done in this order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trim: list[str] | None = Field(None, min_length=1, description="texts (as under data) whose tokens are kept")
    column: str | None = Field(None, description="column of the texts; default: text, messages, content, input_ids")
    extend: list[str] | None = Field(None, min_length=1, description="new tokens, as text")
    special: bool = Field(False, description="the new tokens are special: skipped when ids are decoded for readers")
    initial: Literal["mean", "pieces"] = Field(
        "mean", description="rows of new tokens: mean of all tokens', or of those that the new one's text was cut into"
    )
    pad_to_multiple: int | None = Field(None, ge=1, description="rows are added up to a multiple of this")

    @model_validator(mode="after")
    def _something(self) -> VocabularySettings:
        if self.trim is None and self.extend is None and self.pad_to_multiple is None:
            raise ValueError("give trim, extend or pad_to_multiple")
        if self.extend is None and (self.special or self.initial != "mean"):
            raise ValueError("special and initial belong to extend")
        if self.trim is None and self.column is not None:
            raise ValueError("column belongs to trim")
        if self.extend is not None and (len(set(self.extend)) != len(self.extend) or "" in self.extend):
            raise ValueError("extend: tokens must be distinct and not empty")
        return self


@dataclass(frozen=True)
class Rows:
    """The new embedding's rows, in order: old rows, then new tokens, then padding."""

    kept: tuple[int, ...]  # old row of each of the first rows
    overwritten: tuple[tuple[int, tuple[int, ...]], ...]  # (position, old rows to average) of new tokens; () means all
    size: int  # of the new embedding; rows beyond those are padding
    tokens: tuple[int, ...]  # old rows that are tokens: what a mean is taken of

    @property
    def token_map(self) -> list[int]:
        """Old row -> new row, for old rows up to the last kept one."""
        back = {old: new for new, old in enumerate(self.kept)}
        return [back.get(old, -1) for old in range(max(self.kept) + 1)]


# -- tokenizer.json ----------------------------------------------------------------------------------------------------


def parse_tokenizer(raw: bytes | None) -> dict[str, Any]:
    """tokenizer.json as plain data. Raises SutureError unless it is a byte-pair encoding of the ordinary kind."""
    if raw is None:
        raise SutureError(f"vocabulary: the checkpoint has no {TOKENIZER}", "add it, or use pad_to_multiple alone")
    try:
        content = json.loads(raw)
        model = content["model"]
        kind, vocabulary = model["type"], model["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise SutureError(f"{TOKENIZER}: not a tokenizer: {error}", "restore the file") from error
    if kind != "BPE" or not isinstance(vocabulary, dict):
        raise SutureError(
            f"vocabulary: {TOKENIZER} holds a {kind} model; only byte-pair encodings (BPE) are supported",
            "use pad_to_multiple alone",
        )
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or model.get("dropout"):
        raise SutureError(
            f"vocabulary: {TOKENIZER}: subword prefixes, suffixes and dropout are not supported",
            "use pad_to_multiple alone",
        )
    return content


def all_tokens(content: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, added ones included."""
    added = {token["content"]: int(token["id"]) for token in content.get("added_tokens") or []}
    return {**content["model"]["vocab"], **added}


def merge_pairs(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Merges in order of rank, from either way of writing them."""
    pairs = []
    for merge in content["model"]["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        pairs.append((left, right))
    return pairs


def pieces_of(token: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """Everything that byte-pair encoding passes through on its way to the token: characters and merged pieces."""
    symbols = list(token)
    seen = {token, *symbols}
    while True:
        ranked = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
        if not ranked:
            return seen
        _, at = min(ranked)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        seen.add(symbols[at])


def ids_to_keep(content: Mapping[str, Any], used: Iterable[int], named: Iterable[int]) -> set[int]:
    """Ids that trimming to the tokens `used` keeps; `named` by configs."""
    vocabulary: dict[str, int] = content["model"]["vocab"]
    by_id = {i: token for token, i in vocabulary.items()}
    ranks = {pair: rank for rank, pair in enumerate(merge_pairs(content))}
    kept = set(named) | {int(token["id"]) for token in content.get("added_tokens") or []}
    for i in used:
        kept.add(i)
        if i in by_id and not _BYTE.fullmatch(by_id[i]):
            kept |= {vocabulary[piece] for piece in pieces_of(by_id[i], ranks) if piece in vocabulary}
    byte_level = '"ByteLevel"' in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    kept |= {i for token, i in vocabulary.items() if _BYTE.fullmatch(token) or (byte_level and len(token) == 1)}
    unknown = content["model"].get("unk_token")
    return kept | ({vocabulary[unknown]} if unknown in vocabulary else set())


def trimmed_tokenizer(content: Mapping[str, Any], new_id: Mapping[int, int]) -> dict[str, Any]:
    """tokenizer.json with the tokens of `new_id` (old -> new), merges and every other mention of an id to match."""
    model = content["model"]
    vocabulary = {token: new_id[i] for token, i in model["vocab"].items() if i in new_id}
    merges = [
        merge
        for merge, (left, right) in zip(model["merges"], merge_pairs(content), strict=True)
        if left in vocabulary and right in vocabulary and left + right in vocabulary
    ]
    result = dict(content)
    result["model"] = {**model, "vocab": dict(sorted(vocabulary.items(), key=lambda item: item[1])), "merges": merges}
    result["added_tokens"] = [{**token, "id": new_id[int(token["id"])]} for token in content.get("added_tokens") or []]
    result["post_processor"] = _renumbered_template(content.get("post_processor"), new_id)
    if isinstance(content.get("padding"), dict):
        result["padding"] = {**content["padding"], "pad_id": new_id.get(content["padding"]["pad_id"], 0)}
    return result


def _renumbered_template(part: Any, new_id: Mapping[int, int]) -> Any:
    """A post-processor with its ids changed: `ids` of templates, [token, id] of BERT's and RoBERTa's."""
    if isinstance(part, list):
        return [_renumbered_template(item, new_id) for item in part]
    if not isinstance(part, dict):
        return part
    result = {}
    for key, value in part.items():
        if key == "ids" and isinstance(value, list):
            result[key] = [new_id[i] for i in value]
        elif key in ("sep", "cls") and isinstance(value, list) and len(value) == 2:
            result[key] = [value[0], new_id[value[1]]]
        else:
            result[key] = _renumbered_template(value, new_id)
    return result


def extended_tokenizer(content: Mapping[str, Any], tokens: Sequence[str], special: bool) -> dict[str, Any]:
    """tokenizer.json with `tokens` added after its last id. Raises SutureError for one that it has."""
    known = all_tokens(content)
    twice = [token for token in tokens if token in known]
    if twice:
        raise SutureError(f"vocabulary: extend: '{twice[0]}' is token {known[twice[0]]} already", "leave it out")
    first = max(known.values()) + 1
    added = [
        {
            "id": first + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": not special,
            "special": special,
        }
        for i, token in enumerate(tokens)
    ]
    return {**content, "added_tokens": [*(content.get("added_tokens") or []), *added]}


# -- the other files ---------------------------------------------------------------------------------------------------


def named_ids(config: Mapping[str, Any], size: int) -> set[int]:
    """Token ids that a config names and the vocabulary of `size` rows has."""
    found: set[int] = set()
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= named_ids(value, size) if key.endswith("_config") else set()
        elif key.endswith(_ID_KEYS):
            found |= {i for i in (value if isinstance(value, list) else [value]) if _is_id(i, size)}
    return found


def renumbered_config(config: Mapping[str, Any], new_id: Mapping[int, int], size: int) -> dict[str, Any]:
    """config.json or generation_config.json with the ids that it names changed; those of no row stay.

    Raises SutureError for settings made of token ids that cannot be followed.
    """
    result: dict[str, Any] = {}
    for key, value in config.items():
        if key in _UNMAPPED and value:
            raise SutureError(f"vocabulary: {key} names tokens in a way that is not followed", f"remove {key} first")
        if isinstance(value, Mapping) and key.endswith("_config"):
            result[key] = renumbered_config(value, new_id, size)
        elif key.endswith(_ID_KEYS):
            ids: list[Any] = list(value) if isinstance(value, list) else [value]
            renumbered = [new_id[i] if _is_id(i, size) else i for i in ids]
            result[key] = renumbered if isinstance(value, list) else renumbered[0]
        elif key in _ID_LISTS and isinstance(value, list):
            result[key] = [new_id[i] for i in value if i in new_id]
        else:
            result[key] = value
    return result


def _is_id(value: Any, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


def tokenizer_files(
    content: Mapping[str, Any], present: Mapping[str, bytes], new_id: Mapping[int, int] | None
) -> dict[str, bytes | None]:
    """The tokenizer's files that must change. `content`: the new tokenizer.json; `present`: those of the input.

    new_id: old -> new id when tokens were dropped, else None.
    """
    files: dict[str, bytes | None] = {TOKENIZER: _json(content, None)}
    added = {token["content"]: token for token in content.get("added_tokens") or []}
    if "tokenizer_config.json" in present:
        settings = json.loads(present["tokenizer_config.json"])
        decoder = settings.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            kept = {entry["content"]: entry for entry in decoder.values()}
            keys = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
            settings["added_tokens_decoder"] = {
                str(token["id"]): kept.get(text) or {key: token[key] for key in keys}
                for text, token in sorted(added.items(), key=lambda item: item[1]["id"])
            }
            files["tokenizer_config.json"] = _json(settings, 2)
    if "added_tokens.json" in present:
        files["added_tokens.json"] = _json({text: token["id"] for text, token in added.items()}, 2)
    if new_id is not None and "vocab.json" in present:
        files["vocab.json"] = _json(content["model"]["vocab"], None)
    if new_id is not None and "merges.txt" in present:
        lines = ["#version: 0.2", *(" ".join(pair) for pair in merge_pairs(content))]
        files["merges.txt"] = ("\n".join(lines) + "\n").encode()
    if new_id is not None:
        files |= dict.fromkeys(name for name in OTHER_VOCABULARIES if name in present)
    return files


def _json(content: Any, indent: int | None) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=indent) + "\n").encode()
