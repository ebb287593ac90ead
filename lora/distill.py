"""What training a whole model towards another minimizes: the forward KL divergence on the teacher's likeliest tokens.

Of the teacher's prediction p the k likeliest tokens are kept, and the rest as one bucket; with q the student's

    KL = sum over the k of p log(p / q)  +  p_rest log(p_rest / q_rest)

which is at most the divergence over the whole vocabulary, and all of it when k is the vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TINY = 1e-12  # a bucket's probability below which float32 sums to one cannot tell it from zero


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Token ids (int32) and log-probabilities (float32), each [..., k], of logits [..., vocabulary]."""
    found = logits.float().log_softmax(-1).topk(min(k, logits.shape[-1]), dim=-1)
    return found.indices.to(torch.int32), found.values


def forward_kl(logits: Tensor, ids: Tensor, log_p: Tensor) -> Tensor:
    """KL [...] in nats of the student's logits [..., vocabulary] from what `top_k` kept of the teacher's."""
    log_q = logits.float().log_softmax(-1).gather(-1, ids.long())
    p = log_p.exp()
    rest_p, rest_q = ((1 - x.sum(-1)).clamp_min(_TINY) for x in (p, log_q.exp()))
    return (p * (log_p - log_q)).sum(-1) + rest_p * (rest_p / rest_q).log()


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood [...] in nats of token ids `targets` [...] under logits [..., vocabulary]; zero for -100."""
    found = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return found.view(targets.shape)


def rate_at(step: int, steps: int, warmup: float) -> float:
    """Share of the full rate at a step (from 0) of so many: linear warm-up, then half a cosine to zero."""
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
