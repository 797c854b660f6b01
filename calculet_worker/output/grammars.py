"""What answers must be, as text for the library that holds them to it: schemas made plain, and calls of tools as a grammar.

JSON is written as `json.dumps` writes it (`, ` and `: `, no line ends): a model that may put spaces anywhere may never stop doing
so. Calls are written as `output.tools` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from calculet_core.requests import Constraint, ToolRule
from calculet_worker.output.tools import HEAD, MIDDLE, OPEN, TAIL

JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FORMATS = frozenset((
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
))  # fmt: skip
"""Of strings, that the library can keep to."""
VALUES = frozenset(("enum", "const", "default", "examples"))
"""Keywords whose values are data and no schemas."""
MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose values are schemas by name."""
OPEN_ENDED = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties")
"""Keywords that say something of properties that are not named."""


def call_grammar(constraint: Constraint) -> str:
    """Calls; where none is required, also an answer by schema, or free text before calls."""
    calls = " | ".join(f"call{place}" for place in range(len(constraint.tools)))
    more = " more*" if constraint.parallel else ""
    rules = [f"rest: ({calls}) {_text(TAIL)}", f"more: {_text(chr(10) + OPEN)} rest"]
    rules += [_call(place, tool) for place, tool in enumerate(constraint.tools)]
    if constraint.required:
        rules.insert(0, f"start: {_text(OPEN)} rest{more}")
    elif constraint.schema is not None:
        rules.insert(0, f"start: {_text(OPEN)} rest{more} | %json {schema_text(constraint.schema)}")
    else:
        rules.insert(0, f"start: begun rest{more} | TEXT")
        rules += [f"begun[lazy]: TEXT {_text(OPEN)}", "TEXT: /(.|\\n)*/"]
    return "%llguidance {}\n" + "\n".join(rules) + "\n"


def _call(place: int, tool: ToolRule) -> str:
    return f"call{place}: {_text(HEAD + tool.name + MIDDLE)} %json {schema_text(tool.parameters)}"


def _text(text: str) -> str:
    return json.dumps(text)


def schema_text(schema: dict[str, Any]) -> str:
    """The schema as it is compiled, with how JSON is written."""
    return json.dumps({**plain_schema(schema), "x-guidance": JSON_FORM})


def plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """What is compiled of a schema.

    Formats that nobody knows are left out: JSON Schema takes them for remarks. Objects that name their properties and say nothing
    of others get no others: a model that may add what it likes often never stops. Not where schemas are joined, since closing a
    part would forbid what the other parts name.
    """
    close = not any(_joined(part) for part in _parts(schema))
    found: dict[str, Any] = _rewritten(schema, close)
    return found


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema within a schema, itself first."""
    if isinstance(schema, list):
        for item in schema:
            yield from _parts(item)
    elif isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name in MAPS and isinstance(value, dict):
                yield from _parts(list(value.values()))
            elif name not in VALUES:
                yield from _parts(value)


def _joined(part: dict[str, Any]) -> bool:
    return "allOf" in part or ("properties" in part and not part.keys().isdisjoint(("anyOf", "oneOf", "$ref")))


def _rewritten(schema: Any, close: bool) -> Any:
    if isinstance(schema, list):
        return [_rewritten(item, close) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            found[name] = {key: _rewritten(item, close) for key, item in value.items()}
        elif name in VALUES:
            found[name] = value
        elif name != "format" or not isinstance(value, str) or value in FORMATS:
            found[name] = _rewritten(value, close)
    if close and isinstance(schema.get("properties"), dict) and schema["properties"] and schema.keys().isdisjoint(OPEN_ENDED):
        found["additionalProperties"] = False
    return found
