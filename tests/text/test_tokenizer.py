from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from moesaic.core.errors import CheckpointError, ConfigError, RequestError
from moesaic.testing import byte_tokenizer
from moesaic.text.detokenizer import IncrementalDecoder
from moesaic.text.tokenizer import Tokenizer


def write_byte_tokenizer(path: Path, **config: object) -> Path:
    """One token per byte, and one special token."""
    byte_tokenizer(path, ["<end>"], **config)
    return path


def write_fallback_tokenizer(path: Path) -> Path:
    """SentencePiece's kind: unknown characters are spelled <0xNN>, spaces are U+2581."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {piece: len(vocab) + index for index, piece in enumerate(["\u2581", "a", "b", "\u2581a"])}
    tokenizer = HFTokenizer(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


WRITERS = {"bytes": write_byte_tokenizer, "fallback": write_fallback_tokenizer}


@pytest.fixture(scope="module", params=list(WRITERS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(WRITERS[request.param](tmp_path_factory.mktemp("tokenizer")))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_join_to_the_whole_text_and_split_no_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push([token]) for token in ids] + [decoder.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(text=st.text("ab \u20ac\U0001f600", max_size=6).map("a".__add__), data=st.data())
def test_an_answer_goes_on_with_the_text_before_it(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(1, len(ids)))
    before = tokenizer.decode(ids[:cut])
    decoder = IncrementalDecoder(tokenizer, prompt_token_ids=ids[:cut])
    answer = "".join([*map(decoder.push, ([token] for token in ids[cut:])), decoder.finish()])
    assert before.rstrip("\ufffd") + answer == tokenizer.decode(ids)


def test_a_token_within_a_text_keeps_its_space(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b a")
    assert "".join(tokenizer.token(token) for token in ids).removeprefix(" ") == "a b a"
    assert b"".join(tokenizer.token_bytes(token) for token in ids).removeprefix(b" ") == b"a b a"


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\u20ac")[:-1]
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(decoder.push([token]) for token in ids) == "a"
    assert decoder.finish().startswith("\ufffd")


def test_bytes_that_never_become_text_are_handed_out_and_cost_no_more(tokenizer: Tokenizer) -> None:
    (bad,) = {token for token in tokenizer.encode("\u20ac") if tokenizer.token_bytes(token) == b"\xe2"}
    decoder = IncrementalDecoder(tokenizer)
    text = "".join(decoder.push([bad]) for _ in range(300))
    assert set(text) == {"\ufffd"}
    assert len(decoder._window) < 100
    assert (text + decoder.push(tokenizer.encode("ab")) + decoder.finish()).endswith("b")


def test_special_tokens_are_hidden_unless_asked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path))
    end = tokenizer.vocab_size - 1
    ids = [*tokenizer.encode("ab"), end]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<end>"
    shown = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    assert "".join(shown.push([token]) for token in ids) == "ab<end>"


def test_special_tokens_can_be_kept_one_by_one(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, ["<end>", "<call>"])
    tokenizer = Tokenizer(tmp_path)
    ids = [*tokenizer.encode("a"), 257, 256, *tokenizer.encode("\u20ac"), 256, 257]
    for kept, text in (
        (["<call>", "b"], "a<call>\u20ac<call>"),
        (["<end>"], "a<end>\u20ac<end>"),
        ([], "a\u20ac"),
    ):
        decoder = IncrementalDecoder(tokenizer, kept_special_tokens=kept)
        assert "".join([*map(decoder.push, ([token] for token in ids)), decoder.finish()]) == text
    shown = IncrementalDecoder(tokenizer, skip_special_tokens=False, kept_special_tokens=["<call>"])
    assert shown.push(ids) == "a<call><end>\u20ac<end><call>"


def test_hidden_tokens_without_end_cost_no_more(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, ["<end>"])
    decoder = IncrementalDecoder(Tokenizer(tmp_path))
    assert decoder.push([104]) and not any(decoder.push([256]) for _ in range(500))
    assert len(decoder._window) < 100
    assert decoder.push([105]) == Tokenizer(tmp_path).decode([105])


def test_the_bytes_of_a_token_that_is_no_character(tokenizer: Tokenizer) -> None:
    parts = [tokenizer.token_bytes(token) for token in tokenizer.encode("\u20ac")]
    assert b"".join(parts)[-3:] == "\u20ac".encode()


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"add_bos_token": True, "bos_token": "<s>"}, ["<s>"]),
        ({"add_bos_token": True, "bos_token": {"content": "<s>"}}, ["<s>"]),
        ({"add_bos_token": False, "bos_token": "<s>"}, []),
        ({"bos_token": "<s>"}, []),
        ({"add_bos_token": True, "bos_token": None}, []),
        ({"add_bos_token": True, "bos_token": "<none>"}, []),
    ],
)
def test_a_text_begins_with_the_bos_token_that_the_settings_ask_for(
    tmp_path: Path, settings: dict[str, Any], first: list[str]
) -> None:
    byte_tokenizer(tmp_path, ["<s>"], **settings)
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.token(token) for token in tokenizer.encode("ab")] == [*first, "a", "b"]
    assert [tokenizer.token(token) for token in tokenizer.encode("ab", False)] == ["a", "b"]


def test_a_bos_token_that_tokenizer_json_adds_comes_once(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path, ["<s>"], add_bos_token=True, bos_token="<s>")
    file = str(tmp_path / "tokenizer.json")
    own = HFTokenizer.from_file(file)
    own.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    own.save(file)
    assert Tokenizer(tmp_path).encode("a")[:2] == [256, own.token_to_id("a")]


def test_a_lone_surrogate_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt"):
        tokenizer.encode("a\ud800b")


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def test_chat_uses_the_checkpoints_template(tmp_path: Path) -> None:
    path = write_byte_tokenizer(tmp_path, chat_template=TEMPLATE, bos_token={"content": "<end>"})
    tokenizer = Tokenizer(path)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert tokenizer.render(messages) == "<end>[user]hi\n[assistant]yes\n>"
    continued = tokenizer.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert continued == "<end>[user]hi\n[assistant]yes"
    assert tokenizer.chat(messages)[0] == tokenizer.vocab_size - 1


def test_special_tokens_of_the_tokenizer_cannot_be_set(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path, chat_template=TEMPLATE, bos_token="<end>"))
    with pytest.raises(RequestError, match="^chat_template_kwargs: 'bos_token' cannot be set$") as caught:
        tokenizer.chat([{"role": "user", "content": "hi"}], bos_token="<s>")
    assert caught.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("form", "content", "text"),
    [
        ("<im>{{ messages[0].content }}<im_end>", "i", "<im>i"),
        ("<im>{{ messages[0].content }}<im_end>", "def f():\n    ", "<im>def f():\n    "),
        ("<im>{{ messages[0].content|trim }}<im_end>", "yes \n", "<im>yes"),
    ],
    ids=["a word of the template", "spaces kept", "spaces trimmed"],
)
def test_a_continued_message_ends_where_transformers_ends_it(
    tmp_path: Path, form: str, content: str, text: str
) -> None:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path, chat_template=form))
    messages = [{"role": "assistant", "content": content}]
    assert tokenizer.render(messages, add_generation_prompt=False, continue_final_message=True) == text


@pytest.mark.parametrize("messages", [[], [{"role": "assistant"}], [{"role": "assistant", "content": " "}]])
def test_nothing_cannot_be_continued(tmp_path: Path, messages: list[dict[str, str]]) -> None:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path, chat_template="{{ messages[0].content }}"))
    with pytest.raises(RequestError, match="no content to continue"):
        tokenizer.render(messages, add_generation_prompt=False, continue_final_message=True)
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path, chat_template="fixed"))
    with pytest.raises(RequestError, match="leaves the last message out"):
        tokenizer.render([{"content": "a"}], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages|tojson(separators=(',',':'), sort_keys=true) }}", '[{"content":"é","role":"user"}]'),
        ("{{ messages[0].content|tojson(indent=2) }}", '"é"'),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aéb"),
        ("{{ messages[0].content if tools is none and documents is none }}", "é"),
    ],
    ids=["compact", "indented", "generation", "no tools"],
)
def test_what_templates_use_of_transformers_is_there(tmp_path: Path, template: str, text: str) -> None:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path, chat_template=template))
    assert tokenizer.render([{"role": "user", "content": "é"}]) == text


@pytest.mark.slow
@pytest.mark.parametrize("tools", [None, [{"name": "f"}]])
@pytest.mark.parametrize(
    "tool_use",
    [
        "\n [{{ tools | length }}]{{ [messages, tools] }}\n",
        "{% set x = 1 %}  \n{{ [x, messages, tools] }}",
        None,
    ],
)
@pytest.mark.parametrize("default", ["  {{ [messages, tools] }}  \n\n", "{{ [2, messages, tools] }}", None])
def test_a_named_template_is_that_of_requests_with_tools(
    tmp_path: Path, default: str | None, tool_use: str | None, tools: list[Any] | None
) -> None:
    """Its text is the same as alone, with all white space."""
    named = {"other": "x", "default": default, "tool_use": tool_use}
    listed = [{"name": name, "template": text} for name, text in named.items() if text is not None]
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path, chat_template=listed))
    wanted = (tool_use or default) if tools else (default or tool_use)
    if wanted is None:
        assert not tokenizer.has_chat_template
        return
    alone = Tokenizer(write_byte_tokenizer(tmp_path, chat_template=wanted))
    messages = [{"role": "user", "content": "hi"}]
    more = {"tools": tools} if tools else {}
    if "tools |" in wanted and not tools:
        with pytest.raises(RequestError, match="the chat template refuses"):
            tokenizer.render(messages, **more)
        return
    assert tokenizer.render(messages, **more) == alone.render(messages, **more)


@pytest.mark.slow
def test_the_template_file_wins_over_the_config_and_the_flag_over_both(tmp_path: Path) -> None:
    path = write_byte_tokenizer(tmp_path, chat_template="config")
    (path / "chat_template.jinja").write_text("file")
    assert Tokenizer(path).render([]) == "file"
    (tmp_path / "own.jinja").write_text("own")
    assert Tokenizer(path, tmp_path / "own.jinja").render([]) == "own"
    with pytest.raises(ConfigError, match="--chat-template"):
        Tokenizer(path, tmp_path / "none.jinja")
    (path / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(CheckpointError, match="chat_template.jinja: a chat template that is not UTF-8"):
        Tokenizer(path)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ ''.__class__.__mro__[1].__subclasses__() }}", id="escapes"),
        pytest.param("{{ messages.append(1) }}", id="changes its input"),
        pytest.param("{{ raise_exception('roles must alternate') }}", id="raises"),
        pytest.param("{{ messages[0].content.nothing.more }}", id="undefined", marks=pytest.mark.slow),
        pytest.param("{{ 1 / 0 }}", id="arithmetic", marks=pytest.mark.slow),
        pytest.param("{% for i in range(10**9) %}{% endfor %}", id="too long", marks=pytest.mark.slow),
        pytest.param(
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", id="too deep", marks=pytest.mark.slow
        ),
    ],
)
def test_a_template_that_misbehaves_is_a_request_error(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match="messages"):
        tokenizer.render([{"role": "user", "content": "x"}])


@pytest.mark.slow
def test_damage_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer(tmp_path)
    write_byte_tokenizer(tmp_path, chat_template="{% if %}")
    with pytest.raises(CheckpointError, match="chat template is damaged"):
        Tokenizer(tmp_path)
    for template in (5, {"default": "x"}, [{"name": "default", "template": 5}]):
        write_byte_tokenizer(tmp_path, chat_template=template)
        with pytest.raises(CheckpointError, match="chat_template: got .* allowed: a text"):
            Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        Tokenizer(tmp_path)


def test_no_template_is_a_request_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.chat([])


@pytest.mark.slow
def test_a_long_text_is_encoded_beside_other_threads(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_byte_tokenizer(tmp_path))
    text = "ab " * 400_000
    encoding = threading.Thread(target=tokenizer.encode, args=(text,))
    begun = now = time.monotonic()
    longest = 0.0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        last, now = now, time.monotonic()
        longest = max(longest, now - last)
    assert longest < (now - begun) / 2
