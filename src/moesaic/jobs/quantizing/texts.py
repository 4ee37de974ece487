"""The prompts with which a checkpoint is calibrated and measured, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic.core.errors import ConfigError, RequestError
from moesaic.jobs.profiling.prompts import Prompt, read
from moesaic.text.tokenizer import Tokenizer

HELD_OUT_EVERY = 8
"""Number of prompts of which one is not calibrated with but measured with."""
PACKAGE_TEXTS = Path(__file__).parent / "texts.jsonl"
"""Texts to measure with if none are given."""
Tokens = list[list[int]]


@dataclass(frozen=True)
class Texts:
    """Token ids of prompts."""

    calibrating: Tokens
    measuring: Tokens


class Reader:
    """Reads prompts for one model."""

    def __init__(self, path: Path, vocab_size: int, longest: int) -> None:
        """longest: maximum tokens of a prompt. Longer ones are cut."""
        self._path, self._vocab_size, self._longest = path, vocab_size, longest

    def read(
        self, calibrate: Sequence[Path], evaluate: Sequence[Path], max_tokens: int, max_measured_tokens: int
    ) -> Texts:
        """Read the prompts of --calibrate and --evaluate.

        Without --evaluate, one of HELD_OUT_EVERY prompts of --calibrate is held out, or else the texts of
        this package are used. max_tokens, max_measured_tokens: maximum tokens of all prompts together.

        Raises ConfigError, with file and line, for what is not a prompt, and for files with too few.
        """
        tokenizer = Tokenizer(self._path)
        try:
            calibrating = self._tokens(tokenizer, calibrate, "--calibrate")
            measuring = self._tokens(
                tokenizer, evaluate or ([] if calibrate else [PACKAGE_TEXTS]), "--evaluate"
            )
        finally:
            tokenizer.close()
        if calibrate and not evaluate:
            if len(calibrating) < 2:
                raise ConfigError(
                    "--calibrate: got 1 prompt; allowed: at least 2, of which one is held out, or --evaluate"
                )
            held_out_prompts = [
                prompt for index, prompt in enumerate(calibrating) if index % HELD_OUT_EVERY == 1
            ]
            calibrating = [prompt for index, prompt in enumerate(calibrating) if index % HELD_OUT_EVERY != 1]
            measuring = held_out_prompts
        measuring = [prompt for prompt in measuring if len(prompt) > 1]
        if max_measured_tokens and not measuring:
            flag = "--evaluate" if evaluate else "--calibrate"
            raise ConfigError(f"{flag}: got no text to measure with; allowed: one of at least two tokens")
        return Texts(_take_first(calibrating, max_tokens), _take_first(measuring, max_measured_tokens))

    def _tokens(self, tokenizer: Tokenizer, files: Sequence[Path], flag: str) -> Tokens:
        return [self._encode(tokenizer, prompt)[: self._longest] for prompt in read(files, flag=flag)]

    def _encode(self, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
        try:
            tokens = tokenizer.encode(prompt.text) if isinstance(prompt.text, str) else prompt.text
        except RequestError as error:
            raise ConfigError(f"{prompt.location}: {error}") from error
        bad = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if bad is not None or not tokens:
            got = "no token" if bad is None else f"token id {bad}"
            raise ConfigError(f"{prompt.location}: got {got}; allowed: ids of 0 to {self._vocab_size - 1}")
        return tokens


def _take_first(prompts: Tokens, max_tokens: int) -> Tokens:
    """The first prompts that have at most so many tokens together. The last one may be cut."""
    first_prompts: Tokens = []
    for prompt in prompts:
        if max_tokens < 2:
            break
        first_prompts.append(prompt[:max_tokens])
        max_tokens -= len(first_prompts[-1])
    return first_prompts
