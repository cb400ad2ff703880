"""README is a contract: every command, option, exit code and receipt key stands in it; and the house is tidy."""

import json
import re
import subprocess
from pathlib import Path

import click
import pytest

import h3spool
from h3spool.cli import commands
from h3spool.errors import ERRORS, H3SpoolError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
VISIBLE = {name: command for name, command in commands.commands.items() if not command.hidden}


@pytest.mark.parametrize("name", sorted(VISIBLE))
def test_every_command_has_help_with_an_example_and_a_row_in_readme(name):
    command = VISIBLE[name]
    leaves = command.commands.values() if isinstance(command, click.Group) else [command]
    for leaf in leaves:
        assert leaf.help and "Example: h3spool" in leaf.help
    assert re.search(rf"^\| `{name}\b", README, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(VISIBLE))
def test_every_option_is_in_readme_and_has_help(name):
    words = re.split(r"[\s`,]+", README)
    for option in VISIBLE[name].params:
        if isinstance(option, click.Option):
            assert option.help and option.opts[0] in words, f"{name} {option.opts}"
            if option.envvar:
                assert option.envvar in README


def test_readme_names_no_option_that_does_not_exist():
    known = {flag for command in VISIBLE.values() for option in command.params for flag in option.opts}
    commands_only = README.split("## Commands")[1].split("## Exit codes")[0]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", commands_only)) <= known


def test_the_exit_code_table_is_the_error_classes():
    rows = dict(re.findall(r"^\| ([0-9, ]+) \| (.+) \|$", README, re.MULTILINE))
    for error in (H3SpoolError, *ERRORS):
        assert rows[str(error.exit_code)] == error.__doc__
    assert set(rows) == {"0", "1", "2", "130, 143", *(str(error.exit_code) for error in ERRORS)}


def test_the_receipt_table_names_every_top_level_key():
    schema = json.loads((Path(h3spool.__file__).parent / "receipt.schema.json").read_text())
    table = README.split("## The receipt")[1].split("## Troubleshooting")[0]
    for key in schema["properties"]:
        assert f"`{key}`" in table


def test_the_chinese_page_names_only_commands_that_exist():
    page = (ROOT / "README.zh-CN.md").read_text()
    named = set(re.findall(r"h3spool ([a-z]+)", page)) - {"comfyui"}
    assert named and named <= set(VISIBLE)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).exists()]


def test_modules_stay_readable():
    for path in (ROOT / "h3spool").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 450, f"{path.name} is too long; is it two things?"


def test_the_repository_stays_small():
    sizes = {path: path.stat().st_size for path in tracked()}
    assert sum(size for path, size in sizes.items() if "tests" in path.parts) < 3 << 20
    assert sum(size for path, size in sizes.items() if "demo" in path.parts) < 6 << 20
    assert not [path for path in sizes if path.suffix in (".mp4", ".mkv")]
