"""The kernel that GPUs run against its reference: by Triton's interpreter, which needs no GPU, and on CUDA where it is."""

import os
import subprocess
import sys

import pytest
import torch

from suture.quant import gptq as reference
from suture.quant.gptq import GPTQOptions, gptq, output_error
from suture.quant.scheme import Scheme

pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")

COMPARE = """
import torch
from suture.quant.gptq import round_block as reference
from suture.quant.gptq_kernel import round_block as kernel

torch.manual_seed(0)
cases = [(32, 70, 4, False, False), (32, 130, 3, True, False), (20, 5, 2, False, True), (1, 3, 8, True, True)]
for n, out, bits, paired, first in cases:
    block = 0.3 * torch.randn(n, out)
    scale, zero = 0.02 + 0.1 * torch.rand(3, out), torch.randint(0, 2**bits, (3, out)).float()
    group, U = torch.randint(0, 3, (n,)), 0.2 * torch.randn(n, n).triu(1)
    P = 0.1 * torch.randn(n, n).triu(1) if paired else None
    start = 0.3 * torch.randn(out) if first else None
    ours, theirs = block.clone(), block.clone()
    codes, errors = kernel(ours, scale, zero, group, 2**bits - 1, U, P, start)
    expected, left = reference(theirs, scale, zero, group.tolist(), 2**bits - 1, U, P, start)
    assert torch.equal(codes, expected), f"{int((codes != expected).sum())} of {codes.numel()} codes differ"
    assert 0 < len(expected.unique()) <= 2**bits and float(expected.max()) <= 2**bits - 1
    torch.testing.assert_close(errors, left, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
print("same")
"""


def test_the_interpreted_kernel_gives_the_codes_of_the_reference():
    """In a process of its own: triton asks for the interpreter when the kernel is defined."""
    given = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stderr[-2000:]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("asymmetric", ["none", "gptaq", "qronos"])
def test_on_a_gpu_the_kernel_costs_no_more_than_the_reference(asymmetric, monkeypatch):
    """Compiled, products and sums may be fused: a weight between two codes may fall to the other side."""
    torch.manual_seed(0)
    x = torch.randn(4096, 256, device="cuda") @ torch.randn(256, 256, device="cuda") * 0.1
    W, H = 0.3 * torch.randn(200, 256, device="cuda"), x.T @ x / len(x)
    D = 0.05 * torch.randn(256, 256, device="cuda") @ H
    options = GPTQOptions(Scheme(bits=4, group_size=64), asymmetric=asymmetric)
    fused = gptq(W, H, options, torch.float32, D).quantized
    monkeypatch.setattr(reference, "_kernel", lambda w: None)
    plain = gptq(W, H, options, torch.float32, D).quantized
    assert (fused.codes == plain.codes).float().mean() > 0.99
    errors = [output_error(W, found.dequantize(), H) for found in (fused, plain)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)
