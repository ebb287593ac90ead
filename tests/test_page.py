"""The page and the card: made from report.json alone, self-contained, accessible, and nothing of the input lost."""

import copy
import html.parser
import json
import re
import typing
from pathlib import Path

import jsonschema
import kit
import numpy as np
import pytest

import suture
from suture.report import score as scoring
from suture.report.card import card, front_matter, is_ours
from suture.report.charts import pareto_front
from suture.report.clusters import paired
from suture.report.document import verdict
from suture.report.figures import interval_text
from suture.report.multiplicity import adjusted
from suture.report.page import render
from suture.report.pairs import holm


class Checker(html.parser.HTMLParser):
    """Tags balance, ids are unique, every image and table is named; collects what a loader would fetch."""

    VOID: typing.ClassVar = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.fetched, self.problems, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if "id" in given:
            self.ids.append(given["id"])
        self.fetched += [given[key] for key in ("src", "srcset", "data") if key in given]
        if tag in ("link", "script", "iframe", "img", "object"):
            self.fetched.append(tag)
        if tag == "svg" and not given.get("aria-label"):
            self.problems.append("svg without a name")
        if tag == "a" and not given["href"].startswith("#"):
            self.fetched.append(given["href"])

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def checked(page):
    checker = Checker()
    checker.feed(page)
    assert not checker.open and not checker.problems and not checker.fetched
    assert len(set(checker.ids)) == len(checker.ids)
    assert "url(" not in page and "@import" not in page and "http" not in re.sub(r"xmlns=\S+", "", page)
    return " ".join(" ".join(checker.text).split())


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model with a card of its own, two outputs of it with reports, and a comparison of both."""
    home = tmp_path_factory.mktemp("page")
    model = kit.make("L1", home / "model")
    (model / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: [en]\nbase_model: some/base\n---\n# The base\n"
    )
    ids = kit.ids_file(home / "ids.jsonl", rows=9)
    more = kit.ids_file(home / "more.jsonl", rows=6, seed=5)
    report = {"data": str(ids), "window": 24, "sets": [{"name": "other text", "data": str(more)}]}
    outputs = [
        kit.run({"model": str(model), "output": str(home / name), "steps": [{"rtn": settings}], "report": report})
        for name, settings in (("w4", {"bits": 4, "group_size": 32}), ("w3", {"bits": 3, "group_size": 32}))
    ]
    compared = suture.compare_all(model, [run.output for run in outputs], str(ids), output=home / "compared", window=24)
    return home, outputs, compared


def test_the_page_is_one_self_contained_file(home):
    directory, outputs, _ = home
    page = (directory / "w4/report.html").read_text()
    text = checked(page)
    content = json.loads((directory / "w4/report.json").read_text())
    assert render([content]) == page == outputs[0].report.to_html()
    ratio = content["metrics"][0]
    assert f"Perplexity × {interval_text(ratio['value'], ratio['ci'])}" in text
    for scored in (content, *content["sets"]):
        assert scored["name"] in text and scored["protocol"]["tokens_sha256"] in text
        for row in scored["fidelity"]["metrics"]:
            percent = row["unit"] != "nats per token"
            assert interval_text(row["value"], row["ci"], percent=percent) in text
    for warning in content["warnings"]:
        assert warning in text
    assert "prefers-color-scheme: dark" in page and "@media print" in page and 'lang="en"' in page
    assert outputs[0]._repr_html_().startswith("<iframe srcdoc=")


def test_the_base_goes_through_the_text_once_for_all_candidates(home, monkeypatch):
    """And each candidate's figures are those that it has alone."""
    directory, outputs, compared = home
    passes, real = [], scoring._hidden_states

    def counted(skeleton, windows, *given):
        passes.append((str(skeleton.source.source), windows.n_windows))
        return real(skeleton, windows, *given)

    monkeypatch.setattr(scoring, "_hidden_states", counted)
    names = [run.output for run in outputs]
    again = suture.compare_all(directory / "model", names, str(directory / "ids.jsonl"), window=24)
    all_windows = max(n for _, n in passes)
    assert passes.count((str(directory / "model"), all_windows)) == 1
    assert all(passes.count((str(name), all_windows)) == 1 for name in names)
    assert again.contents == compared.contents
    alone = suture.compare(directory / "model", names[1], str(directory / "ids.jsonl"), window=24)
    (ratio, *rest), (beside, *others) = alone.content["metrics"], again.contents[1]["metrics"]
    assert rest == others and alone.content["sets"] == again.contents[1]["sets"]
    assert ratio | {"p_holm": beside["p_holm"]} == beside  # which allows for the other candidate


def test_p_values_allow_for_every_candidate_of_a_comparison(home):
    """Each file beside the page says so too; one candidate's own run allows for its own texts."""
    directory, outputs, compared = home
    ratios = [content["metrics"][0] for content in compared.contents]
    assert [row["p_holm"] for row in ratios] == holm([row["p_value"] for row in ratios])
    assert ratios[0]["p_holm"] != ratios[0]["p_value"]
    for number, content in enumerate(compared.contents):
        (kept,) = (directory / "compared").glob(f"{number + 1}-*/report.json")
        assert json.loads(kept.read_text()) == content
        assert content["multiplicity"] == {"method": "Holm", "candidates": 2, "texts": 2, "tasks": 0}
        assert "allow for 2 tests on texts of all 2 candidates" in checked(kept.with_name("report.html").read_text())
    own = outputs[0].report.content
    assert own["multiplicity"] == {"method": "Holm", "candidates": 1, "texts": 2, "tasks": 0}


@pytest.mark.parametrize("family", ["texts", "tasks"])
def test_adjusting_leaves_what_it_is_given_alone(home, family):
    """Tests that were not made count for nothing."""
    _, _, compared = home
    content = copy.deepcopy(compared.contents[0])
    pair = {"p": 0.01, "p_holm": None}
    content["tasks"] = [{"paired": dict(pair)}, {"paired": {"p": None, "p_holm": None}}]
    content["generation"] = [{"paired": {"p": 0.04, "p_holm": None}}]
    content["sets"] = [{"metrics": [{"name": "ppl_ratio", "p_value": None}]}]
    before = copy.deepcopy(content)
    made = adjusted([content, content])
    assert content == before
    if family == "tasks":
        assert [row["paired"]["p_holm"] for one in made for row in (*one["tasks"], *one["generation"])] == [
            *(0.04, None, 0.08),
            *(0.04, None, 0.08),
        ]
    assert made[0]["multiplicity"][family] == {"texts": 2, "tasks": 4}[family]


def test_a_comparison_follows_its_schema(home):
    directory, _, compared = home
    whole = json.loads((directory / "compared/comparison.json").read_text())
    kit.validator("comparison").validate(whole)
    assert whole["reports"] == compared.contents
    with pytest.raises(jsonschema.ValidationError):
        kit.validator("comparison").validate(whole | {"reports": []})


def test_a_comparison_shows_every_candidate(home):
    directory, _, compared = home
    text = checked((directory / "compared/report.html").read_text())
    assert (directory / "compared/report.html").read_text() == compared.to_html()
    for report in compared.reports.values():
        ratio = report.content["metrics"][0]
        assert interval_text(ratio["value"], ratio["ci"]) in text
    assert {path.parent.name for path in (directory / "compared").glob("*/report.json")} == {"1-w4", "2-w3"}
    written = json.loads((directory / "compared/comparison.json").read_text())
    assert [content["candidate"] for content in written["reports"]] == [
        r.content["candidate"] for r in compared.reports.values()
    ]


def test_names_that_look_like_markup_stay_text(home):
    content = json.loads((home[0] / "w4/report.json").read_text())
    content["name"] = content["protocol"]["data"] = "<script>alert(1)</script>"
    content["layers"]["output_errors"] = {'model.layers.0.<b onload="x">_proj': 0.1}
    page = render([content])
    assert "<script" not in page and "<b " not in page and "&lt;script&gt;" in page


def test_lost_energy_is_shown_by_kind_and_block(home):
    content = json.loads((home[0] / "w4/report.json").read_text())
    content["layers"]["retained_energy"] = {"key_energy": {"model.layers.0.self_attn": 0.9, "model.layers.1": 0.75}}
    page = render([content])
    assert "block 0, key: 0.1<" in page and "block 1, key: 0.25<" in page


def test_infinite_and_missing_figures_are_shown_as_such(home):
    content = json.loads((home[0] / "w4/report.json").read_text())
    content["metrics"][0] |= {"value": "Infinity", "ci": None}
    content["fidelity"] = content["noise_floor"] = None
    assert "∞" in checked(render([content]))


def test_the_card_has_the_hubs_metadata_and_keeps_the_input_s(home):
    directory, _, _ = home
    text = (directory / "w4/README.md").read_text()
    data = front_matter(text)
    assert (data["base_model"], data["base_model_relation"], data["license"]) == (
        "some/base",
        "quantized",
        "apache-2.0",
    )
    assert {"suture", "rtn", "compressed-tensors"} <= set(data["tags"]) and data["library_name"] == "transformers"
    (results,) = data["model-index"]
    content = json.loads((directory / "w4/report.json").read_text())
    metrics = [metric for result in results["results"] for metric in result["metrics"]]
    values = {metric["name"].split(" (")[0]: metric for metric in metrics}
    kl = content["fidelity"]["metrics"][0]
    found = values["KL divergence from the base"]
    assert (
        any(m["value"] == pytest.approx(kl["value"], abs=1e-5) for m in metrics) and len(found["args"]["interval"]) == 2
    )
    assert (directory / "w4/README.base.md").read_text() == (directory / "model/README.md").read_text()
    assert "AutoModelForCausalLM.from_pretrained" in text and "README.base.md" in text and is_ours(text)
    from huggingface_hub import ModelCard

    loaded = ModelCard.load(directory / "w4/README.md", ignore_metadata_errors=False)
    assert loaded.data.base_model == "some/base" and loaded.data.eval_results


def test_the_card_of_a_card_that_suture_wrote_keeps_the_first_one(home, tmp_path):
    directory, _, _ = home
    untied = kit.run(
        {
            "model": str(directory / "model"),
            "output": str(tmp_path / "a"),
            "steps": [{"rtn": {"bits": 8, "group_size": 32}}],
        }
    )
    assert (untied.output / "README.base.md").read_bytes() == (directory / "model/README.md").read_bytes()
    data = front_matter((untied.output / "README.md").read_text())
    assert "model-index" not in data and data["base_model_relation"] == "quantized"


def test_a_base_in_a_directory_is_named_by_it():
    facts = {"blocks": 1, "of_blocks": 1, "loaded_as": "LlamaForCausalLM", "max_difference": 0.0}
    text = card(
        source="/models/my model",
        on_hub=False,
        config={},
        steps=[("rtn", {})],
        relation="quantized",
        content=None,
        earlier=None,
        verification=facts,
        kept=None,
    )
    assert front_matter(text)["base_model"] == "my-model" and "to be replaced by its Hub id" in text


WORDS = {
    "equivalent": (0.005, 0.0001, 0.02),
    "worse": (0.10, 0.01, 0.02),
    "better": (-0.10, 0.01, 0.02),
    "inconclusive": (0.02, 0.05, 0.02),
}


@pytest.mark.parametrize("word", WORDS)
def test_the_verdict_comes_from_the_interval_and_the_margin(word):
    effect, spread, margin = WORDS[word]
    rng = np.random.default_rng(0)
    base = [rng.normal(3, 1, 50) for _ in range(30)]
    new = [x + effect + rng.normal(0, spread) for x in base]
    found = verdict(paired(base, new), margin)
    assert found["word"] == word
    assert ("tokens_for_margin" in found) == (word == "inconclusive")
    few = verdict(paired(base[:3], new[:3]), margin)
    assert (few["word"], few["why"]) == ("inconclusive", "there is no interval")


def test_the_front_holds_what_nothing_beats():
    points = [(1, 5), (2, 3), (3, 4), (4, 1), (4, 2), (1, 5)]
    assert pareto_front(points) == [0, 1, 3, 5]


@pytest.mark.parametrize(
    ("value", "ci", "text"),
    [
        (1.01423, [1.0117, 1.0167], "1.0142 [1.0117, 1.0167]"),
        (0.5, None, "0.5, no interval"),
        (1.0, [1.0, 1.0], "1 [1, 1]"),
        (8.37e-6, [6.06e-6, 1.07e-5], "8.37e-06 [6.06e-06, 1.07e-05]"),
        ("Infinity", None, "∞"),
        (134.56, [79.8, 226.9], "135 [80, 227]"),
        (1.0, [1 - 3e-12, 1 + 4e-12], "1 ± 3.5e-12"),
    ],
)
def test_decimals_follow_the_interval(value, ci, text):
    assert interval_text(value, ci) == text


@pytest.fixture(scope="module")
def hurt(tmp_path_factory):
    """Runs whose steps record something of layers: spectra and experts; ranges; a latent."""
    home = tmp_path_factory.mktemp("hurt")
    ids, other = kit.ids_file(home / "ids.jsonl", rows=9), kit.ids_file(home / "other.jsonl", rows=6, seed=5)

    def run(name, kind, *steps):
        content = {
            "model": str(kit.make(kind, home / f"{name}-base")),
            "output": str(home / name),
            "steps": list(steps),
        }
        content["report"] = {"data": str(ids), "window": 24, "fidelity": False}
        return kit.run(content | {"calibration": {"data": str(other), "samples": 8, "length": kit.LENGTH}})

    gptq = {"gptq": {"bits": 4, "group_size": 16}}
    return {
        "experts": run("experts", "MX", {"spectra": {}}, gptq),
        "ranges": run("ranges", "L1", {"awq": {"bits": 4, "group_size": 32, "grid": 3}}),
        "latent": run("latent", "L0", {"mla": {"rank": 32, "rope_dim": 8}}),
    }


def test_where_it_hurts_is_what_the_steps_recorded(hurt):
    """Errors, spectra, coverage by expert, ranges and the latent: from the manifest into report.json and onto the page."""
    schema = json.loads((Path(suture.__file__).parent / "report/schema.json").read_text())
    pages = {}
    for name, run in hurt.items():
        content = json.loads((run.output / "report.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(content)
        pages[name] = content["layers"], checked((run.output / "report.html").read_text())
        modules = json.loads((run.output / "suture.json").read_text())["modules"]
        for layer, found in content["layers"]["coverage"].items():
            assert found["tokens"] == modules[layer]["tokens"] and found["inputs"] == modules[layer]["shape"][1]
    layers, page = pages["experts"]
    manifest = json.loads((hurt["experts"].output / "suture.json").read_text())
    (spectra,) = [receipt["spectra"] for receipt in manifest["receipts"] if "spectra" in receipt]
    assert set(layers["spectra"]) == set(spectra)
    name = "model.layers.1.self_attn.k_proj"
    found, recorded = layers["spectra"][name], spectra[name]["outputs"]
    assert (found["of"], found["rank_for"], found["full_rank"]) == ("outputs", recorded["rank_for"], 24)
    assert len(found["singular_values"]) == 17 and found["singular_values"][0] == recorded["largest"]
    assert found["singular_values"] == sorted(found["singular_values"], reverse=True)
    tokens = {n: e["tokens"] for n, e in layers["coverage"].items() if "experts" in n}
    assert len(set(tokens.values())) > 1 and "Calibration coverage" in page
    a = tokens["model.layers.0.block_sparse_moe.experts.1.w1"]
    assert f"expert 1, block 0: {a}" in page and "Relative output error" in page and "Singular values" in page
    layers, page = pages["ranges"]
    widest = max(layers["input_ranges"], key=lambda n: layers["input_ranges"][n]["peak_ratio"])
    assert layers["input_ranges"] and "Activation ranges" in page and widest in page
    layers, page = pages["latent"]
    assert layers["spectra"]["model.layers.0.self_attn.latent"]["kept_rank"] == 32
    assert "latent, 32 kept" in page and set(layers["retained_energy"]) >= {"key_energy", "value_energy"}


def test_a_latent_s_spectrum_holds_the_energy_that_it_keeps():
    """Without text and with equal weights the energies are those of the joint matrix: their top r are what is kept."""
    import torch

    from suture.surgery.latent import joint_latent, scaled_metric

    y = torch.randn(2, 3, 4, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for width, rank in ((20, 7), (6, 4)):
        part = y[..., :width]
        found = joint_latent(part, torch.eye(width, dtype=torch.float64), scaled_metric(part, 1.0), rank)
        expected = torch.linalg.svdvals(part.flatten(0, 2)).square()
        torch.testing.assert_close(found.energies[: len(expected)], expected)
        parts = [part[side].square().sum() * kept for side, kept in ((0, found.key_energy), (1, found.value_energy))]
        torch.testing.assert_close(sum(parts), expected[:rank].sum())
