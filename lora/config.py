"""adapter_config.json as PEFT writes it: what bears on the weights is read, what cannot be merged is refused.

The format grows with every PEFT release, so a key that is not known here is a note, while a known key of the wrong type
is an error. A scale is alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv 2312.03732), with each module's own r and alpha.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.errors import SutureError, did_you_mean
from ..checkpoint.strict_json import strict_json

CONFIG = "adapter_config.json"
_LIMIT = 64_000_000
# Initializations that leave the base as it was: their B A is the whole change.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica", "default")
_RECOMPUTED_INITS = ("pissa", "olora")
# Keys that turn the update into something else than W + B A, and why that cannot be merged.
_UNMERGEABLE = {
    "alora_invocation_tokens": "an aLoRA adapter acts only after its invocation tokens: no single weight does that",
    "arrow_config": "an Arrow adapter routes each token to other experts: no single weight does that",
    "kasa_config": "a KaSA adapter truncates its base by an SVD that is not stored",
    "use_qalora": "a QA-LoRA adapter acts on pooled inputs and merges into zero points, not into weights",
    "use_bdlora": "a BD-LoRA adapter is block diagonal in a layout that depends on its tensor-parallel degree",
}
_WITHOUT_EFFECT = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "lora_dropout",
        "lora_ga_config",
        "loftq_config",
        "megatron_config",
        "megatron_core",
        "monteclora_config",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",
    )
)
_READ = frozenset(
    (
        "alpha_pattern",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layer_replication",
        "layers_to_transform",
        "lora_alpha",
        "lora_bias",
        "modules_to_save",
        "r",
        "rank_pattern",
        "target_modules",
        "target_parameters",
        "trainable_token_indices",
        "use_dora",
        "use_rslora",
    )
)


@dataclass(frozen=True)
class AdapterConfig:
    """The keys of adapter_config.json that bear on the weights."""

    r: int = 8
    alpha: float = 8.0
    rslora: bool = False
    dora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] | str | None = None  # names, one regular expression, or PEFT's default table
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] | None = None
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    token_indices: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # module's last name ("": embedding) -> rows
    bias: str = "none"
    lora_bias: bool = False
    init: str = "plain"  # plain | pissa | olora | how the base was changed in a way that cannot be recomputed
    layer_replication: tuple[tuple[int, int], ...] = ()
    tied: bool = False  # embedding and head share one adapter
    base: str | None = None
    revision: str | None = None

    def rank(self, path: str) -> int:
        """r of the module at `path` (as PEFT names it)."""
        key = _first_match(self.rank_pattern, path)
        return self.r if key is None else self.rank_pattern[key]

    def alpha_of(self, path: str) -> float:
        key = _first_match(self.alpha_pattern, path)
        return self.alpha if key is None else self.alpha_pattern[key]

    def scale(self, path: str) -> float:
        """What B A is multiplied by at `path`."""
        r = self.rank(path)
        return self.alpha_of(path) / (math.sqrt(r) if self.rslora else r)

    def targets(self, path: str, block: int | None = None) -> bool:
        """Whether PEFT would put a LoRA on the module at `path`, in block `block`. False for a null target_modules."""
        if self.target_modules is None or matches(self.exclude_modules, path) or self.saves(path):
            return False
        # layers_to_transform selects among ends of names: neither a regular expression nor a whole path asks for it
        ends = isinstance(self.target_modules, tuple) and path not in self.target_modules
        if ends and self.layers_to_transform and block not in self.layers_to_transform:
            return False
        return matches(self.target_modules, path)

    def saves(self, path: str) -> bool:
        """Whether the module at `path` is trained in full, alone or inside of one that is."""
        return any(f".{name}." in f".{path}." for name in self.modules_to_save)

    def is_parameter(self, path: str) -> bool:
        """Whether the LoRA of the module at `path` is one of its parameter `weight` (`target_parameters`)."""
        return matches(self.target_parameters, f"{path}.weight")


def matches(wanted: tuple[str, ...] | str | None, path: str) -> bool:
    """PEFT's rule: a list holds names or ends of names by whole components, a string is one regular expression."""
    if wanted is None:
        return False
    if isinstance(wanted, str):
        return re.fullmatch(wanted, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in wanted)


def _first_match(patterns: Mapping[str, Any], path: str) -> str | None:
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", path)), None)


def unmatched_patterns(config: AdapterConfig, paths: list[str]) -> list[str]:
    """Keys of rank_pattern and alpha_pattern that decide for none of `paths`."""
    used = {_first_match(patterns, path) for patterns in (config.rank_pattern, config.alpha_pattern) for path in paths}
    return [key for key in {**config.rank_pattern, **config.alpha_pattern} if key not in used]


def read_config(directory: Path) -> tuple[AdapterConfig, tuple[str, ...]]:
    """The adapter's settings, and notes on keys that are not known here.

    Raises SutureError: no such file, not JSON, a key of the wrong type, or an adapter that no merge can be right for.
    """
    path = directory / CONFIG
    raw = strict_json(path, _LIMIT)
    if not isinstance(raw, dict):
        raise SutureError(f"{path}: an object was expected, found {type(raw).__name__}")
    return parse_config(raw, str(path))


def parse_config(raw: Mapping[str, Any], where: str) -> tuple[AdapterConfig, tuple[str, ...]]:
    """`read_config` for content that is already in memory."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        near = did_you_mean(kind, ["LORA"]) if isinstance(kind, str) and kind.upper() == "LORA" else ""
        raise SutureError(
            f"{where}: peft_type is {kind!r}{near}; only LORA adapters can be read",
            "PEFT's save_as_lora turns other kinds into a LoRA by SVD",
        )
    for key, reason in _UNMERGEABLE.items():
        if raw.get(key):
            raise SutureError(f"{where}: {key}: {reason}", "use the adapter unmerged, through PEFT")
    take = _Reader(raw, where)
    config = AdapterConfig(
        r=take.positive("r", 8),
        alpha=take.number("lora_alpha", 8.0),
        rslora=take.flag("use_rslora"),
        dora=take.flag("use_dora"),
        rank_pattern={key: take.is_positive(f"rank_pattern.{key}", v) for key, v in take.patterns("rank_pattern")},
        alpha_pattern={key: take.is_number(f"alpha_pattern.{key}", v) for key, v in take.patterns("alpha_pattern")},
        target_modules=take.names_or_pattern("target_modules"),
        exclude_modules=take.names_or_pattern("exclude_modules"),
        layers_to_transform=take.layers("layers_to_transform"),
        target_parameters=take.names("target_parameters"),
        modules_to_save=take.names("modules_to_save"),
        token_indices=take.token_indices("trainable_token_indices"),
        bias=take.choice("bias", ("none", "all", "lora_only")),
        lora_bias=take.flag("lora_bias"),
        init=_init(raw.get("init_lora_weights", True)),
        layer_replication=take.ranges("layer_replication"),
        tied=take.flag("ensure_weight_tying"),
        base=raw.get("base_model_name_or_path") or None,
        revision=raw.get("revision") or None,
    )
    strangers = sorted(set(raw) - _READ - _WITHOUT_EFFECT - set(_UNMERGEABLE))
    notes = [f"{CONFIG}: keys that suture does not know are ignored: {', '.join(strangers)}"] if strangers else []
    return config, tuple(notes)


def _init(value: Any) -> str:
    if value in _PLAIN_INITS:
        return "plain"
    return str(value).lower()


def refuse_changed_base(config: AdapterConfig, where: str) -> None:
    """Raise SutureError when training began from a base that suture cannot compute from the original one."""
    if config.init == "plain" or config.init in _RECOMPUTED_INITS:
        return
    raise SutureError(
        f"{where}: init_lora_weights '{config.init}' changed the base before training, by data or chance that is not stored",
        "give the changed (residual) base that was saved then as the model, with base_is_residual: true; or save the "
        "adapter with PEFT's path_initial_model_for_weight_conversion",
    )


@dataclass(frozen=True)
class _Reader:
    """Takes keys of a raw config with their types checked; a null is an absent key."""

    raw: Mapping[str, Any]
    where: str

    def _wrong(self, key: str, expected: str, value: Any) -> SutureError:
        return SutureError(f"{self.where}: {key}: {expected} was expected, found {value!r:.80}", "correct the file")

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return bool(value)

    def positive(self, key: str, default: int) -> int:
        value = self.raw.get(key)
        return default if value is None else self.is_positive(key, value)

    def is_positive(self, key: str, value: Any) -> int:
        if type(value) is not int or value < 1:
            raise self._wrong(key, "a whole number above 0", value)
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        return default if value is None else self.is_number(key, value)

    def is_number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, "a number", value)
        return float(value)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.raw.get(key)
        if value is not None and value not in choices:
            raise self._wrong(key, f"one of {', '.join(choices)}", value)
        return value or choices[0]

    def patterns(self, key: str) -> list[tuple[str, Any]]:
        value = self.raw.get(key)
        if value is None:
            return []
        if not isinstance(value, dict):
            raise self._wrong(key, "a mapping from module names to numbers", value)
        for pattern in value:
            self._check_pattern(key, pattern)
        return list(value.items())

    def _check_pattern(self, key: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise SutureError(
                f"{self.where}: {key}: '{pattern}' is not a regular expression: {error}", "correct the file"
            ) from error

    def names(self, key: str) -> tuple[str, ...]:
        value = self.raw.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise self._wrong(key, "a list of names", value)
        return tuple(value)

    def names_or_pattern(self, key: str) -> tuple[str, ...] | str | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            self._check_pattern(key, value)
            return value if value != "all-linear" else ".*"
        return self.names(key)

    def layers(self, key: str) -> tuple[int, ...] | None:
        value = self.raw.get(key)
        if value is None:
            return None
        numbers = value if isinstance(value, list) else [value]
        if not all(type(number) is int for number in numbers):
            raise self._wrong(key, "a layer's number or a list of them", value)
        return tuple(numbers)

    def ranges(self, key: str) -> tuple[tuple[int, int], ...]:
        value = self.raw.get(key)
        if value is None:
            return ()
        good = isinstance(value, list) and all(
            isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair) for pair in value
        )
        if not good or any(first >= last for first, last in value):
            raise self._wrong(key, "a list of [first, end) layer ranges", value)
        return tuple((first, last) for first, last in value)

    def token_indices(self, key: str) -> dict[str, tuple[int, ...]]:
        value = self.raw.get(key)
        if value is None:
            return {}
        by_module = value if isinstance(value, dict) else {"": value}
        for rows in by_module.values():
            if not isinstance(rows, list) or not all(type(row) is int and row >= 0 for row in rows):
                raise self._wrong(key, "token ids, or a mapping from module names to token ids", value)
        return {name: tuple(rows) for name, rows in by_module.items()}
