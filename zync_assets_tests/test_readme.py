"""The README: its form, its tables, and every block of code in it, run as it stands there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from dagster import AssetKey, DagsterInstance, Definitions

from zync_assets.cli.main import COMMANDS, main
from zync_assets.kafka.topics import delete_topic
from zync_assets.local.services import Services
from zync_assets.pipeline_file import load
from zync_assets.pipeline_file.grammar import FILE, KAFKA, KEYS, LAKE, REGISTRY, SPARK
from zync_assets.pipeline_file.key import Key
from zync_assets.pipeline_file.keys import SECTIONS as SECTIONS_OF_RULES

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
LINES = README.read_text().splitlines()
PAGES = [page for page in sorted((ROOT / "demo").glob("*.md")) if page.name != "README.md"]
SECTIONS = [
    "zync_assets",
    "Quick start",
    "A first pipeline of your own",
    "In Dagster, with Python",
    "A glossary of ten words",
    "Guarantees and limits",
    "Reference",
    "Connecting and securing",
    "Operating",
    "Developing",
]
RUN = ("sh", "yaml", "console", "python")
"""The languages whose blocks the tests below run, all of them."""

SECRETS = dict.fromkeys(("KAFKA_USER", "KAFKA_PASSWORD", "REGISTRY_USER", "REGISTRY_PASSWORD", "KEY", "SECRET"), "x")
OF_ONE_TYPE = [key for kind in SECTIONS_OF_RULES.values() for key in kind.keys]
TOPICS = ("orders", "payments", "paid-orders", "clean-orders")
SPARK_OF_TESTS = 'spark: {master: "local[2]", spark.sql.shuffle.partitions: 2}\n'


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line``: the line of its opening fence."""

    language: str
    line: int
    text: str


def all_blocks(lines: Sequence[str]) -> list[Block]:
    found: list[Block] = []
    opened: int | None = None
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            if opened is None:
                opened = number
            else:
                text = "\n".join(lines[opened : number - 1]) + "\n"
                found.append(Block(lines[opened - 1].strip().removeprefix("```"), opened, text))
                opened = None
    assert opened is None
    return found


BLOCKS = all_blocks(LINES)


def blocks(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def prose() -> Iterator[tuple[int, str]]:
    """The lines outside of blocks, with their numbers."""
    inside = False
    for number, line in enumerate(LINES, 1):
        fence = line.lstrip().startswith("```")
        inside ^= fence
        if not inside and not fence:
            yield number, line


def section(title: str) -> str:
    text = README.read_text()
    found = re.search(rf"^##? {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_readme_has_its_ten_sections_in_order() -> None:
    titles = [match[1] for _, line in prose() if (match := re.fullmatch(r"##? (.*)", line))]
    assert titles == SECTIONS


def test_the_readme_is_short_and_narrow() -> None:
    assert len(LINES) < 450
    assert [number for number, line in enumerate(LINES, 1) if len(line) > 120] == []


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_deeper_page_is_narrow_and_the_readme_names_it(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 120] == []
    assert f"](demo/{page.name})" in README.read_text()


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in (README, *PAGES):
        for target in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_block_has_a_language_that_a_test_runs() -> None:
    assert {block.language for block in BLOCKS} == set(RUN)
    assert [number for number, line in prose() if line.startswith(("    ", "\t")) and "- " not in line] == []


def test_the_quick_start_holds_the_two_sh_blocks_of_the_readme() -> None:
    first, second = blocks("sh")
    assert section("Quick start").count("```sh\n") == 2
    assert first.text.splitlines()[-1] == ".venv/bin/zync demo"
    assert second.text.splitlines()[-1] == ".venv/bin/pytest"


def test_the_glossary_has_ten_words() -> None:
    assert re.findall(r"^(\d+)\. ", section("A glossary of ten words"), re.MULTILINE) == [str(n) for n in range(1, 11)]


def row(key: Key) -> str:
    """The row of a key in the reference: name, first sentence and default."""
    head, other, _ = key.default.partition(", else")
    default = "required" if key.required else head + (", else …" if other else "")
    return f"| `{key.name}` | {key.summary.removesuffix('.')} | {default or '–'} |"


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("The file", FILE),
        ("`inputs`", KEYS["inputs"].keys),
        ("`outputs`", KEYS["outputs"].keys),
        ("`transforms`", [key for key in KEYS["transforms"].keys if key not in OF_ONE_TYPE]),
        ("`kafka`, `registry`, `spark`, `lake`", (*KAFKA, *REGISTRY, *SPARK, *LAKE)),
    ],
)
def test_a_table_of_the_reference_is_what_the_grammar_says(title: str, keys: Sequence[Key]) -> None:
    text = section("Reference") + (ROOT / "demo" / "connecting.md").read_text()
    part = text.partition(f"### {title}\n")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `.*$", part, re.MULTILINE) == [row(key) for key in keys]
    for key in keys:
        if key.name in ("shape", "create"):
            assert all(f"`{below.name}`" in part for below in key.keys)


def test_the_page_of_rules_has_the_keys_of_each_type() -> None:
    part = (ROOT / "demo" / "rules.md").read_text().partition("## Keys of each type\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `.*$", part, re.MULTILINE) == [row(key) for key in OF_ONE_TYPE]


def test_the_readme_names_every_command() -> None:
    text = section("Operating")
    assert [name for name in COMMANDS if f"`zync {name}" not in text and f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_a_command_in_the_text_is_one_of_zync_s_with_options_that_it_has(page: Path) -> None:
    context = click.Context(main)
    for code in re.findall(r"`(zync [^`]+)`", page.read_text()):
        words = code.split()[1:]
        command: click.Command | None = main
        while isinstance(command, click.Group) and words and words[0].islower():
            command = command.get_command(context, words.pop(0))
            assert command is not None, code
        known = {"--help", *(name for option in (command.params if command else ()) for name in option.opts)}
        assert {word for word in words if word.startswith("--")} <= known, code


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: f"line {block.line}")
def test_a_pipeline_of_the_readme_is_valid(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text(block.text)
    assert load(path, SECRETS).inputs


RULE_FILES = re.findall(
    r"^```yaml\n(inputs:.*?)^```$", (ROOT / "demo" / "rules.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.parametrize("text", RULE_FILES)
def test_a_pipeline_of_the_page_of_rules_is_valid(text: str, tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    path.write_text(text)
    assert load(path, SECRETS).rules


def test_the_first_pipeline_has_ten_lines() -> None:
    assert len(blocks("yaml")[0].text.splitlines()) == 10


@pytest.fixture
def shop(services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the first pipeline of the README as ``shop.yaml``, and the environment of its commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", services.bootstrap_servers)
    monkeypatch.setenv("SCHEMA_REGISTRY_URL", services.registry_url)
    Path("shop.yaml").write_text(blocks("yaml")[0].text + SPARK_OF_TESTS)
    kafka = {"bootstrap.servers": services.bootstrap_servers}
    for topic in TOPICS:
        delete_topic(kafka, topic)
    yield tmp_path
    for topic in TOPICS:
        delete_topic(kafka, topic)


def answer(command: str) -> str:
    """The stdout of a line of a ``console`` block: a command of zync, after a pipe if need be."""
    before, _, own = f"| {command}".rpartition("| zync ")
    given = before.strip("| ")
    text = subprocess.run(["bash", "-c", given], capture_output=True, text=True, check=True).stdout if given else ""
    # The shell splits the words, since it knows its own quotes.
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {own}"], capture_output=True, text=True, check=True).stdout
    found = CliRunner().invoke(main, words.split("\0")[:-1], input=text)
    assert found.exit_code == 0, f"{command}: {found.stderr}"
    return found.stdout


def played(block: Block) -> str:
    """A ``console`` block with the answers that its commands give now."""
    shown = ""
    for line in block.text.splitlines():
        if line.startswith("$ "):
            shown += f"{line}\n"
            shown += "".join(f"{text.rstrip()}\n" for text in answer(line[2:]).splitlines() if text.strip())
    return shown


def same(shown: str, expected: str) -> bool:
    """Whether two texts are equal, where ``…`` stands for any text of a line, and a line of ``…`` for any lines.

    Runs of spaces and of the rules of tables count as equal, since times and ages have no fixed width.
    """
    shown, expected = (re.sub(r"([ ─])\1+", r"\1", text) for text in (shown, expected))
    # A cell between two others may be empty: its spaces are then one run.
    lines = [
        r"(?:.*\n)*" if line == "…" else re.escape(line).replace(r"\ …\ ", r"\ (?:.*\ )?").replace("…", ".*") + r"\n"
        for line in expected.splitlines()
    ]
    return re.fullmatch("".join(lines), shown) is not None


@pytest.mark.slow
def test_the_commands_and_the_python_of_the_readme_do_what_it_says(shop: Path) -> None:
    """One pipeline for all blocks, in the order of the README."""
    for block in BLOCKS:
        if block.language == "console":
            now = played(block)
            assert same(now, block.text), f"README.md, line {block.line}; the answers now are\n{now}"
        if block.language == "python":
            assert printed(block) == "12\n"


def printed(block: Block) -> str:
    """The output of the asset that a ``python`` block defines."""
    names: dict[str, object] = {"__name__": "shop"}
    exec(compile(block.text, f"README.md:{block.line}", "exec"), names)
    definitions = names["defs"]
    assert isinstance(definitions, Definitions)
    job = definitions.resolve_implicit_global_asset_job_def()
    with DagsterInstance.ephemeral() as instance, contextlib.redirect_stdout(io.StringIO()) as out:
        # The sensor adds the key of a pool's first range.
        instance.add_dynamic_partitions("shop/Staging", ["0:0-999999"])
        assert job.execute_in_process(instance=instance, asset_selection=[AssetKey("revenue")]).success
    return out.getvalue()


@pytest.mark.slow
def test_the_example_of_the_page_of_edits_does_what_it_says(shop: Path) -> None:
    old, new, console = all_blocks((ROOT / "demo" / "edits.md").read_text().splitlines())
    Path("shop.yaml").write_text(old.text + SPARK_OF_TESTS)
    Path("new.yaml").write_text(new.text + SPARK_OF_TESTS)
    Path("orders.jsonl").write_text(
        "".join(json.dumps({"key": {"id": id}, "value": {"id": id, "item": item}}) + "\n" for id, item in ITEMS)
    )
    answer("zync produce orders orders.jsonl --create")
    answer("zync run shop.yaml --until-idle")
    now = played(console)
    assert same(now, console.text), now


ITEMS = ((1, "tea"), (2, "cups"))


@dataclass(frozen=True)
class Example:
    """Records for an example of the page of rules, and its outputs. ``records``: topic, key, value, and seconds; ``outputs``:
    topic → keys and values."""

    records: Sequence[tuple[str, object, object, int]]
    outputs: dict[str, list[tuple[object, object]]]


ORDER = {"ID": 1, "customer": "Ann", "lines": [{"sku": "tea", "qty": 2}, {"sku": "cup", "qty": 0}]}
EXAMPLES = {
    "group": Example(
        [
            ("order", None, {"txn": 1, "done": False, "row": {"product": "tea", "qty": 2}}, 0),
            ("order", None, {"txn": 2, "done": False, "row": {"product": "cup", "qty": 1}}, 1),
            ("menu", None, {"txn": 1, "done": True, "row": {"price": 3}}, 2),
        ],
        {"NewOrders": [({"txn": 1}, {"product": "tea", "total": 6, "prices": [3]})]},
    ),
    "expire-after": Example(
        [
            ("Invoices", {"ID": 1}, {"after": {"ID": 1}}, 0),
            ("Invoices", {"ID": 2}, {"after": {"ID": 2}}, 60),
            ("InvoiceStatus", None, {"after": {"InvoiceID": 2, "status": "paid"}}, 3601),
        ],
        {"NewInvoices": [({"ID": 1}, {"ID": 1, "status": None}), ({"ID": 2}, {"ID": 2, "status": "paid"})]},
    ),
    "explode": Example(
        [
            ("shop.public.orders", {"ID": 1}, {"op": "c", "after": ORDER}, 0),
            ("shop.public.orders", {"ID": 1}, {"op": "u", "after": ORDER}, 1),
            ("shop.public.users", {"ID": 7}, {"op": "c", "after": {"ID": 7}}, 0),
        ],
        {
            "Orders": [({"ID": 1}, {"ID": 1, "customer": "Ann"})],
            "Lines": [({"ID": 1, "sku": "tea"}, {"ID": 1, "sku": "tea", "qty": 2})],
            "shop.public.orders.clean": [({"ID": 1}, {"op": "u", "after": ORDER})],
            "shop.public.users.clean": [({"ID": 7}, {"op": "c", "after": {"ID": 7}})],
        },
    ),
    "coalesce": Example(
        [("Invoices", {"ID": id}, {"after": {"ID": id, "n": n}}, 0) for id, n in ((1, 1), (2, 1), (1, 2))],
        {"NewInvoices": [({"ID": 2}, {"ID": 2, "n": 1}), ({"ID": 1}, {"ID": 1, "n": 2})]},
    ),
}
"""A word that is in one example of the page alone → the example."""


@pytest.mark.slow
@pytest.mark.parametrize("word", EXAMPLES)
def test_an_example_of_the_page_of_rules_does_what_it_says(shop: Path, services: Services, word: str) -> None:
    [text] = (text for text in RULE_FILES if f" {word}:" in text or f"type: {word}" in text)
    # Topics that are missing.
    text = re.sub(r"(topic: .*, +pool: (?:Staging|Bundles))", r"\1, create: {}", text)
    Path("shop.yaml").write_text(text + SPARK_OF_TESTS)
    example, kafka = EXAMPLES[word], {"bootstrap.servers": services.bootstrap_servers}
    inputs = dict.fromkeys(topic for topic, *_ in example.records)
    try:
        for topic in inputs:
            lines = [
                json.dumps({"key": key, "value": value, "timestamp": 1_700_000_000_000 + 1000 * seconds})
                for name, key, value, seconds in example.records
                if name == topic
            ]
            Path("records.jsonl").write_text("\n".join(lines))
            answer(f"zync produce {topic} records.jsonl --create")
        answer("zync run shop.yaml --until-idle")
        for topic, wanted in example.outputs.items():
            found = [json.loads(line) for line in answer(f"zync consume {topic} --until-end").splitlines()]
            assert [(item["key"], item["value"]) for item in found] == wanted, topic
    finally:
        for topic in (*inputs, *example.outputs):
            delete_topic(kafka, topic)


PIP = """#!/bin/sh
echo "$@" >> pip-arguments
"""
VENV = """#!/bin/sh
[ "$*" = "-m venv .venv" ] && mkdir -p .venv/bin && cp {tools}/* .venv/bin
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a block of the quick start runs with this environment's packages: `python3.11 -m venv` makes
    links to this environment's commands, and `pip` writes its arguments down. `.ci/run` installs for real."""
    tools, path = tmp_path / "tools", tmp_path / "path"
    tools.mkdir()
    path.mkdir()
    for name in ("zync", "pytest"):
        (tools / name).write_text(f'#!/bin/sh\nexec {Path(sysconfig.get_path("scripts")) / name} "$@"\n')
    (tools / "pip").write_text(PIP)
    (tools / "pyright").write_text("#!/bin/sh\necho types | tee types\n")
    (path / "python3.11").write_text(VENV.format(tools=tools))
    for script in (*tools.iterdir(), *path.iterdir()):
        script.chmod(0o755)
    folder = tmp_path / "zync"
    (folder / ".ci").mkdir(parents=True)
    (folder / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    (folder / "README.md").write_bytes(README.read_bytes())
    monkeypatch.setenv("PATH", f"{path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ZYNC_DEMO_DIR", str(tmp_path / "demo"))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
def test_the_first_block_of_the_quick_start_plays_the_demo(checkout: Path) -> None:
    block = blocks("sh")[0].text
    try:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert Path("pip-arguments").read_text() == "install --quiet --editable .\n"
        expected = json.loads((ROOT / "demo" / "expected.json").read_text())["after"][-1]["output"]
        outputs, _, rows = done.stdout.rpartition("topic NewInvoices:")[2].partition("table NewInvoices")
        assert len(re.findall(r"^ *\d+ ", outputs, re.MULTILINE)) == len(expected)
        assert len(re.findall(r"^ *\d+ .* paid *$", rows, re.MULTILINE)) == len(
            {item["key"]["ID"] for item in expected}
        )
    finally:
        CliRunner().invoke(main, ["demo", "--clean"])


SAMPLE = """
import pytest

def test_of_the_default_run():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("number", range(28))
def test_of_a_share(number):
    pass
"""


@pytest.mark.slow
def test_ci_runs_the_second_block_of_the_quick_start_then_types_and_a_share_of_the_slow_tests(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("test_sample.py").write_text(SAMPLE)
    options = f"test_sample.py -c {ROOT / 'pyproject.toml'} -p zync_assets_tests.conftest -n 0 --color=no"
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    done = subprocess.run(["bash", ".ci/run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # The default run, and a share of the slow tests.
    assert re.findall(r"(\d+) passed, (\d+) deselected", done.stdout) == [("1", "28"), ("1", "28")]
    assert Path("types").exists()
    assert re.search(r"\d+ passed", done.stdout.splitlines()[-1])
    assert Path("pip-arguments").read_text() == "install --quiet --editable .[test]\n"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "pytest" in " ".join(extras["test"])
