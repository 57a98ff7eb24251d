"""A person's own script: however it ends that is told, and what it measures is kept."""

from __future__ import annotations

import hashlib
import json
import signal
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.events import Events
from jobs.host import derive_state
from jobs.script import LONG_LINE, Figures, Tail

Run = Callable[..., Any]


@pytest.fixture
def run(supervise: Callable[..., Any], tmp_path: Path) -> Run:
    """Starts a supervised run of a script with this source."""
    count = 0

    def start(source: str, *args: str, metrics_file: str | None = None, **more: Any) -> Any:
        nonlocal count
        count += 1
        path = tmp_path / f"my test {count}.py"
        path.write_text(textwrap.dedent(source))
        case = {"args": list(args), "metrics_file": metrics_file}
        inputs = {"script": {"path": str(path)}}
        return supervise(case, job="script", inputs=inputs, **more)

    return start


@pytest.fixture
def figures(tmp_path: Path) -> Iterator[Figures]:
    with Events(tmp_path / "events.jsonl") as events:
        yield Figures("case-0", events)


# -- how it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nraise ValueError('bad layer')", "exit code 1; its last line: ValueError: bad"),
        (
            "import sys\nprint('no data')\nsys.exit(3)",
            "ended with exit code 3; its last line: no data",
        ),
        ("import sys\nsys.exit('gone wrong')", "exit code 1; its last line: gone wrong"),
        ("import os\nos._exit(9)", "ended with exit code 9; it wrote nothing"),
        ("import ctypes\nctypes.string_at(0)", "was killed by SIGSEGV"),
        ("import os\nos.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os\nos.kill(os.getpid(), 15)", "was killed by SIGTERM"),
        ("def (", "exit code 1; its last line: SyntaxError"),
    ],
)
def test_each_way_to_end_is_told(run: Run, source: str, message: str) -> None:
    ended = run(source)
    assert (ended.ended()["state"], ended.ended()["rc"]) == ("finished", 1)
    result = ended.result()
    assert result["error"]["kind"] == "ScriptFailed"
    assert result["error"]["message"].startswith("my test 1.py ")
    assert message in result["error"]["message"]
    # A traceback in the log is the script's own, and there is no other.
    assert "worker.py" not in ended.text("log") + result["error"]["traceback"]
    if "ValueError" in source:
        assert "line 2, in <module>" in result["error"]["traceback"]


def test_a_script_that_ends_well_has_its_figures_and_fingerprint(run: Run) -> None:
    source = "print('hello')\nprint('metric ms=7.5')\n"
    ended = run(source)
    assert ended.ended()["rc"] == 0
    result = ended.result()
    assert (result["status"], result["metrics"], result["curves"]) == (
        "ok",
        {"ms": {"value": 7.5}},
        {},
    )
    digest = hashlib.sha256(source.encode()).hexdigest()
    assert result["fingerprints"] == {"script": f"sha256:{digest}"}
    assert (result["wiring"], result["notes"]) == ({}, [])
    assert ended.text("log") == "hello\nmetric ms=7.5\n"


@pytest.mark.parametrize(
    ("inputs", "args", "words"),
    [
        ({"script": {"path": "/nowhere/x.py"}}, [], "/nowhere/x.py cannot be read on the host"),
        ({"script": {"path": "/tmp"}}, [], "/tmp cannot be read on the host: Is a directory"),
        (None, ["a\0b"], "cannot be started with these args: embedded null byte"),
        (None, ["x" * (1 << 18)], "Argument list too long"),
    ],
)
def test_what_cannot_be_started_says_why(
    run: Run, supervise: Any, tmp_path: Path, inputs: Any, args: list[str], words: str
) -> None:
    if inputs is None:
        ended = run("print(1)", *args)
    else:
        ended = supervise({"args": args}, job="script", inputs=inputs)
    assert ended.ended()["rc"] == 1
    assert ended.result()["error"]["kind"] == "BadInput"
    assert words in ended.result()["error"]["message"]


STUBBORN = """
    import os, signal, sys, time
    from pathlib import Path
    def on_term(number, frame):
        print("metric terms=1", flush=True)
        if sys.argv[1] == "polite":
            sys.exit(0)
    signal.signal(signal.SIGTERM, on_term)
    Path("pid.tmp").write_text(str(os.getpid()))
    Path("pid.tmp").rename("pid")
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("manner", ["polite", "deaf"])
def test_a_cancelled_script_has_its_grace_and_then_is_gone(
    run: Run, eventually: Any, is_running: Callable[[int], bool], manner: str
) -> None:
    started = run(STUBBORN, manner, grace_s=60 if manner == "polite" else 0.5)
    eventually(lambda: (started.dir / "work" / "pid").exists())
    pids = [int(started.text("work/pid")), started.json("supervisor.json")["pgid"]]
    started.process.send_signal(signal.SIGTERM)
    ending = started.ended()
    assert ending["state"] == "cancelled"
    assert ending["signal_name"] == ("SIGTERM" if manner == "polite" else "SIGKILL")
    assert [pid for pid in pids if is_running(pid)] == []
    if manner == "polite":  # it heard the signal before anything killed it
        assert "metric terms=1" in started.text("log")
    # A case that was cancelled has no result, not even a failure.
    assert not (started.dir / "results" / "case-0.json").exists()


def test_the_time_limit_ends_a_script(run: Run) -> None:
    assert run(STUBBORN, "deaf", timeout_s=1, grace_s=0.1).ended()["state"] == "timed_out"


def test_a_script_dies_with_its_killed_supervisor(
    run: Run, eventually: Any, is_running: Callable[[int], bool]
) -> None:
    started = run(STUBBORN, "deaf")
    eventually(lambda: (started.dir / "work" / "pid").exists())
    pid = int(started.text("work/pid"))
    started.process.kill()
    eventually(lambda: not is_running(pid))
    assert derive_state(started.dir)["state"] == "vanished"


def test_a_daemon_that_outlives_the_script_blocks_nothing_and_is_ended(
    run: Run, is_running: Callable[[int], bool]
) -> None:
    ended = run(
        """
        import os, signal, time
        from pathlib import Path
        if os.fork():
            while not Path("daemon").exists():
                time.sleep(0.01)
            os.write(1, b"metric done=1\\n")  # whole lines: print makes two writes of one
            raise SystemExit
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path("tmp").write_text(str(os.getpid()))
        Path("tmp").rename("daemon")
        while True:
            os.write(1, b"daemon\\n")
            time.sleep(0.001)
        """,
        grace_s=0.2,
    )
    assert ended.ended()["rc"] == 0
    assert ended.result()["metrics"] == {"done": {"value": 1.0}}
    assert not is_running(int(ended.text("work/daemon")))
    assert "left processes behind" in ended.said()


# -- where it runs -----------------------------------------------------------------------------


def test_arguments_arrive_byte_for_byte(run: Run) -> None:
    args = [
        "",
        "a b",
        "'single' \"double\"",
        "$(touch evil) `touch evil` ${HOME} ; & | > x",
        "line\nbreak\r\ttab",
        "grüße 日本 🙂",
        "x" * 300,
        "--metric",
        "\\ %s {x}",
        "\udcff",
    ]
    source = """
        import json, os, sys
        print("metric n=%d" % (len(sys.argv) - 1))
        with open("args", "wb") as file:
            file.write(b"\\0".join(os.fsencode(arg) for arg in sys.argv[1:]))
    """
    # A locale that knows no umlaut must not matter.
    ended = run(source, *args, env={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"})
    assert ended.ended()["rc"] == 0, ended.text("log")
    sent = b"\0".join(arg.encode("utf-8", "surrogateescape") for arg in args)
    assert (ended.dir / "work" / "args").read_bytes() == sent
    assert sorted(path.name for path in (ended.dir / "work").iterdir()) == ["args"]


def test_it_runs_in_the_runs_folder_and_can_import_the_snapshot(run: Run, snapshot: Path) -> None:
    source = """
        import json, os, sys
        import eagle3.errors, jobs.events
        names = ("RUN_DIR", "ORCHESTRATOR_METRICS", "OMP_NUM_THREADS", "PYTHONUNBUFFERED",
                 "CUDA_VISIBLE_DEVICES", "JOBS_SUPERVISOR_PID", "PYTHONPATH")
        print(json.dumps([os.getcwd(), eagle3.errors.__file__, sys.stdin.read(),
                          *map(os.environ.get, names)]))
    """
    gpus = {"wanted": None, "lease": False}
    ended = run(source, threads=3, gpus=gpus, env={"PYTHONPATH": "/elsewhere"})
    assert ended.ended()["rc"] == 0, ended.text("log")
    work = str(ended.dir / "work")
    assert json.loads(ended.text("log")) == [
        work,
        str(snapshot / "eagle3" / "errors.py"),
        "",
        str(ended.dir),
        f"{work}/metrics.json",
        "3",
        "1",
        "",
        None,
        f"{snapshot}:/elsewhere",
    ]


# -- what it measures --------------------------------------------------------------------------


def test_figures_arrive_while_it_runs_and_stepped_ones_are_curves(
    run: Run, eventually: Any
) -> None:
    started = run(
        """
        import time
        from pathlib import Path
        for step in (0, 1, 2):
            print(f"metric loss={1 / (step + 1)} step={step}")
        print("metric tok/s=54.8 low=50 high=60")
        while not Path("go").exists():
            time.sleep(0.01)
        print("metric loss=0.25 step=2")
        print("metric loss=9 step=1")
        print("metric last=1", end="")
        """
    )
    eventually(lambda: len(started.events("metric")) == 4)
    assert not (started.dir / "results" / "case-0.json").exists()
    (started.dir / "work" / "go").touch()
    assert started.ended()["rc"] == 0
    seen = [(e["case_id"], e["name"], e["value"], e["step"]) for e in started.events("metric")]
    assert seen[0] == ("case-0", "loss", 1.0, 0)
    assert seen[3] == ("case-0", "tok/s", 54.8, None)
    assert len(seen) == 7
    result = started.result()
    assert result["metrics"] == {
        "loss": {"value": 0.25},
        "tok/s": {"value": 54.8, "low": 50.0, "high": 60.0},
        "last": {"value": 1.0},
    }
    points = [(0, 1.0), (1, 9.0), (2, 0.25)]
    assert result["curves"] == {"loss": [{"step": s, "value": v} for s, v in points]}


def test_much_output_of_any_kind_hides_no_metric(run: Run) -> None:
    ended = run(
        """
        import os, sys, time
        out = sys.stdout.buffer
        out.write(b"metric first=1\\n")
        for i in range(50):
            out.write(b"\\xff\\xfe \\x00 noise metric x=1\\n" * 20000)
            out.write(b"half " * 80000)
            out.write(b"\\nmetric n=%d step=%d\\n" % (i, i))
        out.write(b"y" * (10 << 20) + b"metric not=1\\nmetric after=2\\n")
        out.write(b"metric " + b"z" * (10 << 20) + b"\\n")
        out.flush()
        for part in (b"met", b"ric split", b"=3", b"5\\n", b"\\rmetric bar=4\\r\\n"):
            os.write(1, part)
            time.sleep(0.03)
        """
    )
    assert ended.ended()["rc"] == 0
    assert (ended.dir / "log").stat().st_size > 50 << 20
    result = ended.result()
    values = {name: figure["value"] for name, figure in result["metrics"].items()}
    assert values == {"first": 1, "n": 49, "after": 2, "split": 35, "bar": 4}
    assert [point["step"] for point in result["curves"]["n"]] == list(range(50))
    (note,) = result["notes"]
    assert note.startswith("this line is no metric NAME=VALUE")
    assert len(note) < 400


def test_the_tail_holds_one_line_at_most_whatever_comes(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"metric before=1\nmetr")
    tail = Tail(tmp_path / "log")
    with (tmp_path / "log").open("ab") as log:
        log.write(b"ic x=1\n" + b"n" * (3 << 20) + b"\nmetric a=1\n" + b"metric " * LONG_LINE)
    found = list(tail.new_lines(tail.size()))
    assert found[0] == b"metric a=1"
    assert len(found) == 2
    assert len(found[1]) == LONG_LINE
    assert tail.rest() == b""
    with (tmp_path / "log").open("ab") as log:
        log.write(b"metric b=1\nmetric c=1\nmetric d=1")
    assert list(tail.new_lines(tail.size())) == [b"metric c=1"]
    assert tail.rest() == b"metric d=1"


@pytest.mark.parametrize(
    ("line", "figure", "step"),
    [
        (b"metric a=1", {"value": 1.0}, None),
        (b"metric a=-1.5e-3  step=7 ", {"value": -0.0015}, 7),
        (b"metric a=2 high=3 low=1 step=-1", {"value": 2.0, "low": 1.0, "high": 3.0}, -1),
        ("metric größe/ü=1.".encode(), {"value": 1.0}, None),
    ],
)
def test_lines_that_are_metrics(
    figures: Figures, line: bytes, figure: dict[str, float], step: int | None
) -> None:
    figures.take_line(line)
    (series,) = figures.series.values()
    assert series.figure() == figure
    assert list(series.steps) == ([] if step is None else [step])
    assert figures.notes == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"metric a", "no metric NAME=VALUE"),
        (b"metric a=", "no metric NAME=VALUE"),
        (b"metric =1", "no metric NAME=VALUE"),
        (b"metric a=1_000", "no metric NAME=VALUE"),
        (b"metric a=75%", "no metric NAME=VALUE"),
        (b"metric a=1 b=2", "no metric NAME=VALUE"),
        (b"metric a=1 step=1.5", "no metric NAME=VALUE"),
        (b"metric a=1 step=1 step=2", "no metric NAME=VALUE"),
        (b"metric a=1 low=x high=2", "no metric NAME=VALUE"),
        (b"metric a=1 of the best", "no metric NAME=VALUE"),
        (b"metric a=1 low=0", "both low and high"),
        (b"metric a=5 low=0 high=1", "'a' is 5.0, outside 0.0 to 1.0"),
        (b"metric a=nan", "'a' is value nan, which is not finite"),
        (b"metric a=-Infinity", "which is not finite"),
        (b"metric a=1e999", "which is not finite"),
        (b"metric a=1 low=-inf high=2", "which is not finite"),
        (b"metric " + b"n" * 251 + b"=1", "251 characters"),
    ],
)
def test_lines_that_are_none_become_one_note(figures: Figures, line: bytes, words: str) -> None:
    figures.take_line(line)
    figures.take_line(line)
    assert figures.series == {}
    (note,) = figures.notes
    assert words in note


def test_a_value_without_a_step_is_the_last_word(figures: Figures) -> None:
    for line in (b"metric a=1 step=1", b"metric a=5", b"metric a=2 step=2"):
        figures.take_line(line)
    assert figures.plain()["metrics"] == {"a": {"value": 5.0}}
    assert [point["value"] for point in figures.plain()["curves"]["a"]] == [1.0, 2.0]


def test_a_file_of_metrics_is_read_at_the_end(run: Run) -> None:
    ended = run(
        """
        import json, os
        print("metric both=1")
        print("metric same=2")
        print("metric printed=3")
        json.dump({
            "plain": 1, "both": 4, "same": 2.0,
            "interval": {"value": 2, "low": 1, "high": 3},
            "curve": [{"step": 10, "value": 0.5}, {"step": 2, "value": 9, "low": 8, "high": 10}],
            "nan": float("nan"), "huge": 10**400, "word": "x", "flag": True, "none": None,
            "odd": {"value": 1, "lo": 0}, "stepless": [1, 2], "empty": [],
        }, open(os.environ["ORCHESTRATOR_METRICS"], "w"))
        """
    )
    assert ended.ended()["rc"] == 0
    result = ended.result()
    assert result["metrics"] == {
        "both": {"value": 4.0},
        "same": {"value": 2.0},
        "printed": {"value": 3.0},
        "plain": {"value": 1.0},
        "interval": {"value": 2.0, "low": 1.0, "high": 3.0},
        "curve": {"value": 0.5},
    }
    assert result["curves"] == {
        "curve": [
            {"step": 2, "value": 9.0, "low": 8.0, "high": 10.0},
            {"step": 10, "value": 0.5},
        ]
    }
    notes = "\n".join(result["notes"])
    assert "'both' was printed as 1.0 and written to metrics.json as 4.0; the file's" in notes
    left_out = [n.split("'")[1] for n in result["notes"] if n.endswith("it is left out")]
    assert left_out == ["nan", "huge", "word", "flag", "none", "odd", "stepless", "empty"]
    assert [event["text"] for event in ended.events("note")] == result["notes"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("'{'", "cannot be read as JSON"),
        ("'[1]'", "holds no JSON object"),
        ("'[' * 100000", "cannot be read as JSON"),
        ("' ' * (65 << 20)", "larger than 64 MiB"),
        (None, "ended without writing its metrics_file deep/m.json"),
    ],
)
def test_a_file_that_cannot_be_read_fails_the_case(
    run: Run, content: str | None, words: str
) -> None:
    write = "pass" if content is None else f"open('deep/m.json', 'w').write({content})"
    ended = run(f"import os\nos.mkdir('deep')\n{write}\n", metrics_file="deep/m.json")
    assert ended.ended()["rc"] == 1
    assert words in ended.result()["error"]["message"]


def test_a_file_that_was_there_before_is_not_this_runs(run: Run, tmp_path: Path) -> None:
    old = tmp_path / "m.json"
    old.write_text('{"a": 1}')
    ended = run("pass", metrics_file=str(old))
    assert ended.ended()["rc"] == 1
    assert "ended without writing" in ended.result()["error"]["message"]
    ended = run(f"open({str(old)!r}, 'w').write('{{\"a\": 2}}')", metrics_file=str(old))
    assert ended.ended()["rc"] == 0
    assert ended.result()["metrics"] == {"a": {"value": 2.0}}


def test_each_case_has_its_own_figures(supervise: Any, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import json, sys\nprint('metric n=' + sys.argv[1])\n"
        "if sys.argv[1] == '1': json.dump({'first': 1}, open('metrics.json', 'w'))\n"
    )
    cases = [{"args": [str(i)], "metrics_file": None} for i in (1, 2)]
    ended = supervise(*cases, job="script", inputs={"script": {"path": str(path)}})
    assert ended.ended()["rc"] == 0
    assert sorted(ended.result(0)["metrics"]) == ["first", "n"]
    assert ended.result(1)["metrics"] == {"n": {"value": 2.0}}


def test_a_disk_that_the_script_has_filled_is_told(
    supervise: Any, tmp_path: Path, tiny_disk: Callable[[str, str], Path]
) -> None:
    path = tmp_path / "script.py"
    path.write_text("open('filler', 'wb').write(bytes(1 << 20))\n")
    disk = tiny_disk("full", "512k")
    ended = supervise({"args": []}, job="script", inputs={"script": {"path": str(path)}}, into=disk)
    assert ended.process.wait(timeout=20) == 1
    assert "exit.json cannot be written" in ended.said()
    assert "No space left" in ended.said()
    assert derive_state(ended.dir)["state"] == "vanished"
