"""Integer codes of 2..8 bits in 32-bit words: one dense stream of bits per row, least significant bit first.

For bits that divide 32 this is the familiar 32/bits codes per word; for 3, 5, 6 and 7 bits a code may straddle two words
(the layout of compressed-tensors since 0.18).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint.errors import SutureError
from .scheme import row_pieces


def words(count: int, bits: int) -> int:
    """32-bit words that hold `count` codes."""
    return -(-count * bits // 32)


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack unsigned codes [rows, cols] along `dim` (0 or 1) into int32. Raises SutureError on a code out of range.

    >>> codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]])
    >>> [hex(word) for word in pack(codes, bits=4, dim=1)[0].tolist()]
    ['0x7654321']
    >>> bool((unpack(pack(codes, bits=3, dim=1), bits=3, count=8, dim=1) == codes).all())
    True
    """
    if codes.numel():
        low, high = int(codes.min()), int(codes.max())
        if low < 0 or high >= 2**bits:
            raise SutureError(f"a code of {low if low < 0 else high} does not fit in {bits} bits")
    return _pack_rows(codes.T, bits).T.contiguous() if dim == 0 else _pack_rows(codes, bits)


def unpack(packed: Tensor, bits: int, count: int, dim: int) -> Tensor:
    """Codes, uint8, `count` of them along `dim`."""
    return _unpack_rows(packed.T, bits, count).T.contiguous() if dim == 0 else _unpack_rows(packed, bits, count)


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    rows, count = codes.shape
    packed = torch.empty(rows, words(count, bits), dtype=torch.int32, device=codes.device)
    for some in row_pieces(rows, count):
        packed[some] = _pack_piece(codes[some], bits)
    return packed


def _pack_piece(codes: Tensor, bits: int) -> Tensor:
    # A code at bit p of the stream adds (code << p % 32) to word p // 32, and what passes bit 31 to the next word.
    rows, count = codes.shape
    stream = torch.zeros(rows, words(count, bits) + 1, dtype=torch.int64, device=codes.device)
    for first in range(_period(bits)):  # codes first, first + period, ... start at the same bit of their word
        part = codes[:, first :: _period(bits)].to(torch.int64)
        at, shift = _positions(part.shape[1], first, bits, codes.device)
        value = part << shift
        stream[:, at] += value & 0xFFFFFFFF
        if shift + bits > 32:
            stream[:, at + 1] += value >> 32
    stream = stream[:, :-1]
    return torch.where(stream >= 2**31, stream - 2**32, stream).to(torch.int32)


def _unpack_rows(packed: Tensor, bits: int, count: int) -> Tensor:
    rows = packed.shape[0]
    if packed.shape[1] != words(count, bits):
        raise SutureError(f"{count} codes of {bits} bits need {words(count, bits)} words, found {packed.shape[1]}")
    stream = packed.to(torch.int64) & 0xFFFFFFFF
    stream = torch.cat([stream, torch.zeros_like(stream[:, :1])], dim=1)
    codes = torch.empty(rows, count, dtype=torch.uint8, device=packed.device)
    for first in range(min(_period(bits), count)):
        n = len(range(first, count, _period(bits)))
        at, shift = _positions(n, first, bits, packed.device)
        value = stream[:, at] >> shift
        if shift + bits > 32:
            value |= stream[:, at + 1] << (32 - shift)
        codes[:, first :: _period(bits)] = (value & (2**bits - 1)).to(torch.uint8)
    return codes


def _period(bits: int) -> int:
    """Codes after which the bit position within a word repeats."""
    return 32 // _gcd(32, bits)


def _gcd(a: int, b: int) -> int:
    return a if b == 0 else _gcd(b, a % b)


def _positions(n: int, first: int, bits: int, device: torch.device) -> tuple[Tensor, int]:
    """Word of each of the codes first, first + period, ..., and the bit at which they all start."""
    index = first + _period(bits) * torch.arange(n, device=device)
    return index * bits // 32, first * bits % 32


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight codes in a word, least significant first


def interleave(codes: Tensor) -> Tensor:
    """Codes [rows, cols] with each eight columns in AWQ's order; cols is a multiple of 8."""
    return codes.reshape(codes.shape[0], -1, 8)[:, :, list(AWQ_ORDER)].reshape(codes.shape)


def deinterleave(codes: Tensor) -> Tensor:
    """Inverse of `interleave`."""
    inverse = sorted(range(8), key=AWQ_ORDER.__getitem__)
    return codes.reshape(codes.shape[0], -1, 8)[:, :, inverse].reshape(codes.shape)
