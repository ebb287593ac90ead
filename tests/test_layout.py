"""Every tensor of a checkpoint has its place: a parameter of the model, a known stale buffer, or unknown and kept."""

import json
import re

import pytest
import torch
from kit import MODELS, NAMES, edit, fuse_experts, make, read, some_ids, stock
from torch import nn
from transformers.pytorch_utils import Conv1D

from suture.calibrate.replay import Stream, run_block
from suture.calibrate.skeleton import open_skeleton
from suture.checkpoint.errors import SutureError
from suture.checkpoint.families import FAMILIES, WRAPPERS, family_of, stale_buffer
from suture.checkpoint.layout import text_config
from suture.checkpoint.reader import open_checkpoint


def skeleton_of(directory):
    return open_skeleton(open_checkpoint(directory))


def layout_of(directory):
    return skeleton_of(directory).layout


def logits(directory):
    skeleton = skeleton_of(directory)
    stream = Stream.start(skeleton, [some_ids()])
    for index in range(skeleton.n_blocks):
        skeleton.load_block(index)
        run_block(skeleton, index, stream)
        skeleton.free_block(index)
    skeleton.load_head()
    return skeleton.logits(stream.hidden[0], torch.arange(some_ids().shape[1]))


def adding(**extra):
    return lambda tensors: tensors | {name.replace("__", "."): tensor for name, tensor in extra.items()}


# ---- the table


def test_the_kit_has_every_family_and_wrapper():
    kinds = {model_type for model_type, _ in MODELS.values()}
    assert kinds == set(FAMILIES)
    assert set(WRAPPERS.values()) <= set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_b14_every_tensor_has_exactly_one_place(shelf, name):
    layout = layout_of(shelf(name))
    on_disk = set(read(shelf(name)))
    placed = {place.tensor for place in layout.places.values()}
    assert placed <= on_disk
    assert not placed & set(layout.unknown)
    assert placed | set(layout.unknown) == on_disk
    assert not layout.stale and layout.head_duplicate is None
    assert bool(layout.unknown) == name.startswith("W-")
    assert all("vision_tower" in tensor or "multi_modal_projector" in tensor for tensor in layout.unknown)


@pytest.mark.parametrize("name", NAMES)
def test_b4_b8_every_linear_layer_of_a_block_is_listed_once(shelf, name):
    """Against the module tree: nothing that multiplies by a matrix is left out but routers."""
    skeleton = skeleton_of(shelf(name))
    modules = {
        path: module
        for path, module in skeleton.model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and f".{skeleton.family.blocks}." in f".{path}."
    }
    linears = skeleton.layout.linears
    assert [linear.module for linear in linears] == list(dict.fromkeys(linear.module for linear in linears))
    assert {linear.module for linear in linears} == set(modules)
    shapes = open_checkpoint(shelf(name)).shapes
    for linear in linears:
        weight = modules[linear.module].weight
        stored = (
            (linear.in_features, linear.out_features) if linear.conv1d else (linear.out_features, linear.in_features)
        )
        assert tuple(weight.shape) == stored == shapes[linear.place.tensor]
        assert linear.place.tensor == f"{linear.name}.weight"
        assert linear.bias == (f"{linear.name}.bias" if f"{linear.name}.bias" in shapes else None)
        assert linear.numel == weight.numel()


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_in_forward_order_and_share_their_input(shelf, name):
    skeleton = skeleton_of(shelf(name))
    hidden = skeleton.embed(some_ids())
    for index in range(skeleton.n_blocks):
        block = skeleton.load_block(index)
        arrived = []
        for path, module in block.named_modules():
            if isinstance(module, nn.Linear | Conv1D):
                module.register_forward_pre_hook(lambda _, x, to=arrived, path=path: to.append((path, x[0])))
        skeleton.run_block(index, hidden)
        inputs = dict(arrived)
        order = [path for path, _ in arrived]
        position = 0
        for group in skeleton.layout.blocks[index]:
            shared = [linear for linear in group if linear.expert in (None, group[0].expert)]
            assert all(torch.equal(inputs[linear.role], inputs[group[0].role]) for linear in shared)
            places = [order.index(linear.role) for linear in group]
            if group[0].expert is None:
                assert places == list(range(position, position + len(group)))
                position += len(group)


@pytest.mark.parametrize("name", NAMES)
def test_b9_the_norms_of_the_table_compute_what_its_norm_kind_says(shelf, name):
    skeleton = skeleton_of(shelf(name))
    family = skeleton.family
    block = skeleton.load_block(1)
    skeleton.load_head()
    x = torch.randn(5, int(skeleton.hf_config.hidden_size), generator=torch.Generator().manual_seed(0))
    apart = {"FA": {"ln_attn", "ln_mlp"}, "FA-new": {"input_layernorm"}}.get(name, set())  # one norm, or two
    norms = {path: block.get_submodule(path) for path in family.norms if path not in apart}
    norms[family.final_norm] = skeleton.backbone.get_submodule(family.final_norm)
    for path, norm in norms.items():
        torch.testing.assert_close(norm(x), by_kind(family.norm_kind, norm, x), msg=path)
    named = {path for path, module in block.named_modules() if "Norm" in type(module).__name__}
    absent = {path for path in family.head_norms if path not in named}
    assert named == set(family.norms) - apart | (set(family.head_norms) - absent)
    optional = {"DS": {"self_attn.q_a_layernorm"}, "PH": {"self_attn.q_layernorm", "self_attn.k_layernorm"}}
    assert absent == optional.get(name, set())


def by_kind(kind, norm, x):
    if kind == "layernorm":
        return nn.functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    weight = norm.weight if kind == "w" else 1 + norm.weight
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def test_the_rope_column_agrees_with_the_arithmetic_of_the_modules(shelf):
    """`interleaved`: neighbouring channels are a pair; `half`: channel i goes with i + d/2."""
    import transformers.models as models

    x, d = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0)), 8
    angles = torch.arange(6)[:, None] * 0.3 ** torch.arange(4)
    cos, sin = angles.cos().repeat(1, 2)[None], angles.sin().repeat(1, 2)[None]
    pair = {"half": (x[..., : d // 2], x[..., d // 2 :]), "interleaved": (x[..., 0::2], x[..., 1::2])}
    for model_type, family in FAMILIES.items():
        if family.rope == "none":
            continue
        name = model_type.removesuffix("_text")
        code = getattr(getattr(models, name), f"modeling_{name}")
        rotate = code.apply_rotary_pos_emb_interleave if family.rope == "interleaved" else code.apply_rotary_pos_emb
        rotated, _ = rotate(x, x, cos, sin)
        a, b = pair[family.rope]
        turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
        torch.testing.assert_close(rotated, turned, msg=model_type)


def test_an_unknown_family_is_refused_with_the_nearest_name_and_the_list():
    with pytest.raises(SutureError) as error:
        family_of("qwen3_mo")
    message = str(error.value)
    assert "unknown model_type 'qwen3_mo' (did you mean 'qwen3_moe'?)" in message
    assert all(known in message for known in [*FAMILIES, *WRAPPERS])


def test_an_unknown_family_is_refused_when_a_checkpoint_is_opened_for_work(tmp_path):
    directory = edit(make("L1", tmp_path / "m"), model_type="lama")
    with pytest.raises(SutureError, match=r"unknown model_type 'lama' \(did you mean 'llama'\?\)"):
        skeleton_of(directory)


# ---- stale and unknown tensors


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("L1", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        (
            "GP",
            {"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64), "transformer.h.1.attn.masked_bias": torch.ones(1)},
        ),
        (
            "NX",
            {
                "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
                "gpt_neox.layers.0.attention.masked_bias": torch.ones(1),
                "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(2),
            },
        ),
        ("W-gemma3", {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    ],
)
def test_a19_stale_buffers_are_dropped_with_a_reason(shelf, tmp_path, name, extra):
    layout = layout_of(edit(make(name, tmp_path / "m"), lambda tensors: tensors | extra))
    assert set(layout.stale) == set(extra)
    assert all("recomputed" in reason for reason in layout.stale.values())
    assert layout.unknown == layout_of(shelf(name)).unknown


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.0.attn.c_attn.bias",
        "model.layers.0.self_attn.q_proj.bias",
        "gpt_neox.layers.0.attention.query_key_value.bias",
        "gpt_neox.layers.0.attention.dense.bias",
        "transformer.h.0.c_attn.bias",
        "model.layers.0.cross_attention_bias",
        "model.rotary_emb.inv_freq_scale",
    ],
)
def test_a19_a_parameter_is_not_taken_for_a_stale_buffer(name):
    assert stale_buffer(name) is None


@pytest.mark.parametrize("name", ["L1", "GP"])
def test_a19_unknown_tensors_are_kept(tmp_path, name):
    stem = "transformer." if name == "GP" else "model."
    extra = {f"{stem}extra.weight": torch.ones(3), "value_head.weight": torch.ones(1, 48)}
    layout = layout_of(edit(make(name, tmp_path / "m"), lambda tensors: tensors | extra))
    assert set(layout.unknown) == set(extra)
    assert not layout.stale


def test_a19_a_vision_towers_tensor_is_never_a_stale_buffer(tmp_path):
    """Only the text model's buffers are known; a name alike in a vision tower is a parameter for all we know."""
    extra = {"vision_tower.blocks.0.attn.bias": torch.ones(16)}
    layout = layout_of(edit(make("W-gemma3", tmp_path / "m"), lambda tensors: tensors | extra))
    assert "vision_tower.blocks.0.attn.bias" in layout.unknown
    assert not layout.stale


# ---- config and weights that disagree


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("L1", {"num_key_value_heads": 4}, "k_proj.weight has shape [16, 64], but config.json implies [32, 64]"),
        ("L0", {"num_key_value_heads": 4}, "k_proj.weight has shape [64, 64], but config.json implies [32, 64]"),
        ("Q3", {"head_dim": 8}, "q_proj.weight has shape [96, 40], but config.json implies [48, 40]"),
        ("Q3", {"head_dim": 32}, "q_proj.weight has shape [96, 40], but config.json implies [192, 40]"),
        ("L1", {"vocab_size": 400}, "embed_tokens.weight has shape [320, 64], but config.json implies [400, 64]"),
        ("L1", {"intermediate_size": 64}, "gate_proj.weight has shape [128, 64], but config.json implies [64, 64]"),
        ("P3", {"num_key_value_heads": 4}, "qkv_proj.weight has shape [96, 64], but config.json implies [128, 64]"),
        ("GP", {"n_positions": 128}, "wpe.weight has shape [64, 48], but config.json implies [128, 48]"),
        ("QM", {"moe_intermediate_size": 24}, "gate_proj.weight has shape [48, 64], but config.json implies [24, 64]"),
    ],
)
def test_e2_b1_a_config_edited_alone_is_refused_by_shape(tmp_path, name, config, message):
    with pytest.raises(SutureError, match=re.escape(message)) as error:
        layout_of(edit(make(name, tmp_path / "m"), **config))
    assert "was num_key_value_heads, head_dim or vocab_size edited?" in str(error.value)


@pytest.mark.parametrize("kv", [3, 5])
def test_e2_key_value_heads_that_do_not_divide_the_heads_are_refused(tmp_path, kv):
    with pytest.raises(SutureError):
        layout_of(edit(make("L1", tmp_path / "m"), num_key_value_heads=kv))


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("L1", "model.layers.1.mlp.up_proj.weight"),
        ("L1", "model.norm.weight"),
        ("L1", "lm_head.weight"),
        ("Q2", "model.layers.0.self_attn.q_proj.bias"),
        ("Q3", "model.layers.0.self_attn.k_norm.weight"),
        ("MX", "model.layers.0.block_sparse_moe.experts.2.w3.weight"),
        ("MX", "model.layers.1.block_sparse_moe.gate.weight"),
        ("W-mistral3", "language_model.lm_head.weight"),
        ("NX", "embed_out.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, name, lost):
    directory = edit(make(name, tmp_path / "m"), lambda tensors: {k: t for k, t in tensors.items() if k != lost})
    with pytest.raises(
        SutureError, match=rf"1 tensors that the \w+ config asks for are not .* first {re.escape(lost)};"
    ):
        layout_of(directory)


def test_a_config_with_more_layers_than_weights_is_refused(tmp_path):
    with pytest.raises(SutureError, match=r"9 tensors .* first model\.layers\.2\.self_attn\.q_proj\.weight"):
        layout_of(edit(make("L1", tmp_path / "m"), num_hidden_layers=3))


def test_a_checkpoint_without_the_familys_embedding_says_where_it_looked(tmp_path):
    renamed = edit(make("L1", tmp_path / "m"), lambda tensors: {f"backbone.{k}": t for k, t in tensors.items()})
    with pytest.raises(
        SutureError, match=r"looked for model\.embed_tokens\.weight.*begin with backbone\.lm_head\.weight"
    ):
        layout_of(renamed)


def test_a_value_that_transformers_refuses_is_an_error_about_the_config(tmp_path):
    with pytest.raises(SutureError, match=r"transformers refuses config\.json"):
        layout_of(edit(make("L1", tmp_path / "m"), hidden_size="wide"))


def test_deepseek_with_expert_layers_is_refused(tmp_path):
    with pytest.raises(SutureError, match=r"expert layers \(first_k_dense_replace 1 of 2 layers\) is not supported"):
        layout_of(edit(make("DS", tmp_path / "m"), first_k_dense_replace=1))


# ---- tied heads


@pytest.mark.parametrize("name", ["L2", "Q2", "G1", "GP", "W-gemma3-new"])
def test_f1_a_tied_model_has_no_head_of_its_own(shelf, name):
    layout = layout_of(shelf(name))
    assert layout.head is None and layout.head_duplicate is None
    assert layout.places["lm_head.weight"].tensor == layout.embedding


@pytest.mark.parametrize("name", ["L2", "Q2", "GP"])
def test_f1_a_stored_copy_of_a_tied_head_is_noted_and_kept(tmp_path, name):
    embedding = "transformer.wte.weight" if name == "GP" else "model.embed_tokens.weight"
    copy = lambda tensors: tensors | {"lm_head.weight": tensors[embedding].clone()}  # noqa: E731
    layout = layout_of(edit(make(name, tmp_path / "m"), copy))
    assert layout.head is None
    assert layout.head_duplicate == "lm_head.weight"
    assert not layout.unknown


def test_f1_a_tied_model_with_another_head_stored_is_refused(tmp_path):
    def other(tensors):
        head = tensors["model.embed_tokens.weight"].clone()
        head[7, 3] += 1
        return tensors | {"lm_head.weight": head}

    with pytest.raises(SutureError, match=r"ties the head to the embedding, but lm_head\.weight holds other values"):
        layout_of(edit(make("L2", tmp_path / "m"), other))


def test_f1_an_untied_config_with_a_head_has_one(shelf):
    assert layout_of(shelf("L1")).head == "lm_head.weight"
    assert layout_of(shelf("NX")).head == "embed_out.weight"
    assert layout_of(shelf("W-gemma3")).head == "language_model.lm_head.weight"


# ---- prefixes


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("W-gemma3", "language_model.model."),
        ("W-gemma3-new", "model.language_model."),
        ("W-mistral3", "language_model.model."),
    ],
)
def test_a_wrappers_prefix_is_found_and_its_logits_are_the_text_models(shelf, name, stem):
    layout = layout_of(shelf(name))
    assert layout.disk_stem == stem
    assert layout.embedding == f"{stem}embed_tokens.weight"
    assert layout.linears[0].name == f"{stem}layers.0.self_attn.q_proj"
    assert layout.linears[0].module == "model.layers.0.self_attn.q_proj"
    with torch.no_grad():
        torch.testing.assert_close(logits(shelf(name)), stock(shelf(name))(some_ids()).logits, rtol=1e-5, atol=1e-4)


def test_the_two_prefixes_of_a_wrapper_hold_the_same_text_model(shelf, tmp_path):
    old, new = "language_model.model.", "model.language_model."
    rename = lambda tensors: {k.replace(old, new).removeprefix("language_model."): t for k, t in tensors.items()}  # noqa: E731
    renamed = edit(make("W-gemma3", tmp_path / "m"), rename)
    assert layout_of(renamed).head == "lm_head.weight"
    assert torch.equal(logits(renamed), logits(shelf("W-gemma3")))


def test_a_text_model_renamed_into_a_wrapper_with_a_few_vision_tensors(shelf, tmp_path):
    """As files of a wrapper look to us, without a vision tower that would load."""
    text = json.loads((shelf("G3") / "config.json").read_text())
    tensors = {f"language_model.{name}": tensor for name, tensor in read(shelf("G3")).items()}
    fake = {"vision_tower.a.weight": torch.ones(2, 2), "multi_modal_projector.b": torch.ones(3)}
    directory = edit(make("G3", tmp_path / "m"), lambda _: tensors | fake)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    )
    layout = layout_of(directory)
    assert layout.disk_stem == "language_model.model."
    assert set(layout.unknown) == set(fake)
    assert torch.equal(logits(directory), logits(shelf("G3")))


def test_a_wrapper_without_text_config_is_refused(tmp_path):
    with pytest.raises(SutureError, match="a gemma3 wrapper without a text_config object"):
        layout_of(edit(make("W-gemma3", tmp_path / "m"), text_config=None))


@pytest.mark.parametrize("inner", [True, False, None])
def test_f1_a_wrapper_that_is_not_tied_unties_its_text_model(tmp_path, inner):
    """transformers goes by the outer key; gemma3's inner default is tied."""
    directory = make("W-gemma3", tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    text = {k: v for k, v in config["text_config"].items() if k != "tie_word_embeddings"}
    edit(directory, text_config=text if inner is None else text | {"tie_word_embeddings": inner})
    assert layout_of(directory).head == "language_model.lm_head.weight"


def test_text_config_leaves_a_plain_config_alone():
    config = {"model_type": "llama", "text_config": {"hidden_size": 3}}
    assert text_config(config) == config


def test_b7_gpt2_without_its_prefix_is_the_same_model(shelf, tmp_path):
    """As the first GPT-2 files are: `h.0.attn.c_attn.weight`, with masks."""

    def bare(tensors):
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
        return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks

    directory = edit(make("GP", tmp_path / "m"), bare)
    layout = layout_of(directory)
    assert layout.disk_stem == ""
    assert set(layout.stale) == {"h.0.attn.bias", "h.1.attn.bias"}
    assert not layout.unknown
    assert torch.equal(logits(directory), logits(shelf("GP")))


# ---- mixtures of experts


@pytest.mark.parametrize("name", ["MX", "QM"])
def test_b4_experts_fused_on_disk_are_the_same_linears_and_the_same_model(shelf, tmp_path, name):
    fused = edit(make(name, tmp_path / "m"), fuse_experts)
    apart_layout, fused_layout = layout_of(shelf(name)), layout_of(fused)
    of = lambda layout: [(x.name, x.module, x.role, x.out_features, x.in_features, x.expert) for x in layout.linears]  # noqa: E731
    assert of(fused_layout) == of(apart_layout)
    assert not fused_layout.unknown
    assert any(linear.place.expert is not None for linear in fused_layout.linears)
    assert torch.equal(logits(fused), logits(shelf(name)))


def test_b4_fused_experts_of_another_shape_are_refused(tmp_path):
    def short(tensors):
        fused = fuse_experts(tensors)
        name = "model.layers.0.mlp.experts.gate_up_proj"
        return fused | {name: fused[name][:, :-2]}

    with pytest.raises(SutureError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj has shape \[4, 190, 64\]"):
        layout_of(edit(make("MX", tmp_path / "m"), short))


def test_b4_experts_fewer_than_the_config_says_are_refused_when_fused(tmp_path):
    def fewer(tensors):
        fused = fuse_experts(tensors)
        return {k: t[:3] if "experts.gate_up" in k or "experts.down" in k else t for k, t in fused.items()}

    with pytest.raises(SutureError, match=r"mlp\.experts\.\w+ has shape \[3, "):
        layout_of(edit(make("MX", tmp_path / "m"), fewer))


@pytest.mark.parametrize(("name", "sparse"), [("MX", [0, 1]), ("QM", [1])])
def test_b4_experts_are_most_of_a_mixtures_weights_and_all_are_listed(shelf, name, sparse):
    layout = layout_of(shelf(name))
    experts = [linear for linear in layout.linears if linear.expert is not None]
    assert sorted({linear.block for linear in experts}) == sparse
    n = 4 if name == "MX" else 8
    assert len(experts) == 3 * n * len(sparse)
    assert {linear.expert for linear in experts} == set(range(n))
    assert not any("gate.weight" in linear.place.tensor for linear in layout.linears)  # routers stay
    dense = [linear.role for linear in layout.linears if linear.block == 0 and linear.expert is None]
    assert ("mlp.gate_proj" in dense) == (name == "QM")
