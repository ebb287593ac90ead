"""What serving costs: rooflines by hand, and timing that keeps its level on a machine that drifts."""

import math

import numpy as np
import pytest

from suture.report.cost import GPUS, batch_at_the_ridge, cost_section, decode_roofline
from suture.report.latency import interleave, measure, median_ratio, summary, warm_up


def test_decoding_one_sequence_is_bound_by_memory():
    """8 GB of weights at 2.039 TB/s: 255 tokens a second, whatever the arithmetic."""
    gpu = GPUS["A100 80GB SXM"]
    one = decode_roofline(gpu, 8e9, 16e9)
    assert one.bound == "memory" and one.tokens_per_second == pytest.approx(2.039e12 / 8e9)
    assert one.intensity == pytest.approx(2.0)
    ridge = batch_at_the_ridge(gpu, 8e9, 16e9)
    below, above = (decode_roofline(gpu, 8e9, 16e9, batch=math.ceil(ridge) + d) for d in (-2, 2))
    assert (below.bound, above.bound) == ("memory", "arithmetic")
    assert above.tokens_per_second == pytest.approx(gpu.flops / 16e9)
    long = decode_roofline(gpu, 8e9, 16e9, cache_bytes=8e9)
    assert long.tokens_per_second == pytest.approx(one.tokens_per_second / 2)


def test_a_quarter_of_the_bytes_decodes_four_times_as_fast_at_best():
    facts = {
        name: {"bytes_by_dtype": {"BF16": size}, "bytes_read": size, "flops_per_token": 16e9, "cache": None}
        for name, size in (("base", 16e9), ("candidate", 4e9))
    }
    section = cost_section(facts, GPUS)
    assert [row["gpu"] for row in section["roofline"]] == list(GPUS)
    for row in section["roofline"]:
        speed = row["tokens_per_second"]
        assert speed["candidate"] == pytest.approx(4 * speed["base"], rel=1e-3)


class Machine:
    """A clock on which work takes `cost` of its units.

    drift: its speed swings by half over a run and falls, with rare spikes. walk: its speed is a random walk with jumps to
    another level, as of a processor that heats up. heavy: every run is late by a share from a Pareto law whose variance is
    infinite.
    """

    def __init__(self, seed, kind="drift"):
        self.rng, self.n, self.kind, self.level = np.random.default_rng(seed), 0, kind, 0.0

    def work(self, cost):
        def run():
            self.n += 1
            drift = 1 + 0.5 * math.sin(self.n / 60) + 0.002 * self.n
            spike = 3.0 if self.rng.random() < 0.02 else 1.0
            late = math.exp(self.rng.normal(0, 0.02))
            if self.kind == "heavy":
                return cost * late * (1 + 0.05 * self.rng.pareto(1.5))
            if self.kind == "walk":
                jump = self.rng.random() < 0.02
                self.level += self.rng.normal(0, 0.3 if jump else 0.01)
                return cost * late * math.exp(self.level)
            return cost * drift * spike * late

        return run


def trial(seed, cost, kind):
    machine = Machine(seed, kind)
    a, b = machine.work(1.0), machine.work(cost)
    return median_ratio(*interleave(a, b, 20))


@pytest.mark.parametrize("kind", ["drift", "walk", "heavy"])
@pytest.mark.parametrize("cost", [1.0, 0.97])
def test_the_interval_covers_where_the_machine_is_not_still(cost, kind):
    """A/A: 1 is covered in at least 93 of 100 trials; a true 0.97 as often."""
    hits = sum(low <= cost <= high for _, low, high in (trial(seed, cost, kind) for seed in range(100)))
    assert hits >= 93


def test_timing_one_after_the_other_would_not():
    """The same machine, all A before all B: most intervals miss."""
    hits = 0
    for seed in range(40):
        machine = Machine(seed)
        a, b = machine.work(1.0), machine.work(1.0)
        first = np.array([a() for _ in range(40)]).reshape(20, 2)
        second = np.array([b() for _ in range(40)]).reshape(20, 2)
        _, low, high = median_ratio(first, second)
        hits += low <= 1 <= high
    assert hits < 20


def test_a_measurement_holds_every_sample_and_its_control():
    machine = Machine(0)
    found = measure(machine.work(1.0), machine.work(0.5), blocks=10)
    assert found.ratio == pytest.approx(0.5, rel=0.1) and found.low < 0.5 < found.high
    assert found.seconds_a.size == found.seconds_b.size == 20 and not found.too_noisy
    assert all(5 <= n <= 30 for n in found.warm_up)
    facts = summary(found.seconds_a)
    assert facts["runs"] == 20 and facts["mad"] < facts["median"] < facts["p95"]
    equal = measure(machine.work(1.0), machine.work(1.0001), blocks=10)
    assert equal.too_noisy


def test_two_models_are_timed_in_turn(tmp_path):
    """Prefill and decode of real models: the decode cache is cut back, so that every run does the same work."""
    import kit
    import torch

    from suture.pipeline.timing import decoding, time_models

    small, large = kit.make("L1", tmp_path / "small"), kit.make("L1", tmp_path / "large")
    found = time_models(small, large, torch.device("cpu"), prompt=16, new=3, blocks=6)
    assert [(m["name"], m["tokens"], m["blocks"]) for m in found["measurements"]] == [
        ("prefill", 16, 6),
        ("decode", 3, 6),
    ]
    peak = found["peak_memory"]
    assert 5e7 < peak["base"] < 3e9 and peak["candidate"] == pytest.approx(peak["base"], rel=0.2)
    for m in found["measurements"]:
        low, high = m["ratio"]["ci"]
        assert 0 < low <= m["ratio"]["value"] <= high and m["base"]["runs"] == len(m["samples"]["base"]) == 12
    model, ids = kit.stock(small), torch.arange(16)[None]
    expected = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0, 16:]
    seen = []
    handle = model.register_forward_hook(lambda m, a, out: seen.append(int(out.logits[0, -1].argmax())))
    run = decoding(model, ids, 3)
    run()
    run()
    handle.remove()
    assert seen == [*expected.tolist(), *expected.tolist()[1:]]


def test_warm_up_ends_when_times_settle():
    times = iter([5.0, 4.0, 3.0, 2.0, 1.5, *[1.0] * 50])
    assert warm_up(lambda: next(times)) == 13
    growing = iter(np.linspace(1, 30, 60))
    assert warm_up(lambda: next(growing)) == 30


def test_vector_of_pairs_of_times():
    a, b = np.array([10, 11, 10.5, 12, 10.2, 10.8]), np.array([9, 9.9, 9.66, 10.9, 9.2, 9.9])
    ratio, low, high = median_ratio(np.stack([a, a], 1), np.stack([b, b], 1))
    assert ratio == pytest.approx(0.9051414507) and low < ratio < high
