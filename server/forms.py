"""The forms of an answer that a client may ask for: `response_format`, `tools` and `tool_choice`. Knows no HTTP."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxserve.sampling_params import SamplingParams
from jaxserve.server.reasoning import thoughts_grammar
from jaxserve.server.tool_calls import Tool, ToolCallReader, ToolFormat
from jaxserve.structured.grammars import ANY_OBJECT, inline_json, schema_of
from jaxserve.structured.params import StructuredOutputsParams
from jaxserve.validation import require

MAX_TOOLS = 128
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class JsonSchema(BaseModel):
    model_config = STRICT

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Null is any JSON object.")
    strict: bool | None = Field(None, description="Without effect: every schema is kept.")


class ResponseFormat(BaseModel):
    """OpenAI's, and vLLM's `structural_tag`."""

    model_config = STRICT

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    def form(self) -> StructuredOutputsParams | None:
        """What the engine is asked for. ValueError for what does not belong together."""
        schema = self.type == "json_schema"
        require((self.json_schema is not None) == schema, "response_format.json_schema", self.json_schema, _WITH_SCHEMA)
        tags = self.type == "structural_tag"
        for field in ("structures", "triggers"):
            value = getattr(self, field)
            require((value is not None) == tags, f"response_format.{field}", value, _WITH_TAGS)
        if self.type == "text":
            return None
        if tags:
            tag = {"structures": self.structures, "triggers": self.triggers}
            return StructuredOutputsParams(structural_tag=tag)
        if schema and self.json_schema.schema_ is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_)
        return StructuredOutputsParams(json_object=True)


_WITH_SCHEMA = "given with type 'json_schema', and only with it"
_WITH_TAGS = "given with type 'structural_tag', and only with it"


class Function(BaseModel):
    model_config = STRICT

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema; null is any object.")
    strict: bool | None = Field(
        None, description="Calls have arguments that fit `parameters`, also if none is asked for."
    )


class ToolDefinition(BaseModel):
    model_config = STRICT

    type: Literal["function"]
    function: Function


class FunctionChoice(BaseModel):
    model_config = STRICT

    name: str


class NamedTool(BaseModel):
    model_config = STRICT

    type: Literal["function"]
    function: FunctionChoice


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ToolCalling:
    """The calls that an answer may hold, in the format of its model."""

    def __init__(
        self, tool_format: ToolFormat, tools: list[ToolDefinition], choice: ToolChoice | None, *, parallel: bool
    ):
        named = choice.function.name if isinstance(choice, NamedTool) else None
        self._format, self._parallel = tool_format, parallel and named is None
        functions = [tool.function for tool in tools if named in (None, tool.function.name)]
        self._tools = [Tool(each.name, {**(each.parameters or {}), "type": "object"}) for each in functions]
        self._forced = choice not in (None, "auto")
        self._strict = [bool(each.strict) for each in functions]

    def params(self, params: SamplingParams, thinks_at_once: bool | None = None) -> SamplingParams:
        """The parameters under which the answer is what it may be: calls if they are required, else also text.

        `thinks_at_once`: whether the answer begins within thoughts; else it may think first, or not at all if None.
        """
        special_tokens, rules = self._format.special_tokens, []
        if self._format.shows_special_tokens:
            params = replace(params, skip_special_tokens=False)
        answer = self._answer(params.structured_outputs)
        if answer is None:
            return params
        if thinks_at_once is not None:
            rules = [thoughts_grammar(special_tokens, begun=thinks_at_once)]
        grammar = "\n".join(["%llguidance {}", f"start: {'thoughts ' if rules else ''}answer", *rules, *answer])
        return replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))

    def _answer(self, form: StructuredOutputsParams | None) -> list[str] | None:
        """The rule `answer` of a Lark grammar, and those that it needs; None if any text is an answer."""
        if form is None and not self._forced:
            return ["answer: free", self._free_form()] if any(self._strict) else None
        calls = self._format.grammar(self._tools, parallel=self._parallel)
        if self._forced:
            return ["answer: calls", calls]
        if form.json is None and not form.json_object:
            raise ValueError("tools: they must be left out beside a form other than JSON, unless a call is required")
        return [f"answer: calls | {inline_json(schema_of(form), form)}", calls]

    def _free_form(self) -> str:
        """Any text, but calls as `strict` tools want them; of the other tools any object is taken."""
        pairs = zip(self._tools, self._strict, strict=True)
        tools = [tool if strict else tool._replace(parameters=ANY_OBJECT) for tool, strict in pairs]
        return self._format.free_grammar(tools)

    def reader(self) -> ToolCallReader:
        return ToolCallReader(self._format, [tool.name for tool in self._tools], parallel=self._parallel)


def check_tools(tools: list[ToolDefinition] | None, choice: ToolChoice | None) -> bool:
    """Whether an answer may hold calls. ValueError for a choice that cannot be made."""
    names = [tool.function.name for tool in tools or ()]
    require(len(set(names)) == len(names), "tools", names, "functions with different names")
    for index, tool in enumerate(tools or ()):
        kind = (tool.function.parameters or {}).get("type", "object")
        valid = kind == "object" or (isinstance(kind, list) and "object" in kind)
        require(valid, f"tools[{index}].function.parameters.type", kind, "'object': arguments are named")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        require(name in names, "tool_choice.function.name", name, f"the name of one of the tools, {names}")
    require(choice != "required" or len(names) > 0, "tool_choice", choice, "'none' or 'auto' where there are no tools")
    return bool(names) and choice != "none"
