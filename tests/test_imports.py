"""Who imports whom, as ARCHITECTURE.md says; what stays unloaded; how long it takes to say --help."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROGRAM, clean_environment, clip_bytes, make_clip, put

import h3spool
from h3spool.admit import manifest

PACKAGE = Path(h3spool.__file__).parent
ARCHITECTURE = PACKAGE.parent / "ARCHITECTURE.md"
MODULES = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}


def names_of(dotted: str) -> str | None:
    """`h3spool.vae.audio` -> `vae.audio` where that is a module of ours."""
    inner = dotted.removeprefix("h3spool").removeprefix(".")
    path = inner.replace(".", "/")
    return inner if inner and ({f"{path}.py", f"{path}/__init__.py"} & MODULES) else None


def imports_of(source: str) -> set[str]:
    """The modules of h3spool that a source imports, at the top, in functions, and for types."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {names_of(alias.name) for alias in node.names if alias.name.split(".")[0] == "h3spool"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who imports whom"
            if (node.module or "").split(".")[0] == "h3spool":
                found |= {names_of(f"{node.module}.{alias.name}") or names_of(node.module) for alias in node.names}
                found |= {"export" for alias in node.names if (node.module, alias.name) == ("h3spool", "export")}
    return found - {None}


@functools.cache
def table() -> dict[str, set[str] | None]:
    """ARCHITECTURE.md's fenced block of lines `module.py   what it is   -> a, b`; None: everything."""
    blocks = re.findall(r"^```\n(.*?)^```$", ARCHITECTURE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "errors.py" in block)
    rows = (re.fullmatch(r"(\S+) .*->(.*)", line) for line in block.splitlines())
    allowed = {row[1]: {name.strip() for name in row[2].split(",") if name.strip()} for row in rows}
    return {name: None if modules == {"all"} else modules for name, modules in allowed.items()}


@functools.cache
def rooms() -> dict[str, set[str]]:
    """The table's rooms as the code has them; a folder of the table is one room."""
    found: dict[str, set[str]] = {}
    folders = [name for name in table() if name.endswith("/")]
    for module in sorted(MODULES - {"__init__.py", "vae/__init__.py"}):
        room = next((folder for folder in folders if module.startswith(folder)), module)
        found.setdefault(room, set()).update(imports_of((PACKAGE / module).read_text()))
    return {
        room: {name for name in names if not (room.endswith("/") and name.split(".")[0] == room[:-1])}
        for room, names in found.items()
    }


def test_every_module_has_its_line_in_the_table():
    assert set(rooms()) == set(table())


@pytest.mark.parametrize("room", sorted(table()))
def test_each_imports_what_the_table_says(room):
    allowed = table()[room]
    if allowed is not None:
        assert rooms()[room] == allowed


def test_the_lazy_export_is_all_that_the_package_itself_imports():
    assert imports_of((PACKAGE / "__init__.py").read_text()) == {"steps"}


def test_only_the_command_line_prints_or_exits():
    for module in sorted(MODULES):
        tree = ast.parse((PACKAGE / module).read_text())
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if not module.startswith(("cli/", "node/")):
            assert not calls & {"print", "exit", "sys.exit", "click.echo"}, module
            assert "click" not in {
                alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
            }


def test_only_the_networks_import_torch_at_the_top():
    for module in sorted(MODULES):
        top = [
            node
            for node in ast.parse((PACKAGE / module).read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        loaded = {
            name.split(".")[0]
            for node in top
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        }
        if not module.startswith("vae/") and module != "decode.py":
            assert not loaded & {"torch", "safetensors", "rich", "imageio_ffmpeg", "httpx", "xxhash"}, module


# ---------------------------------------------------------------- what stays unloaded

RUN = """
import io, json, sys
from h3spool.cli import main
for argv in json.loads(sys.argv[1]):
    sys.argv, sys.stdin = ["h3spool", *argv], io.StringIO("")
    try:
        main()
    except SystemExit as end:
        loaded = sorted({"torch", "numpy", "rich", "xxhash", "imageio_ffmpeg"} & set(sys.modules))
        print(json.dumps(["--->", argv[0], end.code, loaded]), flush=True)
"""


def loaded_by(*calls) -> list:
    argv = [sys.executable, "-c", RUN, json.dumps([[str(word) for word in call] for call in calls])]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env=clean_environment())
    return [json.loads(line)[1:] for line in done.stdout.splitlines() if line.startswith('["--->"')]


def test_light_commands_load_nothing_heavy(sampler, decoder, tmp_path):
    """torch costs 1.2 to 1.8 s, numpy 0.1 s: neither for what only moves names and hashes."""
    (name, *_) = (put(sampler, "verified") for _ in range(2))
    assert manifest(sampler.job("verified", name))
    run = f"push-{sampler.uuid}-0-{'0' * 16}"
    calls = [
        ["--help"],
        ["init", tmp_path / "new", "--role", "decoder"],
        ["admit", "--spool", decoder.root, "--", run],
        ["push", "-s", sampler.root, "--to", decoder.root, "--min-free", "0"],
        ["status", "-s", sampler.root, "--json"],
        ["requeue", "-s", decoder.root, name],
        ["gc", "-s", sampler.root],
        ["fsck", "-s", sampler.root],
    ]
    results = loaded_by(*calls)
    assert [result[0] for result in results] == [str(call[0]) for call in calls]
    assert [result[2] for result in results] == [[]] * len(calls)
    assert [result[1] for result in results[:5]] == [0] * 5


def test_looking_at_numbers_loads_numpy_and_no_torch(decoder, sampler, tmp_path):
    put(decoder, "incoming")
    (tmp_path / "clip").write_bytes(clip_bytes(*make_clip()))
    results = loaded_by(
        ["verify", "-s", decoder.root],
        ["export", "-s", sampler.root, tmp_path / "clip", "--min-free", "0"],
        ["loop", "--once", "-s", sampler.root, "--to", decoder.root, "--min-free", "0"],
        ["mux", "-s", decoder.root],
    )
    assert [(result[1], "torch" in result[2]) for result in results] == [(0, False)] * 4
    assert "numpy" in results[0][2]


# ---------------------------------------------------------------- start-up

BARE = """
import click
@click.group()
def main(): "A program."
for name in "abcdefgh":
    @main.command(name)
    @click.option("--x", help="An option.")
    def command(x): "A command."
main()
"""


def cpu_s(argv) -> float:
    """User and system seconds of one run: what it costs, however busy the machine is."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env=clean_environment())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_starts_within_twice_a_bare_click_program():
    ours, bare = [], []
    for _ in range(7):  # in turn, so that both see the same machine
        ours.append(cpu_s([PROGRAM, "--help"]))
        bare.append(cpu_s([sys.executable, "-c", BARE, "--help"]))
    assert min(ours) < 2 * min(bare), f"h3spool --help {min(ours):.3f} s, a bare click program {min(bare):.3f} s"
