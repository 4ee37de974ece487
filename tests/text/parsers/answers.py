"""Texts of answers, and what they mean: one example or more for each syntax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "metric": {"type": "boolean"},
                    "where": {"$ref": "#/$defs/place"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["city"],
                "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
)


@dataclass(frozen=True)
class Answer:
    """An answer as a model writes it, and what a client should see."""

    parser: str
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and JSON text of the arguments of each call."""
    content: str = ""
    reasoning: str = ""
    reasoning_parser: str = "none"
    inside: bool = False
    ids: tuple[str | None, ...] | None = None


CITY = '{"city": "Bern \\"<tool_call>\\" {[", "days": 2}'
BROKEN_CITY = '{"city": "Bern, "days": 2}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
RAW_LINES = '{\n\t"city": "a\nb\t\\"c\\" \\\\",\n"days": 2}'
ESCAPED_LINES = '{\n\t"city": "a\\nb\\t\\"c\\" \\\\",\n"days": 2}'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
INVOKE = (
    '<invoke name="get_weather">\n<parameter name="city">Bern</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n'
)
V31 = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜>"
SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
KIMI = "<|tool_call_begin|>functions.get_weather:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMIS = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
ANALYSIS = "<|channel|>analysis<|message|>Think.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{}<|call|>"
)
HY3_CALL = (
    "<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
HY3 = (f"<tool_calls>\n{HY3_CALL}\n</tool_calls>").replace(">", ":opensource>")
HY3_PREVIEW, HY3_PREVIEW_TWO = (
    f"<tool_calls>\n{calls}\n</tool_calls>" for calls in (HY3_CALL, f"{HY3_CALL}\n{HY3_CALL}")
)
HY3_TWO = (f"<tool_calls>\n{HY3_CALL}\n{HY3_CALL}\n</tool_calls>").replace(">", ":opensource>")
M3_CALL = '~<invoke name="get_weather">~<city>Bern~</city>~<days>2~</days>~</invoke>\n'.replace(
    "~", "]<]minimax[>["
)
M3 = "]<]minimax[>[<tool_call>\n{}]<]minimax[>[</tool_call>"
BERN = '{"city": "Bern", "days": 2}'
WEATHER = (("get_weather", BERN),)
GPT = {"reasoning_parser": "openai_gptoss"}

COMPLETE = {
    "hermes": Answer("hermes", HERMES, (("get_weather", CITY),)),
    "hermes after content": Answer("hermes", f"I look.\n\n{NOW}", (("now", "{}"),), "I look."),
    "hermes two": Answer("hermes", f"{HERMES}\n{NOW}", (("get_weather", CITY), ("now", "{}"))),
    "hermes and content": Answer("hermes", f"{NOW}\n\nDone. ", (("now", "{}"),), "\n\nDone. "),
    "hermes arguments first": Answer(
        "hermes",
        '<tool_call>{"id": [1], "arguments": {"a": 1}, "name": "f"}</tool_call>',
        (("f", '{"a": 1}'),),
    ),
    "hermes further keys": Answer(
        "hermes",
        '<tool_call>{"name": "f", "parameters": {"a": 1}, "id": 7}</tool_call>x',
        (("f", '{"a": 1}'),),
        "x",
    ),
    "hermes encoded twice": Answer(
        "hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', (("f", '{"a": 1}'),)
    ),
    "hermes raw lines": Answer("hermes", HERMES.replace(CITY, RAW_LINES), (("get_weather", ESCAPED_LINES),)),
    "hermes raw lines first": Answer(
        "hermes",
        f'<tool_call>{{"arguments": {RAW_LINES}, "name": "f"}}</tool_call>',
        (("f", ESCAPED_LINES),),
    ),
    "mistral raw lines": Answer("mistral", f"[TOOL_CALLS]f[ARGS]{RAW_LINES}", (("f", ESCAPED_LINES),)),
    "kimi_k2 raw lines": Answer(
        "kimi_k2",
        KIMIS[0] + KIMI.format(0, RAW_LINES) + KIMIS[1],
        (("get_weather", ESCAPED_LINES),),
        ids=("functions.get_weather:0",),
    ),
    "kimi_k2 section misspelled": Answer(
        "kimi_k2",
        f"<|tool_call_section_begin|>{KIMI.format(0, '{}')}<|tool_call_section_end|>",
        (("get_weather", "{}"),),
        ids=("functions.get_weather:0",),
    ),
    "kimi_k2 misspelled section in the text": Answer(
        "kimi_k2", "A <|tool_call_section_begin|> is.", (), "A <|tool_call_section_begin|> is."
    ),
    "openai raw lines": Answer(
        "openai",
        ANALYSIS + CALL.format(RAW_LINES),
        (("get_weather", ESCAPED_LINES),),
        reasoning="Think.",
        reasoning_parser="openai_gptoss",
    ),
    "hermes null": Answer(
        "hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', (("f", "{}"),)
    ),
    "hermes none": Answer("hermes", '<tool_call>{"name": "f"}</tool_call>', (("f", "{}"),)),
    "hermes no end tag": Answer("hermes", '<tool_call>{"name": "f", "arguments": {}}', (("f", "{}"),)),
    "hermes a brace too few": Answer(
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', (("f", '{"a": 1}'),)
    ),
    "qwen3_coder": Answer("qwen3_coder", XML, WEATHER),
    "qwen3_coder two": Answer("qwen3_xml", f"Now:\n{XML}\n{XML}", WEATHER * 2, "Now:"),
    "qwen3_coder two in one": Answer(
        "qwen3_coder",
        XML.replace("</tool_call>", "<function=now>\n</function></tool_call>!"),
        (*WEATHER, ("now", "{}")),
        "!",
    ),
    "qwen3_coder first tag missing": Answer("qwen3_coder", XML.removeprefix("<tool_call>\n"), WEATHER),
    "qwen3_coder lines": Answer(
        "qwen3_coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\n\na </parameter> "b"\n</parameter>\nc\n\n'
        "</parameter>\n</function>\n</tool_call>",
        (("get_weather", '{"city": "\\na </parameter> \\"b\\"\\n</parameter>\\nc\\n"}'),),
    ),
    "qwen3_coder types": Answer(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=metric>True</parameter>"
        '<parameter=where>{"lat": 1.50}</parameter><parameter=note>null</parameter>'
        "<parameter=new>7</parameter><parameter=days>two</parameter><parameter=city></parameter></function></tool_call>",
        (
            (
                "get_weather",
                '{"metric": true, "where": {"lat": 1.50}, "note": null, "new": 7, "days": "two", "city": ""}',
            ),
        ),
    ),
    "glm45": Answer("glm45", GLM, WEATHER),
    "glm47": Answer("glm47", GLM.replace("\n", "") + "<tool_call>now</tool_call>", (*WEATHER, ("now", "{}"))),
    "glm tags in a value": Answer(
        "glm45",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a</arg_value><arg_key></arg_value></tool_call>",
        (("get_weather", '{"city": "a</arg_value><arg_key>"}'),),
    ),
    "minimax_m2": Answer("minimax_m2", f"<minimax:tool_call>\n{INVOKE}</minimax:tool_call>", WEATHER),
    "minimax_m2 two": Answer(
        "minimax_m2",
        f"Hm.\n<minimax:tool_call>\n{INVOKE}{INVOKE}</minimax:tool_call>\n",
        WEATHER * 2,
        "Hm.\n",
    ),
    "minimax_m3": Answer("minimax_m3", M3.format(M3_CALL), WEATHER),
    "minimax_m3 two": Answer("minimax_m3", f"Hm.\n{M3.format(M3_CALL * 2)}\n", WEATHER * 2, "Hm.\n"),
    "minimax_m3 nested": Answer(
        "minimax_m3",
        M3.format(
            '~<invoke name="get_weather">~<where>~<lat>1.5~</lat>~<of>~<item>a~</item>~<item>~<on>true~</on>'
            "~</item>~</of>~</where>~<note>~</note>~</invoke>\n"
        ).replace("~", "]<]minimax[>["),
        (("get_weather", '{"where": {"lat": 1.5, "of": ["a", {"on": true}]}, "note": ""}'),),
    ),
    "minimax_m3 keys like tags": Answer(
        "minimax_m3",
        M3.format(
            '~<invoke name="get_weather">~<where>~<tool_call>1~</tool_call>'
            "~<invoke>~<item>a~</item>~</invoke>~</where>~</invoke>"
        ).replace("~", "]<]minimax[>["),
        (("get_weather", '{"where": {"tool_call": 1, "invoke": ["a"]}}'),),
    ),
    "minimax_m3 JSON in an element": Answer(
        "minimax_m3",
        M3.format(M3_CALL.replace("days>2", 'where>{"lat": [1]}').replace("days", "where")),
        (("get_weather", '{"city": "Bern", "where": {"lat": [1]}}'),),
    ),
    "mimo": Answer(
        "mimo",
        "<tool_call><function=get_weather><parameter=city>\nBern\n</parameter></function></tool_call>",
        (("get_weather", '{"city": "\\nBern\\n"}'),),
    ),
    "hy_v3": Answer("hy_v3", HY3, WEATHER),
    "hy_v3_preview": Answer("hy_v3_preview", HY3_PREVIEW, WEATHER),
    "hy_v3_preview reasoning": Answer(
        "hy_v3_preview",
        f"So.</think>Yes.{HY3_PREVIEW_TWO}",
        WEATHER * 2,
        "Yes.",
        "So.",
        "hy_v3_preview",
        True,
    ),
    "hy_v3_preview in open reasoning": Answer(
        "hy_v3_preview", f"So.\n{HY3_PREVIEW}", WEATHER, "", "So.", "hy_v3_preview", True
    ),
    "hy_v3 two": Answer("hy_v3", f"So.\n{HY3_TWO}.", WEATHER * 2, "So.."),
    "hy_v3 reasoning": Answer(
        "hy_v3", f"So.</think:opensource>Yes.{HY3}", WEATHER, "Yes.", "So.", "hy_v3", True
    ),
    "deepseek_v31": Answer("deepseek_v31", V31.format(BERN).join(SECTION), WEATHER),
    "deepseek_v31 two": Answer(
        "deepseek_v31",
        "Look." + (V31.format(BERN) + V31.format("")).join(SECTION),
        (*WEATHER, ("get_weather", "{}")),
        "Look.",
    ),
    "deepseek_v3": Answer("deepseek_v3", V3.format(BERN).join(SECTION), WEATHER),
    "deepseek_v3 two": Answer(
        "deepseek_v3", (V3.format(BERN) + "\n" + V3.format(BERN)).join(SECTION) + ".", WEATHER * 2, "."
    ),
    "kimi_k2": Answer(
        "kimi_k2",
        "Ok." + (KIMI.format(0, BERN) + KIMI.format(1, " {} ")).join(KIMIS),
        (*WEATHER, ("get_weather", "{}")),
        "Ok.",
        ids=("functions.get_weather:0", "functions.get_weather:1"),
    ),
    "mistral": Answer(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {BERN}}}, '
        '{"name": "now", "arguments": {}}]',
        (*WEATHER, ("now", "{}")),
    ),
    "mistral new": Answer(
        "mistral",
        f"So.[TOOL_CALLS]get_weather[ARGS]{BERN}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}",
        (*WEATHER, ("now", "{}")),
        "So.",
        ids=(None, "abc"),
    ),
    "mistral bare": Answer("mistral", f"[TOOL_CALLS]get_weather{BERN}", WEATHER),
    "harmony": Answer("openai", ANALYSIS + CALL.format(BERN), WEATHER, "", "Think.", **GPT),
    "harmony stopped": Answer(
        "openai", (ANALYSIS + CALL.format(BERN)).removesuffix("<|call|>"), WEATHER, "", "Think.", **GPT
    ),
    "harmony recipient first": Answer(
        "openai", " to=functions.now<|channel|>commentary json<|message|>", (("now", "{}"),), **GPT
    ),
    "harmony final": Answer(
        "openai",
        f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hello. <|return|>",
        (),
        "Hello. ",
        "Think.",
        **GPT,
    ),
    "harmony preamble": Answer(
        "openai",
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant{ANALYSIS}{CALL.format(BERN)}",
        WEATHER,
        "I look.",
        "Think.\nThink.",
        **GPT,
    ),
    "harmony without ends": Answer(
        "openai",
        "<|channel|>analysis<|message|>Think.<|channel|>final<|message|>Hello",
        (),
        "Hello",
        "Think.",
        **GPT,
    ),
    "harmony without reasoning": Answer("openai", ANALYSIS + CALL.format(BERN), WEATHER, "Think."),
    "think": Answer(
        "hermes",
        f"<think>\nIs it <tool_call>?\n</think>\n\nYes.\n{NOW}",
        (("now", "{}"),),
        "Yes.",
        "Is it <tool_call>?",
        "qwen3",
    ),
    "think opened": Answer("hermes", "\nSo.\n</think>\n\nYes.", (), "Yes.", "So.", "qwen3", True),
    "think opened twice": Answer("hermes", "\n<think>So.</think>Yes.", (), "Yes.", "So.", "qwen3", True),
    "think always": Answer("hermes", "So.</think>Yes.", (), "Yes.", "So.", "deepseek_r1"),
    "think later": Answer("hermes", "No <think>So.</think> ", (), "No <think>So.</think> ", "", "qwen3"),
    "think unclosed": Answer("hermes", "<think>So. ", (), "", "So. ", "qwen3"),
    "think until a call": Answer(
        "kimi_k2",
        "<think>So.\n" + KIMI.format(0, BERN).join(KIMIS),
        WEATHER,
        "",
        "So.",
        "kimi_k2",
        ids=("functions.get_weather:0",),
    ),
    "think until xml": Answer("qwen3_coder", f"So.\n\n{XML}", WEATHER, "", "So.", "qwen3", True),
    "think empty": Answer("glm45", f"\n<think></think>\n{GLM}", WEATHER, "", "", "glm45"),
    "think mistral": Answer("mistral", "[THINK]So.[/THINK]Yes", (), "Yes", "So.", "mistral"),
}

DAMAGED = {
    "qwen3_coder value open before a key": Answer(
        "qwen3_coder", XML.replace("Bern\n</parameter>", "Bern"), WEATHER
    ),
    "qwen3_coder value open before a key on the same line": Answer(
        "qwen3_coder", XML.replace("\nBern\n</parameter>\n", "Bern"), WEATHER
    ),
    "qwen3_coder last value open": Answer("qwen3_coder", XML.replace("2\n</parameter>", "2"), WEATHER),
    "qwen3_coder last value open, then more": Answer(
        "qwen3_coder",
        XML.replace("2\n</parameter>", "2") + f"\n{XML}\nDone.",
        WEATHER * 2,
        "\nDone.",
    ),
    "qwen3_coder function open": Answer("qwen3_coder", XML.replace("</function>\n", ""), WEATHER),
    "qwen3_coder function open, then more": Answer(
        "qwen3_coder",
        XML.replace("</function>\n", "") + f"\n{XML}\nDone.",
        WEATHER * 2,
        "\nDone.",
    ),
    "qwen3_coder value and function open": Answer(
        "qwen3_coder", XML.replace("</parameter>\n</function>\n", "") + f"\n{XML}", WEATHER * 2
    ),
    "qwen3_coder value and function open, then text": Answer(
        "qwen3_coder", XML.replace("2\n</parameter>\n</function>", "2") + "\nDone.", WEATHER, "\nDone."
    ),
    "qwen3_coder everything open before the next": Answer(
        "qwen3_coder", XML.replace("\n</function>\n</tool_call>", "") + f"\n{XML}", WEATHER * 2
    ),
    "qwen3_coder ends behind a value": Answer("qwen3_coder", XML.partition("</function>")[0], WEATHER),
    "qwen3_coder ends in a value": Answer(
        "qwen3_coder", XML.partition("\n</parameter>")[0], (("get_weather", '{"city": "Bern"}'),)
    ),
    "qwen3_coder garbled end tag": Answer(
        "qwen3_coder", XML.replace("Bern\n</parameter>", "Bern\n</parameter1>"), WEATHER
    ),
    "qwen3_coder tags in a value": Answer(
        "qwen3_coder",
        XML.replace("Bern", "a </function> b </tool_call> c <parameter=x> d </parameter> e"),
        (
            (
                "get_weather",
                '{"city": "a </function> b </tool_call> c <parameter=x> d </parameter> e", "days": 2}',
            ),
        ),
    ),
    "minimax_m2 value open before a key": Answer(
        "minimax_m2",
        f"<minimax:tool_call>\n{INVOKE.replace('Bern</parameter>', 'Bern')}</minimax:tool_call>",
        WEATHER,
    ),
    "minimax_m2 everything open": Answer(
        "minimax_m2",
        f"<minimax:tool_call>\n{INVOKE.replace('2</parameter>', '2').replace('</invoke>', '')}"
        f"</minimax:tool_call>\n<minimax:tool_call>\n{INVOKE}</minimax:tool_call>",
        WEATHER * 2,
    ),
    "glm value open before a key": Answer("glm45", GLM.replace("Bern</arg_value>", "Bern"), WEATHER),
    "glm last value open": Answer("glm45", GLM.replace("2</arg_value>", "2"), WEATHER),
    "glm value not opened": Answer("glm45", GLM.replace("<arg_value>Bern", "Bern"), WEATHER),
    "glm key not closed": Answer("glm45", GLM.replace("city</arg_key>\n", "city"), WEATHER),
    "glm key not opened": Answer("glm45", GLM.replace("\n<arg_key>city", "city"), WEATHER),
    "glm key not opened, space": Answer("glm45", GLM.replace("\n<arg_key>city", " city"), WEATHER),
    "minimax_m3 value open before a key": Answer(
        "minimax_m3", M3.format(M3_CALL.replace("]<]minimax[>[</city>", "")), WEATHER
    ),
    "minimax_m3 everything open": Answer(
        "minimax_m3",
        M3.format(M3_CALL.replace("]<]minimax[>[</days>]<]minimax[>[</invoke>", "") + M3_CALL),
        WEATHER * 2,
    ),
    "minimax_m3 object open before a key": Answer(
        "minimax_m3",
        M3.format('~<invoke name="get_weather">~<where>~<lat>1~</lat>~<city>7~</city>~</invoke>').replace(
            "~", "]<]minimax[>["
        ),
        (("get_weather", '{"where": {"lat": 1}, "city": "7"}'),),
    ),
    "minimax_m3 block not opened": Answer("minimax_m3", M3_CALL, WEATHER, "\n"),
    "minimax_m3 garbled end tag": Answer(
        "minimax_m3", M3.format(M3_CALL.replace("</city>", "</ciy>")), WEATHER
    ),
    "minimax_m3 space behind a prefix": Answer(
        "minimax_m3", M3.format(M3_CALL).replace("[>[<", "[>[ <"), WEATHER
    ),
    "minimax_m3 a key twice": Answer(
        "minimax_m3",
        M3.format('~<invoke name="get_weather">~<where>~<a>1~</a>~<a>x~</a>~</where>~</invoke>').replace(
            "~", "]<]minimax[>["
        ),
        (("get_weather", '{"where": {"a": [1, "x"]}}'),),
    ),
    "minimax_m3 text before the end of a block": Answer(
        "minimax_m3", M3.format(f"{M3_CALL}So."), WEATHER, "\nSo."
    ),
    "minimax_m3 text behind an end tag": Answer(
        "minimax_m3",
        M3.format(M3_CALL.replace("</city>", "</city>, CH")),
        (("get_weather", '{"city": "Bern]<]minimax[>[</city>, CH", "days": 2}'),),
    ),
    "minimax_m3 call and block open before the next": Answer(
        "minimax_m3",
        M3.format(M3_CALL).partition("]<]minimax[>[</invoke>")[0] + f"\n{M3.format(M3_CALL)}",
        WEATHER * 2,
    ),
    "minimax_m3 in open reasoning": Answer(
        "minimax_m3", f"So.{M3.format(M3_CALL)}", WEATHER, "", "So.", "minimax_m3", True
    ),
    "hy_v3 in open reasoning": Answer("hy_v3", f"So.\n{HY3}", WEATHER, "", "So.", "hy_v3", True),
    "hy_v3 value open": Answer("hy_v3", HY3.replace("Bern</arg_value:opensource>", "Bern"), WEATHER),
    "hy_v3 call open": Answer("hy_v3", HY3.replace("</tool_call:opensource>\n", ""), WEATHER),
    "hermes in open reasoning": Answer("hermes", f"So.\n\n{NOW}", (("now", "{}"),), "", "So.", "qwen3", True),
    "hermes named in reasoning": Answer(
        "hermes",
        f"So {NOW.replace('now', 'later')}</think>{NOW}",
        (("now", "{}"),),
        "",
        f"So {NOW.replace('now', 'later')}",
        "qwen3",
        True,
    ),
    "glm in open reasoning": Answer("glm45", f"So.\n{GLM}", WEATHER, "", "So.", "glm45", True),
    "xml in open reasoning": Answer(
        "qwen3_coder",
        "So.<tool_call><function=now></function></tool_call>",
        (("now", "{}"),),
        "",
        "So.",
        "qwen3",
        True,
    ),
    "xml without its first tag in open reasoning": Answer(
        "qwen3_coder", "So.\n<function=now>\n</function>", (("now", "{}"),), "", "So.", "qwen3", True
    ),
    "minimax_m2 in open reasoning": Answer(
        "minimax_m2",
        f"So.<minimax:tool_call>\n{INVOKE}</minimax:tool_call>",
        WEATHER,
        "",
        "So.",
        "minimax_m2",
        True,
    ),
    "hermes brackets missing": Answer(
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>.', (("f", '{"a": 1}'),), "."
    ),
    "hermes ends without its brackets": Answer(
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": [{"b": 1', (("f", '{"a": [{"b": 1}]}'),)
    ),
    "hermes bracket too many": Answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}\n}\n</tool_call>.',
        (("f", '{"a": 1}'),),
        ".",
    ),
    "hermes call open before the next": Answer(
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": 1\n{NOW}',
        (("f", '{"a": 1}'), ("now", "{}")),
    ),
    "hermes two in one block": Answer(
        "hermes",
        HERMES.replace("\n</", '\n{"name": "now", "arguments": null}\n</') + ".",
        (("get_weather", CITY), ("now", "{}")),
        ".",
    ),
    "hermes a call and a broken one in one block": Answer(
        "hermes",
        NOW.replace("\n</", '\n{"name": "now", "arguments": 1}\n</') + NOW,
        (("now", "{}"), ("now", "{}")),
        '\n{"name": "now", "arguments": 1}\n</tool_call>',
    ),
    "hermes a broken call before a sound one": Answer(
        "hermes",
        f"{NOW.replace('{}', '{x}')}\n{NOW}",
        (("now", "{}"),),
        NOW.replace("{}", "{x}"),
    ),
    "hermes a quotation mark missing before a sound call": Answer(
        "hermes",
        f"{HERMES.replace(CITY, BROKEN_CITY)}\n{NOW}",
        (("now", "{}"),),
        HERMES.replace(CITY, BROKEN_CITY),
    ),
    "hermes as Python writes it": Answer(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": True, "b": [None, False]}}</tool_call>',
        (("f", '{"a": true, "b": [null, false]}'),),
    ),
    "hermes backslashes": Answer(
        "hermes",
        r'<tool_call>{"name": "f", "arguments": {"a": "\d\\.\"\u00e9 \users \$"}}</tool_call>',
        (("f", r'{"a": "\\d\\.\"\u00e9 \\users \\$"}'),),
    ),
    "mistral ends without its brackets": Answer(
        "mistral", '[TOOL_CALLS]f[ARGS]{"a": [1[TOOL_CALLS]now[ARGS]{', (("f", '{"a": [1]}'), ("now", "{}"))
    ),
    "mistral ends with brackets too many": Answer(
        "mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}} [TOOL_CALLS]now[ARGS]{}]', (("f", '{"a": 1}'), ("now", "{}"))
    ),
    "mistral list ends without its brackets": Answer(
        "mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1]', (("f", '{"a": 1}'),)
    ),
    "kimi_k2 brackets": Answer(
        "kimi_k2",
        "".join(KIMI.format(0, text) for text in ('{"a": [1}', '{"a": [1', '{"a": [1]}]}')).join(KIMIS),
        (("get_weather", '{"a": [1]}'),) * 3,
        ids=("functions.get_weather:0",) * 3,
    ),
    "kimi_k2 tokens in a text": Answer(
        "kimi_k2",
        KIMI.format(0, '{"a": "<|tool_call_end|>"}').join(KIMIS),
        (("get_weather", '{"a": "<|tool_call_end|>"}'),),
        ids=("functions.get_weather:0",),
    ),
    "kimi_k2 separator missing before the next": Answer(
        "kimi_k2",
        (KIMI.format(0, "{}").replace("<|tool_call_argument_begin|>", "") + KIMI.format(1, "{}")).join(KIMIS),
        (("get_weather", "{}"),),
        KIMI.format(0, "{}").replace("<|tool_call_argument_begin|>", "").join((KIMIS[0], "")),
        ids=("functions.get_weather:1",),
    ),
    "deepseek_v3 brackets and fence": Answer(
        "deepseek_v3",
        (V3.format('{"a": 1}}') + "\n" + V3.format('{"a": 1').replace("\n```<", "<")).join(SECTION),
        (("get_weather", '{"a": 1}'),) * 2,
    ),
    "harmony brackets": Answer(
        "openai",
        CALL.format('{"a": [1') + CALL.format('{"a": 1}}'),
        (("get_weather", '{"a": [1]}'), ("get_weather", '{"a": 1}')),
        **GPT,
    ),
    "harmony a broken call before a sound one": Answer(
        "openai",
        ANALYSIS + CALL.format("{'a': 1}") + CALL.format(BERN),
        WEATHER,
        CALL.format("{'a': 1}"),
        "Think.",
        **GPT,
    ),
    "harmony a broken call after a text": Answer(
        "openai",
        f"<|channel|>commentary<|message|>So.<|end|>{CALL.format('x')}",
        (),
        f"So.\n{CALL.format('x')}",
        **GPT,
    ),
    "kimi_k2 ends behind its arguments": Answer(
        "kimi_k2",
        (KIMI.format(0, BERN) + KIMI.format(1, "{}")).replace("<|tool_call_end|>", ""),
        (*WEATHER, ("get_weather", "{}")),
        ids=("functions.get_weather:0", "functions.get_weather:1"),
    ),
    "deepseek_v3 call open before the next": Answer(
        "deepseek_v3",
        (V3.format(BERN).replace("<｜tool▁call▁end｜>", "") + "\n" + V3.format(BERN)).join(SECTION),
        WEATHER * 2,
    ),
    "deepseek_v31 call open before the end of the section": Answer(
        "deepseek_v31",
        V31.format(BERN).replace("<｜tool▁call▁end｜>", "").join(SECTION) + "So.",
        WEATHER,
        "So.",
    ),
    "mistral list without brackets": Answer(
        "mistral",
        f'[TOOL_CALLS] {{"name": "get_weather", "arguments": {BERN}}}, '
        '{"name": "now", "arguments": {}}\nSo.',
        (*WEATHER, ("now", "{}")),
        "\nSo.",
    ),
    "mistral token twice": Answer(
        "mistral",
        f'[TOOL_CALLS] [TOOL_CALLS] [{{"name": "get_weather", "arguments": {BERN}}}]',
        WEATHER,
    ),
    "mistral ends without arguments": Answer("mistral", "[TOOL_CALLS]now", (("now", "{}"),)),
    "mistral in open reasoning": Answer(
        "mistral", "So.[TOOL_CALLS]now[ARGS]{}", (("now", "{}"),), "", "So.", "mistral", True
    ),
    "deepseek in open reasoning": Answer(
        "deepseek_v31", "So." + V31.format(BERN).join(SECTION), WEATHER, "", "So.", "deepseek_v3", True
    ),
    "harmony bare recipient": Answer("openai", CALL.format(BERN).replace("functions.", ""), WEATHER, **GPT),
    "harmony second channel": Answer(
        "openai",
        "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Think.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello<|return|>",
        (),
        "Hello",
        "Think.",
        **GPT,
    ),
    "harmony final without its message token": Answer(
        "openai",
        f'{ANALYSIS}<|start|>assistant<|channel|>final {{"a": "b c"}}<|return|>',
        (),
        '{"a": "b c"}',
        "Think.",
        **GPT,
    ),
    "harmony words without their message token": Answer(
        "openai", "<|channel|>final Bern it is, I <|end|>say", (), "Bern it is, I say", **GPT
    ),
    "harmony call without its message token": Answer(
        "openai",
        (ANALYSIS + CALL.format(BERN)).replace("json<|message|>", "json"),
        WEATHER,
        "",
        "Think.",
        **GPT,
    ),
    "harmony call without arguments": Answer(
        "openai", "<|channel|>commentary to=functions.now<|call|>", (("now", "{}"),), **GPT
    ),
    "harmony without a channel": Answer(
        "openai", "<|message|>Hello there<|return|>", (), "Hello there", **GPT
    ),
    "harmony message without a channel": Answer(
        "openai", f"{ANALYSIS}<|start|>assistant<|message|>Hello<|end|>", (), "Hello", "Think.", **GPT
    ),
    "harmony text before its end": Answer("openai", "Hello there<|return|>", (), "Hello there", **GPT),
    "harmony stopped in a header": Answer(
        "openai", f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.g", (), "", "Think.", **GPT
    ),
    "harmony stopped behind its start": Answer(
        "openai", f"{ANALYSIS}<|start|>assistant", (), "", "Think.", **GPT
    ),
    "reasoning that the prompt closed": Answer(
        "hermes", "</think>\n\nHello", (), "Hello", reasoning_parser="qwen3"
    ),
    "minimax_m3 reasoning that the prompt closed": Answer(
        "hermes", "\n</mm:think>Hello", (), "Hello", reasoning_parser="minimax_m3"
    ),
    "an object as Python writes it": Answer(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=where>\n{'lat': None, 'of': \"it's\"}\n"
        "</parameter>\n</function>\n</tool_call>",
        (("get_weather", '{"where": {"lat": null, "of": "it\'s"}}'),),
    ),
}
"""Answers with tags left out or garbled, or with calls inside of open reasoning."""

BROKEN_ARGUMENTS = (
    "{'a': 1}",
    '{"a": 1 "b": 2}',
    '{"a": "b, "c": 2}',
    '{"a": [1}, "b": 2}',
    '{"a": 1},"b": 2}',
    '{"a": 1,}',
    '{"a": 1, "b":}',
    '{"a": 01}',
    '{"a": 1.}',
    '{"a": NaN}',
    '{"a": truth}',
    r'{"a": "it\'s"}',
    "{a: 1}",
    '{"a" 1}',
    "[1]",
    "1",
    "true",
    '"a"',
    '"{\\"a\\": [1}"',
)
"""Arguments that are no JSON object, and whose meaning nobody knows."""
NO_CALLS = {
    "hermes": (
        "<tool_call>",
        "a <tool_call> b",
        "<tool_call>{}</tool_call>",
        "<tool_call>{x}</tool_call>",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": "b"}}</tool_call>',
        "</tool_call>",
        "<tool_call",
        '<tool_call>{"name": "f',
        '<tool_call>{"name": "' + "f" * 5000 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"na\\me": "f"}',
        *(
            f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
            for arguments in BROKEN_ARGUMENTS
        ),
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "b": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}}, "b": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1} x',
        '<tool_call>{"name": "f", "argments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "a": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 1}}</tool_call>',
        '<tool_call>{"arguments": [], "name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "' + "b" * 5000 + "</tool_call>",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=f",
        "<tool_call>x</tool_call>",
        "<tool_call><function=f>x</function></tool_call>",
        "<tool_call><function=></function></tool_call>",
        "the <function=f> tag",
        "<tool_call>\n<function=f>\n<parameter=x",
    ),
    "glm45": (
        "<tool_call>",
        "<tool_call>a b</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>f<arg_key>k</arg_k>v",
    ),
    "hy_v3": (
        "<tool_call:opensource>x",
        "<tool_calls:opensource>.",
        "<tool_call:opensource>a b<tool_sep:opensource>",
    ),
    "hy_v3_preview": ("<tool_call>x", "<tool_calls>.", "<tool_call>a b<tool_sep>"),
    "minimax_m2": ("<minimax:tool_call></minimax:tool_call>", '<minimax:tool_call><invoke name="f">x'),
    "minimax_m3": (
        "]<]minimax[>[",
        "]<]minimax[>[<tool_call>]<]minimax[>[</tool_call>",
        "]<]minimax[>[<tool_call>\n]<]minimax[>[</city>",
        '<tool_call><invoke name="get_weather"></invoke></tool_call>',
        ']<]minimax[>[<invoke name="f">x',
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>f",
        "<｜tool▁call▁begin｜><｜tool▁sep｜>",
    ),
    "deepseek_v3": ("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",),
    "kimi_k2": (
        "<|tool_call_begin|>f",
        "<|tool_call_begin|>a b<|tool_call_argument_begin|>{}<|tool_call_end|>",
        *(
            f"<|tool_call_begin|>f<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            for arguments in BROKEN_ARGUMENTS
        ),
        '<|tool_call_begin|>f<|tool_call_argument_begin|>{"a": 1} So.',
    ),
    "mistral": (
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]f[X]{}",
        '[TOOL_CALLS] f [{"name": "g"}]',
        "[TOOL_CALLS]f\n{}",
        *(f"[TOOL_CALLS]f[ARGS]{{{arguments}" for arguments in BROKEN_ARGUMENTS),
        '[TOOL_CALLS]f[ARGS]{"a": 1},"b": 2}',
        '[TOOL_CALLS]f[ARGS]{"a": 1}} So.',
        '[TOOL_CALLS]f[ARGS]{"a": 1 So.',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, "b": 2}]',
    ),
    "openai": (
        "Hello",
        "<|start|>x",
        "<|channel|>x",
        "<|start|>assistant hello<|channel|>x",
        " to=x",
        "assistance",
        *(
            f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}<|call|>"
            for arguments in BROKEN_ARGUMENTS
        ),
    ),
}
"""Texts that begin like a call and are none: every character is content."""
