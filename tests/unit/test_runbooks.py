"""A page for each alert, and no command in it that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import builders_docs
import click
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = ROOT / "docs" / "runbooks"
PAGES = sorted(RUNBOOKS.rglob("*.md"))
SECTIONS = {
    RUNBOOKS: ["What it means", "What users notice", "Look", "Do", "It is over when"],
    RUNBOOKS / "zh": ["含义", "用户感受", "查看", "处理", "何时结束"],
}
each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(RUNBOOKS)) for page in PAGES])


def alerts() -> set[str]:
    rules = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yml").read_text())
    return {rule["alert"] for group in rules["groups"] for rule in group["rules"]}


def commands(text: str) -> list[str]:
    """Every `calculet ...` in code, in a block or within a line."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    lines = [line for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`([^`]+)`", re.sub(r"^```\w*\n.*?^```", "", text, flags=re.S | re.M))
    spans = [" ".join(span.split()) for span in spans]  # a line may end within one
    return [command for command in lines + spans if command.split(" ")[0] in builders_docs.PROGRAMS]


def check(command: str) -> None:
    """Parse it as the program would, without running it.

    Raises:
        click.ClickException: there is no such program, verb, option or value.
    """
    for words in builders_docs.commands(command):
        builders_docs.check(words)


@pytest.mark.parametrize("folder", list(SECTIONS), ids=lambda folder: folder.name)
def test_every_alert_has_its_page_and_every_page_its_alert(folder: Path) -> None:
    assert {page.stem for page in folder.glob("*.md")} - {"README"} == alerts()
    listed = set(re.findall(r"\((Calculet\w+)\.md\)", (folder / "README.md").read_text()))
    assert listed == alerts()


@each_page
def test_a_page_answers_the_five_questions(page: Path) -> None:
    text = page.read_text()
    if page.stem != "README":
        assert text.startswith(f"# {page.stem}\n")
        assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS[page.parent]


@each_page
def test_a_page_names_only_commands_that_exist(page: Path) -> None:
    for command in commands(page.read_text()):
        check(command)


def test_the_chinese_pages_name_the_same_commands() -> None:
    for page in RUNBOOKS.glob("Calculet*.md"):
        chinese = RUNBOOKS / "zh" / page.name
        assert sorted(commands(chinese.read_text())) == sorted(commands(page.read_text())), page.name


@each_page
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("command", ["calculet mend BOARD", "calculet status --verbose", "calculet pingpong BOARD maybe", "calculet keys find"])
def test_the_check_finds_a_command_that_does_not_exist(command: str) -> None:
    with pytest.raises(click.ClickException):
        check(command)
