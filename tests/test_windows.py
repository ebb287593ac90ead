"""What is scored: every token once, behind enough context, BOS first and never a target, all counts accounted for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suture.checkpoint.errors import SutureError
from suture.report import windows as w
from suture.report.windows import gptq_windows, rolling_windows

BOS = 999


def documents_of(lengths):
    """Documents whose ids tell where they come from: document d, token i is 1000 (d + 1) + i."""
    return [list(range(1000 * (d + 1), 1000 * (d + 1) + n)) for d, n in enumerate(lengths)]


def targets_of(plan):
    return [int(i) for ids, start in zip(plan.ids, plan.score_from, strict=True) for i in ids[start:]]


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    window=st.integers(2, 20),
    share=st.floats(0, 1),
    bos=st.booleans(),
    max_windows=st.none() | st.integers(1, 12),
    max_tokens=st.none() | st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_every_token_is_scored_once_with_its_context_and_accounted_for(
    lengths, window, share, bos, max_windows, max_tokens
):
    documents, stride = documents_of(lengths), 1 + int(share * (window - 2))
    cut = [d[:max_tokens] for d in documents]
    if not any(len(d) > (not bos) for d in cut):
        with pytest.raises(SutureError, match="nothing to score"):
            rolling_windows(cut, window=window, stride=stride, bos_id=BOS if bos else None)
        return
    plan = rolling_windows(
        documents,
        window=window,
        stride=stride,
        bos_id=BOS if bos else None,
        max_windows=max_windows,
        max_tokens_per_document=max_tokens,
    )
    scored = targets_of(plan)
    expected = [i for d in cut for i in d[0 if bos else 1 :]]
    assert len(set(scored)) == len(scored) == plan.n_scored
    assert set(scored) <= set(expected)
    assert scored == [1000 * (int(d) + 1) + int(t) for d, t in zip(plan.document, plan.token, strict=True)]
    assert plan.n_tokens_in == sum(lengths) == plan.n_scored + sum(plan.n_unscored.values())
    if max_windows is None:
        assert scored == expected
    else:
        assert plan.n_windows <= max_windows
    seen = set()
    for ids, start in zip(plan.ids, plan.score_from, strict=True):
        content = ids[1:] if bos else ids
        assert ids.size <= window
        assert not bos or ids[0] == BOS
        assert BOS not in ids[start:]
        assert (np.diff(content) == 1).all()  # contiguous tokens of one document
        document = int(ids[-1]) // 1000
        assert start >= (1 if document not in seen else window - stride)
        seen.add(document)


def test_h2_every_window_starts_with_bos_which_is_never_scored():
    plan = rolling_windows(documents_of([30, 7]), window=8, bos_id=BOS)
    assert all(ids[0] == BOS and (ids[1:] != BOS).all() for ids in plan.ids)
    assert (plan.score_from >= 1).all()
    assert plan.n_scored == 37 and plan.n_unscored == {}
    assert plan.add_bos == "per_window"


@pytest.mark.parametrize(("bos", "scored", "unscored"), [(None, 99, {w.FIRST_OF_DOCUMENT: 1}), (BOS, 100, {})])
@pytest.mark.parametrize("stride", [5, 9, 1])
def test_h4_no_token_is_lost_at_window_borders(bos, scored, unscored, stride):
    plan = rolling_windows(documents_of([100]), window=10, stride=stride, bos_id=bos)
    assert plan.n_scored == scored
    assert plan.n_unscored == unscored


def test_h4_the_benchmark_protocol_loses_one_token_per_window_and_says_so():
    plan = gptq_windows(range(107), window=10)
    assert plan.n_scored == 90
    assert plan.n_unscored == {w.FIRST_OF_WINDOW: 10, w.TAIL: 7}
    assert plan.n_tokens_in == 107


def test_h10_protocol_records_window_stride_and_context():
    documents = documents_of([40, 25])
    one, two = rolling_windows(documents, window=16), rolling_windows(documents, window=16, stride=4)
    assert one.protocol()["stride"] == 8 and one.protocol()["min_context"] == 8
    assert two.protocol()["min_context"] == 12
    assert one.n_scored == two.n_scored
    assert one.tokens_sha256 != two.tokens_sha256
    assert one.protocol() == rolling_windows([np.array(d) for d in documents], window=16).protocol()
    assert one.tokens_sha256 != rolling_windows(documents, window=16, bos_id=BOS).tokens_sha256
    assert set(one.protocol()) >= {"id", "window", "stride", "add_bos", "first_scored", "n_scored", "tokens_sha256"}
    assert one.protocol()["cluster"] == "document"


def test_odd_windows_keep_at_least_half_of_the_window_as_context():
    plan = rolling_windows(documents_of([50]), window=7, bos_id=BOS)
    assert (plan.score_from[1:] >= 3.5).all()


def test_first_window_has_the_whole_beginning():
    plan = rolling_windows(documents_of([20]), window=8, stride=4, bos_id=BOS)
    assert plan.ids[0].tolist() == [BOS, *range(1000, 1007)]
    assert plan.score_from.tolist() == [1, 4, 4, 4, 7]
    assert plan.ids[1].tolist() == [BOS, *range(1004, 1011)]
    assert plan.ids[-1].tolist() == [BOS, *range(1013, 1020)]  # the last window is filled with context


@pytest.mark.parametrize(("n", "bos", "n_scored"), [(1, BOS, 1), (2, BOS, 2), (2, None, 1)])
def test_very_short_documents(n, bos, n_scored):
    plan = rolling_windows(documents_of([0, n, 0]), window=8, bos_id=bos)
    assert plan.n_scored == n_scored
    assert plan.clusters.tolist() == [1]


@pytest.mark.parametrize(("n", "bos"), [(0, BOS), (0, None), (1, None)])
def test_documents_with_nothing_to_score_are_an_error(n, bos):
    with pytest.raises(SutureError, match="nothing to score"):
        rolling_windows(documents_of([n]), window=8, bos_id=bos)


def test_a_single_token_document_without_bos_is_counted():
    plan = rolling_windows(documents_of([1, 5]), window=8)
    assert plan.n_scored == 4
    assert plan.n_unscored == {w.FIRST_OF_DOCUMENT: 2}


def test_max_windows_takes_from_the_documents_in_turn():
    plan = rolling_windows(documents_of([100, 3, 100]), window=8, stride=4, max_windows=6)
    assert plan.n_windows == 6
    assert [len(set(plan.token[plan.document == d])) for d in range(3)] == [7 + 4 + 4, 2, 7 + 4]
    assert plan.n_unscored[w.BEYOND_WINDOW_CAP] == 203 - plan.n_scored - 3
    few = rolling_windows(documents_of([100, 3, 100]), window=8, max_windows=1)
    assert few.clusters.tolist() == [0]
    assert few.n_unscored == {w.FIRST_OF_DOCUMENT: 1, w.BEYOND_WINDOW_CAP: 203 - 8}


def test_max_tokens_per_document_is_counted():
    plan = rolling_windows(documents_of([30, 4]), window=8, bos_id=BOS, max_tokens_per_document=10)
    assert plan.n_scored == 14
    assert plan.n_unscored == {w.BEYOND_DOCUMENT_CAP: 20}


def test_bytes_follow_the_scored_share():
    documents = documents_of([10, 20, 0])
    whole = rolling_windows(documents, window=8, bos_id=BOS, n_bytes=[40, 90, 0])
    assert whole.n_bytes.tolist() == [40, 90] and whole.bytes_exact
    cut = rolling_windows(documents, window=8, bos_id=BOS, n_bytes=[40, 90, 0], max_tokens_per_document=10)
    assert cut.n_bytes.tolist() == [40, 45] and not cut.bytes_exact
    assert not rolling_windows(documents, window=8, n_bytes=[40, 90, 0]).bytes_exact
    assert gptq_windows(range(20), window=10, n_bytes=40.0).n_bytes == 36
    with pytest.raises(SutureError, match="bytes of 1 documents given for 3"):
        rolling_windows(documents, window=8, n_bytes=[40])


def test_values_are_split_by_document_and_targets_located():
    plan = rolling_windows(documents_of([12, 0, 9]), window=6, bos_id=BOS)
    split = plan.by_document(targets_of(plan))
    assert [part.tolist() for part in split] == [list(range(1000, 1012)), list(range(3000, 3009))]
    for target in range(plan.n_scored):
        window, position, document = plan.locate(target)
        assert plan.ids[window][position] == targets_of(plan)[target]
        assert document == plan.document[target]
    with pytest.raises(ValueError, match="one per target"):
        plan.by_document([1.0])


def test_gptq_protocol_keeps_document_labels_per_target():
    labels = [0] * 7 + [5] * 9 + [2] * 6  # any order of labels, a window may straddle documents
    plan = gptq_windows(range(22), documents=labels, window=5)
    assert plan.protocol_id == "gptq-5" and plan.cluster == "document"
    assert plan.token.tolist() == [i for i in range(20) if i % 5]
    assert plan.document.tolist() == [labels[i] for i in plan.token]
    assert plan.clusters.tolist() == [0, 2, 5]
    assert sum(len(part) for part in plan.by_document(plan.token)) == 16
    assert plan.by_document(plan.token)[2].tolist() == [i for i in plan.token if labels[i] == 5]


def test_gptq_2048_by_default_with_2047_targets_and_bos_once():
    plan = gptq_windows([BOS, *range(5000)], bos_id=BOS)
    assert plan.protocol_id == "gptq-2048"
    assert (plan.n_windows, plan.n_scored) == (2, 2 * 2047)
    assert plan.add_bos == "once" and plan.stride == 2048
    assert plan.ids[0][0] == BOS and plan.ids[1][0] == 2047
    assert plan.protocol()["cluster"] == "block"
    assert gptq_windows(range(5000)).add_bos == "none"


@pytest.mark.parametrize(("window", "n", "max_windows"), [(512, 11000, None), (700, 9000, None), (512, 11000, 9)])
def test_blocks_without_documents_hold_at_least_2048_tokens(window, n, max_windows):
    plan = gptq_windows(range(n), window=window, max_windows=max_windows)
    sizes = [int(np.isin(plan.token, plan.token[plan.document == b]).sum()) for b in plan.clusters]
    per_window = window - 1
    assert all(size // per_window * window >= 2048 for size in sizes)
    assert (np.diff(plan.document) >= 0).all()
    assert plan.clusters.tolist() == list(range(len(sizes)))


def test_gptq_max_windows_takes_the_first_ones():
    plan = gptq_windows(range(47), window=10, max_windows=2)
    assert plan.n_unscored == {w.FIRST_OF_WINDOW: 2, w.TAIL: 7, w.BEYOND_WINDOW_CAP: 20}
    assert plan.token.max() == 19


def test_gptq_refuses_short_text_and_wrong_labels():
    with pytest.raises(SutureError, match="100 tokens, fewer than one window of 2048"):
        gptq_windows(range(100))
    with pytest.raises(SutureError, match="one label per token"):
        gptq_windows(range(100), documents=[0, 1], window=10)


def test_h13_a_window_longer_than_the_context_is_refused():
    with pytest.raises(SutureError, match="window = 80 is longer than the model's context of 64"):
        rolling_windows(documents_of([100]), window=80, max_positions=64)
    with pytest.raises(SutureError, match="2048 is longer than the model's context of 512"):
        gptq_windows(range(5000), max_positions=512)
    assert rolling_windows(documents_of([100]), window=64, max_positions=64).window == 64


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"window": 1}, "window = 1"),
        ({"window": 8, "stride": 8}, "stride = 8"),
        ({"window": 8, "stride": 0}, "stride = 0"),
        ({"window": 8, "max_windows": 0}, "max_windows = 0"),
        ({"window": 8, "max_tokens_per_document": 0}, "max_tokens_per_document = 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings_, message):
    with pytest.raises(SutureError, match=message):
        rolling_windows(documents_of([20]), **settings_)


def test_a_document_that_brings_its_own_bos_is_refused():
    with pytest.raises(SutureError, match="document 1 begins with the BOS id"):
        rolling_windows([[1, 2], [BOS, 3]], window=8, bos_id=BOS)
    assert rolling_windows([[1, 2], [BOS, 3]], window=8).n_scored == 2  # without BOS it is a token like others


def test_an_inconsistent_plan_cannot_be_built():
    plan = rolling_windows(documents_of([20]), window=8)
    with pytest.raises(RuntimeError, match="unaccounted"):
        replace(plan, n_tokens_in=21)
    with pytest.raises(RuntimeError, match="scored twice"):
        replace(plan, token=np.zeros_like(plan.token))
    with pytest.raises(RuntimeError, match="longer than allowed"):
        replace(plan, window=4)
