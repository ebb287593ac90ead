"""Replaying a model block by block equals its own forward, for every family; a paused block equals a repeated one."""

import json

import pytest
import torch
from kit import LENGTH, NAMES, VOCABULARY, edit, make, read, some_ids, stock

from suture.calibrate.replay import Stream, run_block, staged_block
from suture.calibrate.skeleton import open_skeleton
from suture.calibrate.statistics import Deviation, SecondMoment
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint

TOLERANCE = 1e-5  # of the largest logit
STAGED = ("L1", "G3", "GP", "P3", "QM", "DS-q-lora")


def skeleton_of(directory):
    return open_skeleton(open_checkpoint(directory))


def replay(skeleton, batches):
    """Logits [all rows, T, vocabulary] of token batches, one block in memory at a time."""
    stream = Stream.start(skeleton, batches)
    for index in range(skeleton.n_blocks):
        skeleton.load_block(index)
        run_block(skeleton, index, stream)
        skeleton.free_block(index)
    skeleton.load_head()
    length = batches[0].shape[1]
    logits = torch.cat([skeleton.logits(hidden, torch.arange(length)) for hidden in stream.hidden])
    skeleton.free_head()
    return logits


@torch.no_grad()
def forward(directory, ids):
    return stock(directory)(ids, use_cache=False).logits.float()


def assert_close(found, expected, tolerance=TOLERANCE):
    assert found.shape == expected.shape
    assert torch.isfinite(expected).all()
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def differ(a, b):
    return float((a - b).abs().max()) > 0.02 * float(a.abs().max())


# ---- replay equals the model


@pytest.mark.parametrize("name", NAMES)
def test_b11_b12_replay_equals_the_models_own_forward(shelf, name):
    ids = some_ids(batch=3)
    skeleton = skeleton_of(shelf(name))
    assert_close(replay(skeleton, [ids]), forward(shelf(name), ids))
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_one_batch_of_four_equals_four_batches_of_one(shelf, name):
    ids = some_ids(batch=4, seed=1)
    skeleton = skeleton_of(shelf(name))
    assert_close(replay(skeleton, list(ids.split(1))), replay(skeleton, [ids]))


@pytest.mark.parametrize("name", ["G2", "G3", "MI", "P3-longrope", "GP"])
def test_b11_one_skeleton_serves_sequences_of_several_lengths(shelf, name):
    skeleton = skeleton_of(shelf(name))
    for length in (LENGTH, 5, 2 * LENGTH, 5):  # P3-longrope has other frequencies beyond 16 positions
        ids = some_ids(batch=2, length=length, seed=length)
        assert_close(replay(skeleton, [ids]), forward(shelf(name), ids))


@pytest.mark.parametrize("name", ["L2", "G3", "GP"])
def test_logits_at_chosen_positions_are_those_of_all_positions(shelf, name):
    skeleton = skeleton_of(shelf(name))
    hidden = skeleton.embed(some_ids())
    skeleton.load_head()
    keep = torch.tensor([0, 7, LENGTH - 1])
    assert_close(skeleton.logits(hidden, keep), skeleton.logits(hidden, torch.arange(LENGTH))[:, keep])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("G2", {"sliding_window": 64}),
        ("G2", {"attn_logit_softcapping": None}),
        ("G2", {"final_logit_softcapping": None}),
        ("G2", {"query_pre_attn_scalar": 16}),
        ("G3", {"layer_types": ["full_attention", "full_attention"]}),
        ("G3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("MI", {"sliding_window": None}),
        ("L-llama3", {"rope_parameters": None}),
        ("L-yarn", {"rope_parameters": None}),
        ("DS-q-lora", {"rope_parameters": None}),
        ("P3-partial", {"rope_parameters": None}),
        ("P3-longrope", {"original_max_position_embeddings": 128}),
        ("NX", {"use_parallel_residual": False}),
        ("QM", {"norm_topk_prob": False}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_b11_the_kit_would_notice_a_setting_that_is_ignored(shelf, tmp_path, name, change):
    """The equalities above mean something only if each of these settings moves the logits."""
    ids = some_ids()
    as_it_is = replay(skeleton_of(shelf(name)), [ids])
    directory = make(name, tmp_path / "changed", **{k: v for k, v in change.items() if v is not None})
    if None in change.values():
        edit(directory, **change)
        if "rope_parameters" in change:
            config = json.loads((directory / "config.json").read_text())
            edit(directory, **{"rope_theta": 10000.0} if "rope_theta" not in config else {})
    changed = replay(skeleton_of(directory), [ids])
    assert differ(as_it_is, changed)
    assert_close(changed, forward(directory, ids))


@pytest.mark.parametrize("name", ["L1", "Q3", "G2"])
def test_b1_b18_logits_are_the_arithmetic_of_the_paper(shelf, name):
    """Not transformers' code but our own few lines: attention with head_dim from the config, kv heads repeated."""
    ids = some_ids(batch=1)
    directory = shelf(name)
    config, tensors = json.loads((directory / "config.json").read_text()), read(directory)
    assert_close(replay(skeleton_of(directory), [ids]), plain_llama(config, tensors, ids), 1e-4)


def plain_llama(config, tensors, ids):
    """Logits of a llama, qwen3 or gemma2 checkpoint, in float64."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    gemma = config["model_type"] == "gemma2"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    positions = torch.arange(ids.shape[1])
    theta = config["rope_parameters"]["rope_theta"]
    angles = positions[:, None] * theta ** (-torch.arange(0, d, 2).double() / d)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def norm(x, name):
        weight = t[f"{name}.weight"] + (1.0 if gemma else 0.0)
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight

    def rotate(x):
        return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin

    def attention(x, prefix, window):
        q, k, v = (x @ t[f"{prefix}.{p}_proj.weight"].T for p in "qkv")
        q, k, v = (z.view(1, -1, z.shape[-1] // d, d).transpose(1, 2) for z in (q, k, v))
        if f"{prefix}.q_norm.weight" in t:
            q, k = norm(q, f"{prefix}.q_norm"), norm(k, f"{prefix}.k_norm")
        q, k = rotate(q), rotate(k)
        k, v = (z.repeat_interleave(heads // kv_heads, 1) for z in (k, v))
        scores = q @ k.transpose(2, 3) * (config.get("query_pre_attn_scalar") or d) ** -0.5
        if gemma:
            scores = config["attn_logit_softcapping"] * (scores / config["attn_logit_softcapping"]).tanh()
        distance = positions[:, None] - positions[None]
        hidden_from = (distance < 0) | (
            (distance >= window) if window else torch.zeros_like(distance, dtype=torch.bool)
        )
        out = scores.masked_fill(hidden_from, -torch.inf).softmax(-1) @ v
        return out.transpose(1, 2).reshape(1, -1, heads * d) @ t[f"{prefix}.o_proj.weight"].T

    def mlp(x, prefix):
        gate, up = x @ t[f"{prefix}.gate_proj.weight"].T, x @ t[f"{prefix}.up_proj.weight"].T
        act = torch.nn.functional.gelu(gate, approximate="tanh") if gemma else torch.nn.functional.silu(gate)
        return (act * up) @ t[f"{prefix}.down_proj.weight"].T

    h = t["model.embed_tokens.weight"][ids] * (config["hidden_size"] ** 0.5 if gemma else 1.0)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        sliding = gemma and config["layer_types"][i] == "sliding_attention"
        a = attention(
            norm(h, f"{layer}.input_layernorm"), f"{layer}.self_attn", config["sliding_window"] if sliding else 0
        )
        h = h + (norm(a, f"{layer}.post_attention_layernorm") if gemma else a)
        before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        m = mlp(norm(h, f"{layer}.{before}"), f"{layer}.mlp")
        h = h + (norm(m, f"{layer}.post_feedforward_layernorm") if gemma else m)
    logits = norm(h, "model.norm") @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T
    cap = config.get("final_logit_softcapping")
    return (cap * (logits / cap).tanh() if cap else logits).float()


# ---- spellings of RoPE

ROPE_SPELLINGS = [
    ("L1", {"rope_theta": 1e6, "rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    (
        "L1",
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
    ),
    (
        "G3",
        {"rope_theta": 1e6, "rope_local_base_freq": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            }
        },
    ),
    (
        "NX",
        {"rotary_emb_base": 500.0, "rotary_pct": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    (
        "DS",
        {"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
]


@pytest.mark.parametrize(("name", "old", "new"), ROPE_SPELLINGS, ids=["theta", "linear", "per-layer", "neox", "yarn"])
def test_b3_both_spellings_of_rope_give_the_same_logits(shelf, tmp_path, name, old, new):
    ids = some_ids()
    found = []
    for spelling in (old, new):
        directory = make(name, tmp_path / str(len(found)))
        path = directory / "config.json"
        config = {key: value for key, value in json.loads(path.read_text()).items() if key != "rope_parameters"}
        path.write_text(json.dumps(config | spelling))  # null stays null
        found.append(replay(skeleton_of(directory), [ids]))
    assert torch.equal(found[0], found[1])
    assert differ(found[0], replay(skeleton_of(shelf(name)), [ids]))  # neither fell back to the default


# ---- fused matrices


def split_heads(family, linear, weight, heads, kv_heads):
    """Rows of a fused weight by part, as the family's table says: {"q": [heads, d, in], ...}."""
    fused = next(f for f in family.fused if f.linear == linear)
    d = weight.shape[0] // (heads + 2 * kv_heads)
    if fused.layout == "per group":
        grouped = weight.view(kv_heads, -1, d, weight.shape[1])
        return {"q": grouped[:, :-2].flatten(0, 1), "k": grouped[:, -2], "v": grouped[:, -1]}
    q, k, v = weight.split([heads * d, kv_heads * d, kv_heads * d])
    return {p: w.view(-1, d, weight.shape[1]) for p, w in zip(fused.parts, (q, k, v), strict=True)}


def join_heads(family, linear, parts):
    fused = next(f for f in family.fused if f.linear == linear)
    if fused.layout == "per group":
        kv_heads = len(parts["k"])
        grouped = [parts[p].unflatten(0, (kv_heads, -1)) for p in fused.parts]
        return torch.cat(grouped, 1).flatten(0, 2)
    return torch.cat([parts[p].flatten(0, 1) for p in fused.parts])


@pytest.mark.parametrize(
    ("name", "qkv", "out"),
    [
        ("NX", "attention.query_key_value", "attention.dense"),
        ("FA", "self_attention.query_key_value", "self_attention.dense"),
        ("FA-new", "self_attention.query_key_value", "self_attention.dense"),
        ("GP", "attn.c_attn", "attn.c_proj"),
        ("P3", "self_attn.qkv_proj", "self_attn.o_proj"),
    ],
)
def test_b6_b7_b8_heads_permuted_by_the_tables_layout_leave_logits_as_they_are(shelf, tmp_path, name, qkv, out):
    """A wrong row layout gives fluent nonsense that no shape can catch; permuting heads with it would move the logits."""
    ids = some_ids()
    layout = skeleton_of(shelf(name)).layout
    family = layout.family
    config = json.loads((shelf(name) / "config.json").read_text())
    heads = config.get("num_attention_heads") or config["n_head"]
    kv_heads = {"FA": 1, "FA-new": 2}.get(name) or config.get("num_key_value_heads", heads)
    order = torch.arange(kv_heads).roll(1)
    q_order = (order[:, None] * (heads // kv_heads) + torch.arange(heads // kv_heads).flip(0)).flatten()

    def permuted(tensors):
        for index in range(2):
            prefix = f"{layout.disk_stem}{family.blocks}.{index}."
            for end in ("weight", "bias"):
                key = f"{prefix}{qkv}.{end}"
                if key not in tensors:
                    continue
                w = tensors[key]
                flip = family.conv1d and end == "weight"
                rows = w[:, None] if end == "bias" else w.T if flip else w
                parts = split_heads(family, qkv, rows, heads, kv_heads)
                parts = {p: x[q_order if p == "q" else order] for p, x in parts.items()}
                joined = join_heads(family, qkv, parts)
                tensors[key] = joined[:, 0] if end == "bias" else joined.T if flip else joined
            w = tensors[f"{prefix}{out}.weight"]
            columns = w.T if family.conv1d else w
            by_head = columns.reshape(columns.shape[0], heads, -1)[:, q_order].flatten(1)
            tensors[f"{prefix}{out}.weight"] = by_head.T if family.conv1d else by_head
        return tensors

    changed = edit(make(name, tmp_path / "permuted"), permuted)
    assert not torch.equal(
        read(changed)[layout.linears[0].place.tensor], read(shelf(name))[layout.linears[0].place.tensor]
    )
    assert_close(replay(skeleton_of(changed), [ids]), replay(skeleton_of(shelf(name)), [ids]))


# ---- what it refuses, and what it leaves behind


def test_g9_a_token_outside_the_vocabulary_is_refused(shelf):
    with pytest.raises(SutureError, match=f"token id {VOCABULARY} is outside the model's vocabulary of {VOCABULARY}"):
        skeleton_of(shelf("L1")).embed(torch.tensor([[0, VOCABULARY]]))


def test_b17_a_weight_with_nan_is_named_before_it_is_used(tmp_path):
    def damaged(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
        return tensors

    skeleton = skeleton_of(edit(make("L1", tmp_path / "m"), damaged))
    skeleton.load_block(0)
    with pytest.raises(SutureError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 NaN or infinite values"):
        skeleton.load_block(1)


@pytest.mark.parametrize("name", NAMES)
def test_capture_leaves_every_parameter_on_meta_and_the_blocks_in_place(shelf, name):
    skeleton = skeleton_of(shelf(name))
    blocks = [skeleton.block(i) for i in range(skeleton.n_blocks)]
    skeleton.embed(some_ids())
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    assert [skeleton.block(i) for i in range(skeleton.n_blocks)] == blocks
    skeleton.load_block(1)
    loaded = {name for name, parameter in skeleton.model.named_parameters() if not parameter.is_meta}
    assert loaded == set(skeleton.layout.block_tensors(1))
    skeleton.free_block(1)
    skeleton.load_head()
    skeleton.free_head()
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_embedding_again_after_the_head_was_loaded_leaves_the_head(shelf):
    skeleton = skeleton_of(shelf("GP"))  # its learned positions are part of both
    skeleton.load_head()
    hidden = skeleton.embed(some_ids())
    before = skeleton.logits(hidden, torch.arange(LENGTH))
    skeleton.embed(some_ids(seed=5))
    assert torch.equal(skeleton.logits(hidden, torch.arange(LENGTH)), before)


# ---- staged blocks


def staged(directory, paused, index=1, change=None, batches=3):
    """One staged block over a stream: what was observed, and the outputs."""
    skeleton = skeleton_of(directory)
    stream = Stream.start(skeleton, some_ids(batch=2 * batches).split(2))
    skeleton.load_block(index)
    stages = skeleton.layout.blocks[index]
    seen = [[] for _ in stages]
    calls = []
    run = skeleton.run_block

    def counted(index, hidden, positions=None):
        calls.append(index)
        return run(index, hidden)

    skeleton.run_block = counted

    def observe(stage, inputs):
        seen[stage].append([x.clone() for x in inputs] if isinstance(inputs, list) else inputs.clone())

    staged_block(skeleton, index, stream, stages, observe, lambda k: change and change(skeleton, k), paused)
    return skeleton, stream, seen, calls


def halve_stage(skeleton, stage):
    for linear in skeleton.layout.blocks[1][stage]:
        skeleton.model.get_submodule(linear.module).weight.data.mul_(0.5)


@pytest.mark.parametrize("name", STAGED)
def test_a_paused_block_equals_one_run_again_bit_for_bit(shelf, name):
    _, paused, seen_paused, _ = staged(shelf(name), True, change=halve_stage)
    _, again, seen_again, _ = staged(shelf(name), False, change=halve_stage)
    assert torch.equal(paused.buffer, again.buffer)
    assert len(seen_paused) == len(seen_again)
    for one, other in zip(seen_paused, seen_again, strict=True):
        for x, y in zip(one, other, strict=True):
            pairs = zip(x, y, strict=True) if isinstance(x, list) else [(x, y)]
            assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", STAGED)
def test_a_paused_block_runs_each_batch_once(shelf, name):
    skeleton, _, seen, calls = staged(shelf(name), True)
    assert calls == [1, 1, 1]
    assert all(len(batches) == 3 for batches in seen)
    _, _, _, repeated = staged(shelf(name), False)
    assert len(repeated) == 3 * (len(skeleton.layout.blocks[1]) + 1)


@pytest.mark.parametrize("name", STAGED)
def test_a_staged_block_without_changes_is_the_block(shelf, name):
    skeleton, stream, _, _ = staged(shelf(name), True)
    plain = Stream.start(skeleton, stream.ids)
    run_block(skeleton, 1, plain)
    torch.testing.assert_close(plain.buffer, stream.buffer, rtol=1e-5, atol=1e-5)  # another library's sums


@pytest.mark.parametrize("paused", [True, False])
def test_c12_weights_changed_at_one_stage_are_seen_by_the_next(shelf, paused):
    def silence(skeleton, stage):  # after q, k, v and after gate, up: what follows must see zeros
        if stage in (0, 2):
            halve = skeleton.layout.blocks[1][stage][-1]  # v_proj, up_proj
            skeleton.model.get_submodule(halve.module).weight.data.zero_()

    _, _, seen, _ = staged(shelf("L1"), paused, change=silence)
    assert all(x.abs().max() > 0 for x in seen[0] + seen[2])
    assert all(x.abs().max() == 0 for x in seen[1] + seen[3])


@pytest.mark.parametrize("name", STAGED)
def test_c12_every_stage_is_shown_the_inputs_of_its_linear_layers(shelf, name):
    """Against the whole model with hooks of its own."""
    directory = shelf(name)
    skeleton, stream, seen, _ = staged(directory, True, index=0)
    model = skeleton_of(directory)
    model.load_block(0)
    inputs = {}
    for linear in model.layout.blocks[0]:
        module = model.model.get_submodule(linear[0].module)
        module.register_forward_pre_hook(lambda m, x, key=linear[0].module: inputs.setdefault(key, x[0].clone()))
    model.run_block(0, model.embed(stream.ids[0]))
    for stage, group in zip(seen, skeleton.layout.blocks[0], strict=True):
        first = stage[0][0] if isinstance(stage[0], list) else stage[0]
        assert torch.equal(first, inputs[group[0].module])
        assert first.shape[-1] == group[0].in_features


def test_b4_experts_are_shown_only_the_tokens_routed_to_them(shelf):
    _, stream, seen, _ = staged(shelf("QM"), True)
    for stage in seen[-2:]:
        for batch, inputs in zip(stream.ids, stage, strict=True):
            assert len(inputs) == 8
            assert sum(len(x) for x in inputs) == 2 * batch.numel()  # top 2 of 8
    assert [x.shape[-1] for x in (seen[-2][0][0], seen[-1][0][0])] == [64, 48]


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("where", ["observe", "change"])
def test_hooks_are_removed_also_when_the_caller_raises(shelf, paused, where):
    skeleton = skeleton_of(shelf("L1"))
    stream = Stream.start(skeleton, some_ids(batch=4).split(2))
    skeleton.load_block(0)
    count = 0

    def third(*_):
        nonlocal count
        count += 1
        if count == 3:
            raise ValueError("stop")

    nothing = lambda *_: None  # noqa: E731
    observe, change = (third, nothing) if where == "observe" else (nothing, third)
    with pytest.raises(ValueError, match="stop"):
        staged_block(skeleton, 0, stream, skeleton.layout.blocks[0], observe, change, paused)
    assert not any(module._forward_pre_hooks for module in skeleton.model.modules())
    plain = Stream.start(skeleton, stream.ids)
    run_block(skeleton, 0, stream)  # the block still works
    run_block(skeleton, 0, plain)
    assert torch.equal(stream.buffer, plain.buffer)


@pytest.mark.parametrize(
    "paused",
    [
        True,
        False,
    ],
)
def test_stages_out_of_forward_order_are_refused(shelf, paused):
    skeleton = skeleton_of(shelf("L1"))
    stream = Stream.start(skeleton, [some_ids()])
    skeleton.load_block(0)
    stages = [skeleton.layout.blocks[0][1], skeleton.layout.blocks[0][0]]
    with pytest.raises(SutureError, match="block 0: the forward came to"):
        staged_block(skeleton, 0, stream, stages, lambda *_: None, lambda *_: None, paused)
    assert not any(module._forward_pre_hooks for module in skeleton.model.modules())


@pytest.mark.parametrize("paused", [True, False])
def test_a_staged_block_without_stages_is_the_block(shelf, paused):
    """Every layer of a block may be under ignore."""
    skeleton = skeleton_of(shelf("L1"))
    stream, plain = (Stream.start(skeleton, [some_ids()]) for _ in range(2))
    skeleton.load_block(0)
    staged_block(skeleton, 0, stream, [], lambda *_: None, lambda *_: None, paused)
    run_block(skeleton, 0, plain)
    assert torch.equal(stream.buffer, plain.buffer)


# ---- streams


def test_j1_a_stream_saved_is_the_stream_restored(shelf, tmp_path):
    skeleton = skeleton_of(shelf("L1"))
    stream = Stream.start(skeleton, some_ids(batch=4).split(3))
    stream.save(tmp_path / "hidden.bin")
    other = Stream.empty(skeleton, stream.ids)
    other.buffer.zero_()
    other.restore(tmp_path / "hidden.bin")
    assert torch.equal(other.buffer, stream.buffer)
    assert all(torch.equal(a, b) for a, b in zip(other.hidden, stream.hidden, strict=True))
    assert stream.tokens == 4 * LENGTH


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_j1_saved_states_of_another_size_are_refused(shelf, tmp_path, damage):
    skeleton = skeleton_of(shelf("L1"))
    stream = Stream.start(skeleton, [some_ids()])
    path = tmp_path / "hidden.bin"
    stream.save(path)
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-4] if damage == "short" else content + b"1234")
    with pytest.raises(SutureError, match=rf"hidden\.bin: the saved hidden states are not {len(content)} bytes"):
        stream.restore(path)


def test_j3_states_past_the_budget_live_in_a_file_with_the_same_values(shelf, tmp_path):
    skeleton = skeleton_of(shelf("G3"))
    batches = some_ids(batch=4).split(2)
    spill = tmp_path / "spill.bin"
    in_memory, in_file = Stream.start(skeleton, batches), Stream.start(skeleton, batches, budget=100, spill=spill)
    assert spill.stat().st_size == in_file.buffer.numel() * 4
    for index in range(skeleton.n_blocks):
        skeleton.load_block(index)
        for stream in (in_memory, in_file):
            staged_block(skeleton, index, stream, skeleton.layout.blocks[index], lambda *_: None, lambda *_: None, True)
        skeleton.free_block(index)
    assert torch.equal(in_memory.buffer, in_file.buffer)


def test_j3_states_within_the_budget_touch_no_file(shelf, tmp_path):
    skeleton = skeleton_of(shelf("L1"))
    Stream.start(skeleton, [some_ids()], budget=1 << 20, spill=tmp_path / "spill.bin")
    assert not (tmp_path / "spill.bin").exists()


# ---- second moments


def tokens(batch, length, width, seed=0, dtype=torch.float32):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def moment(*parts, dtype=torch.float32):
    found = SecondMoment.zeros(parts[0].shape[-1], dtype)
    for part in parts:
        found.add(part)
    return found


@pytest.mark.parametrize("width", [1, 7, 256, 300, 513])  # panels of 256 columns
def test_the_second_moment_is_the_mean_outer_product(width):
    x = tokens(3, 20, width)
    found = moment(x, dtype=torch.float64)
    flat = x.double().flatten(0, 1)
    assert found.tokens == 60
    torch.testing.assert_close(found.hessian(), flat.T @ flat / 60, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.hessian(), found.hessian().T)


@pytest.mark.parametrize("split", [1, 2, 3, 6])
def test_the_second_moment_does_not_depend_on_batches(split):
    x = tokens(6, 17, 33)
    whole, parts = moment(x), moment(*x.split(split))
    assert torch.equal(whole.hessian(), parts.hessian())
    assert whole.tokens == parts.tokens == 6 * 17


@pytest.mark.parametrize("chunk", [1, 7, 24, 88, 100])
def test_sums_over_chunks_do_not_depend_on_how_tokens_came(chunk):
    x, y = tokens(8, 11, 40), tokens(8, 11, 40) + 1
    flat, other = x.flatten(0, 1).double(), y.flatten(0, 1).double()
    found = []
    for sizes in ((88,), (1,) * 88, (13, 0, 50, 25)):
        second, deviation = SecondMoment.zeros(40, chunk=chunk), Deviation.zeros(40)
        deviation.waiting.chunk = chunk
        for one, two in zip(x.flatten(0, 1).split(sizes), y.flatten(0, 1).split(sizes), strict=True):
            second.add(one)
            deviation.add(one, two)
        found.append((second.hessian(), deviation.mean()))
        assert torch.equal(second.hessian(), found[-1][0]) and torch.equal(deviation.mean(), found[-1][1])
    for hessian, mean in found:
        assert torch.equal(hessian, found[0][0]) and torch.equal(mean, found[0][1])
        torch.testing.assert_close(hessian.double(), flat.T @ flat / 88, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mean.double(), (other - flat).T @ flat / 88, rtol=1e-5, atol=1e-5)


def test_the_second_moment_takes_tokens_in_any_shape():
    x = tokens(2, 12, 5, dtype=torch.float64)
    expected = moment(x, dtype=torch.float64).hessian()
    for shape in ((24, 5), (2, 3, 4, 5), (1, 24, 5)):
        found = moment(x.reshape(shape), dtype=torch.float64)
        assert found.tokens == 24
        torch.testing.assert_close(found.hessian(), expected, rtol=1e-12, atol=1e-12)


def test_c4_no_token_leaves_a_second_moment_of_zeros():
    found = moment(torch.empty(0, 6))
    assert found.tokens == 0
    assert torch.equal(found.hessian(), torch.zeros(6, 6))
