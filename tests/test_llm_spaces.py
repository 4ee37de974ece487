"""The text of an answer where a word's token begins with the space before it, as with Mixtral's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from moesaic import LLM, SamplingParams
from tests.server.test_spaces import spaced_tokenizer
from tests.support import model_configs, tiny_models


@pytest.mark.slow
def test_an_answer_goes_on_with_the_prompt_and_a_chat_begins_anew(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.build("mixtral", model_configs.mixtral(vocab_size=258)), tmp_path)
    word = spaced_tokenizer(tmp_path).encode("a")[0]
    params = SamplingParams(max_tokens=3, temperature=0, logit_bias={word: 100.0}, ignore_eos=True)
    llm = LLM(str(tmp_path))
    (answer,) = llm.generate("b", params)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    whole = theirs.decode(answer.prompt_token_ids + answer.outputs[0].token_ids)
    assert "b" + answer.text == whole == "b a a a"
    assert "".join(piece.text for piece in llm.stream("b", params)) == answer.text
    assert llm.chat([{"role": "user", "content": "b"}], params)[0].text == "a a a"
