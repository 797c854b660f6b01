"""Chats as text: an artifact's chat template in a sandbox, and tools for models whose template knows nothing of them.

Control tokens come from the template alone: where a text of a message or a tool spells one, it is cut in two, so that it is read as
text and nobody can forge another role's turn.

Tools. A template that has a place for tools and writes calls as `output.tools` reads them (Hermes 2 Pro's form, which Qwen 2.5
and 3 were trained on) renders tools, calls and results itself. For any other template the same form is put into plain messages: the
tools are described at the end of the system message, a call is text of the assistant's, a result is a message of the user's. What
the model writes is held to the form by its constraint in either case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from calculet_core.errors import ArtifactError, CalculetError, InvalidValue, Unsupported
from calculet_core.shell.files import read_bounded
from calculet_worker.output.tools import CLOSE, OPEN

MAX_RENDERED_CHARACTERS = 32 << 20
CUT = "\ufdd0"
"""A code point that is no character: where a message's text is cut for encoding. In a message it is dropped."""
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
"""What a client cannot set through the variables that it gives."""
OTHER_FORMS = ("<function=", "<arg_key>")
"""Marks of templates whose calls are tagged alike, but are no JSON within."""
TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
TOOLS_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""As Qwen 2.5's template words it."""


class ChatTemplate:
    """A template; may be used by several threads. `shield` cuts control tokens, `names` are what it calls BOS and EOS.

    Raises:
        ArtifactError: the file is missing or is no template.
    """

    def __init__(self, path: Path, shield: Callable[[Any], Any], names: Mapping[str, str]) -> None:
        self._shield, self._names = shield, names
        source, self._template = _read_template(path)
        variables = meta.find_undeclared_variables(self._template.environment.parse(source))
        self.knows_tools = "tools" in variables and OPEN in source and not any(mark in source for mark in OTHER_FORMS)
        """It renders tools and calls itself, in our form."""
        self._has_system: bool | None = None

    def render(self, messages: list[dict[str, Any]], tools: list[str] | None, options: str | None = None) -> list[str]:
        """The prompt's text, in the pieces that are to be encoded each for itself; `tools` as JSON, and `options`, the client's
        variables (such as Qwen 3's `enable_thinking`), as JSON of an object. What the template does not use does nothing.

        Raises:
            InvalidValue: an option has a name of ours, the template refuses the messages, or there is too much text.
            Unsupported: content that is not text.
        """
        plain = [_plain(index, message) for index, message in enumerate(messages)]
        told, more = _read_tools(tools or []), self._shield(self._read_options(options)) if options else dict[str, Any]()
        if self.knows_tools:
            if told:
                more["tools"] = [self._shield(tool) for tool in told]
        elif told or any(message["role"] == "tool" or "tool_calls" in message for message in plain):
            plain = self._without_tools(plain, told)
        return self._generate([self._shield(message) for message in plain], more).split(CUT)

    def _read_options(self, options: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(options)
        except (ValueError, RecursionError) as error:
            raise InvalidValue(f"chat_template_kwargs: {error}", param="chat_template_kwargs") from None
        for name in found:
            if name in OWN_VARIABLES or name in self._names:
                where = f"chat_template_kwargs.{name}"
                raise InvalidValue(f"{where}: that variable is the server's own", param=where)
        return found

    def _generate(self, messages: list[dict[str, Any]], more: dict[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(messages=messages, add_generation_prompt=True, **self._names, **more):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise InvalidValue(f"messages: more than {MAX_RENDERED_CHARACTERS} characters of text", param="messages")
        except CalculetError:
            raise
        except Exception as error:  # whatever a template does with messages that it was not written for
            raise InvalidValue(f"messages: the model's chat template refuses them: {error}", param="messages") from None
        return "".join(pieces)

    def _without_tools(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same chat for a template that knows only system, user and assistant."""
        found: list[dict[str, Any]] = []
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "tool":
                result = f"<tool_response>\n{content}\n</tool_response>"
                if found and found[-1].get("results"):
                    found[-1]["content"] += "\n" + result
                else:
                    found.append({"role": "user", "content": result, "results": True})
            elif calls := message.get("tool_calls"):
                texts = [content] if content else []
                found.append({"role": role, "content": "\n".join(texts + [_call_text(call["function"]) for call in calls])})
            else:
                found.append(message)
        plain = [{name: value for name, value in message.items() if name != "results"} for message in found]
        return self._described(plain, tools) if tools else plain

    def _described(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        text = TOOLS_BEFORE + "".join("\n" + _to_json(tool) for tool in tools) + TOOLS_AFTER
        first = messages[0]
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
        if self._takes_system():
            return [{"role": "system", "content": text}, *messages]
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]

    def _takes_system(self) -> bool:
        """Some templates refuse a system message, or drop it."""
        if self._has_system is None:
            try:
                chat = [{"role": "system", "content": "calculet-probe"}, {"role": "user", "content": "x"}]
                self._has_system = "calculet-probe" in self._generate(chat, {})
            except InvalidValue:
                self._has_system = False
        return self._has_system


def _read_tools(tools: list[str]) -> list[dict[str, Any]]:
    try:
        return [json.loads(tool) for tool in tools]
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"tools: {error}", param="tools") from None


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{_to_json(call)}\n{CLOSE}"


def _plain(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text parts joined by line ends, with "" for an absent content, and with calls' arguments read."""
    if calls := message.get("tool_calls"):
        message = {**message, "tool_calls": [_with_arguments(call) for call in calls]}
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if not isinstance(content, list):
        return message
    texts = []
    for place, part in enumerate(content):
        where = f"messages[{index}].content[{place}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Unsupported(f"{where}: only text is supported, not {kind!r}", param="messages")
        if not isinstance(part.get("text"), str):
            raise InvalidValue(f"{where}.text: expected a string", param="messages")
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments that are JSON of an object as such, as templates expect them; others, a call that was cut, as they are."""
    function = call["function"]
    text, found = function["arguments"], None
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        pass
    return {**call, "function": {**function, "arguments": found if isinstance(found, dict) else text}}


def any_of(names: Mapping[str, int]) -> re.Pattern[str] | None:
    """Matches and captures any of the names, longer ones first."""
    spelled = sorted((name for name in names if name), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, spelled))})") if spelled else None


def shield_for(specials: Mapping[str, int]) -> Callable[[Any], Any]:
    """What cuts every special's name within the texts of a message, at any depth."""
    pattern = any_of({name: token_id for name, token_id in specials.items() if len(name) > 1})

    def cut(match: re.Match[str]) -> str:
        half = len(match[0]) // 2
        return match[0][:half] + CUT + match[0][half:]

    def shield(value: Any) -> Any:
        if isinstance(value, str):
            while pattern is not None and (cut_once := pattern.sub(cut, value)) != value:
                value = cut_once
            return value
        if isinstance(value, dict):
            return {shield(key): shield(item) for key, item in value.items()}
        return [shield(item) for item in value] if isinstance(value, list) else value

    return shield


def _read_template(path: Path) -> tuple[str, jinja2.Template]:
    try:
        source = read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: {error}") from None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return source, environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ArtifactError(f"{path}: not a chat template: {error}") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    """As chat templates expect it: not escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
