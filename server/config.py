"""The server's options. A leaf: knows neither HTTP nor an engine."""

import os
from dataclasses import dataclass
from typing import no_type_check

from jaxserve.validation import is_integer, is_number, require

LOG_FORMATS = ("text", "json")
RUN_IN = ("thread", "process")
DEMO_NAME = "SmolLM2-135M-Instruct"  # what the demo model is called
TOOL_CALL_PARSERS = ("hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("deepseek_r1", "qwen3")


@no_type_check  # it checks itself: the tests' type checker would come first with another error
@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Every option of the server beside the engine's; ValueError where a value breaks a rule. Times are in seconds.

    Attributes:
        host: the address to listen at; the default is reachable from this machine only.
        port: 0 takes a free one.
        served_model_name: what clients call the model, one name or several; None is the model as given.
        api_key: keys of which a client must show one, one or several; None takes those of the environment variable
            JAXSERVE_API_KEY (separated by commas), or asks for none.
        allowed_origins: web origins whose pages may call the server (CORS); none by default.
        run_in: where the engine runs: in a `thread` of the server's process, or in a `process` of its own.
        tool_call_parser: the format in which the model writes tool calls: `hermes` (also Qwen), `llama3_json` or
            `mistral`; None goes by the chat template.
        reasoning_parser: how the model's thoughts are told from its answer: `qwen3` (between <think> and </think>) or
            `deepseek_r1` (from the beginning to </think>); None takes all for the answer.
        chat_template: a chat template in place of the model's own, or a file that holds one.
        trust_request_chat_template: let requests bring chat templates. A template is a program.
        max_request_bytes: the largest body that is read (413 beyond it).
        max_prompts_per_request: the most prompts of one request.
        max_queued_requests: answers that may wait for a place in the engine (429 beyond it).
        request_timeout: what one request may take, however slowly its client reads; None for ever.
        body_timeout: what a client may take to send a request.
        shutdown_timeout: what running requests get to end when the server is told to stop.
        stream_interval: tokens that are joined into one event of a stream; the first one is sent at once.
        otlp_traces_endpoint: the URL of an OpenTelemetry collector's OTLP over HTTP, http://localhost:4318/v1/traces
            say, that gets a span of every request; needs the extra `otel`.
        log_format: `text` or `json`. Prompts and answers are never logged.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: list[str] | str | None = None
    api_key: list[str] | str | None = None
    allowed_origins: list[str] | str | None = None
    run_in: str = "thread"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    max_request_bytes: int = 4 * 2**20
    max_prompts_per_request: int = 256
    max_queued_requests: int = 1024
    request_timeout: float | None = 1800.0
    body_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    stream_interval: int = 1
    otlp_traces_endpoint: str | None = None
    log_format: str = "text"

    def __post_init__(self):
        for name in ("served_model_name", "api_key", "allowed_origins"):
            values = getattr(self, name)
            if name == "api_key" and values is None:
                values = [key for key in os.environ.get("JAXSERVE_API_KEY", "").split(",") if key]
            values = [values] if isinstance(values, str) else values or []
            filled = isinstance(values, list | tuple) and all(isinstance(text, str) and text for text in values)
            shown = "..." if name == "api_key" else values
            require(filled, name, shown, "a text or a list of texts, none of them empty")
            object.__setattr__(self, name, tuple(values))
        for name, least in (
            ("port", 0),
            ("max_request_bytes", 1),
            ("max_prompts_per_request", 1),
            ("max_queued_requests", 0),
            ("stream_interval", 1),
        ):
            value = getattr(self, name)
            require(is_integer(value) and value >= least, name, value, f"an integer of at least {least}")
        require(self.port < 2**16, "port", self.port, "less than 65536")
        for name in ("request_timeout", "body_timeout", "shutdown_timeout"):
            value = getattr(self, name)
            valid = (is_number(value) and value > 0) or (name == "request_timeout" and value is None)
            require(valid, name, value, "a number of seconds above 0")
            object.__setattr__(self, name, None if value is None else float(value))
        require(self.log_format in LOG_FORMATS, "log_format", self.log_format, f"one of {', '.join(LOG_FORMATS)}")
        for name, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            value = getattr(self, name)
            require(value is None or value in known, name, value, f"None or one of {', '.join(known)}")
        endpoint = self.otlp_traces_endpoint
        valid = endpoint is None or (isinstance(endpoint, str) and endpoint.startswith(("http://", "https://")))
        require(valid, "otlp_traces_endpoint", endpoint, "None or a URL of http or https")
        require(self.run_in in RUN_IN, "run_in", self.run_in, f"one of {', '.join(RUN_IN)}")
