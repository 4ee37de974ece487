"""Padding follows the real tokens, is really computed, and holds blocks of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.test_tokens import batch, batches
from tests.support import model_configs, tiny_models
from tests.test_llm_offload import floats

from moesaic import LLM, SamplingParams
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.core.tokens import TokenBatch
from moesaic.kernels import table
from moesaic.kernels.batch import AttentionBatch
from moesaic.offload.padding import PaddedBlocks, Padding, count_padding_blocks
from moesaic.offload.parts import divide_by_context
from moesaic.testing import byte_tokenizer

LONGEST = 40
DISK = Offload(
    1 << 30, "cgopipe", micro_batch=2, micro_batches=2, prefill_rows=2 * LONGEST, padded_prompt_len=LONGEST
)
LENGTHS = (1, 40, 17, 5)
NEW = 6
needs_native = pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")


# ---- rows


def test_worked_example() -> None:
    """A prompt of 2 tokens, a row at position 5, a chunk of a prompt, and the end of a longer prompt."""
    whole = batch([2, 1, 3, 2], before=[0, 5, 0, 4], wanted=[1, 2, 7])
    padded = Padding(longest=4, block_size=16).add_padding(whole)
    assert padded.positions.tolist() == [0, 1, 2, 3, 5, 0, 1, 2, 4, 5]
    assert padded.token_ids.tolist() == [0, 1, 0, 0, 2, 3, 4, 5, 6, 7]
    assert padded.query_starts.tolist() == [0, 4, 5, 8, 10]
    assert padded.context_lens.tolist() == [4, 6, 3, 6]
    assert padded.logit_rows.tolist() == [1, 4, 9]


@given(batches(), st.integers(1, 12))
def test_rows_keep_their_order_and_what_they_see(whole: TokenBatch, longest: int) -> None:
    padded = Padding(longest, 16).add_padding(whole)
    rows = np.diff(padded.query_starts) - np.diff(whole.query_starts)
    assert (rows == padded.context_lens - whole.context_lens).all() and (rows >= 0).all()
    assert (padded.context_lens <= np.maximum(whole.context_lens, longest)).all()
    for index, starts in enumerate(zip(whole.query_starts[:-1], padded.query_starts[:-1], strict=True)):
        count = int(np.diff(whole.query_starts)[index])
        real, mine = (
            (one.token_ids[begin : begin + count].tolist(), one.positions[begin : begin + count].tolist())
            for one, begin in zip((whole, padded), starts, strict=True)
        )
        assert real == mine
    assert padded.token_ids[padded.logit_rows].tolist() == whole.logit_rows.tolist()
    assert padded.block_tables is whole.block_tables


def test_padding_is_counted_in_whole_blocks_behind_what_decodes() -> None:
    rows = replace(
        batch([1, 1, 3, 1], before=[5, 3, 0, 0], wanted=[0, 1]),
        block_tables=np.array([[7, 4, 9, 2, 0], [3, 1, 0, 0, 0], [5, 6, 8, 0, 0], [10, 11, 0, 0, 0]]),
    )
    assert count_padding_blocks(rows, block_size=4).tolist() == [2, 1, 0, 0]
    assert Padding(4, block_size=4).contexts(rows).sum() == 6 + 4 + 3 + 1 + 3 * 4


# ---- blocks


def ints(count: int, first: int = 0) -> Any:
    return np.arange(first, first + count)


def test_a_request_holds_blocks_for_the_longest_prompt_and_its_own_answer() -> None:
    pool = PaddedBlocks(num_blocks=12, block_size=4, prefix_reuse=False, longest=10)
    assert pool.allocate(0, ints(3), 2) == 0 and len(pool.table(0)) == 3
    assert pool.allocate(1, ints(11), 10) == 0 and len(pool.table(1)) == 3
    assert pool.capacity(0) == 12 - 7 and pool.capacity(1) == 12
    for tokens, blocks in ((5, 3), (6, 4), (9, 4), (10, 5)):  # 2 to 7 of an answer: 12 to 17 tokens
        assert pool.extend(0, tokens) and len(pool.table(0)) == blocks
    pool.free(0)
    pool.free(1)
    assert pool.stats().num_free == 12


def test_padding_gives_way_before_a_request_does() -> None:
    pool = PaddedBlocks(num_blocks=4, block_size=4, prefix_reuse=False, longest=8)
    assert pool.allocate(0, ints(1), 0) == 0
    assert pool.allocate(1, ints(4), 0, spare=1) is None, "two blocks and one to spare"
    assert pool.allocate(1, ints(4), 0) == 0
    for tokens in range(2, 9):
        assert pool.extend(0, tokens) and len(pool.table(0)) == 2
    assert not pool.extend(0, 9)
    pool.free(1)
    assert pool.extend(0, 9) and len(pool.table(0)) == 4


def test_known_prefixes_are_found_with_padding_behind_them() -> None:
    pool = PaddedBlocks(num_blocks=12, block_size=4, prefix_reuse=True, longest=20)
    pool.allocate(0, ints(9), 8)
    pool.commit(0, ints(9), 9)
    first = pool.table(0).tolist()
    assert pool.allocate(1, ints(10), 9) == 8
    assert pool.table(1).tolist()[:2] == first[:2] and not set(pool.table(1).tolist()[2:]) & set(first)
    pool.free(0)
    assert pool.stats().num_cached == 0 and pool.stats().num_used == 5


# ---- whole runs


BESIDE = replace(DISK, link=1e9, slow_cache=1.0)
LEVELS = {
    "a disk": DISK,
    "the cache moves": BESIDE,
    "the other core attends": replace(BESIDE, slow_attention=True),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny_models.save(
        tiny_models.build("qwen3_moe", model_configs.qwen3()), tmp_path_factory.mktemp("padding")
    )
    byte_tokenizer(made)
    return made


def llm(path: Path, offload: Offload = DISK, **settings: Any) -> LLM:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 4 * LONGEST, "max_model_len": 64, **settings}
    return LLM(str(path), threads=1, offload=offload, **settings)


def answers(made: LLM) -> list[Any]:
    prompts = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=2, ignore_eos=True)
    return [floats(result.outputs[0]) for result in made.generate(prompts, params)]


@needs_native
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("prefill_rows", [7, LONGEST, 2 * LONGEST, 3 * LONGEST])
def test_as_many_rows_are_computed_as_requests_that_are_all_the_longest_have(
    path: Path, prefill_rows: int, levels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention covers as many tokens too, in whole blocks, also in decode."""
    asked: list[AttentionBatch] = []
    made = llm(path, replace(LEVELS[levels], prefill_rows=prefill_rows))
    [block, *_] = made._worker._executor._model.blocks
    attend = type(block).attention

    def seen(self: Any, query: Any, keys: Any, values: Any, attention: AttentionBatch) -> Any:
        assert len(query) == attention.batch.num_rows
        if self.input_norm is block.input_norm:  # or the one beside it
            asked.append(attention)
        return attend(self, query, keys, values, attention)

    monkeypatch.setattr(type(block), "attention", seen)
    answers(made)
    passes = {one.prefill: one for one in made.stats().experts.passes}
    requests, real = len(LENGTHS), sum(LENGTHS)
    assert (passes[True].rows, passes[False].rows) == (real, requests * (NEW - 1))
    assert passes[True].rows + passes[True].padding_rows == requests * LONGEST
    assert passes[False].padding_rows == 0
    assert sum(one.batch.num_rows for one in asked if one.batch.num_rows > 2) == requests * LONGEST
    attended = sum(int(one.batch.context_lens.sum()) for one in asked)
    assert attended == sum(one.context + one.padding_context for one in passes.values())
    padded = requests * sum(LONGEST + index for index in range(1, NEW))
    assert abs(passes[False].context + passes[False].padding_context - padded) <= requests * (NEW - 1) * 16
    assert passes[False].padding_context > passes[False].context / 2


@needs_native
@pytest.mark.parametrize("levels", LEVELS)
def test_answers_are_those_without_padding(path: Path, levels: str) -> None:
    """Every log-probability is equal too."""
    assert answers(llm(path, LEVELS[levels])) == answers(llm(path, replace(DISK, padded_prompt_len=None)))


@needs_native
def test_rows_that_decode_beside_a_prompt_attend_to_their_padding(path: Path) -> None:
    """There are two seats, and answers have different lengths. So prompts join requests that decode."""
    made = llm(path, replace(DISK, micro_batch=1), max_num_seqs=2)
    prompts = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (3, 4, 5)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 8, 3)]
    made.generate(prompts, params)
    prefill = sum(one.padding_rows for one in made.stats().experts.passes)
    assert prefill == sum(LONGEST - length for length in (3, 4, 5))
    mixed = [one for one in made.stats().experts.passes if one.prefill]
    # 2 x 40, and 40 beside a row that has 6 tokens, in blocks of 16, and 40 + 2 with padding: 2 more blocks
    assert sum(one.context + one.padding_context for one in mixed) == 3 * LONGEST + 6 + 2 * 16


@needs_native
@pytest.mark.parametrize(
    ("offload", "told"),
    [
        (replace(DISK, padded_prompt_len=65), "padded: got 65; allowed: 1 to 64"),
        (replace(DISK, padded_prompt_len=0), "padded: got 0; allowed: 1 to 64"),
    ],
)
def test_padding_that_cannot_be_is_refused(path: Path, offload: Offload, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        llm(path, offload)


@needs_native
def test_where_there_is_no_room_for_all_padding_all_answers_come(path: Path) -> None:
    """The cache has four blocks, and a request needs at most four."""
    token = 3 * 2 * 2 * 16 * 4
    small = llm(path, kv_cache_memory=str(64 * token), enable_prefix_caching=False)
    assert answers(small) == answers(llm(path, replace(DISK, padded_prompt_len=None)))
    assert small.stats().blocks.num_used == 0


def test_padding_that_comes_down_counts_where_micro_batches_are_made() -> None:
    """Two prompts have 16 tokens. Two rows decode after 4 tokens, each before a block of padding. Such a row
    counts 21 tokens, not 5."""
    whole = batch([1, 1, 16, 16], before=[4, 4, 0, 0], wanted=[0])
    tables = np.array([[1, 2], [3, 4], [5, 0], [6, 0]])
    whole = replace(whole, block_tables=tables)
    contexts = Padding(longest=16, block_size=16).contexts(whole)
    assert contexts.tolist() == [5 + 16, 5 + 16, 16, 16]
    parts = divide_by_context(whole, contexts, 40, whole_sequences=True)
    assert [origin.tolist() for _, origin in parts] == [[0], [1, *range(2, 18)], [*range(18, 34)]]
