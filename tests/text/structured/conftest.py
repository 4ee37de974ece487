"""Whether an answer may be a text, for tests of schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher

from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.text.structured.grammar import make_grammar
from moesaic.text.structured.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def accepts() -> Callable[[Any, Any], bool]:
    """A function that says whether a schema's grammar accepts the JSON text of a value."""
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b"</s>"], frozenset([256]))
    library_tokenizer = vocabulary.build_tokenizer(257, (256,))

    def accept(schema: Any, value: Any) -> bool:
        grammar = make_grammar(StructuredOutputsParams(json=json.dumps(schema)), {})
        matcher = LLMatcher(library_tokenizer, grammar, log_level=0)
        tokens = list(json.dumps(value).encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accept
