"""The whole command against a real store: answers, bad input, death, and nothing lost."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file

from orchestrator.__main__ import main
from orchestrator.paths import CLONE
from tests.orchestrator.world import World, make_world

pytestmark = [
    pytest.mark.runs,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning"),
]
OWN = ("wiring.embedding=own",)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("a world"))


def runs(world: World) -> list[Path]:
    return sorted((world.results / "runs").glob("*"), key=lambda p: p.stat().st_ctime)


def record(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def filed(world: World, folder: Path) -> Any:
    client = MlflowClient(f"sqlite:///{world.results}/mlflow.db")
    return client.get_run(record(folder, "filed.json")["run"])


def test_an_answer_is_printed_judged_and_filed(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    predict = 'predict="accuracy < 0.9 and accept_length >= 1"'
    assert main(world.overrides(*OWN, predict, "claim='Noise does not draft.'")) == 0
    out, err = capfd.readouterr()
    for words in ("Noise does not draft.", "states 0, 2, 5", "host local", "supported", "accuracy"):
        assert words in out
    assert "python -m orchestrator ui" in out
    assert err == ""
    folder = runs(world)[-1]
    result = record(folder, "result.json")
    assert result["metrics"]["accuracy"]["denominator"] == 4 * 14
    assert record(folder, "verdict.json")["verdict"] == "supported"
    run = filed(world, folder)
    assert run.info.status == "FINISHED"
    assert run.data.tags["verdict"] == "supported"
    assert run.data.tags["claim"] == "Noise does not draft."
    assert run.data.params["wiring.layers"] == "[-1, 1, 4]"
    assert run.data.metrics["accuracy"] == result["metrics"]["accuracy"]["value"]
    assert run.data.tags["snapshot"]


def test_a_refuted_prediction_is_an_answer_and_strict_makes_it_exit_code_3(world: World) -> None:
    predict = 'predict="accuracy >= 0.9"'
    assert main(world.overrides(*OWN, predict, "strict=true")) == 3
    assert record(runs(world)[-1], "verdict.json")["verdict"] == "refuted"


def test_a_sweep_has_one_parent_and_a_bad_point_does_not_take_it_down(
    world: World, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # One point per kind of bad input, between two good ones.
    bad: dict[str, str] = {}
    for name in ("truncated", "code", "empty"):
        shutil.copytree(world.root / "data", tmp_path / name)
    first = "rows_0-2000/data_0.pt"
    damaged = tmp_path / "truncated" / first
    damaged.write_bytes(damaged.read_bytes()[:500])
    torch.save({"x": Payload(tmp_path / "ran")}, tmp_path / "code" / first)
    sample = torch.load(tmp_path / "empty" / first)
    torch.save({**sample, "loss_mask": torch.zeros(20).long()}, tmp_path / "empty" / first)
    bad["truncated"] = "data_0.pt is damaged or truncated"
    bad["code"] = "data_0.pt contains pickled code"
    bad["empty"] = "data_0.pt: loss_mask is empty"
    paths = [str(world.root / "data"), *(str(tmp_path / n) for n in bad), str(world.root / "data")]
    before = len(runs(world))
    assert main(["-m", *world.overrides(*OWN), f"data.path={','.join(paths)}"]) == 2
    out = capfd.readouterr().out
    assert "Traceback" not in out
    assert "2 answered, 3 not answered" in out
    made = runs(world)[before:]
    verdicts = [record(folder, "verdict.json") for folder in made]
    assert [v["verdict"] for v in verdicts] == ["measured", *["not_answered"] * 3, "measured"]
    for words, verdict in zip(bad.values(), verdicts[1:4], strict=True):
        assert words in verdict["reason"]
        assert words in out
    assert not (tmp_path / "ran").exists()

    children = [filed(world, folder) for folder in made]
    assert [c.info.status for c in children] == ["FINISHED", *["FAILED"] * 3, "FINISHED"]
    (parent,) = {c.data.tags["mlflow.parentRunId"] for c in children}
    client = MlflowClient(f"sqlite:///{world.results}/mlflow.db")
    assert client.get_run(parent).data.metrics["runs/not_answered"] == 3


class Payload:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.flag),)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("drafter.path=/nowhere", "/nowhere does not exist there; name it by its path on the host"),
        ("drafter.path=relative/path", "is relative; name it by its absolute path on the host"),
        ("wiring.layers=[-1,1,5]", "asks for state 6, but the data stores only 0, 2, 5"),
        ("wiring.layers=[-1,1,9]", "canonical state 10, but the target has 7 decoder layers"),
        ("host.python=/nowhere/python", "/nowhere/python cannot be run"),
        ("data.path='~/no such folder'", str(Path.home() / "no such folder") + " does not exist"),
        ("wiring.layers=[-1,1]", "names 2 states, but the drafter's fc takes 3"),
        ("wiring.embedding=target", "the target's embedding is 20 wide and the drafter 24"),
        ("job.device=cuda", "is a build without CUDA; set job.device=cpu"),
    ],
)
def test_bad_input_found_on_the_host_is_one_sentence_and_exit_code_2(
    world: World, capfd: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    if override == "job.device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here, so nothing is wrong with asking for it")
    own = () if override.startswith("wiring.embedding") else OWN
    assert main(world.overrides(*own, override)) == 2
    out = capfd.readouterr().out
    assert words in out.replace("\n", " ")
    assert "Traceback" not in out
    run = filed(world, runs(world)[-1])
    assert run.info.status == "FAILED"
    assert run.data.tags["verdict"] == "not_answered"


def start(world: World, *more: str) -> subprocess.Popen[str]:
    flags = [argument for argument in more if argument.startswith("-")]
    settings = world.overrides(*OWN, *(m for m in more if m not in flags))
    command = [sys.executable, "-m", "orchestrator", *flags, *settings]
    return subprocess.Popen(
        command, cwd=CLONE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def job_of(world: World, known: set[Path]) -> tuple[Path, dict[str, Any]]:
    """The folder on the host, and the supervisor's record, of the run that appears."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for folder in set((world.results / "host" / "runs").glob("*")) - known:
            if (folder / "supervisor.json").is_file():
                return folder, record(folder, "supervisor.json")
        time.sleep(0.02)
    raise AssertionError("no job was started")


def hold(supervisor: dict[str, Any]) -> None:
    """Keep the job from ending before it is ended: it is a matter of a second."""
    os.killpg(supervisor["pgid"], signal.SIGSTOP)


@pytest.mark.parametrize(
    ("kill", "state", "words"),
    [
        ("job", "killed", "the job was killed by SIGKILL"),
        ("supervisor", "vanished", "the job vanished"),
        ("command", "cancelled", "the run was cancelled"),
    ],
)
def test_death_while_running_is_told_truly_and_never_left_running(
    world: World, kill: str, state: str, words: str
) -> None:
    known = set((world.results / "host" / "runs").glob("*"))
    command = start(world)
    _, supervisor = job_of(world, known)
    if kill == "job":
        os.killpg(supervisor["pgid"], signal.SIGKILL)
    elif kill == "supervisor":
        os.kill(supervisor["pid"], signal.SIGKILL)
    else:
        hold(supervisor)
        command.send_signal(signal.SIGINT)
    out, _ = command.communicate(timeout=60)
    assert command.returncode == 1, out
    assert words in out
    folder = runs(world)[-1]
    assert record(folder, "verdict.json")["verdict"] == "not_answered"
    run = filed(world, folder)
    assert run.info.status == ("FAILED" if state == "vanished" else "KILLED")
    with pytest.raises(ProcessLookupError):
        os.killpg(supervisor["pgid"], 0)


def taken_up(world: World, folder: Path) -> Any:
    """The run after `attach`, in MLflow."""
    assert main(["attach", str(folder)]) == 0
    assert record(folder, "verdict.json")["verdict"] == "measured"
    assert record(folder, "result.json")["status"] == "ok"
    return filed(world, folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_dies_loses_nothing(world: World, number: signal.Signals) -> None:
    known = set((world.results / "host" / "runs").glob("*"))
    command = start(world)
    job_of(world, known)
    command.send_signal(number)
    command.communicate(timeout=20)
    folder = runs(world)[-1]
    assert not (folder / "verdict.json").exists()
    run = taken_up(world, folder)
    assert run.info.status == "FINISHED"
    assert (
        run.data.metrics["accuracy"]
        == record(folder, "result.json")["metrics"]["accuracy"]["value"]
    )


def test_a_host_that_is_lost_is_not_a_failed_run(world: World) -> None:
    known = set((world.results / "host" / "runs").glob("*"))
    command = start(world)
    job_of(world, known)
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    for child in children:
        if b"host.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)
    out, _ = command.communicate(timeout=60)
    assert command.returncode == 1
    assert "unreachable" in out
    folder = runs(world)[-1]
    assert f"attach {shlex.quote(str(folder))}" in out
    assert not (folder / "verdict.json").exists()
    assert not (folder / "filed.json").exists()
    assert taken_up(world, folder).info.status == "FINISHED"


def test_ctrl_c_in_a_sweep_cancels_the_run_and_starts_no_other(world: World) -> None:
    known = set((world.results / "host" / "runs").glob("*"))
    before = len(runs(world))
    command = start(world, "-m", "wiring.layers=[-1,1,4],[4,1,-1],[1,4,-1]")
    _, supervisor = job_of(world, known)
    hold(supervisor)
    command.send_signal(signal.SIGINT)
    out, _ = command.communicate(timeout=60)
    assert command.returncode == 1
    assert "2 runs were not started" in out
    assert len(runs(world)) == before + 1
    assert filed(world, runs(world)[-1]).info.status == "KILLED"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("broken", "# @package _global_\nwiring: [1,\n", "broken.yaml"),
        ("headless", "wiring: {layers: [1]}\n", "does not open with '# @package _global_'"),
    ],
)
def test_an_experiment_file_that_cannot_be_used_is_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    assert main(["--config-dir", str(tmp_path), f"+experiment={name}"]) == 2
    err = capfd.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_sweep_into_a_folder_that_cannot_be_written_is_refused(
    world: World, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    more = (f"results={tmp_path}/file/r", "wiring.layers=[-1,1,4],[4,1,-1]")
    assert main(["-m", *world.overrides(*OWN, *more)]) == 2
    err = capfd.readouterr().err
    assert "set results=FOLDER" in err
    assert "Traceback" not in err


def test_d2t_absolute_on_a_table_of_absolute_ids(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.root / "drafter", tmp_path / "drafter")
    path = tmp_path / "drafter" / "model.safetensors"
    tensors = load_file(path)
    own = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    save_file({**tensors, "d2t": own}, path)
    figures = []
    for overrides in ((), (f"drafter.path={tmp_path}/drafter", "wiring.d2t=absolute")):
        assert main(world.overrides(*OWN, *overrides)) == 0
        figures.append(record(runs(world)[-1], "result.json")["metrics"])
    assert figures[0] == figures[1]


def test_a_time_limit_stops_the_job(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(world.overrides(*OWN, "job.timeout_s=0.2")) == 1
    assert "ran past its time limit (job.timeout_s)" in capfd.readouterr().out
    assert filed(world, runs(world)[-1]).info.status == "KILLED"


def test_a_tracking_server_that_is_down_loses_nothing(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(world.overrides(*OWN, "tracking=server", f"tracking.uri={uri}")) == 1
    out = capfd.readouterr().out
    folder = runs(world)[-1]
    assert "measured" in out
    assert uri in out
    assert f"python -m orchestrator record {shlex.quote(str(folder))}" in out
    assert record(folder, "verdict.json")["verdict"] == "measured"
    assert record(folder, "result.json")["metrics"]["accuracy"]
    # The store comes back (here: another one): the same folder is filed, twice to the same end.
    config = (folder / "config.yaml").read_text().replace(f"uri: {uri}", "uri: null")
    (folder / "config.yaml").write_text(config)
    again = ["record", str(folder)]
    assert main(again) == 0
    run = filed(world, folder)
    assert main(again) == 0
    assert filed(world, folder).to_dictionary() == run.to_dictionary()


def test_a_results_folder_that_cannot_be_written_is_refused_before_the_start(
    world: World, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert main(world.overrides(*OWN, f"results={tmp_path}/file/results")) == 2
    err = capfd.readouterr().err
    assert f"{tmp_path}/file/results" in err
    assert "set results=FOLDER" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_ends_in_one_sentence(
    world: World, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], check=True)
    try:
        code = main(world.overrides(*OWN, f"results={small}/results"))
        captured = capfd.readouterr()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert code in (1, 2)
    assert "make room" in captured.out + captured.err
    assert "Traceback" not in captured.out + captured.err


def test_record_names_what_it_cannot_find(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "nope", f"results={world.results}"]) == 2
    assert "there is no run nope" in capfd.readouterr().err
    assert main(["record"]) == 2
    assert "record needs a run's id" in capfd.readouterr().err


def test_a_reader_that_goes_away_takes_no_answer_with_it(world: World) -> None:
    command = start(world)
    assert command.stdout is not None
    command.stdout.close()
    assert command.wait(timeout=60) == 0
    folder = runs(world)[-1]
    assert record(folder, "verdict.json")["verdict"] == "measured"
    assert filed(world, folder).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["+experiment=layers_m1_2_30", "--cfg", "job"], 0),
        (["wiring.lyers=[1]"], 2),
        (["+experiment=nope"], 2),
        ([], 2),
        (["uii"], 2),
        (["record", "nope"], 2),
    ],
)
def test_help_and_errors_import_nothing_heavy(arguments: list[str], code: int) -> None:
    program = (
        "import sys\n"
        "from orchestrator.__main__ import main\n"
        "code = main(sys.argv[1:])\n"
        "heavy = [m for m in ('torch', 'mlflow', 'fabric', 'numpy') if m in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=CLONE, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_verb_suggests_the_nearest(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["recrod"]) == 2
    assert "did you mean 'record'?" in capfd.readouterr().err
