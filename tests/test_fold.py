"""Moving factors between matrices: every place of every family, the right channels, nothing moved that was not."""

import dataclasses

import pytest
import torch
from kit import NAMES, some_ids

from suture.calibrate.replay import Stream, run_block
from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.pipeline import scale
from suture.quant.fold import PAIRS, Fold, apply_fold, block_folds, touched, value_rows

MOE_NORM = "post_attention_layernorm"
GATED = ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"]
SANDWICH = ["input_layernorm", "self_attn.v_proj", "pre_feedforward_layernorm", "mlp.up_proj"]
PLACES = {  # producers of block 1
    "GP": ["ln_1", "attn.c_attn", "ln_2"],
    "NX": ["input_layernorm", "attention.query_key_value", "post_attention_layernorm"],
    "PH": ["input_layernorm", "self_attn.v_proj"],
    "FA": ["input_layernorm", "self_attention.query_key_value"],
    "FA-new": ["ln_attn", "self_attention.query_key_value", "ln_mlp"],
    "P3": ["input_layernorm", "self_attn.qkv_proj", "post_attention_layernorm", "mlp.gate_up_proj"],
    "G2": SANDWICH,
    "G3": SANDWICH,
    "W-gemma3": SANDWICH,
    "W-gemma3-new": SANDWICH,
    "MX": ["input_layernorm", "self_attn.v_proj", MOE_NORM, *(f"mlp.experts.{e}.up_proj" for e in range(4))],
    "QM": ["input_layernorm", "self_attn.v_proj", MOE_NORM, *(f"mlp.experts.{e}.up_proj" for e in range(8))],
    "DS": ["input_layernorm", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj", *GATED[2:]],
    "DS-q-lora": [
        "input_layernorm",
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_layernorm",
        "self_attn.kv_b_proj",
        *GATED[2:],
    ],
}
PLACES |= dict.fromkeys(("P3-partial", "P3-longrope"), PLACES["P3"])


def places(skeleton, index):
    modules = frozenset(linear.module for group in skeleton.layout.blocks[index] for linear in group)
    return block_folds(skeleton, index, modules)


def factors(fold, seed):
    """Between a quarter and four."""
    drawn = torch.rand(fold.channels, generator=torch.Generator().manual_seed(seed))
    return torch.exp((drawn * 2 - 1) * 1.386)


def through(path, change):
    """Logits of some tokens after `change(skeleton, index)` in every loaded block."""
    skeleton = open_skeleton(open_checkpoint(path))
    stream = Stream.start(skeleton, [some_ids()])
    for index in range(skeleton.n_blocks):
        skeleton.load_block(index)
        change(skeleton, index)
        run_block(skeleton, index, stream)
        skeleton.free_block(index)
    skeleton.load_head()
    return skeleton.logits(stream.hidden[0], torch.arange(stream.hidden[0].shape[1]))


def move_all(skeleton, index):
    for number, fold in enumerate(places(skeleton, index)[0]):
        before = {name: skeleton.model.get_parameter(name).clone() for name in touched(skeleton, fold)}
        apply_fold(skeleton, fold, factors(fold, 100 * index + number))
        for name, old in before.items():
            assert not torch.equal(skeleton.model.get_parameter(name), old), name
        if fold.norm:  # what is stored is what was computed with
            stored = skeleton.model.get_parameter(f"{fold.producer}.weight")
            assert torch.equal(stored, stored.bfloat16().float())


@pytest.mark.parametrize("name", NAMES)
def test_d1_d6_d7_random_factors_through_every_place_leave_every_logit(shelf, name):
    """Biases, Gemma's 1 + w, values shared by heads, fused and per-head rows, routers and all experts, latents."""
    original = through(shelf(name), lambda skeleton, index: None)
    moved = through(shelf(name), move_all)
    assert float((moved - original).abs().max()) <= 1e-4 * float(original.abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_d6_the_places_are_those_of_the_family(shelf, name):
    skeleton = open_skeleton(open_checkpoint(shelf(name)))
    folds, missed = places(skeleton, 1)
    prefix = skeleton.layout.block_prefix(1)
    assert [fold.producer.removeprefix(prefix) for fold in folds] == PLACES.get(name, GATED)
    consumers = [consumer for fold in folds for consumer in fold.consumers]
    assert len(consumers) == len(set(consumers))  # nothing is scaled twice
    linears = {linear.module for group in skeleton.layout.blocks[1] for linear in group}
    routers = {f"{prefix}mlp.gate"} if name in ("MX", "QM") else set()
    assert set(consumers) - linears == routers
    reasons = {"GP": "mlp.c_proj", "NX": "mlp.dense_4h_to_h", "PH": "mlp.fc2"} | dict.fromkeys(
        ("FA", "FA-new"), "mlp.dense_4h_to_h"
    )
    assert list(missed) == ([next(m for m in missed if m.endswith(reasons[name]))] if name in reasons else [])
    assert all("GELU" in reason for reason in missed.values())


def test_every_family_has_its_row():
    from suture.checkpoint.families import FAMILIES

    assert set(PAIRS) == set(FAMILIES)


def test_d1_heads_that_share_values_share_factors():
    """The figures of the report that showed the wrong layout."""
    fold = Fold("v", False, ("o",), "a", 4, None, torch.tensor([0, 1, 0, 1, 2, 3, 2, 3]))
    shared = fold.per_channel(torch.arange(1.0, 9.0), "mean")
    assert fold.columns(shared).tolist() == [2, 3, 2, 3, 6, 7, 6, 7]
    assert fold.per_channel(torch.arange(1.0, 9.0), "max").tolist() == [3, 4, 7, 8]


def test_d1_the_wrong_layout_would_be_seen(shelf, monkeypatch):
    """Factors given to heads in turn: the check before rounding refuses to go on."""

    def wrong(skeleton, index):
        for fold in places(skeleton, index)[0]:
            if fold.expand is not None:
                inputs = len(fold.expand)
                fold = dataclasses.replace(fold, expand=torch.arange(inputs) % fold.channels)
                apply_fold(skeleton, fold, factors(fold, 0))

    original = through(shelf("L1"), lambda skeleton, index: None)
    assert float((through(shelf("L1"), wrong) - original).abs().max()) > 0.02 * float(original.abs().max())


def test_d1_a_move_that_is_not_exact_stops_the_block(shelf):
    skeleton = open_skeleton(open_checkpoint(shelf("L1")))
    streams = [Stream.start(skeleton, [some_ids()]) for _ in range(2)]
    skeleton.load_block(0)
    fold = places(skeleton, 0)[0][0]
    lame = dataclasses.replace(fold, consumers=fold.consumers[:2])  # v_proj is forgotten
    choice = scale.Choice(lame, "test", factors(fold, 0), None, None)
    with pytest.raises(SutureError, match="block 0: scaling should leave its outputs as they are"):
        scale._move(skeleton, 0, [choice], *streams)


def test_a_norm_whose_gain_would_be_rounded_away_keeps_it(shelf):
    """Gemma stores gain - 1: a gain near zero has nothing to store it in."""
    skeleton = open_skeleton(open_checkpoint(shelf("G1")))
    skeleton.load_block(0)
    fold = places(skeleton, 0)[0][0]
    weight = skeleton.model.get_parameter(f"{fold.producer}.weight")
    weight.data[:2] = torch.tensor([-1.0, 0.5])
    s = torch.full((fold.channels,), 1000.0)
    taken = apply_fold(skeleton, fold, s)
    assert taken[0] == 1 and weight[0] == -1
    assert taken[1] == 1 and weight[1] == 0.5  # 1.5 / 1000 - 1 is -1 in bfloat16


@pytest.mark.parametrize("name", ["L1", "P3", "GP", "NX", "FA", "FA-new", "DS-q-lora"])
def test_ranges_are_cut_by_output_error_only_where_no_softmax_follows(shelf, name):
    skeleton = open_skeleton(open_checkpoint(shelf(name)))
    rows = value_rows(skeleton, 0)
    linears = {linear.module: linear for group in skeleton.layout.blocks[0] for linear in group}
    assert set(rows) == set(linears)
    free = {m.rsplit(".", 1)[1] for m, r in rows.items() if r is None}
    partly = {m.rsplit(".", 1)[1]: len(r) / linears[m].out_features for m, r in rows.items() if r is not None}
    expected = {
        "L1": {"q_proj": 0, "k_proj": 0},
        "P3": {"qkv_proj": 2 / 12},
        "GP": {"c_attn": 1 / 3},
        "NX": {"query_key_value": 1 / 3},
        "FA": {"query_key_value": 1 / 6},  # four query heads, one key, one value
        "FA-new": {"query_key_value": 1 / 5},  # three query heads, one key, one value, twice
        "DS-q-lora": {"q_a_proj": 0, "q_b_proj": 0, "kv_a_proj_with_mqa": 0, "kv_b_proj": 12 / 28},
    }
    assert expected[name] == {m: pytest.approx(share) for m, share in partly.items() if share < 1}
    assert free | {m for m, share in partly.items() if share == 1} == {m.rsplit(".", 1)[1] for m in linears} - {
        m for m, share in partly.items() if share < 1
    }
