"""The grammars of forced calls: llguidance compiles them, accepts the syntax that each parser reads, and
nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.testing import byte_tokenizer
from moesaic.text.parsers.events import Arguments, CallEnd, CallStart, Content
from moesaic.text.parsers.grammar import write_grammar
from moesaic.text.parsers.table import CALLS, REASONING, Formats
from moesaic.text.structured.grammar import check, json_rule
from moesaic.text.structured.grammar import make_grammar as structured_grammar
from moesaic.text.tokenizer import Tokenizer

from .answers import (
    ANALYSIS,
    BERN,
    CALL,
    COMPLETE,
    GLM,
    HY3,
    HY3_PREVIEW,
    HY3_PREVIEW_TWO,
    HY3_TWO,
    INVOKE,
    KIMI,
    KIMIS,
    M3,
    M3_CALL,
    NOW,
    SECTION,
    TOOLS,
    V3,
    V31,
    XML,
)

HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {BERN}}}\n</tool_call>'
FORCED = {
    "hermes": (HERMES, f"{HERMES}\n{NOW}"),
    "qwen3_coder": (XML, f"{XML}\n{XML}"),
    "glm45": (GLM, f"{GLM}\n{GLM}"),
    "minimax_m2": tuple(
        "\n".join([f"<minimax:tool_call>\n{INVOKE}</minimax:tool_call>"] * count) for count in (1, 2)
    ),
    "minimax_m3": (M3.format(M3_CALL), M3.format(M3_CALL * 2)),
    "deepseek_v31": tuple((V31.format(BERN) * count).join(SECTION) for count in (1, 2)),
    "deepseek_v3": tuple("\n".join([V3.format(BERN)] * count).join(SECTION) for count in (1, 2)),
    "kimi_k2": tuple((KIMI.format(0, BERN) * count).join(KIMIS) for count in (1, 2)),
    "mistral": (f"[TOOL_CALLS]get_weather[ARGS]{BERN}", COMPLETE["mistral"].text),
    "hy_v3": (HY3, HY3_TWO),
    "hy_v3_preview": (HY3_PREVIEW, HY3_PREVIEW_TWO),
    "openai": (CALL.format(BERN).removeprefix("<|start|>assistant").removesuffix("<|call|>"), None),
}
"""One call, and two."""
MARKS = sorted(
    {mark for name in CALLS for mark in Formats(name).marks(()) if mark[0] in "<[]"} - {"<function="}
)


@pytest.fixture(scope="module", params=["special", "plain"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One whose marks are special tokens, and one that spells them."""
    path = tmp_path_factory.mktemp(request.param)
    byte_tokenizer(path, ["</s>", *(MARKS if request.param == "special" else ())])
    return Tokenizer(path)


def accepts(grammar: str, text: str, tokenizer: Tokenizer, path: Path) -> bool:
    """True if `text` is a whole answer of the grammar."""
    matcher = LLMatcher(LLTokenizer((path / "tokenizer.json").read_text(), eos_token=256), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.fixture
def path(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    byte_tokenizer(tmp_path, list(tokenizer.special_tokens))
    return tmp_path


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_answer_has_calls_and_nothing_else(name: str, tokenizer: Tokenizer, path: Path) -> None:
    one, two = FORCED[name]
    forced = write_grammar(CALLS[name], TOOLS, special=tokenizer.special_tokens)
    assert accepts(forced, one, tokenizer, path)
    assert not accepts(forced, f"So. {one}", tokenizer, path)
    assert not accepts(forced, f"{one}.", tokenizer, path)
    assert not accepts(forced, one.replace("get_weather", "get_time"), tokenizer, path)
    assert not accepts(forced, "", tokenizer, path)
    if two is not None:
        assert accepts(forced, two, tokenizer, path)
        single = write_grammar(CALLS[name], TOOLS, parallel=False, special=tokenizer.special_tokens)
        assert accepts(single, one, tokenizer, path) and not accepts(single, two, tokenizer, path)
    named = write_grammar(CALLS[name], TOOLS[1:], special=tokenizer.special_tokens)
    assert not accepts(named, one, tokenizer, path)


@pytest.mark.parametrize("name", FORCED)
def test_an_answer_has_calls_or_a_form(name: str, tokenizer: Tokenizer, path: Path) -> None:
    around = write_grammar(CALLS[name], TOOLS, special=tokenizer.special_tokens, or_form=True)
    form = StructuredOutputsParams(json={"enum": [7]}, around=around)
    check(form, tokenizer.special_tokens)
    either = structured_grammar(form, tokenizer.special_tokens)
    final = "<|channel|>final<|message|>" if name == "openai" else ""
    assert accepts(either, FORCED[name][0], tokenizer, path)
    assert accepts(either, f"{final}7", tokenizer, path)
    for wrong in (f"{final}8", f"{FORCED[name][0]}7", "So."):
        assert not accepts(either, wrong, tokenizer, path)


@pytest.mark.parametrize("name", FORCED)
def test_forced_arguments_follow_the_schema(name: str, tokenizer: Tokenizer, path: Path) -> None:
    one = FORCED[name][0]
    forced = write_grammar(CALLS[name], TOOLS, special=tokenizer.special_tokens)
    wrong = (
        one.replace('"days": 2', '"days": "two"')
        .replace("\n2\n", "\ntwo\n")
        .replace(">2</arg", ">two</arg")
        .replace(">2</par", ">two</par")
        .replace(">2]<]", ">two]<]")
    )
    assert wrong != one and not accepts(forced, wrong, tokenizer, path)
    missing = one.replace('"city": "Bern", ', "").replace("<parameter=city>\nBern\n</parameter>\n", "")
    argument = "<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    missing = missing.replace(argument, "").replace(argument.replace(">", ":opensource>"), "")
    missing = missing.replace('<parameter name="city">Bern</parameter>\n', "")
    missing = missing.replace("]<]minimax[>[<city>Bern]<]minimax[>[</city>", "")
    assert missing != one and not accepts(forced, missing, tokenizer, path)


@pytest.mark.parametrize("name", FORCED)
def test_the_parser_reads_what_its_grammar_allows(name: str) -> None:
    for text in filter(None, FORCED[name]):
        parser = Formats(name).parser(TOOLS, False)
        assert parser is not None
        events = [*parser.push(text), *parser.finish()]
        assert not any(isinstance(event, Content) for event in events)
        assert any(isinstance(event, CallEnd) for event in events)
        begun = [event for event in events if isinstance(event, CallStart)]
        said = "".join(e.text for e in events if isinstance(e, Arguments) and e.index == begun[0].index)
        assert json.loads(said) == json.loads(BERN)


@pytest.mark.parametrize("name", FORCED)
def test_reasoning_may_come_before(name: str, tokenizer: Tokenizer, path: Path) -> None:
    one = FORCED[name][0]
    if name == "openai":
        forced = write_grammar(CALLS[name], TOOLS, special=tokenizer.special_tokens)
        assert accepts(forced, f"{ANALYSIS}<|start|>assistant{one}", tokenizer, path)
        return
    tags = REASONING["qwen3"]
    may, must = (
        write_grammar(CALLS[name], TOOLS, tags=tags, in_reasoning=inside, special=tokenizer.special_tokens)
        for inside in (False, True)
    )
    assert accepts(may, one, tokenizer, path)
    assert accepts(may, f"<think>\nA call?\n</think>\n\n{one}", tokenizer, path)
    assert accepts(must, f"\nA call?\n</think>\n\n{one}", tokenizer, path)
    assert not accepts(must, one, tokenizer, path) and not accepts(may, f"x</think>{one}", tokenizer, path)


@pytest.mark.parametrize("name", ["hermes", "openai", "qwen3_coder"])
def test_white_space_in_arguments_is_bounded(name: str, tokenizer: Tokenizer, path: Path) -> None:
    schema = {"type": "object", "properties": {"where": {"type": "object"}}, "required": ["where"]}
    tools = ({"type": "function", "function": {"name": "f", "parameters": schema}},)
    forced = write_grammar(CALLS[name], tools, special=tokenizer.special_tokens, json_rule=json_rule)
    text = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"where": {__}}}\n</tool_call>',
        "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + '{"where": {__}}',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=where>\n{__}\n</parameter>\n"
        "</function>\n</tool_call>",
    }[name]
    assert accepts(forced, text.replace("__", "\n  "), tokenizer, path)
    assert not accepts(forced, text.replace("__", "\n\n"), tokenizer, path)
    assert not accepts(forced, text.replace("__", "  "), tokenizer, path)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"json": {"type": "object"}}, '{"a": 1}'),
        ({"regex": "[ab]+"}, "abba"),
        ({"choice": ["yes", "no"]}, "yes"),
        ({"grammar": 'start: one\none: "1"'}, "1"),
    ],
)
def test_any_form_may_come_after_reasoning(
    form: dict[str, object], text: str, tokenizer: Tokenizer, path: Path
) -> None:
    special = tokenizer.special_tokens
    for formats, inside, before in (
        (Formats(reasoning="qwen3"), False, "<think>\nHm {a\n</think>\n\n"),
        (Formats(reasoning="qwen3"), False, ""),
        (Formats(reasoning="qwen3"), True, "Hm {a\n</think>\n\n"),
        (
            Formats(reasoning="openai_gptoss"),
            False,
            f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>",
        ),
    ):
        around = formats.after_reasoning(inside, special)
        params = StructuredOutputsParams.from_mapping(form | {"around": around})
        check(params, special)
        whole = structured_grammar(params, special)
        assert accepts(whole, before + text, tokenizer, path)
        assert not accepts(whole, before + text + "!", tokenizer, path)
        assert not accepts(whole, f"{before}!{text}", tokenizer, path)
    assert Formats().after_reasoning(True, special) == ""


def test_choices_among_texts_are_forced_in_xml(tokenizer: Tokenizer, path: Path) -> None:
    schema = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    tools = ({"type": "function", "function": {"name": "f", "parameters": schema}},)
    forced = write_grammar(CALLS["qwen3_coder"], tools, special=tokenizer.special_tokens)
    text = "<tool_call>\n<function=f>\n<parameter=unit>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert accepts(forced, text.format("C"), tokenizer, path)
    assert not accepts(forced, text.format("K"), tokenizer, path)


def test_nested_values_are_forced_in_elements(tokenizer: Tokenizer, path: Path) -> None:
    """Elements where they say all that a schema says, else JSON."""
    tree = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        },
        "required": ["name"],
    }
    schema = {
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/tree"},
            "few": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "any": {"type": "object"},
        },
        "$defs": {"tree": tree},
    }
    tools = ({"type": "function", "function": {"name": "f", "parameters": schema}},)
    forced = write_grammar(CALLS["minimax_m3"], tools, special=tokenizer.special_tokens)
    call = M3.format('~<invoke name="f">{}~</invoke>\n')
    for text, is_allowed in (
        ("", True),
        ("~<tree>~<name>a~</name>~</tree>", True),
        ("~<tree>~<name>a~</name>~<kids>~</kids>~</tree>", True),
        ('~<tree>~<name>a~</name>~<kids>~<item>{"name": "b"}~</item>~</kids>~</tree>', True),
        ("~<tree>~<kids>~</kids>~</tree>", False),
        ("~<few>[1, 2]~</few>", True),
        ("~<few>[1, 2, 3]~</few>", False),
        ('~<any>{"a": 1}~</any>', True),
        ("~<any>1~</any>", False),
    ):
        answer = call.format(text).replace("~", "]<]minimax[>[")
        assert accepts(forced, answer, tokenizer, path) is is_allowed, text
        if is_allowed:
            parser = Formats("minimax_m3").parser(tools, False)
            assert parser is not None
            events = [*parser.push(answer), *parser.finish()]
            arguments = "".join(event.text for event in events if isinstance(event, Arguments))
            assert jsonschema_rs.is_valid(schema, json.loads(arguments)), text
