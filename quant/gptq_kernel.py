"""Step 4 of GPTQ (`gptq.py`) within a block of columns as one kernel for GPUs, written in Triton.

Column after column, a GPU that is told each operation by itself mostly waits for the next: a block of 32 columns is 200 of
them. Rows do not feel one another, so a program takes some rows through all columns of the block, with its part of the
block in registers. `gptq.round_block` is the same in torch, and what this is compared with: by Triton's interpreter
without a GPU (TRITON_INTERPRET=1), on CUDA where there is one.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202 (a kernel's arguments are pointers and numbers)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # of a program


@triton.jit
def _round_block(
    w, codes, errors, U, P, scale, zero, group, first, out, n, levels,
    B: tl.constexpr, R: tl.constexpr, HAS_P: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    TO_INTEGER: tl.constexpr = 12582912.0  # 1.5 * 2^23: added to a float32 below 2^22, it leaves no room for a fraction
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, B)
    at = column[:, None] * out + row[None, :]
    inside = (column < n)[:, None] & (row < out)[None, :]
    W = tl.load(w + at, mask=inside, other=0.0)
    Q = tl.zeros((B, R), tl.float32)
    E = tl.zeros((B, R), tl.float32)
    for i in range(n):
        here = (column == i)[:, None]
        x = tl.sum(tl.where(here, W, 0.0), axis=0)
        g = tl.load(group + i).to(tl.int64) * out
        s = tl.load(scale + g + row, mask=row < out, other=1.0)
        z = tl.load(zero + g + row, mask=row < out, other=0.0)
        wanted = x
        if HAS_FIRST:
            wanted = tl.where(i == 0, tl.load(first + row, mask=row < out, other=0.0), x)
        q = tl.minimum(tl.maximum(z + tl.div_rn(wanted, s), 0.0), levels)
        q = (q + TO_INTEGER) - TO_INTEGER
        e = x - (q - z) * s
        if HAS_P:
            W += tl.load(P + i * B + column)[:, None] * x[None, :]
        W -= tl.load(U + i * B + column)[:, None] * e[None, :]
        Q = tl.where(here, q[None, :], Q)
        E = tl.where(here, e[None, :], E)
    tl.store(w + at, W, mask=inside)
    tl.store(codes + at, Q, mask=inside)
    tl.store(errors + at, E, mask=inside)


def round_block(
    block: Tensor,
    scale: Tensor,
    zero: Tensor,
    group: Tensor,
    levels: int,
    U: Tensor,
    P: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gptq.round_block`. All float32 and contiguous, but `group` (int64); U and P [columns, columns]."""
    n, out = block.shape
    B = triton.next_power_of_2(n)
    codes, errors = torch.empty_like(block), torch.empty_like(block)
    U = torch.nn.functional.pad(U, (0, B - n))
    P = None if P is None else torch.nn.functional.pad(P, (0, B - n))
    grid = (triton.cdiv(out, ROWS),)
    _round_block[grid](
        block, codes, errors, U, U if P is None else P, scale, zero, group, block if first is None else first,
        out, n, float(levels), B=B, R=ROWS, HAS_P=P is not None, HAS_FIRST=first is not None,
    )  # fmt: skip
    return codes, errors
