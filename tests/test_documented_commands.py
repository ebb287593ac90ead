"""What the README and the site print is done as printed: commands, Python and recipes, in a scratch directory.

A page is a session: its fenced blocks run one after another, as a reader would type them, and shown output is compared.
Lines with placeholders (MODEL, OUT, [--option], ...) are run by the instances below, which must use every option that the
line names. What is not run stands in NOT_RUN with the reason. All of it takes minutes: `pytest -m docs`; the plain run
does the handful of `test_the_cheap_ones`.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
import yaml

from suture.cli.main import _FIRST_STEPS
from suture.pipeline.recipes import examples

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

NOT_RUN = {
    "make ": "installs an environment from the package index; what `make demo` then runs is run, and `make test` runs this",
    "pytest ": "the tests themselves",
    "suture --install-completion": "writes to the shell's start-up files; tests/test_feel.py completes words",
}
BENCHMARKS = "python benchmarks/"  # hours, or models that are not here: their options are checked against their --help

# What stands for the placeholders. `text.txt` and so on are written by the fixture `lab`; each command runs in it, in order.
INSTANCES = {
    "suture init": ["init", "init other.yaml --goal nf4-qlora --model builtin:tiny"],
    "suture recipes": ["recipes", "recipes show nf4-qlora", "recipes schema"],
    "suture plan": ["plan small.yaml", "plan small.yaml --json"],
    "suture run": [
        "run small.yaml",
        "run small.yaml --output out/set --set steps.0.gptq.bits=3 --device cpu --gate 3",
        "run small.yaml --overwrite --device auto",
        "run small.yaml --output out/new --resume",
    ],
    "suture watch": ["watch out/small"],
    "suture quantize": [
        "quantize builtin:tiny out/w4 --method gptq --bits 4 --group-size 64 --calibration text.txt --report held.jsonl",
        "quantize builtin:tiny out/w2 --method rtn --bits 2 --group-size 64",
    ],
    "suture apply": [
        "apply builtin:tiny out/gqa --step 'gqa: {kv_heads: 2}' --step 'gptq: {bits: 4, group_size: 64}' "
        "--calibration text.txt",
        "apply builtin:tiny OUT --step 'gqa: {kv_heads: 2}' --step 'gptq: {bits: 4}' --calibration text.txt --show-recipe",
        "apply builtin:tiny out/pca --step 'gqa: {kv_heads: 4, method: pca}' --calibration builtin:novels --samples 4 "
        "--report held.jsonl",
    ],
    "suture steps": ["steps", "steps gptq"],
    "suture lora attach": [
        "lora attach builtin:tiny adapter",
        "lora attach builtin:tiny out/a --r 4 --alpha 8 --targets q_proj --targets v_proj --init pissa --rslora",
        "lora attach builtin:tiny out/dora --r 4 --dora",
        "lora attach out/w4 out/eora --r 4 --init eora --original builtin:tiny --calibration text.txt",
    ],
    "suture lora inspect": ["lora inspect adapter", "lora inspect adapter --base builtin:tiny --json"],
    "suture lora": ["lora --help"],
    "suture report": [
        "report builtin:tiny out/w4 out/small --data held.jsonl --also text.txt --task piqa=piqa.jsonl "
        "--generation gsm8k=gsm8k.jsonl --output out/compared",
        "report builtin:tiny out/w4 --data held.jsonl --latency",
    ],
    "suture power": [
        "power out/small --ratio 1.005 --points 1",
        "power out/w4 --ratio 1.005 --points 1",
        "power --points 3 --flips 0.1",
    ],
    "suture inspect": [
        "inspect builtin:tiny",
        "inspect builtin:tiny out/w4 --context 1024 --batch 2 --gpu A100 --gpu H100 --rank 4 --targets q_proj --json",
        "inspect adapter",
    ],
    "suture check": ["check out/w4"],
    "suture lora extract": [
        "lora extract builtin:tiny tuned out/extracted --rank 16",
        "lora extract builtin:tiny tuned out/e --energy 0.9",
        "lora extract builtin:tiny tuned out/b --budget 100000",
    ],
    "suture lora curve": ["lora curve builtin:tiny tuned out/extracted --data held.jsonl"],
    "suture lora heal": [
        "lora heal out/w2 out/healed --teacher builtin:tiny --data builtin:novels --set r=4 --set tokens=20000",
        "lora heal out/w2 out/healed2 --teacher builtin:tiny --data builtin:novels --set r=4 --set tokens=20000 --resume",
    ],
    "suture lora combine": [
        "lora combine out/sum out/healed=0.5 out/healed2",
        "lora combine out/ties out/healed out/healed2=0.5 --method ties --rank 4",
        "lora combine out/dare out/healed out/healed2=0.5 --method dare --rank 4",
    ],
    "suture lora transport": [
        "apply builtin:tiny permuted --step 'permute: {heads: random, neurons: random}'",
        "lora transport adapter builtin:tiny permuted out/transported",
    ],
}


def listed():
    """(page, line, in a block) of every command that a page prints."""
    for path in PAGES:
        text, where = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            if kind in ("", "sh", "bash"):
                yield from ((where, line, True) for line in block.splitlines() if is_command(line))
        inline = re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
        yield from ((where, line, False) for one in inline if is_command(line := " ".join(one.split())))


def is_command(line):
    return bool(re.match(r"(\.venv/bin/)?(suture|make|python|pytest)(?= |$)", line))


LISTED = list(dict.fromkeys(listed()))


def has_placeholder(line):
    return bool(re.search(r"[\[\]|]|\.\.\.|(?<![\w:=])[A-Z]{1,}\d?(?![\w=])|=[A-Z]{4,}", line))


def name_of(line):
    """`suture lora attach` of a line that begins so."""
    words = line.removeprefix(".venv/bin/").split()
    return " ".join(words[: 3 if words[1:2] == ["lora"] else 2])


def handled(line, fenced):
    """How a listed line is tried: the reason that it is not, "session", or the commands that stand for it."""
    for beginning, reason in NOT_RUN.items():
        if line.startswith(beginning):
            return reason
    if line.startswith("python "):
        return BENCHMARKS if line.startswith(BENCHMARKS) else "session"
    words = name_of(line)
    mentioned = not fenced and words in INSTANCES and line.removeprefix(words)[:3] in ("", " --")  # in prose, as a name
    if has_placeholder(line) or mentioned:
        return [f"suture {one}" for one in INSTANCES[words]]
    return "session" if fenced or len(line.split()) > 1 else ["suture"]


def synopsis(line):
    """The part of a line of the README's overview before what it says of it."""
    return re.split(r" {3,}", line)[0]


@pytest.mark.parametrize(("page", "line", "fenced"), LISTED)
def test_every_command_is_tried_or_has_a_reason(page, line, fenced):
    """And the instances of a line use each option that it names."""
    found = handled(synopsis(line), fenced)
    if isinstance(found, list):
        used = {word.partition("=")[0] for one in found for word in shlex.split(one)}
        assert set(re.findall(r"--[\w-]+", line)) <= used


def test_reasons_are_few_and_used():
    lines = [line for _, line, _ in LISTED]
    assert all(any(line.startswith(beginning) for line in lines) for beginning in NOT_RUN)
    assert len(NOT_RUN) == 3 and sum(handled(synopsis(line), fenced) == "session" for _, line, fenced in LISTED) >= 10


# -- running -----------------------------------------------------------------------------------------------------------


def shell(line, cwd):
    """What a shell says to a command of this environment: stdout and stderr as they come."""
    environment = os.environ | {"PATH": f"{warm.COMMAND.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "95"}
    environment = {key: value for key, value in environment.items() if key != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(
        ["sh", "-c", line.removeprefix(".venv/bin/")],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        env=environment,
        check=False,
    )
    assert done.returncode == (2 if line == "suture" else 0), f"$ {line}\n{done.stdout}"
    return done.stdout


def text_files(home):
    """Small files for the names that pages use."""
    stories = (ROOT / "builtin" / "holmes.jsonl").read_text(encoding="utf-8").splitlines()
    held = [json.dumps({"text": json.loads(line)["text"][:600]}) for line in stories]
    words = " ".join(json.loads(stories[0])["text"].split())
    (home / "held.jsonl").write_text("\n".join(held) + "\n", encoding="utf-8")
    (home / "text.txt").write_text(words[:60000], encoding="utf-8")
    article = "".join(f" = Article {n} = \n\n{words[n * 700 : n * 700 + 600]}\n\n" for n in range(12))
    (home / "wikitext.txt").write_text(article, encoding="utf-8")
    for name in ("code.jsonl",):
        (home / name).write_text("\n".join(held) + "\n", encoding="utf-8")
    (home / "fr.txt").write_text(words[5000:9000], encoding="utf-8")
    piqa = [{"goal": "To open a door", "sol1": f"turn handle {n}", "sol2": "eat it", "label": n % 2} for n in range(12)]
    lambada = [{"text": f"It was a bright day and the {word}"} for word in ("sun", "man", "house", "door") * 3]
    gsm8k = [{"question": f"What is {n} and {n}?", "answer": f"It is even. #### {2 * n}"} for n in range(3)]
    for name, rows in (("piqa", piqa), ("lambada", lambada), ("gsm8k", gsm8k)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


SMALL = {
    "model": "builtin:tiny",
    "calibration": {"data": "text.txt", "samples": 4, "length": 64},
    "steps": [{"gptq": {"bits": 4, "group_size": 64}}],
    "report": {"data": "held.jsonl", "window": 128},
    "output": "out/small",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A directory with what stands for the placeholders: texts, tasks, a recipe, a fine-tuned model."""
    from suture.pipeline.api import apply
    from suture.pipeline.progress import Silent

    home = tmp_path_factory.mktemp("lab")
    text_files(home)
    (home / "small.yaml").write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    apply("builtin:tiny", home / "tuned", {"rescale_residual": {"factor": 2.0}}, progress=Silent())
    return home


@pytest.mark.docs
def test_lines_with_placeholders_run(lab):
    for name, commands in INSTANCES.items():
        for command in commands:
            done = warm.suture(*shlex.split(command), cwd=lab)
            assert done.code == 0, f"{name}: suture {command}\n{done.err}"
            assert done.out, command


def without_numbers(text):
    """Words alone: no box drawing, no numbers, no directories; lines of progress, which come as they may, are left out."""
    kept = [line for line in text.splitlines() if not re.match(r"[\w: -]+: \d+/\d+, ", line)]
    words = re.sub(r"[━┏┓┗┛┃┡┩╇┳┴─┌┐└┘│┬┻╷╵]", " ", "\n".join(kept))
    words = re.sub(r"(/[\w.-]+)+/out/", "/out/", words)
    words = re.sub(r"(\d+ h )?(\d+ min )?\d[\d.]* (s|min|h)\b", "TIME", words)
    return " ".join(re.sub(r"\d[\d,.]*", "N", words).split())


def quality(text):
    """The numbers that a machine does not change by much: perplexities, ratio, tokens, documents, bytes."""
    chosen = [line for line in text.splitlines() if "per token" in line or "doc-rolling" in line or "weights" in line]
    return [float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*\.?\d*", "\n".join(chosen))]


def same_output(shown, printed):
    assert without_numbers(printed) == without_numbers(shown)
    assert quality(printed) == pytest.approx(quality(shown), rel=0.005)


def blocks(page):
    """(kind, text) of a page's fenced blocks and, in between, the commands in its prose that can be run as they are."""
    text = page.read_text(encoding="utf-8")
    for kind, block, inline in re.findall(r"^```(\w*)\n(.*?)^```|`([^`\n]+)`", text, re.MULTILINE | re.DOTALL):
        line = " ".join(inline.split())
        if block:
            yield kind, block
        elif is_command(line) and handled(line, False) == "session":
            yield "sh", line + "\n"


def session(page, home):
    """Do what a page prints, in order."""
    done, space = 0, {}
    for kind, block in blocks(page):
        if kind == "python":
            with contextlib.chdir(home), contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block, str(page), "exec"), space)
            done += 1
        if kind not in ("", "sh", "bash"):
            continue
        lines = block.splitlines()
        if not is_command(lines[0]) or handled(synopsis(lines[0]), True) != "session" or "  " in lines[0]:
            continue  # an overview of many, or a tree or a formula
        if len(lines) > 1 and not is_command(lines[1]):
            same_output("\n".join(lines[1:]), shell(lines[0], home))
            done += 1
            continue
        for line in lines:
            shell(line, home)
            done += 1
    return done


@pytest.mark.docs
@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/reference/recipe.md", "CONTRIBUTING.md"])
def test_a_page_runs_from_top_to_bottom(tmp_path, page):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    assert session(ROOT / page, tmp_path) >= {"README.md": 2, "docs/index.md": 8}.get(page, 1)


def test_pages_with_sessions_are_all_run():
    with_sessions = {page for page, line, fenced in LISTED if handled(synopsis(line), fenced) == "session"}
    assert with_sessions <= {"README.md", "docs/index.md", "docs/reference/recipe.md", "CONTRIBUTING.md"}


@pytest.mark.docs
def test_what_suture_alone_shows_runs(tmp_path):
    for line in re.findall(r"  (suture \w.*)$", _FIRST_STEPS, re.MULTILINE):
        shell(line, tmp_path)


@pytest.mark.docs
def test_the_readmes_recipes_run(tmp_path):
    """The first is recipes/quickstart.yaml itself; of the others, which show a part, the rest is added."""
    from suture.pipeline.api import run
    from suture.pipeline.progress import Silent

    text_files(tmp_path)
    found = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    first, *others = (yaml.safe_load(block) for block in found)
    assert first == yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8"))
    assert len(others) == 3
    with contextlib.chdir(tmp_path):
        shell("suture lora attach builtin:tiny adapter --init pissa", tmp_path)
        for number, part in enumerate(others):
            content = SMALL | {"output": f"out/{number}"} | part
            finished = run(content | {"calibration": SMALL["calibration"] | {"samples": 48}}, progress=Silent())
            assert finished.report is not None
            if "report" in part:
                names = {row["name"] for row in finished.report.content["tasks"]}
                assert names == {"piqa", "lambada"} and len(finished.report.content["sets"]) == 2


@pytest.mark.docs
@pytest.mark.parametrize("line", sorted({line for _, line, _ in LISTED if line.startswith(BENCHMARKS)}))
def test_a_benchmarks_options_are_its_own(line):
    script = line.split()[1]
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
    assert all(option in done.stdout for option in re.findall(r"--[\w-]+", line))
    given = re.sub(r"--[\w-]+(?: [^-\s]\S*)*", "", line).split()[2:]
    assert bool(given) <= bool(re.search(r"^positional arguments:", done.stdout, re.MULTILINE))


def test_the_cheap_ones(tmp_path):
    """What a reader types first; each is printed somewhere."""
    printed = {line for _, line, _ in LISTED} | set(re.findall(r"  (suture \w.*)$", _FIRST_STEPS, re.MULTILINE))
    for line in (
        "suture inspect builtin:tiny",
        "suture quantize builtin:tiny out/w4 --method rtn --group-size 64",
        "suture inspect builtin:tiny out/w4",
        "suture check out/w4",
        "suture init --goal w4-vllm --model builtin:tiny",
        "suture plan recipe.yaml",
        "suture recipes show gqa-heal",
        "suture lora attach builtin:tiny out/adapter",
    ):
        assert line in printed, line
        done = warm.suture(*shlex.split(line)[1:], cwd=tmp_path)
        assert done.code == 0 and (done.out or "init" in line), f"$ {line}\n{done.err}"
    assert examples()["w4-vllm"].name == "w4-vllm" and (tmp_path / "recipe.yaml").is_file()
