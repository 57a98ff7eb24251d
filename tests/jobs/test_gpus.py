"""GPUs are chosen as asked or not at all, and two timed runs never share one."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import BadInput
from jobs.gpus import Choice, Leases, Lock, choose, holder, pass_by_leased
from jobs.host import Host, Wire, derive_state, identity

Supervise = Callable[..., Any]
Eventually = Callable[..., Any]


def gpu(index: int, used: int = 0, *, busy: int | None = 0, apps: int = 0) -> dict[str, Any]:
    processes = [
        {"pid": 900 + i, "name": "python3", "memory_mib": 5, "user": "anna"} for i in range(apps)
    ]
    return {
        "index": index,
        "uuid": f"GPU-{index}{index}",
        "name": "NVIDIA Fake",
        "memory_total_mib": 1000,
        "memory_used_mib": used,
        "utilization": busy,
        "processes": processes,
    }


def lock(name: str) -> Lock:
    return Lock(name=name, label=f"GPU {name}")


# -- the choice --------------------------------------------------------------------------------


def test_the_cpu_hides_every_gpu() -> None:
    (choice,) = choose("cpu", [0], [gpu(0)], inherited="0")
    assert (choice.device, choice.visible, choice.chosen) == ("cpu", "", ())
    assert choice.variables == {"CUDA_VISIBLE_DEVICES": ""}


def test_wanted_gpus_are_taken_in_their_order() -> None:
    (choice,) = choose("cuda", [2, 0], [gpu(0), gpu(1), gpu(2, apps=1)])
    assert choice.variables == {
        "CUDA_VISIBLE_DEVICES": "2,0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert [entry.name for entry in choice.locks] == ["GPU-00", "GPU-22"], "one order for everybody"
    record = choice.plain()
    assert record["foreign"] == [
        {"gpu": 2, "pid": 900, "name": "python3", "memory_mib": 5, "user": "anna"}
    ]
    assert record["notes"] == [
        "GPU 2 (NVIDIA Fake) is in use by pid 900 (python3, 5 MiB, user anna), which is left alone"
    ]
    json.dumps(record)


@pytest.mark.parametrize(
    ("gpus", "freest"),
    [
        ([gpu(0, 10), gpu(1, 5, apps=1)], 0),
        ([gpu(0, apps=2), gpu(1, 900, apps=1)], 1),
        ([gpu(0, 10), gpu(1, 5)], 1),
        ([gpu(0, busy=50), gpu(1, busy=40)], 1),
        ([gpu(0, busy=None), gpu(1, busy=40)], 1),
        ([gpu(0), gpu(1)], 0),
    ],
)
def test_null_takes_the_freest(gpus: list[dict[str, Any]], freest: int) -> None:
    assert choose("auto", None, gpus)[0].visible == str(freest)
    assert len(choose("auto", None, gpus)) == len(gpus)


@pytest.mark.parametrize(
    ("inherited", "wanted", "visible"),
    [
        ("1,2", None, "1"),
        ("2", None, "2"),
        ("GPU-22", None, "2"),
        ("1,2", [2], "2"),
        ("7,2", None, "2"),
        ("MIG-aa", None, None),
    ],
)
def test_what_a_scheduler_has_set_limits_the_choice(
    inherited: str, wanted: list[int] | None, visible: str | None
) -> None:
    choice = choose("cuda", wanted, [gpu(0), gpu(1), gpu(2)], inherited=inherited)[0]
    assert choice.visible == visible


def test_numbers_of_another_order_are_said_aloud() -> None:
    gpus = [gpu(0), {**gpu(1), "name": "Other"}]
    said = choose("cuda", None, gpus, inherited="1")[0].notes
    assert "nvidia-smi's order" in said[-1]
    assert len(choose("cuda", None, gpus, inherited="1", order="PCI_BUS_ID")[0].notes) == 1


@pytest.mark.parametrize(
    ("device", "wanted", "gpus", "more", "words"),
    [
        ("cuda", [7], [gpu(0), gpu(1)], {}, r"GPU 7, but this host has GPU 0 \(NVIDIA Fake\), GPU"),
        ("cuda", [0], [gpu(0), gpu(1)], {"inherited": "1"}, "that CUDA_VISIBLE_DEVICES=1 leaves"),
        ("cuda", [], [gpu(0)], {}, "must name each GPU once"),
        ("cuda", [0, 0], [gpu(0)], {}, "must name each GPU once"),
        ("cuda", None, [], {}, "job.device=cuda, but nvidia-smi shows no GPU"),
        ("auto", [0], [], {}, r"host.gpus=\[0\], but nvidia-smi shows no GPU"),
        ("cuda", None, [gpu(0)], {"inherited": ""}, "CUDA_VISIBLE_DEVICES='' is set"),
        ("cuda", None, [gpu(0)], {"inherited": "NoDevFiles"}, "NoDevFiles"),
        ("cuda", None, [gpu(0)], {"inherited": "5"}, "no GPU that CUDA_VISIBLE_DEVICES=5 leaves"),
        ("cuda", [0], [gpu(0)], {"inherited": "MIG-a"}, "MIG-a is set"),
        ("auto", [0], None, {}, "no nvidia-smi"),
        ("cuda", [0], None, {"inherited": "1"}, "CUDA_VISIBLE_DEVICES=1 is set"),
    ],
)
def test_what_is_not_there_is_an_error(
    device: str, wanted: Any, gpus: Any, more: dict[str, str], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        choose(device, wanted, gpus, **more)


@pytest.mark.parametrize(
    ("device", "gpus", "more", "took", "visible", "words"),
    [
        ("auto", [], {}, "cpu", "", "shows no GPU on this host, so the job runs on the CPU"),
        ("auto", None, {}, "cpu", "", "no nvidia-smi, so the job runs on the CPU"),
        ("auto", [gpu(0)], {"inherited": "-1"}, "cpu", "", "'-1' is set on the host, so the job"),
        ("cuda", None, {}, "cuda", None, "torch takes what it finds"),
        ("cuda", None, {"trouble": "NVML is broken"}, "cuda", None, "NVML is broken"),
        ("auto", None, {"trouble": "NVML is broken"}, "auto", None, "NVML is broken"),
        ("auto", None, {"inherited": "0"}, "auto", None, "torch takes what it finds"),
    ],
)
def test_what_was_decided_without_being_asked_is_said(
    device: str, gpus: Any, more: dict[str, str], took: str, visible: str | None, words: str
) -> None:
    (choice,) = choose(device, None, gpus, **more)
    assert (choice.device, choice.visible) == (took, visible)
    assert words in choice.notes[0]
    assert choice.locks, "a lease must be for something"


def test_wanted_gpus_that_nothing_shows_are_taken_at_their_word() -> None:
    (choice,) = choose("cuda", [1], None, trouble="NVML is broken")
    assert choice.visible == "1"
    assert choice.notes == ("NVML is broken: whether GPU 1 is there and free is not known",)


# -- the lease ---------------------------------------------------------------------------------


def test_a_lease_is_had_once_and_its_holder_is_named(tmp_path: Path) -> None:
    first, second = Leases("run-1", tmp_path / "l"), Leases("run-2", tmp_path / "l")
    assert first.take([lock("a"), lock("b")]) is None
    assert first.take([lock("a")]) is None, "it holds that already"
    blocker = second.take([lock("b")])
    assert blocker is not None
    assert blocker.startswith("GPU b, leased to run run-1 of ")
    assert f"(pid {os.getpid()}) since 20" in blocker
    assert second.take([lock("c")]) is None
    first.release()
    assert second.take([lock("b")]) is None
    second.release()


def test_looking_takes_nothing(tmp_path: Path) -> None:
    first, second = Leases("run-1", tmp_path / "l"), Leases("run-2", tmp_path / "l")
    assert second.taken_by([lock("a")]) is None
    assert first.take([lock("a")]) is None
    assert "leased to run run-1" in str(second.taken_by([lock("a")]))
    first.release()


def test_the_folder_and_its_files_are_everybodys_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        leases = Leases("run-1", tmp_path / "l")
        leases.take([lock("../a b")])
        leases.release()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "l").stat().st_mode) == 0o1777
    (file,) = (tmp_path / "l").iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == (".._a_b.lock", 0o666)


def test_another_user_can_take_and_sign_a_lease_that_was_mine(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    folder = Path("/tmp") / f"leases-{os.getpid()}-test"
    mine = Leases("run-1", folder)
    code = (
        f"import os, sys; sys.path.insert(0, {str(tmp_path.cwd())!r})\n"
        "from pathlib import Path\n"
        "from jobs.gpus import Leases, Lock\n"
        "os.setuid(65534)\n"
        f"leases = Leases('run-2', Path({str(folder)!r}))\n"
        "print(leases.take([Lock(name='a', label='GPU a')]))\n"
    )
    command = [sys.executable, "-c", code]
    try:
        assert mine.take([lock("a")]) is None
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "leased to run run-1" in told
        mine.release()
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert told == "None\n"
        assert json.loads((folder / "a.lock").read_text())["run_id"] == "run-2"
    finally:
        (folder / "a.lock").unlink()
        folder.rmdir()


def test_a_link_is_not_followed_and_the_sentence_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "l").mkdir()
    (tmp_path / "l" / "a.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(BadInput, match=r"a\.lock cannot be opened: .*ORCHESTRATOR_GPU_LEASES"):
        Leases("run-1", tmp_path / "l").take([lock("a")])
    assert not (tmp_path / "victim").exists()
    (tmp_path / "m").symlink_to(tmp_path / "l")
    with pytest.raises(BadInput, match="cannot be opened"):
        Leases("run-1", tmp_path / "m").take([lock("b")])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b'{"since": "x"}',
        b'{"run_id": 1, "user": 1, "pid": 1, "since": 1e300}',
        b"\xff" * 9000,
    ],
)
def test_a_lease_signed_badly_is_still_held(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with (tmp_path / "x").open("rb") as file:
        assert holder(file.fileno()) == "somebody who has not signed"


def test_what_others_wrote_cannot_reach_the_terminal(tmp_path: Path) -> None:
    record = {"run_id": "\x1b[2J", "user": "a\nb", "pid": "9" * 500, "since": 1}
    (tmp_path / "x").write_text(json.dumps(record))
    with (tmp_path / "x").open("rb") as file:
        told = holder(file.fileno())
    assert told.isprintable()
    assert len(told) < 300


def test_a_run_without_a_lease_passes_leased_gpus_by(tmp_path: Path) -> None:
    holds, looks = Leases("run-1", tmp_path / "l"), Leases("run-2", tmp_path / "l")
    both = choose("cuda", None, [gpu(0), gpu(1)])
    holds.take(both[0].locks)
    assert pass_by_leased(looks, both).visible == "1"
    holds.take(both[1].locks)
    shared: Choice = pass_by_leased(looks, both)
    assert shared.visible == "0"
    assert "is leased to run run-1" in shared.notes[-1]
    assert shared.notes[-1].endswith("this run shares it")
    holds.release()


# -- runs --------------------------------------------------------------------------------------


def timed(wanted: list[int] | None = None, **more: Any) -> dict[str, Any]:
    return {"device": "cuda", "gpus": {"wanted": wanted, "lease": True}, **more}


def environment_of(run: Any) -> dict[str, Any]:
    return run.json("environment.json")["variables"]


def test_the_job_sees_the_chosen_gpu_and_the_run_says_so(
    supervise: Supervise, machine: Any
) -> None:
    machine.has(
        "0, GPU-a, NVIDIA Fake, 1000, 900, 90",
        "1, GPU-b, NVIDIA Fake, 1000, 100, 0",
        apps=("GPU-a, 4194999, vllm, 800", "GPU-b, 4194998, python3, 60"),
    )
    gpus = {"wanted": None, "lease": False}
    run = supervise({"do": "ok"}, device="auto", gpus=gpus, env=machine.env)
    assert run.ended()["rc"] == 0
    assert environment_of(run)["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment_of(run)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    record = run.json("gpus.json")
    assert (record["device"], record["visible"], record["leased"]) == ("cuda", "1", [])
    assert [g["uuid"] for g in record["chosen"]] == ["GPU-b"]
    assert [p["pid"] for p in record["foreign"]] == [4194998]
    assert [event["text"] for event in run.events("note")] == record["notes"]
    assert "GPU 1 (NVIDIA Fake) is chosen out of 2" in record["notes"]


def test_on_the_cpu_no_gpu_is_touched_or_asked_for(supervise: Supervise, machine: Any) -> None:
    gpus = {"wanted": None, "lease": False}
    run = supervise({"do": "ok"}, device="cpu", gpus=gpus, env=machine.env)
    assert run.ended()["rc"] == 0
    assert environment_of(run)["CUDA_VISIBLE_DEVICES"] == ""
    assert not machine.was_asked()


def test_without_the_key_nothing_is_chosen(supervise: Supervise, machine: Any) -> None:
    run = supervise({"do": "ok"}, device="cuda", env={**machine.env, "CUDA_VISIBLE_DEVICES": "5"})
    assert run.ended()["rc"] == 0
    assert environment_of(run)["CUDA_VISIBLE_DEVICES"] == "5"
    assert not (run.dir / "gpus.json").exists()


def test_a_gpu_that_is_not_there_fails_the_cases_and_says_what_is(
    supervise: Supervise, machine: Any
) -> None:
    gpus = {"wanted": [3], "lease": False}
    run = supervise({"do": "ok"}, {"do": "ok"}, device="cuda", gpus=gpus, env=machine.env)
    assert run.ended()["rc"] == 1
    for case in (0, 1):
        error = run.result(case)["error"]
        assert error["kind"] == "BadInput"
        assert error["message"].startswith("host.gpus asks for GPU 3, but this host has GPU 0 (")


def test_timed_runs_on_one_gpu_follow_each_other(
    supervise: Supervise, machine: Any, eventually: Eventually
) -> None:
    first = supervise({"do": "gate"}, run_id="first", env=machine.env, **timed())
    first.at_the_gate()
    assert first.json("gpus.json")["leased"] == ["GPU 0 (NVIDIA Fake 9000)"]
    second = supervise({"do": "gate"}, run_id="second", env=machine.env, **timed([0]))
    eventually(lambda: (second.dir / "queue.json").exists())
    queued = derive_state(second.dir)
    assert queued["state"] == "queued"
    assert queued["waiting_for"].startswith("GPU 0 (NVIDIA Fake 9000), leased to run first of ")
    assert f"(pid {first.process.pid})" in queued["waiting_for"]
    # One that measures accuracy runs beside the first meanwhile.
    gpus = {"wanted": None, "lease": False}
    beside = supervise({"do": "ok"}, run_id="third", device="cuda", gpus=gpus, env=machine.env)
    assert beside.ended()["rc"] == 0
    assert "leased to run first" in beside.json("gpus.json")["notes"][-1]
    assert derive_state(second.dir)["state"] == "queued"
    (first.dir / "go").touch()
    assert first.ended()["rc"] == 0
    second.at_the_gate()
    assert not (second.dir / "queue.json").exists()
    (second.dir / "go").touch()
    ending = second.ended()
    assert ending["rc"] == 0
    assert ending["started"] >= first.json("exit.json")["ended"]


def test_a_freest_gpu_is_the_next_one_where_the_first_is_leased(
    supervise: Supervise, machine: Any
) -> None:
    machine.has("0, GPU-a, NVIDIA Fake, 1000, 0, 0", "1, GPU-b, NVIDIA Fake, 1000, 9, 0")
    first = supervise({"do": "gate"}, run_id="first", env=machine.env, **timed())
    first.at_the_gate()
    second = supervise({"do": "gate"}, run_id="second", env=machine.env, **timed())
    second.at_the_gate()
    third = supervise({"do": "ok"}, run_id="third", env=machine.env, **timed())
    for run in (first, second):
        assert run.json("gpus.json")["leased"]
    assert [run.json("gpus.json")["visible"] for run in (first, second)] == ["0", "1"]
    (second.dir / "go").touch()
    assert third.ended()["rc"] == 0
    assert third.json("gpus.json")["visible"] == "1"
    (first.dir / "go").touch()
    assert first.ended()["rc"] == 0


def test_timed_runs_on_the_cpu_follow_each_other(
    supervise: Supervise, machine: Any, eventually: Eventually
) -> None:
    gpus = {"wanted": None, "lease": True}
    first = supervise({"do": "gate"}, run_id="first", gpus=gpus, env=machine.env)
    first.at_the_gate()
    second = supervise({"do": "ok"}, run_id="second", gpus=gpus, env=machine.env)
    eventually(lambda: (second.dir / "queue.json").exists())
    assert "this machine's CPU, leased" in second.json("queue.json")["waiting_for"]
    (first.dir / "go").touch()
    assert second.ended()["started"] >= first.ended()["ended"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_queued_run_can_be_cancelled_and_never_starts(
    supervise: Supervise, machine: Any, eventually: Eventually, number: int
) -> None:
    held = Leases("holder", machine.leases)
    held.take([Lock(name="GPU-aaaa", label="GPU 0")])
    run = supervise({"do": "ok"}, timeout_s=0.1, env=machine.env, **timed())
    eventually(lambda: (run.dir / "queue.json").exists())
    run.process.send_signal(number)
    ending = run.ended()
    assert (ending["state"], ending["rc"], ending["started"]) == ("cancelled", None, None)
    assert derive_state(run.dir) == ending
    for name in ("events.jsonl", "log", "supervisor.json", "queue.json"):
        assert not (run.dir / name).exists()
    held.release()


@pytest.mark.parametrize(("name", "state"), [("TERM", "cancelled"), ("KILL", "vanished")])
def test_a_queued_run_is_cancelled_through_the_hosts_program(
    supervise: Supervise,
    machine: Any,
    tmp_path: Path,
    eventually: Eventually,
    is_running: Callable[[int], bool],
    name: str,
    state: str,
) -> None:
    held = Leases("holder", machine.leases)
    held.take([Lock(name="GPU-aaaa", label="GPU 0")])
    folder = tmp_path / "root" / "runs" / "run-1"
    folder.mkdir(parents=True)
    run = supervise({"do": "ok"}, into=folder, env=machine.env, **timed())
    (folder / "spawn.json").write_text(json.dumps(identity(run.process.pid)))
    eventually(lambda: (folder / "queue.json").exists())
    host = Host(tmp_path / "root", Wire(0, 1))
    listed, _ = host.list_runs({})
    assert [(r["run_id"], r["state"]) for r in listed["runs"]] == [("run-1", "queued")]
    answer, _ = host.signal({"run_id": "run-1", "signal": name})
    assert run.process.pid in answer["signalled"]
    eventually(lambda: derive_state(folder)["state"] == state)
    run.process.wait()
    assert not (folder / "log").exists(), "the worker never started"
    held.release()


def test_a_queued_run_whose_supervisor_is_killed_has_vanished(
    supervise: Supervise, machine: Any, eventually: Eventually
) -> None:
    held = Leases("holder", machine.leases)
    held.take([Lock(name="GPU-aaaa", label="GPU 0")])
    run = supervise({"do": "ok"}, env=machine.env, **timed())
    eventually(lambda: derive_state(run.dir).get("waiting_for"))
    run.process.kill()
    state = eventually(lambda: (s := derive_state(run.dir))["state"] == "vanished" and s)
    assert "it was waiting for GPU 0" in state["reason"]
    held.release()


def test_a_killed_supervisor_frees_its_lease(
    supervise: Supervise, machine: Any, eventually: Eventually
) -> None:
    first = supervise({"do": "gate"}, run_id="first", env=machine.env, **timed())
    first.at_the_gate()
    second = supervise({"do": "ok"}, run_id="second", env=machine.env, **timed())
    eventually(lambda: (second.dir / "queue.json").exists())
    first.process.kill()
    assert second.ended()["rc"] == 0


def test_a_lease_lasts_until_no_process_of_the_run_is_left(
    supervise: Supervise, machine: Any, eventually: Eventually
) -> None:
    """The first job is long over when its supervisor still waits for what it left behind."""
    first = supervise(
        {"do": "gate", "family": True, "leave": True},
        run_id="first",
        grace_s=30,
        env=machine.env,
        **timed(),
    )
    eventually(lambda: "left processes behind" in first.said())
    second = supervise({"do": "ok"}, run_id="second", env=machine.env, **timed())
    eventually(lambda: (second.dir / "queue.json").exists())
    assert not (first.dir / "exit.json").exists()
    first.process.send_signal(signal.SIGTERM)  # do not wait for the grace
    first.ended()
    assert second.ended()["rc"] == 0


def test_a_lease_folder_of_no_use_fails_the_case_with_what_to_do(
    supervise: Supervise, machine: Any
) -> None:
    machine.leases.write_text("a file")
    run = supervise({"do": "ok"}, env=machine.env, **timed())
    assert run.ended()["rc"] == 1
    assert "ORCHESTRATOR_GPU_LEASES" in run.result()["error"]["message"]
    # Without a lease it is no reason to stop.
    gpus = {"wanted": None, "lease": False}
    run = supervise({"do": "ok"}, device="cuda", gpus=gpus, env=machine.env)
    assert run.ended()["rc"] == 0
    assert "whether a GPU is leased is not known" in run.json("gpus.json")["notes"][-1]


def test_a_full_disk_before_the_start_is_said_and_the_run_vanishes(
    supervise: Supervise, machine: Any, tiny_disk: Callable[[str, str], Path]
) -> None:
    disk = tiny_disk("full", "16k")
    (disk / "filler").write_bytes(bytes(12288))
    run = supervise({"do": "ok"}, into=disk, env=machine.env, **timed())
    assert run.process.wait(timeout=20) == 1
    assert "gpus.json cannot be written, so the job is not started" in run.said()
