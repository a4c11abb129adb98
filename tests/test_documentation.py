"""The documentation says what the code does: columns, metadata, spool, variables, commands, links."""

from __future__ import annotations

import importlib.util
import re
import struct
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_type_hints

import click
import numpy as np
import pytest

from ddpan.analysis.cli import main
from ddpan.collector import settings
from ddpan.collector.schema import (
    COLLECTIVE_RECORD,
    COUNTERS,
    COUNTERS_OFFSET,
    HEADER_BYTES,
    LIVE_METADATA,
    METADATA_KEY,
    OPS,
    SCHEMA_VERSION,
    SPOOL_PATTERN,
    STEP_RECORD,
    TABLES,
    BucketInfo,
    Clock,
    Counters,
    GroupInfo,
    Job,
    Metadata,
    ModuleInfo,
    pack_header,
    part_name,
    rank_folder,
)

ROOT = Path(__file__).parents[1]
FORMAT = (ROOT / "docs" / "format.md").read_text()
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

JSON_TYPES: dict[Any, str] = {
    int: "integer",
    str: "string",
    bool: "boolean",
    int | None: "integer or null",
    float | None: "number or null",
    str | None: "string or null",
    list[int]: "list of integers",
    list[str]: "list of strings",
}
HEADER_VALUES: dict[int, int | str] = {
    0: "DDPANSPL",
    8: 1,
    12: HEADER_BYTES,
    16: 11,
    24: -12,
    32: 13,
    36: 14,
    40: 15,
    48: 16,
    56: STEP_RECORD.itemsize,
    60: COLLECTIVE_RECORD.itemsize,
    64: "the-run",
    128: "the-host",
}


def test_answers_in_the_readme_are_those_of_the_program() -> None:
    """Six kinds of run, recorded or simulated; ``python tests/readme_runs.py`` prints what belongs there."""
    path = ROOT / "tests" / "readme_runs.py"
    spec = importlib.util.spec_from_file_location("readme_runs", path)
    assert spec is not None
    assert spec.loader is not None
    runs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runs)
    shown = README.partition("<!-- answers: begin -->\n\n")[2].partition("\n<!-- answers: end -->")[0]
    assert shown == "".join(f"{title}\n\n{runs.quoted(opened())}\n\n" for title, opened in runs.RUNS.items())[:-1]
    assert len(runs.RUNS) >= 6


def tables(text: str) -> Iterator[list[list[str]]]:
    """The cells of each Markdown table in ``text``, its two header rows left out."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        yield [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()[2:]]


def section(title: str) -> str:
    """The text of docs/format.md from the heading ``title`` to the next heading of any level."""
    _, _, rest = FORMAT.partition(f"# {title}\n")
    assert rest, f"docs/format.md has no section {title!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def commands(command: click.Command = main, name: str = "ddpan") -> Iterator[tuple[str, click.Command]]:
    """Each command with its full name, groups first."""
    yield name, command
    for child, value in getattr(command, "commands", {}).items():
        yield from commands(value, f"{name} {child}")


COMMANDS = dict(commands())


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_documented(table: str) -> None:
    (documented,) = tables(section(f"Table `{table}`"))
    expected = [[f"`{c.name}`", c.dtype, "yes" if c.nullable else "no", c.meaning] for c in TABLES[table]]
    assert [[*row[:3], row[3].replace("`", "")] for row in documented] == expected


@pytest.mark.parametrize("kind", [Metadata, Job, Clock, GroupInfo, ModuleInfo, BucketInfo, Counters])
def test_every_metadata_key_is_documented(kind: type) -> None:
    documented = [[(row[0].strip("`"), row[1]) for row in table] for table in tables(section("Metadata"))]
    assert [(key, JSON_TYPES.get(hint, "object")) for key, hint in get_type_hints(kind).items()] in documented


def test_spool_header_lies_where_documented() -> None:
    header = pack_header(
        segment=11,
        epoch_offset_ns=-12,
        rank=13,
        world_size=14,
        steps_capacity=15,
        collectives_capacity=16,
        run="the-run",
        host="the-host",
    )
    rows = next(tables(section("The spool")))
    assert {int(offset): read(header, int(offset), kind) for offset, kind, _ in rows} == HEADER_VALUES


def read(header: bytes, offset: int, kind: str) -> int | str:
    """The value of the documented type ``kind``, ``u32`` or ``64 bytes`` for example, at ``offset``."""
    if kind.endswith(" bytes"):
        return header[offset : offset + int(kind.split(maxsplit=1)[0])].rstrip(b"\0").decode()
    code = {"u32": "<I", "u64": "<Q", "i64": "<q"}[kind]
    return int(struct.unpack_from(code, header, offset)[0])


@pytest.mark.parametrize(("record", "position"), [(STEP_RECORD, 1), (COLLECTIVE_RECORD, 2)])
def test_spool_records_lie_where_documented(record: np.dtype[np.void], position: int) -> None:
    rows = list(tables(section("The spool")))[position]
    documented = [(field.strip("`"), np.dtype(f"{kind[0]}{int(kind[1:]) // 8}"), int(o)) for o, kind, field in rows]
    assert record.fields is not None
    assert documented == [(name, *record.fields[name][:2]) for name in record.names or ()]


def test_names_and_numbers_of_the_format_are_documented() -> None:
    text = " ".join(FORMAT.split())
    assert ", ".join(f"`{op}`" for op in OPS) in text
    assert f"offset {COUNTERS_OFFSET} on" in text
    assert ", ".join(f"`{counter}`" for counter in COUNTERS) in text
    assert f"`{METADATA_KEY}`" in text
    assert f"Version {SCHEMA_VERSION}." in text


@pytest.mark.parametrize("name", [rank_folder(0), *(part_name(table, 1) for table in TABLES), LIVE_METADATA])
def test_names_of_files_are_documented(name: str) -> None:
    assert re.search(rf"^ +{re.escape(name)}\b", section("Layout"), re.MULTILINE)


def test_name_of_a_spool_file_is_documented() -> None:
    (name,) = re.findall(r"^ +(live-\S+)", section("Layout"), re.MULTILINE)
    assert fnmatch(name, SPOOL_PATTERN)


def test_variables_are_documented_and_no_others() -> None:
    documented = set(re.findall(r"\bDDPAN_[A-Z0-9_]+", (ROOT / "docs" / "collector.md").read_text()))
    assert documented == {variable.name for variable in settings.VARIABLES}


def test_every_variable_in_the_collector_is_a_setting() -> None:
    sources = (path.read_text() for path in (ROOT / "collector").rglob("*.py"))
    found = {name for text in sources for name in re.findall(r"\bDDPAN_[A-Z0-9_]+", text)}
    assert found == {variable.name for variable in settings.VARIABLES}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    command = COMMANDS[name]
    help_text = command.get_help(click.Context(command, info_name=name))
    assert "example" in help_text.lower()
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts[0]} has no help"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_documentation(name: str) -> None:
    assert any(name in page.read_text() for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_commands_in_the_documentation_exist(page: Path) -> None:
    code = re.findall(r"(?:^ {4}(?:\$ )?|`)(?:\S*/)?ddpan ([a-z]+)([^`\n]*)", page.read_text(), re.MULTILINE)
    for command, rest in code:
        assert f"ddpan {command}" in COMMANDS, f"{page.name} shows `ddpan {command}`"
        options = {option for parameter in COMMANDS[f"ddpan {command}"].params for option in parameter.opts}
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)) <= options | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_make_targets_in_the_documentation_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^ {4}|`)make ([a-z0-9-]+)", page.read_text(), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_links_in_the_documentation_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The anchors that headings of a Markdown page get: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
