"""Encodes and decodes text with the checkpoint's tokenizer and chat template. Does not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import Metaspace

from moesaic.core.end_tokens import ENDS
from moesaic.core.errors import CheckpointError, ConfigError, RequestError, TemplateError
from moesaic.models.gguf.header import is_gguf
from moesaic.text import added_tokens, gguf_tokenizer, tiktoken_model
from moesaic.text.templates import content
from moesaic.text.templates.chat_template import ChatTemplate, Options
from moesaic.text.templates.probe import Arrivals
from moesaic.text.templates.renderer import Limits
from moesaic.text.tiktoken_model import byte_level_alphabet as byte_level_alphabet

FAST = "tokenizer.json"
REPLACEMENT = "\ufffd"
ALLOW = "--allow-special-tokens-in-content"
DEFAULT_TEMPLATE, TOOLS_TEMPLATE = "default", "tool_use"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of templates that are called as its files are."""


class Tokenizer:
    """The tokenizer of the checkpoint in directory `path`, or in a GGUF file.

    chat_template: a file with a Jinja template, used in place of the checkpoint's own.
    special_tokens_in_content: whether special tokens in messages mean what they mean in the template. Else
    they are text. limits: of the template, which runs in processes of its own. They end with this object.
    with_template: False where no conversation will be formatted; then no process is started.
    Raises CheckpointError if tokenizer.json is missing or damaged, or the template cannot be compiled. Known
    tokenizers are also read from tiktoken's ranks (`tiktoken_model`).
    """

    def __init__(
        self,
        path: Path,
        chat_template: Path | None = None,
        *,
        special_tokens_in_content: bool = False,
        limits: Limits = Limits(),
        with_template: bool = True,
    ) -> None:
        self.settings: dict[str, Any]
        if is_gguf(path):
            self._tokenizer, self.settings = gguf_tokenizer.read(path)
        else:
            self.settings = added_tokens.read_settings(path)
            self._tokenizer = _read_tokenizer(path, self.settings)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._bytes_of_character = byte_level_alphabet()
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self.decode(self._anchor)
        self._bos = self._missing_bos()
        decoder = self._tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = {token.content: number for number, token in decoder if token.special}
        """Text -> id. Models are trained on what they stand for, which is no text."""
        self._special = content.SpecialTokens(list(self.special_tokens))
        unknown_tokens = {
            self._special_tokens().get("unk_token"),
            getattr(self._tokenizer.model, "unk_token", None),
        }
        self._normalized_tokens = {
            number: token.content
            for number, token in decoder
            if token.special and token.normalized and token.content not in unknown_tokens
        }
        """Id -> text of the special tokens that the tokenizer looks for in normalized text."""
        self._special_in_content = special_tokens_in_content
        self._loading_literal = Lock()
        source, template_path = self._find_template(path, chat_template) if with_template else (None, path)
        self.chat_template: str | None = source
        """The source of the chat template."""
        self._template = (
            None if source is None else _start_template(source, template_path, limits, self._special_tokens())
        )

    @cached_property
    def longest_token(self) -> int:
        """Maximum number of characters that one token stands for, in normalised text."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer by the tokenizer's files: its eos_token, and known ends of turns."""
        names = (
            self._special_tokens().get("eos_token"),
            *(end for end in ENDS if end in self.special_tokens),
        )
        token_ids = {self._tokenizer.token_to_id(name) for name in names if name}
        return tuple(sorted(token_id for token_id in token_ids if token_id is not None))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. Raises RequestError if it cannot be encoded as UTF-8."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: not valid Unicode text: {error.reason}", "prompt") from error
        # A long text takes seconds. `encode` would block other threads meanwhile; a batch of one does not.
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return [*self._bos, *ids] if add_special_tokens else list(ids)

    def encode_inside(self, text: str) -> list[int]:
        """The token ids of `text` inside a longer text. Special tokens in it are text."""
        return list(self._literal[0].encode(text, add_special_tokens=False).ids)

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
        return self._bytes_of(token_id, self.token(token_id))

    def all_bytes(self) -> list[bytes]:
        """The bytes of every token, by id."""
        pairs = [[*self._anchor, number] for number in range(self.vocab_size)]
        texts = self._tokenizer.decode_batch(pairs, skip_special_tokens=False)
        return [
            self._bytes_of(number, text.removeprefix(self._anchor_text)) for number, text in enumerate(texts)
        ]

    def _bytes_of(self, token_id: int, text: str) -> bytes:
        """The bytes of a token that decodes to `text` inside a longer text."""
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        # SentencePiece writes a token of a single byte as <0xE2>.
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
        most_characters: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """The token ids of a conversation, formatted by the checkpoint's chat template.

        add_generation_prompt: end with the header of the answer. continue_final_message: end with the text of
        the last message, which the model then continues. most_characters: maximum length of the text.
        variables: further variables of the template.
        Raises RequestError if there is no template, or if the template refuses the messages or reaches a
        limit, and RendererError if no process can be started for it. Special tokens in messages become text;
        RequestError is raised where the template or the tokenizer does not allow that.
        """

        options = Options(add_generation_prompt, continue_final_message, most_characters, variables)
        text, plain = self._require_template().render(_plain(messages), options)
        token = None if self._special_in_content else self._special.first_in(plain)
        if token is None:
            ids = self.encode(text, add_special_tokens=False)
            if (
                not self._special_in_content
                and (other_token := self._find_unwritten_token(ids, text)) is not None
            ):
                raise _not_text(other_token, "in other characters that the tokenizer takes for it")
            return ids
        hidden = self._special.hide(plain)
        if hidden is None:
            raise _not_text(token, "beside characters of both private-use planes of Unicode")
        marked_messages, plane = hidden
        text_with_marks = self._require_template().render_exactly(marked_messages, options)
        if content.restore_tokens(text_with_marks, plane) != text:
            raise _not_text(token, "and the chat template acts on it")
        ids_apart = self._encode_apart(text_with_marks, plane)
        if ids_apart is None:
            raise _not_text(token, "and this tokenizer encodes a text otherwise in pieces than as a whole")
        return ids_apart

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most_characters: int | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation. Parameters and errors are those of `chat`."""
        options = Options(add_generation_prompt, continue_final_message, most_characters, variables)
        return self._require_template().render(_plain(messages), options)[0]

    def close(self) -> None:
        """End the processes of the chat template. Afterwards no conversation can be formatted."""
        if self._template is not None:
            self._template.close()

    @property
    def arrivals(self) -> Arrivals | None:
        """What the chat template does with messages; None without one. The first call tries the template."""
        return None if self._template is None else self._template.arrivals

    def _require_template(self) -> ChatTemplate:
        if self._template is None:
            raise RequestError(
                "messages: this model has no chat template; use /v1/completions or --chat-template",
                "messages",
            )
        return self._template

    def _find_unwritten_token(self, ids: Sequence[int], text: str) -> str | None:
        """A special token in `ids` that is not written in `text`, or None.

        A tokenizer that looks for some of them in normalized text finds these in other characters too.
        """
        written_tokens = Counter(text[begin:end] for begin, end in self._special.spans(text))
        found_tokens = Counter(
            self._normalized_tokens[token] for token in ids if token in self._normalized_tokens
        )
        return next(iter(found_tokens - written_tokens), None)

    def _encode_apart(self, text: str, plane: int) -> list[int] | None:
        """The ids of a rendered `text` whose special tokens in private-use characters are text.

        Encodes what lies between the template's special tokens in pieces. None if the tokenizer does not
        encode this conversation in pieces as it does in one, with an `x` for each of those characters.
        """
        spans = self._special.spans(text)
        masked_text = content.mask_tokens(text, plane)
        full_ids = self.encode(masked_text, add_special_tokens=False)
        if self._encode_pieces(masked_text, spans) != full_ids:
            return None
        return self._encode_pieces(content.restore_tokens(text, plane), spans)

    def _encode_pieces(self, text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of `text`. Its special tokens are those at `spans`; all others are text."""
        begins, ends = [0, *(end for _, end in spans)], [*(begin for begin, _ in spans), len(text)]
        pieces = [text[begin:end] for begin, end in zip(begins, ends, strict=True)]
        literal, needs_space = self._literal
        if needs_space and pieces[0] and not pieces[0].startswith((" ", "\u2581")):
            pieces[0] = " " + pieces[0]
        encodings = literal.encode_batch_fast(pieces, add_special_tokens=False)
        ids = list(encodings[0].ids)
        for (begin, end), piece in zip(spans, encodings[1:], strict=True):
            token = self._tokenizer.token_to_id(text[begin:end])
            assert token is not None
            ids += [token, *piece.ids]
        return ids

    @property
    def _literal(self) -> tuple[tokenizers.Tokenizer, bool]:
        """A tokenizer for pieces in which special tokens are text, and whether the first one gets a space.

        It is made when it is first needed. It is an object of its own, since the library cannot change
        settings while other threads encode.
        """
        with self._loading_literal:
            return self._literal_tokenizer

    @cached_property
    def _literal_tokenizer(self) -> tuple[tokenizers.Tokenizer, bool]:
        literal = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        literal.encode_special_tokens = True  # the library then takes special tokens for text
        metaspace = literal.pre_tokenizer
        if not isinstance(metaspace, Metaspace) or metaspace.prepend_scheme != "first":
            return literal, False
        metaspace.prepend_scheme = "never"  # else every piece would get the space of a text's beginning
        return literal, True

    def _special_tokens(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        values = {name: self.settings.get(name) for name in names}
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
        if token is None or self.settings.get("add_bos_token") is not True:
            return []
        return [] if token in self._tokenizer.encode("a").ids else [token]

    def _find_template(self, path: Path, override: Path | None) -> tuple[str | None, Path]:
        """The source of the chat template, or None, and where it was found."""
        source: Any = self.settings.get("chat_template")
        named_templates = [
            {"name": file.stem, "template": _read_template(file)} for file in _list_more_templates(path)
        ]
        if isinstance(source, list):
            source = join_named_templates([*source, *named_templates])
        # As in transformers, the file takes precedence over the template in tokenizer_config.json.
        file = override or path / "chat_template.jinja"
        if override is not None and not file.is_file():
            raise ConfigError.field("--chat-template", str(file), "a file with a Jinja template")
        if file.is_file():
            source = _read_template(file)
            if override is None and named_templates:
                source = join_named_templates(
                    [{"name": DEFAULT_TEMPLATE, "template": source}, *named_templates]
                )
        if source is not None and not isinstance(source, str):
            raise CheckpointError(f"{path}: chat_template: got {source!r}; allowed: a text")
        return source, override or path


def check_files(source: object, names: Container[str]) -> None:
    """Raises CheckpointError unless the file of a tokenizer is among `names`. source: for the message."""
    if FAST not in names and tiktoken_model.FILE not in names:
        raise CheckpointError(f"{source}: no {FAST} (only fast tokenizers are read)")


def _read_tokenizer(path: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    check_files(path, [name for name in (FAST, tiktoken_model.FILE) if (path / name).is_file()])
    file = path / FAST
    if not file.is_file():
        return tiktoken_model.read(path, settings)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a plain Exception for every defect
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    # tokenizer.json may set both. A prompt must be neither cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added_tokens.add(tokenizer, path, settings)
    return tokenizer


def _start_template(source: str, path: Path, limits: Limits, constants: Mapping[str, str]) -> ChatTemplate:
    """The chat template `source`, in processes that render it."""
    try:
        return ChatTemplate(source, limits, constants)
    except TemplateError as error:
        outcome = f"is damaged: {error}" if error.is_refusal else f"{error}, while it was compiled"
        raise CheckpointError(f"{path}: the chat template {outcome}") from error


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: a chat template that is not UTF-8: {error.reason}") from error


def _list_more_templates(path: Path) -> list[Path]:
    """The files of chat templates with names of their own, which newer programs write."""
    return [] if is_gguf(path) else sorted((path / MORE_TEMPLATES).glob("*.jinja"))


def _not_text(token: str, reason: str) -> RequestError:
    choices = f"messages without it, or a server with {ALLOW}"
    message = f"the special token {token!r} cannot be read as text: it stands in a message, {reason}"
    return RequestError(f"messages: {message}; allowed: {choices}", "messages", "special_token_in_content")


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as chat templates expect them: each content is a text."""
    return [{**message, "content": _join_text(message.get("content"))} for message in messages]


def _join_text(content: object) -> str:
    """The text of a message's content. Parts of text are joined by newlines; None is an empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    wrong = next((part for part, text in zip(parts, texts, strict=True) if not isinstance(text, str)), None)
    if wrong is not None:
        choices = 'a text, or a list of {"type": "text", "text": ...}'
        raise RequestError(f"messages: content: got {wrong!r}; allowed: {choices}", "messages")
    return "\n".join(text for text in texts if text is not None)


def join_named_templates(entries: Sequence[Any]) -> Any:
    """The template that chooses among `entries`, which are {"name", "template"}. None if neither is there.

    Without `tool_use`, or without `default`, it is the other one. One that is no text is returned as it is.
    """
    templates = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    default, tools = templates.get(DEFAULT_TEMPLATE), templates.get(TOOLS_TEMPLATE)
    if default is None or tools is None:
        return default if tools is None else tools
    if not isinstance(default, str) or not isinstance(tools, str):
        return default if isinstance(tools, str) else tools
    # "+" keeps the white space that Jinja would drop around these tags. It drops a newline at the end.
    first, second = tools.removesuffix("\n"), default.removesuffix("\n")
    return f"{{% if tools is not none +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"


class BadWords:
    """The token sequences of texts. It remembers the last texts, which all prompts of a call share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: tuple[str, ...] = ()
        self._sequences: tuple[tuple[int, ...], ...] = ()

    def sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each text, as it stands at the beginning of an answer and as it stands after a space.

        The second one counts only if it has another first token and as many tokens. Raises RequestError for a
        text without tokens.
        """
        if tuple(words) != self._words:
            sequences = [sequence for word in words for sequence in self._encode_word(word)]
            self._words, self._sequences = tuple(words), tuple(dict.fromkeys(sequences))
        return self._sequences

    def _encode_word(self, word: str) -> list[tuple[int, ...]]:
        text = word.lstrip()
        plain = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if not plain:
            raise RequestError(f"bad_words: got {word!r}; allowed: texts of at least one token", "bad_words")
        after_space = tuple(self._tokenizer.encode(" " + text, add_special_tokens=False))
        return (
            [plain, after_space] if len(after_space) == len(plain) and after_space[0] != plain[0] else [plain]
        )


def check_some_token_is_left(
    sequences: Sequence[Sequence[int]], allowed_token_ids: Sequence[int] | None, vocab_size: int
) -> None:
    """Raises RequestError if the sequences of one token forbid every allowed token."""
    banned_ids = {sequence[0] for sequence in sequences if len(sequence) == 1}
    if banned_ids and (
        banned_ids.issuperset(allowed_token_ids)
        if allowed_token_ids is not None
        else len(banned_ids) >= vocab_size
    ):
        token_set = "every token" if allowed_token_ids is None else "every token of allowed_token_ids"
        raise RequestError(f"bad_words: got words that forbid {token_set}; allowed: fewer", "bad_words")
