"""What a person meets on the command line: first steps, how much is told, logs that can be followed, completion."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
import time

import tiny
import warm

import suture
from suture.pipeline.progress import LOG, Logged, Notebook, Silent, default_progress, loop_line
from suture.pipeline.watch import follow


def test_no_command_shows_the_few_with_an_example_each(tmp_path):
    done = warm.suture(cwd=tmp_path)
    assert done.code == 2 and len(done.err.splitlines()) < 20
    from suture.cli.main import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    shown = re.findall(r"^  (\w+) +.*?  suture (\w+)", done.err, re.MULTILINE)
    assert len(shown) >= 10 and all(name == used and name in known for name, used in shown)


def small(home):
    tiny.llama(home / "model", layers=1)
    tiny.ids_file(home / "text.jsonl")


RTN = ["quantize", "model", "out", "--method", "rtn", "--group-size", "32"]


def test_quiet_verbose_and_json_say_what_they_promise(tmp_path):
    small(tmp_path)
    loud = warm.suture(*RTN, "-v", cwd=tmp_path)
    assert loud.code == 0, loud.err
    assert "down_proj" in loud.out and f"out.partial/work/{LOG}; suture watch" in loud.err
    quiet = warm.suture(*RTN, "--quiet", "--overwrite", "--json", cwd=tmp_path)
    assert quiet.code == 0 and quiet.err == ""
    facts = json.loads(quiet.out)
    assert facts["output"] == str(tmp_path / "out") and facts["verification"]["max_difference"] == 0.0
    assert len(facts["modules"]) == 7 and facts["report"] is None and facts["fallbacks"] == {}
    before = warm.suture("-q", *RTN, "--overwrite", cwd=tmp_path)  # also before the command
    assert before.code == 0 and before.err == "" and "note:" not in before.out
    checked = json.loads(warm.suture("check", "out", "--json", cwd=tmp_path).out)
    assert checked["loaded"] and checked["tensors"] > 0


def test_colours_only_on_a_terminal_and_not_with_no_color(tmp_path):
    """`--help` is what is coloured; a pseudo-terminal stands for the terminal."""

    def shown(**variables):
        main, side = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
        environment |= {"TERM": "xterm-256color", "COLUMNS": "100", **variables}
        process = subprocess.Popen([warm.COMMAND, "check", "--help"], stdout=side, stderr=side, env=environment)
        os.close(side)
        text = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:
                break
            if not part:
                break
            text += part
        process.wait()
        os.close(main)
        return text

    colour = re.compile(rb"\x1b\[[0-9;]*3[0-9]m")
    assert colour.search(shown()) and not colour.search(shown(NO_COLOR="1"))
    piped = subprocess.run([warm.COMMAND, "check", "--help"], capture_output=True, check=True)
    assert b"\x1b" not in piped.stdout


def test_the_shell_completes_commands_recipes_and_steps(tmp_path):
    def completed(words):
        environment = os.environ | {
            "_SUTURE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        done = subprocess.run(
            [sys.executable, "-X", "importtime", warm.COMMAND], capture_output=True, text=True, env=environment
        )
        assert " torch" not in done.stderr, done.stderr[-500:]
        return done.stdout.split()

    assert completed("suture ins") == ["inspect"]
    assert "gqa-heal" in completed("suture recipes show g")
    assert completed("suture steps smooth") == ["smoothquant"]


# -- logs --------------------------------------------------------------------------------------------------------------


def test_a_run_can_be_watched_from_its_log_to_its_end(tmp_path):
    small(tmp_path)
    running = warm.start(*RTN, cwd=tmp_path, stop_at=10)
    running.wait_until_stopped()
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(follow(tmp_path / "out", every=0.02)))
    thread.start()
    time.sleep(0.1)
    running.go()
    assert running.wait().code == 0
    thread.join(20)
    assert re.search(r"^\d\d:\d\d:\d\d started, process \d+", seen[0].text)
    assert any("preflight" in one.text for one in seen) and seen[-1].ended == "finished"
    again = warm.suture("watch", "out", cwd=tmp_path)
    assert again.code == 0 and again.out.strip().endswith("out: finished")


def test_watching_a_killed_run_says_so_and_how_to_go_on(tmp_path):
    small(tmp_path)
    assert warm.suture(*RTN, cwd=tmp_path, kill_at=12).code == 137
    watched = warm.suture("watch", "out", cwd=tmp_path)
    assert watched.code == 1 and "--resume" in watched.out
    assert warm.suture(*RTN, "--resume", cwd=tmp_path).code == 0
    nowhere = warm.suture("watch", "nowhere", cwd=tmp_path)
    assert nowhere.code == 1 and "neither a finished output nor a run" in nowhere.err


def test_a_log_tells_loops_and_failures_and_never_ends_a_run(tmp_path):
    import pytest

    with pytest.raises(ValueError, match="no"), Logged(Silent(), tmp_path / LOG) as progress:
        assert list(progress.track("ab", 2, "rtn")) == ["a", "b"]
        raise ValueError("no\nway")
    text = (tmp_path / LOG).read_text()
    assert "rtn: 2/2" in text and text.endswith("ended: ValueError no way\n")
    Logged(Silent(), tmp_path / "missing" / LOG).say("nobody hears")


def test_times_are_in_human_units():
    assert loop_line("gptq", 3, 30, 12.6) == "gptq: 3/30, 4.2 s each, about 113 s left"
    assert loop_line("gptq", 1, 100, 60.0).endswith("about 1 h 39 min left")
    assert loop_line("gptq", 1, 4, 60.0).endswith("about 3 min 0 s left")
    from suture.report.figures import bytes_text, count_text, flops_text, seconds_text

    assert [seconds_text(x) for x in (2.5e-7, 0.0272, 8.31, 125, 12000)] == [
        *("250 ns", "27.2 ms", "8.31 s", "2 min 5 s", "3 h 20 min")
    ]
    assert (count_text(27227128320), flops_text(54.45e9), bytes_text(54.45e9)) == ("27.23 B", "54.45 GFLOP", "54.45 GB")


def test_a_notebook_gets_one_line_that_is_rewritten(monkeypatch):
    shown = []

    class Handle:
        def update(self, text):
            shown.append(text)

    class Display:
        Pretty = staticmethod(str)

        @staticmethod
        def display(text, display_id):
            shown.append(text)
            return Handle()

    assert isinstance(default_progress(), Silent)
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    monkeypatch.setitem(sys.modules, "IPython.display", Display)
    progress = default_progress()
    assert isinstance(progress, Notebook) and list(progress.track([1, 2], 2, "score")) == [1, 2]
    assert shown[-1].startswith("score: 2/2")
    assert "builtin:tiny" in suture.inspect("builtin:tiny")._repr_html_()
