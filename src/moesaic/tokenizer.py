"""Encodes and decodes text with the checkpoint's tokenizer and chat template. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moesaic.core.errors import CheckpointError, ConfigError, RequestError

REPLACEMENT = "\ufffd"
MARK = "\ue000"
"""A private-use character. It marks the end of a continued message while the template is rendered."""
TEMPLATE_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors that Python's operators raise in a chat template, for messages that the template cannot handle."""


class Tokenizer:
    """The tokenizer of the checkpoint in directory `path`.

    chat_template: a file with a Jinja template, used in place of the checkpoint's own.
    Raises CheckpointError if tokenizer.json is missing or damaged.
    """

    def __init__(self, path: Path, chat_template: Path | None = None) -> None:
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{path}: no tokenizer.json (only fast tokenizers are read)")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a plain Exception for every defect
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings_file = path / "tokenizer_config.json"
        self._settings = _read_settings(settings_file) if settings_file.is_file() else {}
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._bytes_of_character = byte_level_alphabet()
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self.decode(self._anchor)
        self._template = self._find_template(path, chat_template)
        self._bos = self._missing_bos()

    @cached_property
    def longest_token(self) -> int:
        """Maximum number of characters that one token stands for, in normalised text."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. Raises RequestError if it cannot be encoded as UTF-8."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: not valid Unicode text: {error.reason}", "prompt") from error
        # A long text takes seconds. `encode` would block other threads meanwhile; a batch of one does not.
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return [*self._bos, *ids] if add_special_tokens else list(ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Bytes that are not valid UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """The text of one token inside a longer text; special tokens have text too.

        SentencePiece's decoders drop a space at the beginning of a text. So another token is decoded before
        this one, and its text is removed.
        """
        return self.decode([*self._anchor, token_id], False).removeprefix(self._anchor_text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for. They may be a part of a character."""
        text = self.token(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        if piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6:
            return bytes([int(piece[3:5], 16)])
        if all(character in self._bytes_of_character for character in piece):
            return bytes(self._bytes_of_character[character] for character in piece)
        return text.encode()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The token ids of a conversation, formatted by the checkpoint's chat template.

        add_generation_prompt: end with the header of the answer. continue_final_message: end with the text of
        the last message, which the model then continues. variables: further variables of the template.
        Raises RequestError if there is no template or the template refuses the messages.
        """
        text = self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation. Parameters and errors are those of `chat`."""
        if self._template is None:
            raise RequestError(
                "messages: this model has no chat template; use /v1/completions or --chat-template",
                "messages",
            )
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message: allowed only with add_generation_prompt false",
                "continue_final_message",
            )
        plain = [{**message, "content": _text_of(message.get("content"))} for message in messages]
        try:
            text = self._template.render(
                messages=_marked(plain) if continue_final_message else plain,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens(),
                **{"tools": None, "documents": None, **variables},  # transformers always sets these names
            )
        except (jinja2.TemplateError, *TEMPLATE_ERRORS) as error:
            raise RequestError(f"messages: the chat template refuses them: {error}", "messages") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        values = {name: self._settings.get(name) for name in names}
        return {
            name: str(value.get("content", "") if isinstance(value, dict) else value)
            for name, value in values.items()
            if value is not None
        }

    def _missing_bos(self) -> list[int]:
        """The BOS token, in a list, if the settings demand it and tokenizer.json does not add it.

        DeepSeek's checkpoints are such a case. There the Llama class of transformers 4 adds it to a text.
        """
        name = self._special_tokens().get("bos_token")
        token = None if name is None else self._tokenizer.token_to_id(name)
        if token is None or self._settings.get("add_bos_token") is not True:
            return []
        return [] if token in self._tokenizer.encode("a").ids else [token]

    def _find_template(self, path: Path, override: Path | None) -> jinja2.Template | None:
        source: Any = self._settings.get("chat_template")
        if isinstance(source, list):  # several named templates: take the one called default
            named = (each for each in source if isinstance(each, dict))
            source = next((each.get("template") for each in named if each.get("name") == "default"), None)
        file = override or path / "chat_template.jinja"
        if override is not None and not file.is_file():
            raise ConfigError.field("--chat-template", str(file), "a file with a Jinja template")
        if file.is_file():
            try:
                source = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{file}: a chat template that is not UTF-8: {error.reason}") from error
        if source is not None and not isinstance(source, str):
            raise CheckpointError(f"{path}: chat_template: got {source!r}; allowed: a text")
        return None if source is None else _compile(source, override or path)


class _Generation(Extension):
    """Parses {% generation %} ... {% endgeneration %} and keeps the text between them.

    Templates mark the model's own text with it, for training.
    """

    tags = {"generation"}  # noqa: RUF012, jinja expects a set here

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, where: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, SyntaxError) as error:
        raise CheckpointError(f"{where}: the chat template is damaged: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    """Refuse a conversation. Chat templates call this function."""
    raise jinja2.TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, **form: Any) -> str:
    """Plain JSON, as in transformers. Jinja's own filter escapes characters for HTML.

    form: indent, separators, sort_keys.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)


def _text_of(content: object) -> str:
    """The text of a message's content. Parts of text are joined by newlines; None is an empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    wrong = next((part for part, text in zip(parts, texts, strict=True) if not isinstance(text, str)), None)
    if wrong is not None:
        allowed = 'a text, or a list of {"type": "text", "text": ...}'
        raise RequestError(f"messages: content: got {wrong!r}; allowed: {allowed}", "messages")
    return "\n".join(text for text in texts if text is not None)


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`messages` with MARK and a space added to the last one's content.

    The space shows whether the template trims contents: then it is gone.
    """
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError("messages: the last message has no content to continue", "messages")
    return [*messages[:-1], {**messages[-1], "content": f"{content}{MARK} "}]


def _cut_at_mark(text: str) -> str:
    """`text` up to the end of the last message's content, which the model then continues."""
    before, found, after = text.rpartition(MARK)
    if not found:
        raise RequestError("messages: the chat template leaves the last message out", "messages")
    return before if after.startswith(" ") else before.rstrip()


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return settings


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2). Every byte has a printable character."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + offset): byte for offset, byte in enumerate(hidden)}
