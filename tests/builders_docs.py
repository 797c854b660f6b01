"""The documentation's code blocks: what each is for, and whether the commands in it exist.

A block says in its first line what is done with it:

* `sh run`: executed as it stands, against a fleet (`sh run fails`: and its last command must fail),
* `sh root`: for the administrator of a machine with systemd; begins with the comment `# as root`, so that readers see it too;
  its commands are parsed here and executed in tests/systemd,
* `sh parse`: not executed (it takes hours, never ends, or wants something that is not here); its commands are parsed,
* `python run`, `yaml`, `json`: executed, or read as such,
* `text`, `mermaid`: for the eye.

Anything else is a block that nobody has thought about, and an error.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

from calculet_perf.cli import main as perf
from calculet_router.__main__ import main as router
from calculet_supervisor.__main__ import main as supervisor
from calculet_supervisor.cli import main as calculet
from calculet_worker.__main__ import cli as worker

ROOT = Path(__file__).resolve().parents[1]
CLASSES = {"sh run", "sh run fails", "sh root", "sh parse", "python run", "yaml", "json", "text", "mermaid"}
AS_ROOT = "# as root"
PROGRAMS: dict[str, object] = {
    "calculet": calculet, "calculet-perf": perf, "calculet-router": router, "calculet-supervisor": supervisor, "calculet-worker": worker,
}  # fmt: skip
OTHERS = {
    "[", "cat", "cp", "curl", "echo", "export", "grep", "head", "journalctl", "kill", "ls", "mkdir", "pip", "pre-commit", "prometheus",
    "promtool", "python", "python3", "sed", "seq", "sleep", "source", "ssh", "sudo", "systemctl", "tail", "timeout", "wait", "$EDITOR",
    "openssl", "install", "chown", "chmod", "kubectl", "docker", "true", "false", "cd", "eval", "rm",
}  # fmt: skip
"""Programs that are not ours and that pages may use."""
_KEYWORDS = {"for", "do", "done", "if", "then", "else", "fi", "while", "until", "in", "!", "{", "}"}
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Block:
    """Fenced code of a page. Its class is the fence's info string."""

    page: str
    line: int
    kind: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page but the runbooks, which have tests and a form of their own, and the manual that is made from the commands."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "runbooks" not in page.parts and page != ROOT / "docs" / "reference" / "cli.md"]


def blocks(page: Path, text: str | None = None) -> list[Block]:
    """All fenced blocks of a page; fences may be indented."""
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    found, fence, kind, start, code = [], "", "", 0, []
    for number, line in enumerate((text if text is not None else page.read_text()).splitlines(), 1):
        mark = re.match(r"^( *)(`{3,}|~{3,})(.*)$", line)
        if not fence and mark:
            fence, kind, start, code = mark[2], mark[3].strip(), number, []
        elif fence and mark and mark[2].startswith(fence) and not mark[3].strip():
            found.append(Block(name, start, kind, "\n".join(code)))
            fence = ""
        elif fence:
            code.append(line)
    assert not fence, f"{name}:{start}: the block does not end"
    return found


def spans(text: str) -> list[str]:
    """Code within lines that is a command of ours; a line may end within one."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.S | re.M)
    found = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))
    return [span for span in found if span.split(" ")[0] in PROGRAMS]


def commands(code: str) -> Iterator[list[str]]:
    """The simple commands of a piece of shell, as words; loops and substitutions are looked into."""
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for token in [*lexer, ";"]:
            if set(token) <= set(";|&()"):
                yield from _command(words)
                words = []
            else:
                words.append(token)


def _command(words: list[str]) -> Iterator[list[str]]:
    while words and (words[0] in _KEYWORDS or _ASSIGNMENT.match(words[0])):
        if words[0] == "for":
            return
        words = words[1:]
    words = words[:-1] if words and words[-1] == "$" else words
    for index, word in enumerate(words):
        if re.fullmatch(r"\d?[<>]{1,2}.*", word):  # redirections end what a program gets
            words = words[:index]
            break
    if words:
        yield words


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def check(words: list[str]) -> None:
    """Parse a command as its program would, without running it.

    Raises:
        click.ClickException: there is no such program, verb, option or value.
    """
    program, rest = words[0], words[1:]
    name = program.rsplit("/", 1)[-1]
    if name == "make":
        for target in rest:
            if target not in make_targets() and "=" not in target:
                raise click.UsageError(f"make has no target {target!r}")
    elif name == "python" and rest[:2] == ["-m", "simulation"]:
        from simulation.__main__ import main as simulation

        _parse(simulation, "simulation", rest[2:])
    elif name in PROGRAMS:
        _parse(PROGRAMS[name], name, rest)
    elif name not in OTHERS:
        raise click.UsageError(f"{program!r} is neither ours nor a program that pages may use")


def _parse(found: object, program: str, words: list[str]) -> None:
    """Options and arguments of a click command; a command without its arguments is a mention of it and good."""
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        if (below := found.get_command(click.Context(found), name)) is None:
            raise click.UsageError(f"{program}: no command {name!r}")
        found = below
    if isinstance(found, click.Command):
        given = any(not word.startswith("-") for word in words)
        if given or words or not any(isinstance(one, click.Argument) and one.required for one in found.params):
            _dry(found, program, words)


def _dry(found: click.Command, program: str, words: list[str]) -> None:
    if isinstance(found, click.Group) and not words:
        return
    try:
        found.make_context(program, list(words))
    except click.exceptions.Exit:  # --help, --version
        return
    except click.BadParameter as error:  # a page's files need not be here; the parser itself is done by then
        if not (error.param is not None and isinstance(error.param.type, click.Path) and "does not exist" in error.message):
            raise
