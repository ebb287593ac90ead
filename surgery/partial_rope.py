"""One rotary key for all KV heads: which frequencies it keeps, and which mixture of heads each of its pairs holds.

RoPE multiplies pair f of every head at position m by the same number e^{imθ_f} (a pair is the complex number
k_f = k[f] + i k[f + d/2]). So any complex combination of the heads' pairs of one frequency commutes with it, and the
score Re Σ conj(q_f) k_f e^{i(n−m)θ_f} stays what it is when the queries take the conjugate. MLA caches one rotary key of
`slots` pairs; what the heads' keys have beyond it keeps its score but loses its rotation.

- `complex`: per frequency, u = the leading eigenvectors of E[(ω∘k)(ω∘k)ᴴ], ω_i² = energy of the queries that read head
  i: the slot holds uᴴ(ω∘k), head i reads it as u_i/ω_i. What is lost is the score energy of the tail eigenvalues.
- `real`: TransMLA's RoRoPE (Meng et al. 2025, partial_rope.py): real orthogonal u, real and imaginary parts as samples
  of one covariance, unweighted. With `fold` F > 1 (its FreqFold), F neighbouring frequencies are treated as one.
- `heads`: MHA2MLA (Ji et al. 2025): no mixture; each head keeps its own pairs of the kept frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError

Mixture = Literal["complex", "real", "heads"]
Subset = Literal["uniform", "high", "low"]
_SMALLEST_WEIGHT = 1e-4  # of the largest ω: a head that no query reads still gets finite rows


@dataclass(frozen=True)
class Fold:
    """Frequencies that are mixed as one, and the slots their leading components go to."""

    frequencies: tuple[int, ...]
    slots: tuple[int, ...]  # per kept component: the frequency it rotates with from now on


@dataclass(frozen=True)
class SharedRotary:
    """Complex maps between the heads' pairs and the shared key's slots; s: slot, i: KV head, f: frequency."""

    encode: Tensor  # [s, i, f]: slot = Σ encode · k_if
    decode: Tensor  # [s, i, f]: k_if ≈ Σ_s decode · slot, and a query of head i reads Σ_f conj(decode) q_f
    energy: float  # share of the (weighted) energy of all pairs that keeps its rotation
    rest: Tensor  # energies of the components that lose theirs


def plan_folds(subset: Subset, pairs: int, slots: int, fold: int, kv_heads: int, mixture: Mixture) -> tuple[Fold, ...]:
    """Every frequency 0..pairs-1 in one fold. Raises SutureError for a combination that cannot be."""
    if mixture == "heads":
        if slots % kv_heads:
            raise SutureError(
                f"mla: rope_dim {2 * slots} cannot be shared out among {kv_heads} KV heads in whole pairs",
                f"method mha2mla needs a multiple of {2 * kv_heads}",
            )
        each = slots // kv_heads
        kept = {"uniform": [k * pairs // each for k in range(each)], "high": range(each)}.get(
            subset, range(pairs - each, pairs)
        )
        return tuple(Fold((f,), (f,) * kv_heads if f in kept else ()) for f in range(pairs))
    if subset == "uniform" and pairs % slots:
        raise SutureError(
            f"mla: rope uniform keeps every k-th of {pairs} frequencies, which cannot give {slots}",
            f"rope_dim must divide {2 * pairs} and be even, or choose rope: high",
        )
    stride = pairs // slots
    if fold == 1:
        first, step = {"uniform": (0, stride), "high": (0, 1), "low": (pairs - slots, 1)}[subset]
        kept = range(first, first + step * slots, step)
        return tuple(Fold((f,), (f,) if f in kept else ()) for f in range(pairs))
    if subset != "uniform" or pairs % fold or fold % stride:
        raise SutureError(
            f"mla: fold {fold} with rope {subset} does not fit {pairs} frequencies of which {slots} are kept",
            f"with rope: uniform, fold must divide {pairs} and be a multiple of {stride}",
        )
    return tuple(
        Fold(tuple(range(start, start + fold)), tuple(range(start, start + fold, stride)))
        for start in range(0, pairs, fold)
    )


def slot_frequencies(folds: Sequence[Fold]) -> tuple[int, ...]:
    """Frequency of each slot of the shared key, in the order in which `share_rotary` fills them."""
    return tuple(sorted(slot for fold in folds for slot in fold.slots))


def share_rotary(
    k: Tensor, moment: Tensor, query_energy: Tensor, folds: Sequence[Fold], mixture: Mixture
) -> SharedRotary:
    """k: [i, f, E] complex rows of the keys; moment: [E, E] second moment of their inputs; query_energy: [i, f]."""
    heads, pairs, _ = k.shape
    order = slot_frequencies(folds)
    encode = torch.zeros(len(order), heads, pairs, dtype=k.dtype)
    decode = torch.zeros_like(encode)
    weight = torch.ones_like(query_energy)
    if mixture == "complex":
        weight = query_energy.clamp_min(0).sqrt()
        weight = weight.clamp_min(float(weight.max()) * _SMALLEST_WEIGHT) if float(weight.max()) else weight + 1
    kc = (k.reshape(heads * pairs, -1) @ moment.to(k.dtype)).view_as(k)
    free = {f: [s for s, slot in enumerate(order) if slot == f] for f in set(order)}
    kept = total = 0.0
    rest: list[Tensor] = []
    for fold in folds:
        f = list(fold.frequencies)
        omega = weight[:, f].reshape(-1).to(k.dtype)  # (i, f) in one dimension
        rows, moved = k[:, f].reshape(len(omega), -1), kc[:, f].reshape(len(omega), -1)
        covariance = omega[:, None] * (moved @ rows.conj().T) * omega
        values, vectors = _components(covariance, mixture)
        total += float(values.sum())
        rest.append(values[len(fold.slots) :])
        for component, slot in enumerate(fold.slots):
            u, s = vectors[:, component], free[slot].pop(0)
            size = torch.linalg.vector_norm(u / omega)  # of the decoder: rows keep the size of the keys they stand for
            encode[s][:, f] = (u.conj() * omega * size).view(heads, len(f))
            decode[s][:, f] = (u / omega / size).view(heads, len(f))
            kept += float(values[component])
    return SharedRotary(encode, decode, kept / total if total else 1.0, torch.cat(rest).clamp_min(0))


def _components(covariance: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Energies and unit vectors (columns), largest first; vectors' phases are fixed."""
    if mixture == "heads":
        return covariance.diagonal().real, torch.eye(len(covariance), dtype=covariance.dtype)
    values, vectors = torch.linalg.eigh(covariance.real if mixture == "real" else covariance)
    values, vectors = values.flip(0), vectors.flip(1).to(covariance.dtype)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return values, vectors * (largest.conj() / largest.abs())
