"""`response_format`, `tools` and `tool_choice`: what an answer must be, as a `Constraint` for the worker.

Schemas are checked where they are compiled, by the worker; here they are taken apart and their places are remembered for errors.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from calculet_core.errors import InvalidValue, Unsupported
from calculet_core.requests import Constraint, ToolRule

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that names none."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""Of `json_object`."""


class Function(msgspec.Struct):
    """A function that may be called."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
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
    schema: dict[str, Any] | None = None
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

    tools: list[dict[str, Any]] | None = None
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
    return Wish([_told(tool.function) for tool in tools if tool.function.name in rules], constraint)


def told_tools(tools: list[Tool]) -> list[dict[str, Any]] | None:
    """Tools as templates are told of them.

    Raises:
        CalculetError: InvalidValue or Unsupported with `param` set.
    """
    _rules(tools)
    return [_told(tool.function) for tool in tools] or None


def _schema(form: ResponseFormat | None) -> tuple[dict[str, Any] | None, str]:
    if form is None or form.type == "text":
        return None, "response_format"
    if form.type == "json_object":
        return ANY_OBJECT, "response_format"
    if form.type != "json_schema":
        raise InvalidValue("response_format.type: must be text, json_object or json_schema", param="response_format.type")
    if form.json_schema is None or form.json_schema.schema is None:
        param = "response_format.json_schema" + ("" if form.json_schema is None else ".schema")
        raise InvalidValue(f"{param} is required", param=param)
    return form.json_schema.schema, "response_format.json_schema.schema"


def _rules(tools: list[Tool]) -> dict[str, ToolRule]:
    rules: dict[str, ToolRule] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise Unsupported(f"{where}.type: only functions are supported, not {tool.type!r}", param=f"{where}.type")
        if tool.function is None:
            raise InvalidValue(f"{where}.function is required", param=f"{where}.function")
        name, parameters = tool.function.name, tool.function.parameters
        if name in rules:
            raise InvalidValue(f"{where}.function.name: {name!r} is there twice", param=f"{where}.function.name")
        param = f"{where}.function.parameters"
        rules[name] = ToolRule(name, _object_schema(parameters, param), param)
    return rules


def _object_schema(parameters: dict[str, Any] | None, param: str) -> dict[str, Any]:
    if not parameters:
        return NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise InvalidValue(f"{param}: its type must be 'object'", param=param)
    return {"type": "object", **parameters}


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


def _told(function: Any) -> dict[str, Any]:
    """As templates are told of it."""
    told: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        told["description"] = function.description
    told["parameters"] = function.parameters or NO_PARAMETERS
    return {"type": "function", "function": told}


def earlier_calls(where: str, calls: list[ToolCall]) -> list[dict[str, Any]]:
    """Calls of an earlier answer as templates know them: arguments that are a JSON object as such, others as they are.

    Raises:
        CalculetError: Unsupported with `param` set.
    """
    found = []
    for index, call in enumerate(calls):
        if call.type not in (None, "function"):
            message = f"{where}[{index}].type: only functions are supported, not {call.type!r}"
            raise Unsupported(message, param=f"{where}[{index}].type")
        function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
        found.append({"id": call.id or "", "type": "function", "function": function})
    return found


def _arguments(text: str) -> Any:
    if not text.strip():
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return found if isinstance(found, dict) else text

