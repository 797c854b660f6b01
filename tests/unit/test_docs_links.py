"""No link of the documentation leads nowhere, and no page is lost; the checker that says so sees what is planted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_links", ROOT / "docs" / "links.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_links"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


checker = load()
README = "# Top\n\n[a](docs/a.md), [folder](docs/more/)\n"
GOOD = {
    "README.md": README,
    "docs/a.md": "# A page\n\n## `calculet up`: how? And 中文 标题\n\n## Twice\n\n## Twice\n\nSee [this](#twice-1).\n",
    "docs/more/b.md": "[up](../a.md#calculet-up-how-and-中文-标题) [web](https://example.org/x#y) [here](http://127.0.0.1:8080/v1)\n",
}


def found(folder: Path, **changes: str) -> list[str]:
    for name, text in {**GOOD, **{name.replace("__", "/") + ".md": text for name, text in changes.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return [str(problem) for problem in checker.check(folder)]


def test_every_link_of_the_documentation_leads_somewhere_and_no_page_is_lost() -> None:
    assert [str(problem) for problem in checker.check()] == []


def test_it_looks_at_both_languages_and_all_kinds_of_pages() -> None:
    seen = {page.relative_to(ROOT).as_posix() for page in checker.pages(ROOT)}
    assert {"README.md", "docs/architecture.md", "docs/reference/metrics.md", "docs/runbooks/zh/README.md"} <= seen


def test_good_pages_pass(tmp_path: Path) -> None:
    assert found(tmp_path) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[x](none.md)", "is not there"),
        ("[x](../a.md#nothing)", "has no heading for #nothing"),
        ("[x](#here)", "has no heading for #here"),
        ("![picture](picture.png)", "is not there"),
        ("[x](../../../etc/passwd)", "leads out of the repository"),
        ("[x](http://vendor.test/page)", "neither https"),
        ("[x]()", "leads nowhere"),
        ("[a text that\ngoes on](none.md)", "is not there"),
        ("[one]: none.md", "is not there"),
        ("```sh\n# no heading\n```\n[x](#no-heading)", "has no heading"),
    ],
)
def test_a_wrong_link_is_named_with_its_page_and_line(tmp_path: Path, line: str, words: str) -> None:
    (problem,) = found(tmp_path, docs__more__b=f"text\n\n{line}\n")
    assert problem.startswith(f"docs/more/b.md:{3 + line.count(chr(10))}: ") and words in problem


@pytest.mark.parametrize("code", ["`[x](none.md)`", "```md\n[x](none.md)\n```", "~~~\n[x](none.md)\n~~~"])
def test_code_is_no_link(tmp_path: Path, code: str) -> None:
    assert found(tmp_path, docs__more__b=f"{code}\n") == []


def test_a_page_that_nobody_links_to_is_lost(tmp_path: Path) -> None:
    assert found(tmp_path, docs__lonely="# Alone\n[me](lonely.md)\n") == ["docs/lonely.md: no link from README.md leads here"]
