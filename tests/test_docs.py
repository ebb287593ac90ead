"""The site builds with strict links, says something of every step, and prints commands that the command line takes."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from suture.cli.main import app
from suture.pipeline.recipes import examples
from suture.pipeline.steps import STEPS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SOURCES = ("checkpoint", "calibrate", "quant", "surgery", "lora", "report", "pipeline", "cli")


def test_the_site_builds_with_strict_links(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path: path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    assert not [path for path, text in built.items() if "--8&lt;--" in text or "--8<--" in text]
    recipe = (tmp_path / "site" / "reference" / "recipe" / "index.html").read_text()
    assert all(
        f"<code>{name}</code>" in recipe for name in (*STEPS, "group_size", "kv_heads", "max_tokens_per_document")
    )
    cli = (tmp_path / "site" / "reference" / "cli" / "index.html").read_text()
    assert "suture lora extract" in cli and "--cache-bits" in cli and "--no-fidelity" in cli
    assert "llm-compressor" in (tmp_path / "site" / "peers" / "index.html").read_text()


def steps_pages():
    text = "\n".join(path.read_text() for path in (DOCS / "steps").glob("*.md"))
    return dict(re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


def test_every_step_has_a_section_with_its_cost_and_when_not_to_use_it():
    """docs/steps/*.md: a heading ## `NAME`, what it does, `Costs:` and `Not when:`."""
    sections = steps_pages()
    assert set(sections) == set(STEPS)
    assert not [name for name, body in sections.items() if "Costs:" not in body or "Not when:" not in body]


def printed_commands():
    """Commands in fenced blocks of the README and the site, in the comments of recipes, and what `suture` alone shows."""
    for path in (ROOT / "README.md", *PAGES):
        for block in re.findall(r"^```(?:sh|bash)?\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if line.startswith("suture ") and not re.search(r"[\[\]|]|\.\.\.|\bMODEL\b", line):
                    yield path.name, line.split("#")[0]
    from suture.cli.main import _FIRST_STEPS

    for line in re.findall(r"  (suture \w.*)$", _FIRST_STEPS, re.MULTILINE):
        yield "suture", line
    for one in examples().values():
        for line in re.findall(r"^#  +(suture .*?)(?:  .*)?$", one.text, re.MULTILINE):
            yield one.file, line.split("#")[0]


COMMANDS = list(dict.fromkeys(printed_commands()))


def test_commands_were_found():
    assert len(COMMANDS) >= 15


@pytest.mark.parametrize(("where", "line"), COMMANDS)
def test_a_printed_command_is_one_that_the_command_line_takes(where, line):
    """Names, options and values parse; nothing is run."""
    command, arguments = typer.main.get_command(app), shlex.split(line)[1:]
    while hasattr(command, "commands") and arguments:
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(line, list(arguments))


def test_troubleshooting_is_by_messages_that_exist():
    text = "\n".join(path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    squeezed = re.sub(r'"\s+f?"', "", text)
    for heading in re.findall(r"^## `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE):
        for part in re.split(r"`, `|\.\.\.|\d+", heading):
            words = part.strip(" :,`")
            assert len(words) < 4 or words in squeezed, f"no message says {words!r}"


def test_every_page_is_short_enough_to_read():
    assert all(len(path.read_text().split()) < 1500 for path in PAGES)


def test_the_generated_tables_come_from_the_code():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    python = generate.made("python")
    assert "## `inspect`" in python and "cache_bits" in python
    with pytest.raises(KeyError, match="no section"):
        generate.made("Nowhere")
