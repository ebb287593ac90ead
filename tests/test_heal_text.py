"""What healing trains on: pieces that share a sequence and do not see each other, and the assistant's tokens alone."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import MODELS, make, run
from transformers import AutoModelForCausalLM

import suture
from suture.calibrate.answers import answer_masks
from suture.calibrate.documents import DataSpec, read_documents
from suture.calibrate.replay import Stream, run_block
from suture.calibrate.skeleton import open_skeleton
from suture.calibrate.tokens import encode_documents, load_tokenizer, pack_calibration
from suture.checkpoint.errors import SutureError
from suture.checkpoint.reader import open_checkpoint
from suture.lora.settings import HealSettings
from suture.pipeline.judge import split, windows_of
from suture.pipeline.plan import make_plan
from suture.pipeline.recipe import make_recipe

TINY = Path(suture.__file__).parent / "builtin" / "tiny"
TURNS = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}> {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} </s>\n"
    "{% endgeneration %}{% else %}{{ m['content'] }} </s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
FORGETS = TURNS.replace("{{ m['content'] }}", "{% if loop.last %}(so) {% endif %}{{ m['content'] }}")


# ---- isolated pieces


@pytest.mark.parametrize("name", ["L1", "MI", "G2", "G3", "P3", "GP", "NX", "PH", "FA-new", "MX", "DS"])
def test_isolated_pieces_give_what_each_gives_by_itself(name, tmp_path):
    """Through every family's own masks and positions, sliding windows, learned positions and latent attention too."""
    make(name, tmp_path / name, "float32")
    skeleton = open_skeleton(open_checkpoint(str(tmp_path / name)))
    ids = torch.randint(0, MODELS[name][1].get("vocab_size", 320), (2, 24), generator=torch.Generator().manual_seed(0))
    sizes = [[9, 12, 3], [1, 23]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in sizes])

    def logits(ids, positions=None):
        stream = Stream.start(skeleton, [ids], positions=[positions])
        for index in range(skeleton.n_blocks):
            skeleton.load_block(index)
            run_block(skeleton, index, stream)
        skeleton.load_head()
        return skeleton.logits(stream.hidden[0], torch.arange(ids.shape[1]))

    together = logits(ids, positions)
    apart = [torch.cat([logits(part[None])[0] for part in row.split(n)]) for row, n in zip(ids, sizes, strict=True)]
    torch.testing.assert_close(together, torch.stack(apart), rtol=1e-4, atol=1e-4)
    assert float((logits(ids) - together).abs().max()) > 0.01  # joined, the second piece sees the first


def test_a_family_whose_positions_depend_on_the_longest_piece_is_refused(tmp_path):
    make("P3-longrope", tmp_path / "m")
    skeleton = open_skeleton(open_checkpoint(str(tmp_path / "m")))
    with pytest.raises(SutureError, match="longrope"):
        skeleton.embed(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[0, 1, 0, 1]]))


@pytest.mark.parametrize("bos", [0, None])
def test_isolated_pieces_are_whole_and_each_begins_with_bos(bos):
    sizes = (5, 30, 9, 14, 3, 21, 8, 40)
    documents = [[100 * (d + 1) + i for i in range(n)] for d, n in enumerate(sizes)]
    answers = [[i % 3 == 0 for i in range(n)] for n in sizes]
    blocks = pack_calibration(documents, samples=9, length=16, bos_id=bos, isolated=True, answers=answers)
    assert blocks.segments is not None and blocks.answers is not None and blocks.n_joined == 0
    seen = []
    for ids, segments, written, positions in zip(
        blocks.ids, blocks.segments, blocks.answers, blocks.positions, strict=True
    ):
        for piece in range(segments[-1] + 1):
            part, marks = ids[segments == piece], written[segments == piece]
            assert positions[segments == piece].tolist() == list(range(len(part)))
            if bos is not None:
                assert part[0] == bos and not marks[0]
                part, marks = part[1:], marks[1:]
            assert (np.diff(part) == 1).all() and len({x // 100 for x in part}) <= 1  # tokens of one document, in order
            assert marks.tolist() == [x % 100 % 3 == 0 for x in part]
            seen += part.tolist()
    assert len(set(seen)) == len(seen) == blocks.n_tokens_kept
    joined = pack_calibration(documents, samples=9, length=16, bos_id=bos)
    assert joined.segments is None and joined.n_joined > 0 and joined.sha256 != blocks.sha256
    with pytest.raises(SutureError, match="sequential"):
        pack_calibration(documents, samples=9, length=16, bos_id=bos, isolated=True, order="sequential")


# ---- the assistant's tokens


def chats(n):
    words = ["river", "lamp", "seven", "wooden", "quiet", "engine", "paper", "harbour", "yellow", "often"]

    def say(i, k):
        return " ".join(words[(i * k + j * (k + 1)) % 10] for j in range(2 + (i * k) % 5))

    return [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"{i}: {say(i, 3)}?"},
            {"role": "assistant", "content": say(i, 7)},
            {"role": "user", "content": say(i, 2)},
            {"role": "assistant", "content": f"{say(i, 5)} {i}"},
        ][: 3 if i % 4 else 5]
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chats")
    shutil.copytree(TINY, directory / "tiny")
    (directory / "tiny/chat_template.jinja").write_text(TURNS, encoding="utf-8")
    rows = [{"messages": chat} for chat in chats(90)]
    (directory / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return directory


def test_answers_are_told_from_the_rest_by_marks_and_by_prefixes_alike(home):
    tokenizer = load_tokenizer(home / "tiny")
    documents = read_documents(DataSpec(str(home / "chats.jsonl")))
    by_prefix = answer_masks(documents, tokenizer)
    for chat, ids, mask in zip(documents.chats, encode_documents(documents, tokenizer, 4096), by_prefix, strict=True):
        written = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]).split("</s>")
        assert [x.strip() for x in written[:-1]] == [m["content"] for m in chat if m["role"] == "assistant"]
    tokenizer.chat_template = MARKED
    assert answer_masks(documents, tokenizer) == by_prefix
    tokenizer.chat_template = FORGETS
    with pytest.raises(SutureError, match=r"document 0: .* up to message 3 otherwise than in the whole.*generation"):
        answer_masks(documents, tokenizer)
    with pytest.raises(SutureError, match="holds texts, of which nothing is an answer"):
        answer_masks(read_documents(DataSpec("builtin:holmes")), tokenizer)


def test_healing_chats_counts_the_answers_of_conversations_that_see_only_themselves(home):
    """The curve's first point and the verdict's start, against stock transformers given one conversation at a time."""
    heal = {"method": "lora", "tokens": 48 * 4 * 6, "batch": 4, "top_k": 4096, "loss_on": "answers", "checkpoint": 6}
    text = {"data": str(home / "chats.jsonl"), "samples": 40, "length": 48, "packing": "isolated"}
    recipe = {"model": str(home / "tiny"), "calibration": text}
    pooled = {"gqa": {"kv_heads": 2, "method": "mean"}}
    run(recipe | {"steps": [pooled], "output": str(home / "pooled")})
    steps = [pooled, {"heal": heal | {"rate": 0.005, "next_token": 0.1}}]
    receipt = run(recipe | {"steps": steps, "output": str(home / "healed")}).manifest["receipts"][1]

    tokenizer = load_tokenizer(home / "tiny")
    documents = read_documents(DataSpec(text["data"]))
    blocks = pack_calibration(
        encode_documents(documents, tokenizer, 4096),
        samples=40,
        length=48,
        bos_id=tokenizer.bos_token_id,
        isolated=True,
        answers=answer_masks(documents, tokenizer),
    )
    parts = split(blocks, HealSettings.model_validate(heal), "heal")
    original, student = (
        AutoModelForCausalLM.from_pretrained(home / name, dtype=torch.float32) for name in ("tiny", "pooled")
    )
    found, rows = [], range(len(blocks.ids) - parts.n_held, len(blocks.ids))
    for row in rows:
        for piece in range(blocks.segments[row, -1] + 1):
            inside = blocks.segments[row] == piece
            ids = torch.from_numpy(blocks.ids[row, inside])[None]
            with torch.no_grad():
                log_p, log_q = (model(ids).logits[0].double().log_softmax(-1) for model in (original, student))
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            found += kl[:-1][torch.from_numpy(blocks.answers[row, inside][1:])].tolist()
    assert receipt["text"]["held_out"]["tokens_of_answers"] == len(found)
    assert receipt["curve"][0]["held_out_kl"] == pytest.approx(np.mean(found), rel=1e-3)
    assert receipt["held_out"]["kl_to_original"]["before"] == pytest.approx(np.mean(found), rel=1e-3)
    assert receipt["curve"][-1]["held_out_kl"] < receipt["curve"][0]["held_out_kl"]
    windows, counts = windows_of(parts)
    assert int(counts.sum()) == len(found) < windows.n_scored


def test_what_joins_documents_is_said_and_what_cannot_be_answers_is_refused(home):
    def planned(steps, **more):
        text = {"data": str(home / "chats.jsonl"), "samples": 30, "length": 48, **more}
        recipe = {"model": str(home / "tiny"), "output": str(home / "never"), "calibration": text, "steps": [steps]}
        return make_plan(make_recipe(recipe)).warnings

    lora = {"method": "lora", "tokens": 1000}
    assert any("packing: isolated keeps them apart" in x for x in planned({"heal": lora}))
    assert not any("see each other" in x for x in planned({"heal": lora}, packing="isolated"))
    with pytest.raises(SutureError, match="holds texts, of which nothing is an answer"):
        planned({"heal": lora | {"loss_on": "answers"}}, data="builtin:novels")
    with pytest.raises(SutureError, match="loss_on belongs to method: lora or full"):
        planned({"heal": {"loss_on": "answers"}})
    with pytest.raises(SutureError, match="isolated goes with order: shuffled"):
        planned({"heal": lora}, packing="isolated", order="sequential")
