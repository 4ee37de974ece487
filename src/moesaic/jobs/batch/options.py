"""The settings of `moesaic run-batch`, from which its command line is generated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moesaic.config.values import check_names
from moesaic.core.errors import ConfigError
from moesaic.text.parsers.table import check_parsers


@dataclass(frozen=True)
class RunBatch:
    """Answer a file of OpenAI batch lines. After a crash the same command continues."""

    input_file: Path
    """File of batch lines: {"custom_id", "method": "POST", "url": "/v1/chat/completions" or
    "/v1/completions", "body": the endpoint's request}."""
    output_file: Path
    """File for results, one line each, in the order in which requests finish. An existing file is
    continued."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model, with spaces between. The bodies of the lines may use any of them, and answers have
    the first. Without a name: MODEL as given."""
    chat_template: Path | None = None
    """File with a Jinja chat template, used in place of the checkpoint's own."""
    tool_call_parser: str = "auto"
    """Parser of the model's tool calls, by vLLM's name, such as hermes, qwen3_coder, glm45 or openai. auto:
    chosen by the chat template. none: requests with tools are refused."""
    reasoning_parser: str = "auto"
    """Parser of the model's reasoning, by vLLM's name, such as qwen3, deepseek_r1 or openai_gptoss. auto:
    chosen by the chat template. none: reasoning stays in the content."""
    allow_special_tokens_in_content: bool = False
    """Let special tokens in the content of messages act like those of the chat template. Otherwise they are
    text, so that nobody can begin a turn inside of a message."""
    strict_fields: bool = False
    """Fail lines with unknown fields in their body. Otherwise such fields are ignored."""
    max_in_flight: int | None = None
    """Maximum number of requests in flight. None: twice --max-num-seqs for each attention worker; with
    --base-url 128."""
    seed: int | None = None
    """Seed from which requests without a seed get theirs, in the order in which they start."""
    base_url: str | None = None
    """URL of an OpenAI-compatible server that runs already and answers the lines, in place of --model."""
    api_key: str | None = None
    """Key of the server of --base-url, sent as `Authorization: Bearer KEY`. None: the value of
    MOESAIC_API_KEY."""

    def __post_init__(self) -> None:
        check_names(self.served_model_name)
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            allowed_values = "a URL such as http://127.0.0.1:8000"
            raise ConfigError.field("--base-url", self.base_url, allowed_values)
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ConfigError.field("--max-in-flight", self.max_in_flight, "an integer of at least 1")
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        if not self.input_file.is_file():
            raise ConfigError.field("--input-file", str(self.input_file), "an existing regular file")
        if self.output_file.exists() and self.output_file.samefile(self.input_file):
            raise ConfigError.field("--output-file", str(self.output_file), "another file than the input")
