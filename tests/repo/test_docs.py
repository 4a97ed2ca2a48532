"""Every block of the docs runs, and every table and figure is what the code and the records say."""

import importlib
import re
import runpy
import shlex
import subprocess

import pytest

import jagcodec
from benchmarks import report
from jagcodec import cli, memory
from jagcodec.doctor import OPTIONAL, VARIABLES
from jagcodec.errors import REASONS
from jagcodec.wire import documents, schema, spec
from tests.helpers import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def page(name):
    return (ROOT / name).read_text()


def anchors(text):
    """The anchors of the headings of a page, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.filterwarnings("error::jagcodec.errors.JagcodecWarning")
@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(path):
    """The blocks of a page run in order and share their names, as a reader would run them."""
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S):
        exec(compile(block, str(path), "exec"), names)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_files_and_make_targets_exist(path):
    text = path.read_text()
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M):
        assert re.search(rf"^{target}:", page("Makefile"), re.M), target
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", text):
        found = path.parent / target if target else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text()), f"{target}#{anchor}"
    for target in re.findall(r"`((?:src|docs|tests|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / target).exists(), target


def test_every_page_says_in_its_first_line_for_whom_it_is():
    lines = {path.name: path.read_text().split("\n\n")[1] for path in PAGES}
    found = {name for name, line in lines.items() if re.match(r"\w+( page)? is for [^.]+\.$", line)}
    assert {*lines} - found <= {"CHANGELOG.md"}


# Tasks that users come with, and where each is told.
TASKS = {
    "see what a file holds": "docs/command-line.md#inspect",
    "read three columns": "docs/guide.md#read-part-of-a-message",
    "read rows 10 to 20 of a file": "docs/guide.md#read-part-of-a-message",
    "keep bfloat16": "docs/values.md#types-of-numbers",
    "send what some rows lack": "docs/recipes.md#send-a-column-that-some-rows-lack",
    "go on with a partial rollout": "docs/guide.md#grow-a-row",
    "write rows without torch": "docs/transports.md#over-http-from-a-producer-without-torch",
    "write Parquet, and read it": "docs/recipes.md#write-parquet-and-read-it-back",
    "know why a message is large": "docs/command-line.md#why-is-my-message-large",
    "send padding on the left": "docs/guide.md#send-rectangles-with-padding-on-the-left",
    "send what vLLM returned": "docs/engines.md#vllm",
    "send a DataProto of verl": "docs/verl.md#dataproto",
    "listen on an open port": "docs/transports.md#strangers",
    "read messages of another version": "docs/stability.md#upgrade-readers-before-writers",
    "log the metrics of a step": "docs/recipes.md#log-the-metrics-of-a-step",
}


def links(name):
    """Where the links of a page lead, as paths from the root."""
    found = re.findall(r"\]\((?!http)([^)#]*)(#[^)]+)?\)", page(name))
    folder = (ROOT / name).parent
    paths = [(folder / target).resolve() if target else ROOT / name for target, _ in found]
    return {
        f"{path.relative_to(ROOT)}{anchor}" for path, (_, anchor) in zip(paths, found, strict=True)
    }


def test_each_task_is_two_clicks_away_from_the_readme():
    once = links("README.md")
    pages = {target.partition("#")[0] for target in once}
    twice = once.union(*(links(name) for name in pages if name.endswith(".md")))
    assert {task for task, target in TASKS.items() if target not in twice} == set()


def test_every_recipe_is_in_the_list_of_tasks():
    recipes = re.findall(r"^## (.+)$", page("docs/recipes.md"), re.M)
    listed = page("docs/recipes.md").partition("\n## " + recipes[1])[0]
    found = anchors("".join(f"## {name}\n" for name in recipes[1:]))
    assert {anchor for anchor in found if f"(#{anchor})" not in listed} == set()


SOURCES = sorted(p for p in (ROOT / "src/jagcodec").rglob("*") if p.suffix in (".py", ".c"))


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda p: p.name)
def test_no_idioms_of_a_translation(path):
    """CONTRIBUTING.md asks for plain English."""
    idioms = (
        r"\b(?:is none|are none|of what|whoever|Whoever|their kin|goes by)\b"
        r"|(?<!here )\b(?:is|are) no\b"
    )
    assert re.findall(idioms, path.read_text()) == []


PUBLIC = sorted(set(vars(jagcodec)["__all__"]) - {"__version__"})
INTEGRATIONS = [path.stem for path in (ROOT / "src/jagcodec/integrations").glob("[!_]*.py")]
SITE = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
SITE += runpy.run_path(str(ROOT / "docs/site.py"))["PAGES"].values()


def test_a_page_has_every_name_once():
    for name, pattern, expected in (
        ("docs/reference.md", r"^::: jagcodec\.(\w+)$", [*PUBLIC, "testing"]),
        ("docs/reference.md", r"^::: jagcodec\.integrations\.(\w+)$", ["setup", *INTEGRATIONS]),
        ("docs/errors.md", r"^\| `(\w+)` \| .+ \| .+ \|$", REASONS),  # a cause, and a remedy
        ("mkdocs.yml", r"^ +- .+: (\S+\.md)$", SITE),  # as `make docs` says, too
    ):
        assert sorted(re.findall(pattern, page(name), re.M)) == sorted(expected)


def test_names_of_the_reference_exist():
    names = re.findall(r"^::: jagcodec\.(\w+)\.(\w+)$", page("docs/reference.md"), re.M)
    for module, name in (found for found in names if found[0] != "integrations"):
        assert hasattr(importlib.import_module(f"jagcodec.{module}"), name), name


def test_make_help_lists_every_target():
    """What .PHONY lists are the targets that people ask for."""
    makefile = page("Makefile")
    (asked_for,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.M)
    command = ["make", "--no-print-directory", "help"]
    lines = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(asked_for.split())


def test_the_changelog_begins_with_this_version():
    """As .github/workflows/release.yml reads it."""
    heading = re.search(r"^## .*$", page("CHANGELOG.md"), re.M).group()
    version = re.escape(jagcodec.__version__)
    assert re.fullmatch(rf"## {version} \((\d{{4}}-\d\d-\d\d|unreleased)\)", heading)


def test_commands_print_what_the_page_shows(tmp_path, monkeypatch, capsys):
    """In order, since some read what others wrote."""
    monkeypatch.chdir(tmp_path)
    text = page("docs/command-line.md")
    (made_first,) = re.findall(r"^```py\n(.*?)^```", text, re.M | re.S)
    exec(compile(made_first, "docs/command-line.md", "exec"), {})
    shown = "".join(re.findall(r"^```console\n(.*?)^```", text, re.M | re.S))
    names = set()
    for part in re.split(r"^\$ jagcodec ", shown, flags=re.M)[1:]:
        command, _, printed = part.partition("\n")
        status = cli.main(shlex.split(command))
        assert status == (1 if command.startswith("diff") and printed else 0), command
        out = capsys.readouterr().out
        if command == "doctor":  # what is installed differs
            found, listed = ([line.split()[0] for line in x.splitlines()] for x in (out, printed))
            # "!" begins advice, such as where no compiler was.
            expected = [name for name in found if name not in ("!", *OPTIONAL, *VARIABLES)]
            assert [name for name in listed if name not in OPTIONAL] == expected
        else:
            assert out == printed, command
        names.add(command.split()[0])
    cli.main([])
    assert names == {*re.findall(r"^    (\w+)", capsys.readouterr().out, re.M)}


def test_no_figure_is_copied_by_hand_and_every_table_is_shown_somewhere():
    """If this fails after a new run: python -m benchmarks.report"""
    made = report.all_tables()
    pages = {path: path.read_text() for path in report.PAGES}
    assert [path for path in pages if report.rewritten(pages[path], made) != pages[path]] == []
    assert {*re.findall(r"<!-- measured: (.+) -->", "".join(pages.values()))} == {*made}
    # A comment at the start of a line ends the paragraph before it.
    assert [path for path, text in pages.items() if re.search(r"^<!-- cell", text, re.M)] == []


def test_measured_tables_are_on_one_page_and_the_readme_has_one():
    named = {
        path.name: re.findall(r"<!-- measured: (.+) -->", path.read_text()) for path in report.PAGES
    }
    assert named.pop("README.md") == ["figures", "meeting"]
    assert [name for name, tables in named.items() if tables] == ["measured.md"]
    assert len(named["measured.md"]) == len({*named["measured.md"]})


def test_a_quoted_cell_is_that_of_one_row():
    head, rows = ("part", "way", "ms"), [("send", "`a`", "1"), ("", "b", "**2**"), ("get", "b", "")]
    made = {"x": report.table(head, rows) + "\n\nMeasured somewhere."}
    assert report.quoted(made, "x | a | ms") == report.quoted(made, "x | send | a | ms") == "1"
    assert report.quoted(made, "x | send | b | ms") == "2"
    for place in ("x | b | ms", "x | c | ms"):
        with pytest.raises(ValueError, match=r"expected one such row, found [02]$"):
            report.quoted(made, place)


def generated(name):
    pattern = rf"<!-- generated: {name} -->\n(.*?)<!-- end -->"
    return re.search(pattern, page("docs/wire-format.md"), re.S).group(1)


def rows_of_table(name):
    """The cells of a table, without its head."""
    lines = generated(name).splitlines()[2:]
    return [tuple(line.strip("| ").split(" | ")) for line in lines]


def quoted(names):
    """Names as a cell of a table holds them."""
    return ", ".join("*dims*" if name == "*" else f"`{name}`" for name in names) or "none"


def test_wire_format_lists_every_kind_of_node_and_record_dtype_and_number_of_a_run():
    children = {schema.ANY: "any number", schema.PER_KEY: "one per key", 0: "none"}
    nodes = [
        (str(int(kind)), kind.name, quoted(form.fields), quoted(form.numbers))
        + (children.get(form.children, str(form.children)),)
        for kind, form in schema.FORMS.items()
    ]
    assert rows_of_table("nodes") == nodes
    starred = {"*items": "any number of `items`"}
    records = [
        (str(int(kind)), kind.name, ", ".join(starred.get(name, f"`{name}`") for name in fields))
        for kind, fields in documents.RECORDS.items()
    ]
    assert rows_of_table("records") == records
    dtypes = re.findall(r"(\w+) (\d+)", generated("dtypes"))
    assert {name: int(size) for name, size in dtypes} == spec.TORCH_ITEMSIZES
    assert tuple(re.findall(r"`(\w+)", generated("runs"))) == spec.RUN_NUMBERS


def test_wire_format_and_security_name_the_limits():
    text = " ".join(page("docs/wire-format.md").split())
    bits = {
        "expanded": jagcodec.Limits().expanded.bit_length() - 1,
        "rows": spec.MAX_UNBACKED_ROWS.bit_length() - 1,
    }
    for part in (
        f"a table of K rows of {len(spec.RUN_NUMBERS)} int64",
        f"may be {spec.INDIRECT} + K.",
        f"K is from 1 to {spec.MOST_RUNS} for a JAGGED",
        f"may also be stored as {spec.ONE_OBJECT}:",
        f"If `index_buffer` is {spec.NO_INDEX}, there is no index",
        f"at most {spec.EXPANSION} times the bytes of the message",
        f"{spec.EXPANSION} for each byte of documents",
        f"a {spec.EXPANSION}th of the reader's own allowance",
        f"{spec.ROW_COST} for each row of each of its runs",
        f"the reader's own allowance (2^{bits['expanded']} bytes).",
        f"2^{bits['rows']} rows",
        f"{spec.SMALL_BUFFER / 1024:g} KiB",
        f"{spec.INLINE_BYTES / 1024:g} KiB",
        *(f" {limit} " for limit in (memory.ALIGNMENT, spec.MAX_NDIM, spec.MAX_DEPTH)),
        *(f" {limit} " for limit in (spec.MAX_STACKS, spec.MAX_EQUAL_HASHES)),
        bytes(memoryview(jagcodec.encode(None)[0])[:10]).hex(" "),
    ):
        assert part in text
    assert f"| `expanded` | 2^{bits['expanded']} |" in page("SECURITY.md")


def test_pictures_show_what_the_code_returns_and_are_shown():
    """Two are drawn by hand; docs/pictures/draw.py and the report draw the others."""
    drawn = runpy.run_path(str(ROOT / "docs/pictures/draw.py"))["pictures"]()
    drawn[report.PICTURE.name] = report.picture(report.record("bench"))
    stored = {path.name: path.read_text() for path in (ROOT / "docs/pictures").glob("*.svg")}
    assert {name: stored[name] for name in drawn} == drawn
    shown = "".join(path.read_text() for path in PAGES)
    assert [name for name in stored if f"pictures/{name})" not in shown] == []
