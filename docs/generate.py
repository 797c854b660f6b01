"""Write docs/reference from the code, so that neither can lie about the other; a test compares them.

Configuration pages come from the structs of `calculet_core.config`, with the docstrings that follow their fields; the others
from the tables of states, errors, faults and metrics.
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from calculet_core import config
from calculet_core.errors import ERROR_TYPES
from calculet_core.faults import FAULT_POLICY
from calculet_core.kv import CONTEXT_OPS
from calculet_core.metrics import CATALOGUE
from calculet_core.states import MACHINES
from calculet_perf.cli import main as perf
from calculet_router.__main__ import main as router
from calculet_supervisor.__main__ import main as supervisor
from calculet_supervisor.cli import main as operators
from calculet_worker.__main__ import cli as worker

FOLDER = Path(__file__).resolve().parent / "reference"
HEAD = "<!-- Written by `make docs` from the code. Do not edit. -->\n\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def states() -> str:
    """Diagrams of all life cycles."""
    parts = ["# Life cycles\n\nEach is one table in `calculet_core/states/`; nothing changes a state but through it.\n"]
    parts += [f"\n## {machine.name}\n\n```mermaid\n{machine.mermaid()}```\n" for machine in MACHINES]
    return "".join(parts)


def errors() -> str:
    """Errors of the HTTP interface."""
    rows = [
        (f"`{cls.code}`", str(cls.http_status), cls.type, "yes" if cls.retryable else "no", inspect.getdoc(cls) or "")
        for cls in sorted(ERROR_TYPES.values(), key=lambda cls: (cls.http_status, cls.code))
    ]
    base = inspect.getdoc(ERROR_TYPES["internal_error"].__mro__[1])
    rows = [(*row[:4], "" if row[4] == base else row[4].replace("\n", " ")) for row in rows]
    text = (
        '# Errors\n\n`{"error": {"message", "type", "param", "code"}}`; 429 and 503 carry `Retry-After`. *Resent* says whether the\n'
        "router may try another worker before the client sees it.\n\n"
    )
    return text + table(("code", "HTTP", "type", "resent", "when"), rows)


def faults() -> str:
    """The fault policy and the context operations."""
    rows = [
        (
            f"`{kind}`", rule.response, rule.reset, "lost" if rule.kv_lost else "kept", f"`{rule.error_code}`",
            "that lane's alone" if rule.confinable else "",
        )
        for kind, rule in FAULT_POLICY.items()
    ]
    operations = [
        (f"`{op}`", "yes" if rule.allowed else "refused", "yes" if rule.needs_proof else "no", rule.reason)
        for op, rule in CONTEXT_OPS.items()
    ]
    return (
        "# Faults of a board\n\nOne response per fault (acceptance §12.2). By default it is the whole job's, and what it loses are all "
        "lanes. Where the artifact proves `lane_fault_isolation` and it is known which lanes failed, the last column holds: their requests "
        "fail, their KV is Unknown until the generation ends, all others go on, and the golden cases run before anything new is let in. "
        "When too few lanes are left for the largest request, the board recovers as the other columns say.\n\n"
        + table(("fault", "response", "reset", "KV", "client's error", "with proven isolation"), rows)
        + "\n# Context operations\n\nScheduling §9.3.\n\n"
        + table(("operation", "allowed", "needs the artifact's proof", "why"), operations)
    )


def metrics() -> str:
    """The metrics catalogue."""
    rows = [
        (f"`{metric.name}{'_total' if metric.kind == 'counter' else ''}`", metric.kind, ", ".join(metric.labels), metric.help)
        for metric in CATALOGUE
    ]
    text = "# Metrics\n\nAll under the router's `/metrics`; a worker's carry its `board` too.\n\n"
    return text + table(("metric", "kind", "labels", "what it tells"), rows)


def field_docs(cls: type) -> dict[str, str]:
    """The docstrings that follow a struct's fields in its source."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    found, previous = {}, None
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            previous = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and previous:
            found[previous] = inspect.cleandoc(str(node.value.value)).replace("\n", " ")
            previous = None
    return found


def type_name(kind: Any) -> str:
    """A type as a reader of YAML would put it."""
    info = msgspec.inspect.type_info(kind)
    names = {"IntType": "integer", "FloatType": "number", "StrType": "text", "BoolType": "true/false", "DictType": "mapping"}

    def name(info: Any) -> str:
        label = type(info).__name__
        if label == "UnionType":
            return " or ".join(name(item) for item in info.types)
        if label == "NoneType":
            return "null"
        if label == "LiteralType":
            return " or ".join(f"`{value}`" for value in info.values)
        if label in ("VarTupleType", "ListType"):
            return f"list of {name(info.item_type)}"
        if label == "StructType":
            return "section"
        bounds = [f"{sign} {value:g}" for sign, value in (("&gt;", getattr(info, "gt", None)), ("&ge;", getattr(info, "ge", None)),
                                                        ("&le;", getattr(info, "le", None))) if value is not None]  # fmt: skip
        return " ".join([names.get(label, label), *bounds])

    return name(info)


def section(cls: type, path: str) -> str:
    """One struct and the structs below it."""
    docs, rows, below = field_docs(cls), [], []
    for field in msgspec.structs.fields(cls):
        nested = nested_struct(field.type)
        if nested:
            below.append((nested, f"{path}.{field.name}" + ("[]" if "tuple" in str(field.type) else "")))
        default = "required" if field.required else ("" if nested and field.default is not None else f"`{show(field)}`")
        rows.append((f"`{field.name}`", type_name(field.type), default, docs.get(field.name, "")))
    text = f"\n### `{path}`\n\n{inspect.getdoc(cls)}\n\n" + table(("key", "type", "default", "meaning"), rows)
    return text + "".join(section(nested, where) for nested, where in below)


def nested_struct(kind: Any) -> type | None:
    """The struct in `X`, `X | None` or `tuple[X, ...]`, if there is one."""
    info = msgspec.inspect.type_info(kind)
    item = getattr(info, "item_type", info)
    items = item.types if isinstance(item, msgspec.inspect.UnionType) else (item,)
    return next((one.cls for one in items if isinstance(one, msgspec.inspect.StructType)), None)


def show(field: Any) -> str:
    """A field's default as YAML."""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    words: dict[Any, str] = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def configuration() -> str:
    """Both configuration files, key by key."""
    return (
        "# Configuration\n\nUnknown keys and wrong types are errors that name the file and the path. Relative paths start at the file.\n"
        "`calculet config check` checks a fleet file with everything it names.\n\n## `calculet-fleet/v1`\n"
        + section(config.FleetConfig, "$")
        + "\n## `calculet-scheduler/v1`\n\nOne file per alias (scheduling §15). Profiles are checked against the artifact's manifest.\n"
        + section(config.SchedulerConfig, "$")
    )


PROGRAMS: tuple[tuple[str, click.Group, str], ...] = (
    ("calculet", operators, "What operators type."),
    ("calculet-perf", perf, "Measures and breaks servers."),
    ("calculet-router", router, "Started by `calculet up` or systemd."),
    ("calculet-worker", worker, "Started by `calculet up` or systemd; builds packages."),
    ("calculet-supervisor", supervisor, "Started by `calculet up` or systemd."),
)


def commands() -> str:
    """Every console script's commands, as man pages in one."""
    text = (
        "# Commands\n\nEvery command with its arguments, options and exit codes; `-h` shows the same. A command that says nothing of exit\n"
        "codes has those of its program. What only watched ends with 130 at Ctrl-C, and what it watched goes on. `calculet completion\n"
        "SHELL` prints what a shell needs to complete `calculet`.\n\n"
    )
    parts = [text]
    for program, _, what in PROGRAMS:
        parts.append(f"* [`{program}`](#{program}): {what}\n")
    for program, group, _ in PROGRAMS:
        parts.append(manual(group, program, None, 2))
    return "".join(parts)


def manual(command: click.Command, path: str, parent: click.Context | None, level: int) -> str:
    """A command, and those below it."""
    ctx = click.Context(command, info_name=path.split(" ")[-1], parent=parent)
    usage = " ".join([path, *command.collect_usage_pieces(ctx)])
    help_text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    text = f"\n{'#' * level} {path}\n\n```\n{usage}\n```\n\n{indented(help_text)}\n"
    rows = [row for param in command.params if (row := parameter(param, ctx)) is not None]
    if rows:
        text += "\n" + table(("", "meaning", "default"), rows)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            if not below.hidden:
                text += manual(below, f"{path} {name}", ctx, min(level + 1, 4))
    return text


def indented(help_text: str) -> str:
    """Paragraphs that a docstring has kept as they are become code."""
    paragraphs = []
    for paragraph in help_text.split("\n\n"):
        kept = any("  " in line.strip() for line in paragraph.splitlines())
        paragraphs.append(f"```sh\n{paragraph}\n```" if kept else escaped(paragraph))
    return "\n\n".join(paragraphs)


def escaped(text: str) -> str:
    """What Markdown would take for HTML."""
    return text.replace("<", "&lt;")


def parameter(param: click.Parameter, ctx: click.Context) -> tuple[str, str, str] | None:
    """A row for an option."""
    if isinstance(param, click.Argument):
        return None  # the first line of the manual has them
    assert isinstance(param, click.Option)
    record = param.get_help_record(ctx)
    if record is None:
        return None
    names, help_text = record
    help_text, _, extra = help_text.partition("  [")
    notes = dict(note.partition(": ")[::2] for note in extra.removesuffix("]").split("; ")) if extra else {}
    fallback = notes.get("default", "").removeprefix("(").removesuffix(")")
    told = "; ".join(f"{name}: {value}" if value else name for name, value in notes.items() if name != "default")
    return f"`{names}`", escaped(help_text + (f" ({told})" if told else "")), escaped("required" if "required" in notes else fallback)


PAGES = {"cli.md": commands, "states.md": states, "errors.md": errors, "faults.md": faults, "metrics.md": metrics, "configuration.md": configuration}


def main() -> int:
    """Write the pages; with `--check` only compare, exit 1 when one is out of date."""
    stale = []
    for name, page in PAGES.items():
        path, text = FOLDER / name, HEAD + page()
        if "--check" in sys.argv:
            stale += [name] if not path.exists() or path.read_text() != text else []
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"out of date: {', '.join(stale)}: run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
