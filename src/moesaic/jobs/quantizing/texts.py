"""The prompts with which a checkpoint is calibrated and measured, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moesaic.core.errors import ConfigError, RequestError
from moesaic.jobs.profiling.prompts import Prompt, read
from moesaic.text.tokenizer import Tokenizer

HELD_OUT = 8
"""One of so many prompts is not calibrated with but measured with."""
SHIPPED = Path(__file__).parent / "texts.jsonl"
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
        self, calibrate: Sequence[Path], evaluate: Sequence[Path], most: int, most_measured: int
    ) -> Texts:
        """Read the prompts of --calibrate and --evaluate.

        Without --evaluate, one of HELD_OUT prompts of --calibrate is held out, or else the texts of this
        package are used. most, most_measured: maximum tokens of all prompts together.

        Raises ConfigError, with file and line, for what is not a prompt, and for files with too few.
        """
        tokenizer = Tokenizer(self._path)
        try:
            calibrating = self._tokens(tokenizer, calibrate, "--calibrate")
            measuring = self._tokens(tokenizer, evaluate or ([] if calibrate else [SHIPPED]), "--evaluate")
        finally:
            tokenizer.close()
        if calibrate and not evaluate:
            if len(calibrating) < 2:
                raise ConfigError(
                    "--calibrate: got 1 prompt; allowed: at least 2, of which one is held out, or --evaluate"
                )
            held = [one for index, one in enumerate(calibrating) if index % HELD_OUT == 1]
            calibrating = [one for index, one in enumerate(calibrating) if index % HELD_OUT != 1]
            measuring = held
        measuring = [one for one in measuring if len(one) > 1]
        if most_measured and not measuring:
            flag = "--evaluate" if evaluate else "--calibrate"
            raise ConfigError(f"{flag}: got no text to measure with; allowed: one of at least two tokens")
        return Texts(_first(calibrating, most), _first(measuring, most_measured))

    def _tokens(self, tokenizer: Tokenizer, files: Sequence[Path], flag: str) -> Tokens:
        return [self._encoded(tokenizer, prompt)[: self._longest] for prompt in read(files, flag=flag)]

    def _encoded(self, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
        try:
            tokens = tokenizer.encode(prompt.text) if isinstance(prompt.text, str) else prompt.text
        except RequestError as error:
            raise ConfigError(f"{prompt.where}: {error}") from error
        bad = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if bad is not None or not tokens:
            got = "no token" if bad is None else f"token id {bad}"
            raise ConfigError(f"{prompt.where}: got {got}; allowed: ids of 0 to {self._vocab_size - 1}")
        return tokens


def _first(prompts: Tokens, most: int) -> Tokens:
    """The first prompts that have at most so many tokens together. The last one may be cut."""
    found: Tokens = []
    for one in prompts:
        if most < 2:
            break
        found.append(one[:most])
        most -= len(found[-1])
    return found
