from __future__ import annotations

from pathlib import Path

from moesaic import LLM, SamplingParams
from moesaic.core.request import FinishReason
from tests.support import endless_demo


def test_answers_to_a_greeting_have_all_the_tokens_that_they_may_have(tmp_path: Path) -> None:
    llm = LLM(str(endless_demo.write(tmp_path)), threads=1, kv_cache_memory="16MiB")
    greedy = SamplingParams(max_tokens=200, temperature=0.0)
    [answer] = llm.chat([[{"role": "user", "content": "Hello"}]], greedy)
    assert answer.outputs[0].finish_reason is FinishReason.LENGTH
    assert len(answer.outputs[0].token_ids) == 200
