"""Which layers a step is for: every pattern must match something, and what is left alone has a reason."""

import re

import pytest
from kit import Shelf

from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.quant.targets import select


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    shelf, found = Shelf(tmp_path_factory.mktemp("kit")), {}

    def layout(name):
        if name not in found:
            found[name] = open_skeleton(open_checkpoint(shelf(name))).layout
        return found[name]

    return layout


def chosen(layout, targets=("all-linear",), ignore=()):
    return [linear.name for linear in select(layout, targets, ignore).chosen]


def ends(names):
    return {name.rsplit(".", 1)[-1] for name in names}


# ---- patterns


@pytest.mark.parametrize("name", ["L1", "P3", "GP", "NX", "FA", "MX", "QM", "W-gemma3"])
def test_all_linear_is_every_layer_of_every_block(layouts, name):
    selection = select(layouts(name), ["all-linear"], [])
    assert selection.chosen == layouts(name).linears
    assert not selection.skipped
    assert selection.names == {linear.name for linear in layouts(name).linears}


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("q_proj", 2),
        ("self_attn.q_proj", 2),
        ("model.layers.0.self_attn.q_proj", 1),
        ("layers.1.mlp.down_proj", 1),
        ("model.layers.0.*", 7),
        ("*.mlp.*", 6),
        ("*_proj", 14),
        ("model.layers.[01].self_attn.?_proj", 8),
        ("re:.*\\.(q|k)_proj", 4),
        ("re:model\\.layers\\.1\\..*", 7),
        ("all-linear", 14),
    ],
)
def test_f13_a_pattern_is_a_name_an_end_a_glob_or_an_expression(layouts, pattern, count):
    assert len(chosen(layouts("L1"), [pattern])) == count
    if pattern != "all-linear":
        selection = select(layouts("L1"), ["all-linear"], [pattern]) if count < 14 else None
        assert selection is None or len(selection.chosen) == 14 - count


def test_f13_the_end_of_a_name_is_whole_components(layouts):
    """`proj` is not q_proj, `attn.q_proj` is not self_attn.q_proj."""
    for pattern in ("proj", "attn.q_proj", "_proj", "layers.0"):
        with pytest.raises(SutureError, match=f"targets: '{re.escape(pattern)}' matches no linear layer"):
            chosen(layouts("L1"), [pattern])


def test_f13_a_vision_towers_layers_are_not_matched(layouts):
    names = chosen(layouts("W-gemma3"), ["q_proj"])
    assert names == [f"language_model.model.layers.{i}.self_attn.q_proj" for i in range(2)]
    with pytest.raises(SutureError, match="matches no linear layer"):
        chosen(layouts("W-gemma3"), ["vision_tower.*"])


def test_f13_chosen_layers_stay_in_forward_order_whatever_the_order_of_patterns(layouts):
    assert chosen(layouts("L1"), ["down_proj", "q_proj"]) == chosen(layouts("L1"), ["q_proj", "down_proj"])
    assert chosen(layouts("L1"), ["q_proj", "*.q_proj", "all-linear"]) == chosen(layouts("L1"))


def test_an_expression_is_for_the_whole_name(layouts):
    with pytest.raises(SutureError, match="matches no linear layer"):
        chosen(layouts("L1"), ["re:q_proj"])


def test_a_damaged_expression_is_refused(layouts):
    with pytest.raises(SutureError, match=r"'re:\(q' is not a regular expression"):
        chosen(layouts("L1"), ["re:(q"])


# ---- nothing matched


@pytest.mark.parametrize("key", ["targets", "ignore"])
@pytest.mark.parametrize(
    ("pattern", "nearest"), [("qproj", "q_proj"), ("down_prj", "down_proj"), ("gate_projs", "gate_proj")]
)
def test_i7_f13_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name(layouts, key, pattern, nearest):
    lists = {"targets": ["all-linear"], "ignore": []} | {key: ["q_proj", pattern]}
    with pytest.raises(SutureError) as error:
        select(layouts("L1"), **lists)
    message = str(error.value)
    assert f"{key}: '{pattern}' matches no linear layer (did you mean '{nearest}'?)" in message
    assert "this model has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in message


def test_i7_ignoring_everything_is_an_error(layouts):
    with pytest.raises(SutureError, match="targets: no layer is left to quantize"):
        chosen(layouts("L1"), ["all-linear"], ["*_proj"])
    with pytest.raises(SutureError, match="no layer is left"):
        chosen(layouts("L1"), ["q_proj"], ["self_attn.q_proj"])


def test_the_reason_of_every_skipped_layer_is_told(layouts):
    selection = select(layouts("L1"), ["*.self_attn.*"], ["model.layers.1.*"])
    assert len(selection.chosen) == 4
    assert len(selection.skipped) == 10
    assert selection.skipped["model.layers.0.mlp.up_proj"] == "matches no target"
    assert selection.skipped["model.layers.1.mlp.up_proj"] == "listed under ignore"
    assert selection.skipped["model.layers.1.self_attn.q_proj"] == "listed under ignore"


# ---- fused matrices


@pytest.mark.parametrize(
    ("name", "patterns", "fused"),
    [
        ("P3", ["q_proj", "k_proj", "v_proj"], "qkv_proj"),
        ("P3", ["gate_proj", "up_proj"], "gate_up_proj"),
        ("NX", ["q_proj", "k_proj", "v_proj"], "query_key_value"),
        ("GP", ["self_attn.q_proj", "k_proj", "v_proj"], "c_attn"),
    ],
)
def test_b8_all_parts_of_a_fused_matrix_name_it(layouts, name, patterns, fused):
    names = chosen(layouts(name), patterns)
    assert ends(names) == {fused}
    assert names == chosen(layouts(name), [fused])
    ignored = chosen(layouts(name), ["all-linear"], patterns)
    assert fused not in ends(ignored) and len(ignored) == len(layouts(name).linears) - 2


@pytest.mark.parametrize("key", ["targets", "ignore"])
@pytest.mark.parametrize(
    ("patterns", "absent"),
    [(["q_proj"], "k_proj, v_proj"), (["q_proj", "v_proj"], "k_proj"), (["up_proj"], "gate_proj")],
)
def test_b8_a_part_of_a_fused_matrix_is_refused(layouts, key, patterns, absent):
    lists = {"targets": ["all-linear"], "ignore": []} | {key: patterns}
    with pytest.raises(SutureError, match=rf"{key}: .* lie in one matrix, [\w.]+, together with {absent}"):
        select(layouts("P3"), **lists)


def test_b8_a_fused_matrix_and_its_parts_in_both_lists_leave_the_rest(layouts):
    assert ends(chosen(layouts("P3"), ["all-linear"], ["qkv_proj", "gate_proj", "up_proj"])) == {"o_proj", "down_proj"}


# ---- heads


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("L1", "lm_head"),
        ("L1", "lm_head*"),
        ("L1", "re:lm_head"),
        ("NX", "embed_out"),
        ("NX", "lm_head"),
        ("W-gemma3", "lm_head"),
        ("W-gemma3", "language_model.lm_head"),
    ],
)
def test_c15_an_untied_head_is_refused(layouts, name, pattern):
    with pytest.raises(SutureError, match="is the head, which stays in full precision; remove it from targets"):
        chosen(layouts(name), ["all-linear", pattern])


@pytest.mark.parametrize("name", ["L2", "Q2", "GP", "W-gemma3-new"])
def test_c15_a_tied_head_is_refused_with_the_reason(layouts, name):
    with pytest.raises(SutureError, match="is the head, which this model ties to its embedding"):
        chosen(layouts(name), ["lm_head"])


@pytest.mark.parametrize("name", ["L1", "L2", "NX", "W-gemma3", "W-gemma3-new"])
def test_c15_ignoring_the_head_is_allowed_since_it_stays_anyway(layouts, name):
    """Recipes for other tools all say so."""
    assert chosen(layouts(name), ["all-linear"], ["lm_head"]) == chosen(layouts(name))
    if name == "NX":
        assert chosen(layouts(name), ["all-linear"], ["embed_out"]) == chosen(layouts(name))


@pytest.mark.parametrize("pattern", ["re:.*(lm_head|down_proj)", "*[_.][hd]*[dj]"])
def test_f13_a_pattern_for_the_head_and_for_layers_still_ignores_the_layers(layouts, pattern):
    assert "down_proj" not in ends(chosen(layouts("L1"), ["all-linear"], [pattern]))


def test_i7_ignoring_everything_by_a_glob_that_also_fits_the_head_is_an_error(layouts):
    with pytest.raises(SutureError, match="no layer is left to quantize"):
        chosen(layouts("L1"), ["all-linear"], ["*"])


def test_embeddings_norms_and_routers_are_no_linear_layers(layouts):
    for name, pattern in (("L1", "embed_tokens"), ("L1", "input_layernorm"), ("MX", "gate"), ("QM", "mlp.gate")):
        with pytest.raises(SutureError, match="matches no linear layer"):
            chosen(layouts(name), [pattern])


# ---- kept by default


@pytest.mark.parametrize("name", ["DS", "DS-q-lora"])
def test_the_latent_projection_stays_unless_named_outright(layouts, name):
    layout = layouts(name)
    kept = [f"model.layers.{i}.self_attn.kv_a_proj_with_mqa" for i in range(2)]
    selection = select(layout, ["all-linear"], [])
    assert list(selection.skipped) == kept
    assert all(
        reason.startswith("kept by default: its output is the cached latent") for reason in selection.skipped.values()
    )
    assert chosen(layout, ["kv_a_proj_with_mqa"]) == kept
    assert set(kept) <= set(chosen(layout, ["all-linear", "kv_a_proj_with_mqa"]))
    assert set(kept) <= set(chosen(layout, ["*_proj", "re:.*mqa"]))


def test_the_latent_projection_stays_when_only_others_are_named_beside_all_linear(layouts):
    names = chosen(layouts("DS"), ["all-linear", "o_proj"])
    assert not any(name.endswith("kv_a_proj_with_mqa") for name in names)
    assert not any(name.endswith("kv_a_proj_with_mqa") for name in chosen(layouts("DS"), ["all-linear", "*.mlp.*"]))


def test_ignoring_the_latent_projection_leaves_it_with_that_reason(layouts):
    selection = select(layouts("DS"), ["all-linear"], ["kv_a_proj_with_mqa"])
    assert set(selection.skipped.values()) == {"listed under ignore"}


# ---- experts


def test_b4_experts_are_matched_by_their_names_on_disk(layouts):
    assert len(chosen(layouts("MX"), ["w1"])) == 8
    assert len(chosen(layouts("MX"), ["*.experts.2.*"])) == 6
    assert len(chosen(layouts("QM"), ["experts.7.down_proj"])) == 1
    with pytest.raises(SutureError, match="this model has k_proj, o_proj, q_proj, v_proj, w1, w2, w3"):
        chosen(layouts("MX"), ["gate_proj"])
