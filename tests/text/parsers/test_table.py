"""Which parser a chat template, or a name, gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moesaic.core.errors import ConfigError
from moesaic.text.parsers.table import CALLS, REASONING, check_parsers, detect_formats

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ messages }}", None, None),
        ('Tools: <tool_call>\n{"name": <function-name>}\n</tool_call>', "hermes", None),
        ("'\\n<tool_call>\\n{\"name\": \"' ... '<think>\\n'", "hermes", "qwen3"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=a>", "qwen3_coder", None),
        ("<tool_call>\n<parameter=example_parameter_1>value_1</parameter> <function=", "mimo", None),
        ("<tool_call>\n<function=f>\n<parameter=a>{{ '<think>\\n' }}", "qwen3_coder", "qwen3"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key><think></think>", "glm45", "qwen3"),
        ("<|channel|>analysis<|message|> namespace functions {", "openai", "openai_gptoss"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '\\n' + '```json'", "deepseek_v3", None),
        (
            "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name '<think>' '</think>'",
            "deepseek_v31",
            "qwen3",
        ),
        ("<|tool_calls_section_begin|> <think></think>", "kimi_k2", "qwen3"),
        ("set toolcall_begin_token = '<minimax:tool_call>' <invoke name= '<think>'", "minimax_m2", "qwen3"),
        ("'<minimax:tool_call>' '<mm:think>' '</mm:think>' '<think>'", "minimax_m2", "minimax_m3"),
        ("set ns_token = ']<]minimax[>[' '<tool_call>' '<mm:think>'", "minimax_m3", "minimax_m3"),
        ("HYTK = ':opensource' '<think{}>' '<tool_calls{}>' '<tool_sep{}>'", "hy_v3", "hy_v3"),
        ("HYTK = '' '<think{}>' '<tool_calls{}>' '<tool_sep{}>'", "hy_v3_preview", "hy_v3_preview"),
        ("'<think>' '<tool_calls>' '<tool_call>' '<tool_sep>'", "hy_v3_preview", "hy_v3_preview"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]", "mistral", "mistral"),
    ],
)
def test_a_template_tells_the_parsers(template: str, calls: str | None, reasoning: str | None) -> None:
    found = detect_formats(template + TOOLS)
    assert (found.calls, found.reasoning, found.takes_tools) == (calls, reasoning, True)
    assert not detect_formats(template).takes_tools
    other = detect_formats(template, "none", "none")
    assert (other.calls, other.reasoning) == (None, None)
    named = detect_formats(template, "kimi_k2", "deepseek_r1")
    assert (named.calls, named.reasoning) == ("kimi_k2", "deepseek_r1")


def test_a_template_tells_how_the_tags_of_hy3_are_spelled() -> None:
    for suffix, name in ((":opensource", "hy_v3"), ("", "hy_v3_preview")):
        template = f"'<think{suffix}>' '<tool_calls{suffix}>' '<tool_sep{suffix}>'"
        formats = detect_formats(template, "hy_v3", "hy_v3")
        assert (formats.calls, formats.reasoning) == (name, name)
    other = detect_formats("{{ messages }}", "hy_v3", "hy_v3")
    assert (other.calls, other.reasoning) == ("hy_v3", "hy_v3")


def test_a_model_without_a_template() -> None:
    assert detect_formats(None).parser((), False) is None


@pytest.mark.parametrize(
    ("template", "as_text"),
    [
        ("'<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'", True),
        ("tool['function']['arguments'] + '\\n' + '```'", True),
        ("tool['function']['arguments'] | tojson + '\\n'", False),
        ("tool_call.arguments | tojson", False),
        ("tool.function.arguments+'x'", True),
        ("'>>>' + tool_call['function']['name'] + '\\n' + tool_call['function']['arguments'] }}", True),
        ("{{ name + '[ARGS]' + arguments }}", True),
        ("{% if arguments is not string %} arguments|tojson {% endif %}{{ '[ARGS]' + arguments }}", False),
        ("'{\"arguments\": ' + tool_call.arguments | tojson + '}'", False),
    ],
)
def test_templates_that_join_arguments_get_texts(template: str, as_text: bool) -> None:
    assert detect_formats(template).text_arguments is as_text


def test_names_are_checked() -> None:
    for name in CALLS:
        check_parsers(name, "auto")
    for name in REASONING:
        check_parsers("none", name)
    with pytest.raises(ConfigError, match="--tool-call-parser: got 'llama'; allowed: auto, none, hermes"):
        check_parsers("llama", "auto")
    with pytest.raises(
        ConfigError, match="--reasoning-parser: got 'hermes'; allowed: auto, none, deepseek_r1"
    ):
        check_parsers("hermes", "hermes")


def test_the_documentation_names_every_parser() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    begin = page.index("| the template contains | `--tool-call-parser`")
    tables = page[begin:].partition("\nA model whose")[0].split("\n\n")
    calls, reasoning = (set(re.findall(r"`([a-z0-9_]+)`", table)) for table in tables)
    assert set(CALLS) <= calls and set(REASONING) <= reasoning
    assert {name for name in calls if "_" in name} <= set(CALLS)


def test_the_pages_name_no_family_without_a_parser() -> None:
    """A family in the table has a parser."""
    root = Path(__file__).parents[3]
    page = (root / "docs" / "serving.md").read_text(encoding="utf-8")
    table = page[page.index("| the template contains | `--tool-call-parser`") :].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        _, _, names, models, _ = re.split(r"(?<!\\)\|", row)
        parsers = set(re.findall(r"`(\w+)`", names))
        assert parsers and parsers <= set(CALLS) and models.strip(), row
