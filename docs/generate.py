"""What the site takes from the code and the README when it is built, so that it cannot lag behind.

A line `--8<-- NAME` in a page is replaced: by a section of README.md of that title, or by `recipe`, `commands`, `python`.
"""

import inspect
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_MARK = re.compile(r"^--8<-- (.+)$", re.MULTILINE)


def on_page_markdown(markdown, **_):
    """mkdocs calls this for every page."""
    return _MARK.sub(lambda found: made(found[1]), markdown)


def made(name):
    makers = {"recipe": recipe, "commands": commands, "python": python}
    return makers[name]() if name in makers else section(name)


def section(title):
    """The README's section of that title without its heading, its subsections but for those that pages show themselves."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,3}} |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise KeyError(f"README.md has no section {title!r}")
    return found[2].strip()


def table(settings):
    rows = [f"| `{key}` | {cell(one)} |" for key, one in settings.items()]
    return "\n".join(["| key | type, default | meaning |", "|---|---|---|", *rows])


def cell(one):
    default = "required" if one["required"] else f"`{one['default']}`"
    kind, meaning = (text.replace("|", "\\|") for text in (one["type"], one["description"]))
    return f"{kind}, {default} | {meaning}"


def recipe():
    from suture.pipeline.recipe import (
        CalibrationSettings,
        GenerationSettings,
        Recipe,
        ReportSettings,
        SetSettings,
        TaskSettings,
        describe_settings,
        describe_steps,
    )

    models = {"": Recipe, "calibration": CalibrationSettings, "report": ReportSettings}
    models |= {"report.sets[]": SetSettings, "report.tasks[]": TaskSettings, "report.generation[]": GenerationSettings}
    parts = []
    for name, model in models.items():
        parts += [
            f"## `{name}`" if name else "## Top level",
            inspect.getdoc(model) or "",
            table(describe_settings(model)),
        ]
    for name, step in describe_steps()["steps"].items():
        text = {"always": "Needs calibration text.", "never": "", "by settings": "Some settings need calibration text."}
        settings = describe_steps(name)["settings"]
        parts += [f"## Step `{name}`", f"{step['summary'].capitalize()}. {text[step['needs_text']]}"]
        parts.append(table(settings) if settings else "No settings.")
    return "\n\n".join(parts)


def commands():
    import typer

    from suture.cli.main import app

    found = typer.main.get_command(app)
    return "\n\n".join(part for name, command in walk("suture", found) for part in described(name, command))


def walk(name, command):
    yield name, command
    for child, inner in sorted(getattr(command, "commands", {}).items()):
        yield from walk(f"{name} {child}", inner)


def described(name, command):
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(
        [name, *(str(p.metavar or p.name.upper()) for p in arguments), *(["[OPTIONS]"] if options else [])]
    )
    yield f"## `{name}`"
    yield (command.help or "").strip()
    yield f"```\n{usage}\n```"
    rows = [
        f"| `{p.metavar or p.name.upper()}` | {getattr(p, 'help', '') or ''} |".replace("\n", " ") for p in arguments
    ] + [f"| `{', '.join(p.opts)}` | {p.help or ''} |".replace("\n", " ") for p in options]
    if rows:
        yield "\n".join(["| | |", "|---|---|", *rows])


def python():
    import suture

    parts = []
    for name in suture.__all__:
        value = getattr(suture, name)
        if name.startswith("__"):
            continue
        signature = f"{name}{inspect.signature(value)}" if callable(value) else name
        signature = re.sub(r"suture\.[\w.]*\.", "", signature)
        parts += [f"## `{name}`", f"```python\n{signature}\n```", f"```text\n{inspect.getdoc(value) or ''}\n```"]
    return "\n\n".join(parts)
