"""Rotation: the matrices, every family it accepts left exactly as it was, the others refused with the reason."""

import json

import pytest
import torch
from kit import MODELS, WRAPPERS, edit, fuse_experts, make, quantize, read, run, some_ids, stock

from suture.checkpoint.errors import SutureError
from suture.surgery.rotate import hadamard, rotation

REFUSED = {
    "G2": "normalizes what attention and MLP put out",
    "G3": "normalizes what attention and MLP put out",
    "GP": "LayerNorm",
    "NX": "LayerNorm",
    "PH": "LayerNorm",
    "FA": "LayerNorm",
    "FA-new": "LayerNorm",
    "W-gemma3": "normalizes what",
    "W-gemma3-new": "normalizes what",
    "W-mistral3": "vision model",
}
ACCEPTED = [name for name in MODELS if name not in REFUSED]


def rotated(model, output, **settings):
    return run({"model": str(model), "output": str(output), "steps": [{"rotate": settings}]})


@pytest.mark.parametrize("n", [1, 2, 8, 12, 20, 28, 36, 40, 48, 576 // 16, 64, 72, 84])
def test_a_hadamard_matrix_has_entries_one_and_orthogonal_rows(n):
    H = hadamard(n)
    if H is None:  # 40, 72 are products: `rotation` makes them
        H = rotation(n, 0) * n**0.5
    assert bool((H.abs() - 1).abs().max() < 1e-12)
    torch.testing.assert_close(H @ H.T, n * torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("n", [3, 15, 14, 96, 576, 896, 1536])
def test_a_rotation_is_orthogonal_seeded_and_flat_where_it_can_be(n):
    R = rotation(n, 0)
    torch.testing.assert_close(R @ R.T, torch.eye(n, dtype=torch.float64))
    assert torch.equal(R, rotation(n, 0)) and not torch.equal(R, rotation(n, 1))
    if n % 4 == 0:
        assert float(R.abs().max() * n**0.5) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("heads", [False, True])
def test_b9_stock_transformers_gives_the_same_logits_after_a_rotation(shelf, tmp_path, name, heads):
    """From float32 files, so that nothing is hidden by their rounding; every norm weight one, no dimension as it was."""
    model = shelf(name, "float32")
    done = rotated(model, tmp_path / "out", heads=heads)
    ids = some_ids()
    before, after = stock(model), stock(tmp_path / "out")
    assert type(before) is type(after)
    with torch.no_grad():
        a, b = before(ids).logits, after(ids).logits
    assert float((a - b).abs().max()) <= 1e-4 * float(a.abs().max())
    assert done.manifest["receipts"][0]["exact"]
    was, now = read(model), read(tmp_path / "out")
    unit = 0.0 if MODELS[name][0] == "gemma" else 1.0
    for key, tensor in now.items():
        if key.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")):
            assert bool((tensor == unit).all())
        elif key.endswith(("q_norm.weight", "k_norm.weight", "a_layernorm.weight", "q_b_proj.weight")):
            assert torch.equal(tensor, was[key])
        elif key.endswith("v_proj.bias") or (key.endswith("kv_b_proj.weight") and not heads):
            assert torch.equal(tensor, was[key]) != heads
        elif not key.endswith("bias") and "kv_b_proj" not in key and key in was:
            assert done.manifest["inputs"][key]["action"] == "changed" and not torch.allclose(tensor, was[key])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("tie_word_embeddings", False) is False and "lm_head.weight" in now


@pytest.mark.parametrize("name", REFUSED)
def test_b9_families_that_a_rotation_would_change_are_refused_with_the_reason(shelf, tmp_path, name):
    with pytest.raises(SutureError, match=REFUSED[name]):
        rotated(shelf(name), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert name in {**MODELS, **WRAPPERS}


def test_a_wrong_rotation_is_caught_before_anything_is_written(shelf, tmp_path, monkeypatch):
    monkeypatch.setattr("suture.pipeline.rotate.rotate_writer", lambda weight, R: R @ weight.to(R.dtype))
    with pytest.raises(SutureError, match="should leave the model's function as it is"):
        rotated(shelf("L1"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_b4_experts_fused_on_disk_are_rotated_in_their_places(tmp_path):
    apart = make("QM", tmp_path / "apart", "float32")
    together = edit(make("QM", tmp_path / "fused", "float32"), fuse_experts)
    rotated(apart, tmp_path / "a")
    rotated(together, tmp_path / "b")
    assert all(torch.equal(t, read(tmp_path / "b")[k]) for k, t in fuse_experts(read(tmp_path / "a")).items())


def test_rotation_spreads_an_outlier_so_that_rounding_hurts_less(tmp_path):
    """One hidden dimension whose readers' weights are fifty times the others': it sets the scale of its group."""

    def plant(tensors):
        wide = {k for k in tensors if k.endswith(("q_proj.weight", "up_proj.weight", "gate_proj.weight"))}
        result = {k: t.clone() for k, t in tensors.items()}
        for key in wide:
            result[key][:, 5] *= 50
        for key in result:
            if key.endswith(("layernorm.weight",)):
                result[key][5] /= 50
        return result

    model = edit(make("L1", tmp_path / "m", "float32"), plant)
    ids, errors = some_ids(4), {}
    with torch.no_grad():
        expected = stock(model)(ids).logits
        for name, steps in (("plain", []), ("rotated", [{"rotate": {}}])):
            run({"model": str(model), "output": str(tmp_path / name), "steps": [*steps, {"rtn": {"group_size": 32}}]})
            errors[name] = float((stock(tmp_path / name)(ids).logits - expected).norm() / expected.norm())
    assert errors["rotated"] < 0.75 * errors["plain"]


def test_the_quantized_model_after_a_rotation_is_resumed_and_verified(shelf, tmp_path):
    model = shelf("L2")
    one = rotated(model, tmp_path / "a", seed=3)
    two = rotated(model, tmp_path / "b", seed=3)
    a, b = read(one.output), read(two.output)
    assert all(torch.equal(a[key], b[key]) for key in a)
    done = quantize(tmp_path / "a", tmp_path / "q", bits=4, group_size=8)
    assert done.manifest["verification"]["missing"] == 0
