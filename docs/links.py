"""Check every link of the Markdown pages: README, CONTRIBUTING, CHANGELOG and all below docs, in every language.

A link within the repository must lead to a file or folder that is there and, where it names an anchor, to a heading of that page
(GitHub's rule for anchors). Nothing may lead out of the repository. Addresses on the web are only looked at, never fetched: they
must be https, a loopback address or one of the examples' hosts. A page that cannot be reached from README.md by links is lost, and
that is an error too. Run by `make docs`; a test holds it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
UNLINKED = {"CONTRIBUTING.md", "CHANGELOG.md"}
"""Found by their name."""
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
_LINK = re.compile(r"!?\[(?:[^\[\]\\]|\\.|\[[^\]]*\])*\]\(\s*<?([^)\s>]*)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?(\S+?)>?\s*$")
_HEADING = re.compile(r"^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$")
_NAMED = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong link, or a lost page (`line` 0)."""

    page: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.message}" if self.line else f"{self.page}: {self.message}"


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside fenced code with their numbers, code spans blanked out."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip(" `~"):
                fence = ""
        elif mark:
            fence = mark[1]
        else:
            yield number, re.sub(r"(`+)(?:(?!\1).)+?\1", lambda found: " " * len(found[0]), line)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading: lower case, letters, digits, `-` and `_`; blanks become `-`."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    return "".join(char for char in text.strip().lower().replace(" ", "-") if char.isalnum() or char in "-_")


def anchors(text: str) -> set[str]:
    """All anchors of a page; equal headings get -1, -2, ..."""
    found: set[str] = set()
    counts: dict[str, int] = {}
    fenced = dict(prose(text))
    for number, line in enumerate(text.splitlines(), 1):
        if number not in fenced:
            continue
        found |= set(_NAMED.findall(line))
        if heading := _HEADING.match(line):
            base = slug(heading[2])
            again = counts.get(base, 0)
            counts[base] = again + 1
            found.add(f"{base}-{again}" if again else base)
    return found


def links(text: str) -> Iterator[tuple[int, str]]:
    """(line, target) of every link outside code; a link's text may begin on the line before."""
    lines = list(prose(text))
    for index, (number, line) in enumerate(lines):
        if reference := _REFERENCE.match(line):
            yield number, reference[1]
            continue
        before = lines[index - 1][1] if index and lines[index - 1][0] == number - 1 else ""
        carried = before[before.rfind("[") :] + " " if "[" in before and "]" not in before[before.rfind("[") :] else ""
        for found in _LINK.finditer(carried + line):
            yield number, found[1]


def pages(root: Path) -> list[Path]:
    """Every page that is checked."""
    return [root / name for name in TOP if (root / name).exists()] + sorted((root / "docs").rglob("*.md"))


def check(root: Path = ROOT) -> list[Problem]:
    """What is wrong below `root`; empty when all is well."""
    problems: list[Problem] = []
    texts = {page: page.read_text(encoding="utf-8") for page in pages(root)}
    known = {page: anchors(text) for page, text in texts.items()}
    reaches: dict[Path, set[Path]] = {page: set() for page in texts}
    for page, text in texts.items():
        name = page.relative_to(root).as_posix()
        for line, target in links(text):
            wrong, leads = _follow(root, page, target, known)
            if wrong:
                problems.append(Problem(name, line, f"({target}) {wrong}"))
            elif leads is not None:
                reaches[page] |= {leads} if leads in texts else {one for one in texts if leads in one.parents}
    problems += [Problem(page, 0, "no link from README.md leads here") for page in _lost(root, reaches)]
    return problems


def _follow(root: Path, page: Path, target: str, known: dict[Path, set[str]]) -> tuple[str | None, Path | None]:
    """What is wrong with a link, and the file or folder it leads to (None: elsewhere on the web)."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        local = parts.hostname in ("127.0.0.1", "localhost", "[::1]") or (parts.hostname or "").endswith("example.com")
        return (None if parts.scheme == "https" or local else "is neither https nor an address of this host"), None
    if not target:
        return "leads nowhere", None
    leads = page if not parts.path else Path(page.parent / unquote(parts.path)).resolve()
    if not leads.is_relative_to(root.resolve()):
        return "leads out of the repository", None
    if not leads.exists():
        return "is not there", None
    if parts.fragment and leads in known and unquote(parts.fragment) not in known[leads]:
        return f"has no heading for #{unquote(parts.fragment)}", None
    return None, leads


def _lost(root: Path, reaches: dict[Path, set[Path]]) -> list[str]:
    seen, todo = set(), [root / "README.md"]
    while todo:
        page = todo.pop()
        if page not in seen and page in reaches:
            seen.add(page)
            todo += reaches[page]
    return sorted(name for page in reaches if page not in seen and (name := page.relative_to(root).as_posix()) not in UNLINKED)


def main() -> int:
    """Print what is wrong; exit 1 when something is."""
    problems = check()
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"links of {len(pages(ROOT))} pages: good")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
