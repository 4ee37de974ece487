from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from moesaic.cost import ops
from moesaic.cost.sizes import PUBLISHED_MODELS, GroupedQuery, ModelSizes

MIXTRAL, LITE = PUBLISHED_MODELS["mixtral-8x7b"], PUBLISHED_MODELS["deepseek-v2-lite"]


def test_worked_example_of_touched_experts() -> None:
    assert [round(ops.uniform_distinct(8, 2, rows), 1) for rows in (0, 1, 2, 36)] == [0.0, 2.0, 3.5, 8.0]


def test_touched_experts_by_brute_force() -> None:
    """Two rows each choose any 2 of 5 experts. Compares with the mean size of the union."""
    choices = [set(pair) for pair in combinations(range(5), 2)]
    unions = [len(one | other) for one in choices for other in choices]
    assert ops.uniform_distinct(5, 2, 2) == pytest.approx(sum(unions) / len(unions))


def test_a_layer_of_a_tiny_model_counted_by_hand() -> None:
    """hidden 4, 2 query heads and 1 key head of width 3, 2 experts of width 5, top-1, and two bytes for each
    number."""
    model = ModelSizes("tiny", 1, 4, 10, GroupedQuery(2, 1, 3), 1, 2, 1, 5)
    rows = 7
    before = ops.query_key_value(model, rows)
    assert (before.flops, before.weights) == (2 * rows * 4 * (6 + 3 + 3), 2 * 4 * 12)
    assert before.activations == 2 * rows * (4 + 12)
    attended = ops.attention(model, rows, context=11, number=1)
    assert attended.flops == 2 * rows * 11 * 2 * (3 + 3), "scores and the weighted sum, for both query heads"
    assert attended.cache == rows * 11 * (3 + 3) * 1
    routed = ops.routed_experts(model, 1)
    assert (routed.flops, routed.weights) == (2 * 3 * 4 * 5, 2 * 3 * 4 * 5)
    assert ops.routed_experts(model, 1, share=0.5).flops == routed.flops / 2
    assert ops.gate(model, rows).weights == 2 * 4 * 2 and ops.shared_experts(model, rows) == ops.Work()
    assert ops.head(model, rows).flops == 2 * rows * 4 * 10
    between = ops.between_products(model, rows, answers=3)
    assert between == ops.Work(activations=2 * rows * ((2 + 2 + 4) * 4 + 2 * 3 * 4 + 2 * (6 + 6)))


def test_a_step_reads_and_writes_the_states_of_linear_attention() -> None:
    """Two of four layers have a state of 300 bytes each: 150 are the mean of all layers."""
    plain = ModelSizes("plain", 4, 4, 10, GroupedQuery(2, 1, 3), 1, 2, 1, 5)
    model = replace(plain, page=600.0)
    for rows in (1, 7):
        without = ops.attention(plain, rows, context=11, number=1)
        attended = ops.attention(model, rows, context=11, number=1)
        assert attended.cache == without.cache + rows * 2 * 150
        assert (attended.flops, attended.activations) == (without.flops, without.activations)


def test_latent_attention_reads_one_latent_for_all_heads() -> None:
    one = ops.attention(LITE, rows=1, context=1, number=2)
    assert one.cache == 2 * 576
    assert one.flops == 16 * (2 * 576 + 2 * 512)
    grouped = ops.attention(MIXTRAL, rows=1, context=1, number=2)
    assert one.flops / one.cache > 7 * grouped.flops / grouped.cache


def test_causal_attention_is_the_sum_over_growing_contexts() -> None:
    prompt = 9
    each = [ops.attention(MIXTRAL, 1, context, 2).flops for context in range(1, prompt + 1)]
    assert ops.causal_attention(MIXTRAL, 3, prompt, 2).flops == 3 * sum(each)


def test_decode_attention_does_not_gain_from_a_batch_and_experts_do() -> None:
    """MoE-Lightning, section 3.3: the intensities of Figures 4 and 5."""
    small, large = (ops.attention(MIXTRAL, rows, 512, 2).intensity for rows in (1, 64))
    assert small == pytest.approx(large) and 3 < small < 4.1
    assert ops.routed_experts(MIXTRAL, 256).intensity > 6 * ops.routed_experts(MIXTRAL, 32).intensity
    assert ops.attention(MIXTRAL, 1, 512, 0.5).intensity > 3 * small


def test_work_adds_and_multiplies() -> None:
    work = ops.Work(8, 1, 2, 1)
    assert work.bytes == 4 and work.intensity == 2 and ops.Work().intensity == 0
    assert work + work == work * 2
    assert ops.feed_forward(LITE, 5) == ops.gate(LITE, 5) + ops.shared_experts(LITE, 5) + ops.routed_experts(
        LITE, 5
    )
    assert ops.dense(LITE, 5).weights == 2 * 3 * 2048 * 10944
