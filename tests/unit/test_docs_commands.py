"""Every code block of the documentation is classified, and no page names a command that does not exist.

What is marked `run` is executed in tests/integration/test_docs_run.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
import yaml
from builders_docs import AS_ROOT, CLASSES, ROOT, Block, blocks, check, commands, pages, spans

from calculet_core.config import FleetConfig, SchedulerConfig, parse_fleet

PAGES = pages()
BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.kind.startswith("sh")]
MINIMAL = {
    "schema": "calculet-fleet/v1", "boards": [{"name": "board0", "device": "sim"}], "models": [{"alias": "qwen3", "package": "p"}],
}  # fmt: skip
each_page = pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])


def of(*kinds: str) -> pytest.MarkDecorator:
    found = [block for block in BLOCKS if block.kind in kinds]
    return pytest.mark.parametrize("block", found, ids=[str(block) for block in found])


@each_page
def test_every_block_says_what_is_done_with_it(page: Path) -> None:
    assert [f"{block}: {block.kind!r}" for block in blocks(page) if block.kind not in CLASSES] == []


@pytest.mark.parametrize("block", SHELL, ids=[str(block) for block in SHELL])
def test_every_command_of_a_block_exists(block: Block) -> None:
    found = list(commands(block.code))
    assert found, "a block without a command"
    for words in found:
        check(words)


@each_page
def test_every_command_within_a_line_exists(page: Path) -> None:
    if page.parent.name in ("reference", "decisions") or page.name == "benchmarks.md":
        return  # generated from the code; history; command lines of benchmarks
    for span in spans(page.read_text()):
        span = re.sub(r"\[[^\]]*\]|\|.*|, .*", "", span).replace("...", "X").replace(" ID", " 1")
        for words in commands(span):
            check(words)


def test_what_needs_root_says_so_and_is_done_in_the_tests_of_systemd() -> None:
    done = "".join(
        path.read_text() for path in [*sorted((ROOT / "tests" / "systemd").glob("*.py")), ROOT / "tests" / "builders_systemd.py"]
    )
    roots = [block for block in SHELL if block.kind == "sh root"]
    assert roots
    for block in roots:
        assert block.code.startswith(AS_ROOT + "\n"), f"{block}: a reader must see it"
        for program, *rest in commands(block.code):
            verb = next((word for word in rest if not word.startswith("-")), "")
            if program == "systemctl":
                tried = re.search(rf'systemctl\(?"?,? ?"{verb}', done) or f'"{verb}"' in done
            elif program.rsplit("/", 1)[-1] == "calculet":
                tried = f'"{verb}"' in done
            else:
                continue
            assert tried, f"{block}: {program} {verb} is not tried in tests/systemd"
    unmarked = [
        str(block) for block in SHELL if block.kind != "sh root" and any(words[0] == "systemctl" for words in commands(block.code))
    ]
    assert unmarked == []


@of("yaml")
def test_yaml_is_yaml_and_parts_of_a_configuration_are_accepted_by_it(block: Block) -> None:
    found = yaml.safe_load(block.code)
    assert isinstance(found, dict)
    if "schema" not in found and set(found) <= set(FleetConfig.__struct_fields__):
        if "tenants" in found and all(one.get("name") != "default" for one in found["tenants"]):
            found["tenants"].insert(0, {"name": "default"})
        parse_fleet(json.dumps({**MINIMAL, **found}).encode(), str(block))
    elif found.get("schema") == "calculet-fleet/v1":
        parse_fleet(block.code.encode(), str(block))
    else:
        assert "schema" in found or not set(found) <= set(SchedulerConfig.__struct_fields__)


@of("json")
def test_json_is_json(block: Block) -> None:
    for line in block.code.splitlines() if block.code.count("\n{") else [block.code]:
        json.loads(line)


@of("python run")
def test_python_compiles(block: Block) -> None:
    compile(block.code, str(block), "exec")


def without_words(block: Block) -> list[list[str]]:
    return list(commands(block.code))


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "tutorial").glob("*.md")), ids=lambda page: page.name)
def test_the_chinese_tutorial_has_the_same_steps(page: Path) -> None:
    chinese = page.parent / "zh" / page.name
    assert [
        (one.kind, without_words(one) if one.kind.startswith("sh") else one.code) for one in blocks(chinese) if one.kind != "text"
    ] == [(one.kind, without_words(one) if one.kind.startswith("sh") else one.code) for one in blocks(page) if one.kind != "text"]
    assert [one.code for one in blocks(chinese) if one.kind == "text"] == [one.code for one in blocks(page) if one.kind == "text"]


def test_the_chinese_introduction_has_the_commands_of_the_readme() -> None:
    english, chinese = blocks(ROOT / "README.md"), blocks(ROOT / "docs" / "zh" / "README.md")
    assert [block.kind for block in english] == [block.kind for block in chinese]
    assert [without_words(one) for one in chinese if one.kind.startswith("sh")] == [
        without_words(one) for one in english if one.kind.startswith("sh")
    ]


# ---------------------------------------------------------------- the checker itself
@pytest.mark.parametrize(
    "line",
    [
        "calculet mend BOARD", "calculet status --verbose", "make everything", "for i in 1 2; do calculet explian $i | head -1; done",
        "curl -s x | nonsense", "sleep 1; calculet drain --no-such", ".venv/bin/calculet keys find", "X=1 calculet keys find", "(calculet keys find)",
        "echo $(calculet keys find)", "python -m simulation dream", "calculet-worker build-package smollm3 --out x", "calculet-perf run m --nothing",
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(click.ClickException):
        for words in commands(line):
            check(words)


def test_a_block_without_a_class_or_an_end_is_found(tmp_path: Path) -> None:
    (found,) = blocks(tmp_path / "page.md", "text\n```sh\ncalculet status\n```\n")
    assert found.kind not in CLASSES and found.code == "calculet status" and found.line == 2
    with pytest.raises(AssertionError, match="does not end"):
        blocks(tmp_path / "page.md", "```sh run\ncalculet status\n")
