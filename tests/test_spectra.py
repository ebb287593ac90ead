"""Spectra of matrices, weighed by what reaches them."""

import pytest
import torch
from kit import edit, ids_file, make, read, run

from suture.checkpoint.errors import SutureError
from suture.surgery.spectra import break_even, described, energies


@pytest.mark.parametrize("shape", [(6, 20), (20, 6)])
def test_energies_are_those_of_the_outputs(shape):
    torch.manual_seed(0)
    w, x = torch.randn(shape, dtype=torch.float64), torch.randn(500, shape[1], dtype=torch.float64)
    x = x * torch.logspace(0, -2, shape[1], dtype=torch.float64)
    outputs = x @ w.T
    wanted = torch.linalg.svdvals(outputs).square()[:6] / 500
    found = energies(w, x.T @ x / 500)
    assert found.numel() == 6 and torch.allclose(found, wanted, rtol=1e-9)
    u, s, v = torch.linalg.svd(outputs, full_matrices=False)
    lost = float((outputs - (u[:, :2] * s[:2]) @ v[:2]).square().sum() / outputs.square().sum())
    assert described(found, shape, [2])["retained_energy"]["2"] == pytest.approx(1 - lost, abs=1e-4)
    assert torch.allclose(energies(w, None), torch.linalg.svdvals(w).square())


def test_numbers_of_a_known_spectrum():
    record = described(torch.tensor([8.0, 1.0, 1.0, 0.0]).double(), (4, 9), None)
    assert record["rank_for"] == {"0.9": 2, "0.95": 3, "0.99": 3, "0.999": 3}
    assert record["retained_energy"] == {"1": 0.8, "2": 0.9} and record["stable_rank"] == 1.25
    assert break_even((64, 64)) == 31 and break_even((4, 9)) == 2


@pytest.mark.parametrize("name", ["L1", "GP", "QM", "DS-q-lora"])
def test_a_matrix_of_low_rank_is_found_and_nothing_changes(shelf, tmp_path, name):
    part = {"GP": "mlp.c_proj", "DS-q-lora": "self_attn.o_proj"}.get(name, "down_proj")

    def planted(tensors):
        for key, tensor in tensors.items():
            if key.endswith(f"{part}.weight"):
                u, s, v = torch.linalg.svd(tensor, full_matrices=False)
                tensors[key] = ((u[:, :3] * s[:3]) @ v[:3]).contiguous()
        return tensors

    model = edit(make(name, tmp_path / "m", "float32"), planted)
    text = {"data": str(ids_file(tmp_path / "ids.jsonl", rows=8)), "samples": 8, "length": 24}
    output = tmp_path / "out"
    done = run({"model": str(model), "output": str(output), "steps": [{"spectra": {}}], "calibration": text})
    before, after = read(model), read(output)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert {account["action"] for account in done.manifest["inputs"].values()} == {"copied"}
    records = done.manifest["receipts"][0]["spectra"]
    linears = [key for key in before if key.endswith(("_proj.weight", "c_attn.weight", "c_fc.weight", "mqa.weight"))]
    assert len(records) == len(linears)
    for key, record in records.items():
        found = record.get("outputs", record["weights"])
        planted_here = key.endswith(part)
        assert (found["rank_for"]["0.999"] <= 3) == planted_here or record.get("tokens", 9) < 9
        assert ("outputs" in record) == (record["tokens"] > 0)
    assert set(done.manifest["receipts"][0]["by_role"]) >= {part.rsplit(".", 1)[-1]}


def test_without_text_it_is_the_weights_alone(shelf, tmp_path):
    done = run(
        {"model": str(shelf("L1")), "output": str(tmp_path / "o"), "steps": [{"spectra": {"activations": False}}]}
    )
    record = done.manifest["receipts"][0]["spectra"]["model.layers.0.self_attn.q_proj"]
    assert "outputs" not in record and record["shape"] == [64, 64]
    with pytest.raises(SutureError, match="ranks: 65 is not between 1 and 64"):
        run(
            {
                "model": str(shelf("L1")),
                "output": str(tmp_path / "p"),
                "steps": [{"spectra": {"ranks": [65], "activations": False}}],
            }
        )
    with pytest.raises(SutureError, match="calibration: missing, but spectra needs text"):
        run({"model": str(shelf("L1")), "output": str(tmp_path / "p"), "steps": [{"spectra": {}}]})
