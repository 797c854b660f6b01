"""`response_format`, `tools` and `tool_choice`: what an answer must be, as a `Constraint` for the worker.

Schemas are read where they are compiled, by the worker; here they stay as the client wrote them, and their places are remembered
for errors.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from calculet_core.errors import InvalidJson, InvalidValue, Unsupported
from calculet_core.requests import Constraint, ToolRule

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
NO_PARAMETERS = '{"type":"object","properties":{},"additionalProperties":false}'
"""Of a function that names none."""
ANY_OBJECT = '{"type":"object"}'
"""Of `json_object`."""
_encode = msgspec.json.Encoder().encode


class Function(msgspec.Struct):
    """A function that may be called."""

    name: FunctionName
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """JSON schema of an object."""
    strict: bool | None = None
    """Taken and ignored: arguments always keep to the schema."""


class Tool(msgspec.Struct):
    """Only functions are supported."""

    type: str
    function: Function | None = None


class FunctionRef(msgspec.Struct):
    """A function by name."""

    name: str


class ToolRef(msgspec.Struct):
    """One of the tools."""

    type: str
    function: FunctionRef | None = None


class AllowedTools(msgspec.Struct):
    """Some of the tools."""

    mode: str
    """`auto` or `required`."""
    tools: Annotated[list[ToolRef], Meta(min_length=1)]


class ToolChoice(msgspec.Struct):
    """A function that must be called, or the tools that may be."""

    type: str
    function: FunctionRef | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(msgspec.Struct):
    """What the answer must keep to."""

    name: FunctionName
    description: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None
    """Taken and ignored: the answer always keeps to the schema."""


class ResponseFormat(msgspec.Struct):
    """`text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchema | None = None


class CalledFunction(msgspec.Struct):
    """Of a call that the model made earlier."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A call that the model made earlier."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Wish(msgspec.Struct, frozen=True):
    """What of it concerns the model (`tools`, for the template) and what the worker."""

    tools: list[str] | None = None
    constraint: Constraint | None = None


NO_WISH = Wish()


def wish_of(asked: Any) -> Wish:
    """Of a chat request with `response_format`, `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        CalculetError: InvalidValue or Unsupported with `param` set.
    """
    tools, choice = asked.tools or [], asked.tool_choice
    schema, param = _schema(asked.response_format)
    if not tools and isinstance(choice, ToolChoice | str) and choice not in ("none", "auto"):
        raise InvalidValue("tool_choice needs tools", param="tool_choice")
    rules = _rules(tools)
    if choice == "none" or not rules:
        return Wish(None, None if schema is None else Constraint(schema, param))
    rules, required = _chosen(rules, choice)
    one = isinstance(choice, ToolChoice) and choice.type == "function"
    parallel = asked.parallel_tool_calls is not False and not one
    constraint = Constraint(None if required else schema, param, tuple(rules.values()), required, parallel)
    return Wish([_told(tool.function) for tool in tools if tool.function is not None and tool.function.name in rules], constraint)


def told_tools(tools: list[Tool]) -> list[str] | None:
    """Tools as templates are told of them.

    Raises:
        CalculetError: InvalidValue or Unsupported with `param` set.
    """
    _rules(tools)
    return [_told(tool.function) for tool in tools if tool.function is not None] or None


def _schema(form: ResponseFormat | None) -> tuple[str | None, str]:
    if form is None or form.type == "text":
        return None, "response_format"
    if form.type == "json_object":
        return ANY_OBJECT, "response_format"
    if form.type != "json_schema":
        raise InvalidValue("response_format.type: must be text, json_object or json_schema", param="response_format.type")
    if form.json_schema is None:
        raise InvalidValue("response_format.json_schema is required", param="response_format.json_schema")
    param = "response_format.json_schema.schema"
    schema = object_text(form.json_schema.schema, param)
    if schema is None:
        raise InvalidValue(f"{param} is required", param=param)
    return schema, param


def _rules(tools: list[Tool]) -> dict[str, ToolRule]:
    rules: dict[str, ToolRule] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise Unsupported(f"{where}.type: only functions are supported, not {tool.type!r}", param=f"{where}.type")
        if tool.function is None:
            raise InvalidValue(f"{where}.function is required", param=f"{where}.function")
        name = tool.function.name
        if name in rules:
            raise InvalidValue(f"{where}.function.name: {name!r} is there twice", param=f"{where}.function.name")
        param = f"{where}.function.parameters"
        rules[name] = ToolRule(name, _parameters(tool.function, param), param)
    return rules


def _parameters(function: Function, param: str) -> str:
    text = object_text(function.parameters, param)
    return NO_PARAMETERS if text is None or not text[1:-1].strip() else text


def object_text(raw: msgspec.Raw, param: str) -> str | None:
    """JSON of an object as the client wrote it; None where there is none.

    Raises:
        CalculetError: InvalidJson for text that is no UTF-8, InvalidValue with `param` set for JSON of something else.
    """
    try:
        text = bytes(raw).decode().strip()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the body is not valid JSON: {error}") from None
    if text in ("", "null"):
        return None
    if not text.startswith("{"):
        raise InvalidValue(f"{param}: expected `object`", param=param)
    return text


def _chosen(rules: dict[str, ToolRule], choice: ToolChoice | str | None) -> tuple[dict[str, ToolRule], bool]:
    """(The functions that may be called, whether one must be)."""
    if choice is None or choice == "auto":
        return rules, False
    if choice == "required":
        return rules, True
    if isinstance(choice, str):
        raise InvalidValue("tool_choice: must be none, auto, required or an object", param="tool_choice")
    if choice.type == "function" and choice.function is not None:
        return _named([choice.function.name], rules, "tool_choice.function.name"), True
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        if allowed.mode not in ("auto", "required"):
            raise InvalidValue("tool_choice.allowed_tools.mode: must be auto or required", param="tool_choice.allowed_tools.mode")
        names = [ref.function.name if ref.function is not None else "" for ref in allowed.tools]
        return _named(names, rules, "tool_choice.allowed_tools.tools"), allowed.mode == "required"
    raise InvalidValue("tool_choice.type: must be function or allowed_tools, with a member of that name", param="tool_choice.type")


def _named(names: list[str], rules: dict[str, ToolRule], param: str) -> dict[str, ToolRule]:
    for name in names:
        if name not in rules:
            raise InvalidValue(f"{param}: no tool is named {name!r}", param=param)
    return {name: rules[name] for name in rules if name in names}


def _told(function: Function, param: str = "tools") -> str:
    """As templates are told of it, as JSON."""
    told: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        told["description"] = function.description
    told["parameters"] = msgspec.Raw(_parameters(function, param).encode())
    return _encode({"type": "function", "function": told}).decode()


def earlier_calls(where: str, calls: list[ToolCall]) -> list[dict[str, Any]]:
    """Calls of an earlier answer; arguments stay JSON as they came, for the worker to read.

    Raises:
        CalculetError: Unsupported with `param` set.
    """
    found = []
    for index, call in enumerate(calls):
        if call.type not in (None, "function"):
            message = f"{where}[{index}].type: only functions are supported, not {call.type!r}"
            raise Unsupported(message, param=f"{where}[{index}].type")
        function = {"name": call.function.name, "arguments": call.function.arguments}
        found.append({"id": call.id or "", "type": "function", "function": function})
    return found
