"""What becomes of fields that a client sends and that the bodies in `requests` do not define.

Clients of other servers send many of them. A field that asks for something which would change the answer is
refused. All others are ignored: a header of the answer names them, and the log has a line for each name.

Question: Which unknown fields of a request are ignored, and which are refused?
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from itertools import islice

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from moesaic.core.errors import RequestError
from moesaic.server.errors import format_path

HEADER = "X-Moesaic-Ignored-Fields"
MAX_LOGGED_NAMES = 100
"""Maximum number of names that one server logs and remembers."""
MAX_SHOWN_NAMES = 20
"""Maximum number of names in the header of one answer."""
MAX_UNKNOWN_FIELDS = 4096
"""Maximum number of unknown fields of one body that are looked at. A body may have millions."""
_LONGEST = 64
"""Maximum length of a name in the header and in the log, in characters."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("grammar", "json_schema", "structural_tag", "regex"), ("", {})),
    **dict.fromkeys(("stop_regex",), ("", [])),
    **dict.fromkeys(("documents", "images", "videos", "audios", "plugins", "mcp_servers"), ([], {})),
    **dict.fromkeys(("chat_template", "template", "system", "input_prefix", "input_suffix"), ("",)),
    **dict.fromkeys(("format",), ("", "text", {})),
    **dict.fromkeys(("prompt_embeds",), ("", [])),
    **dict.fromkeys(("use_beam_search", "watermarking", "echo"), (False,)),
    **dict.fromkeys(("thinking_token_budget", "reasoning_budget"), (-1,)),
    **dict.fromkeys(("logits_processors", "repetition_detection"), ([], {})),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), ({},)),
    **dict.fromkeys(("length_penalty", "num_beams", "guidance_scale"), (1,)),
    **dict.fromkeys(("typical_p", "tfs_z", "repeat_penalty"), (1,)),
    **dict.fromkeys(("mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability", "top_a"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("max_new_tokens", "max_output_tokens", "n_predict", "num_predict"), (-1,)),
    **dict.fromkeys(("lora_path", "lora_name"), ("",)),
}
"""Unknown fields that would change the answer, with the values beside null that ask for nothing."""

_LOG = logging.getLogger(__name__)
_UNUSUAL = re.compile(r"[^A-Za-z0-9_.-]")


class UnknownFields:
    """Refuses or ignores the unknown fields of bodies. strict: refuse all of them."""

    def __init__(self, strict: bool = False) -> None:
        self._strict = strict
        self._logged_names: set[str] = set()

    def check(self, body: BaseModel, request: Request) -> None:
        """Note the fields of `body` that are ignored, for `show` and in the log.

        Raises RequestError for a field that is refused.
        """
        if self._strict:
            for place in _find_unknown(body, ()):
                message = f"{format_path(place)}: not a parameter of this endpoint"
                raise RequestError(message, str(place[0]), "unknown_parameter")
        _refuse(body)
        places = islice(_find_unknown(body, ()), MAX_UNKNOWN_FIELDS)
        names = [".".join(step for step in place if isinstance(step, str)) for place in places]
        self.note(names, request)

    def note(self, names: Iterable[str], request: Request, may_refuse: bool = True) -> None:
        """Name what is ignored, for `show` and in the log.

        Raises RequestError if nothing may be ignored. may_refuse: False for what every server may ignore.
        """
        names = list(dict.fromkeys(names))
        if names and self._strict and may_refuse:
            raise RequestError(f"{names[0]}: not supported", names[0].partition(".")[0], "unknown_parameter")
        noted_names = [*getattr(request.state, "ignored", []), *map(clean, names[: MAX_SHOWN_NAMES + 1])]
        if len(noted_names) > MAX_SHOWN_NAMES:
            noted_names = [*noted_names[:MAX_SHOWN_NAMES], "..."]
        if noted_names:
            request.state.ignored = noted_names
        for name in names:
            self._log(clean(name))

    def _log(self, name: str) -> None:
        if name in self._logged_names or len(self._logged_names) > MAX_LOGGED_NAMES:
            return
        self._logged_names.add(name)
        if len(self._logged_names) > MAX_LOGGED_NAMES:
            _LOG.warning("further unknown fields of requests are ignored without a line here")
        else:
            _LOG.warning("%s: ignored in a request (--strict-fields refuses it)", name)


def show(request: Request, response: Response) -> None:
    """Name the ignored fields of `request` in a header of its answer."""
    names = getattr(request.state, "ignored", None)
    if names:
        response.headers[HEADER] = ", ".join(names)


def clean(name: str) -> str:
    """`name` as it may stand in a header and in a log: short, of letters, digits, `_`, `.`, `-` and `?`."""
    return _UNUSUAL.sub("?", name[:_LONGEST]) or "?"


def _refuse(body: BaseModel) -> None:
    """Raise RequestError for an unknown field that would change the answer."""
    unknown_fields = body.model_extra or {}
    for name in NEUTRAL.keys() & unknown_fields.keys():
        value = unknown_fields[name]
        if value is not None and not any(value == neutral for neutral in NEUTRAL[name]):
            raise RequestError(f"{name}: not supported; leave it out", name, "unsupported_parameter")


def _find_unknown(model: BaseModel, place: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """The places of the unknown fields in `model`. Example: ('messages', 0, 'timestamp')."""
    for name in model.model_extra or ():
        yield (*place, name)
    for name, value in model.__dict__.items():
        if isinstance(value, BaseModel):
            yield from _find_unknown(value, (*place, name))
        # Lists of numbers, such as prompts of token ids, are not walked through.
        elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from _find_unknown(item, (*place, name, index))
