"""GPU memory that a server leaves taken is said, as nvidia-smi has it; without GPUs nothing is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import environment
from jobs.engines import gpu_memory
from jobs.engines.gpu_memory import LIMIT_MIB, GpuMemory

Memory = Callable[[], GpuMemory]
BEFORE = 1000
NONE: dict[str, str] = {}


def gpu(index: int, used: int | str) -> str:
    return f"{index}, GPU-{index}{index}, NVIDIA Fake, 81559, {used}, 0"


def app(index: int, pid: int, held: int) -> str:
    return f"GPU-{index}{index}, {pid}, sglang::scheduler, {held}"


@pytest.fixture
def smi(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with a GPU on which somebody's process is; nobody waits for the driver there."""
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_memory, "WAIT_S", 0.0)
    monkeypatch.setattr(gpu_memory, "POLL_S", 0.01)
    machine.has(gpu(0, BEFORE), apps=(app(0, 7, 900),))
    return machine


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def memory(said: list[str]) -> GpuMemory:
    return GpuMemory(said.append)


def test_what_stays_is_said_with_who_holds_it(smi: Any, memory: GpuMemory, said: list[str]) -> None:
    with memory.around("baseline", NONE):
        smi.has(gpu(0, 71000), apps=(app(0, 7, 900), app(0, 8, 70000)))
    assert said == [
        "baseline: GPU 0 (NVIDIA Fake) has 70000 MiB more in use than before the start (1000 MiB then, "
        "71000 MiB now); nvidia-smi names pid 8 (sglang::scheduler, 70000 MiB)"
    ]
    assert memory.taken_notes() == said
    assert memory.taken_notes() == []


def test_one_that_was_there_is_named_where_it_holds_more_and_nobody_where_none_does(
    smi: Any, memory: GpuMemory, said: list[str]
) -> None:
    with memory.around("baseline", NONE):
        smi.has(gpu(0, 2000), apps=(app(0, 7, 1900),))
    with memory.around("speculative", NONE):
        smi.has(gpu(0, 3000), apps=(app(0, 7, 1900),))
    assert said[0].endswith("; nvidia-smi names pid 7 (sglang::scheduler, 1900 MiB)")
    assert said[1].startswith("speculative: GPU 0 (NVIDIA Fake) has 1000 MiB more")
    assert said[1].endswith("; nvidia-smi names no process that holds it")


@pytest.mark.parametrize("used", [BEFORE, 10, BEFORE + LIMIT_MIB, "[N/A]"])
def test_what_is_given_back_or_little_or_not_known_is_not_said(
    used: int | str, smi: Any, memory: GpuMemory, said: list[str]
) -> None:
    with memory.around("baseline", NONE):
        smi.has(gpu(0, used))
    assert said == []


def test_a_driver_that_gives_back_late_is_waited_for(
    smi: Any, memory: GpuMemory, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "WAIT_S", 60.0)
    calls = Path(smi.folder) / "calls"

    def give_back(asked: int) -> None:
        while calls.read_text().count("\n") < asked + 4:  # two looks behind the server
            time.sleep(0.01)
        smi.has(gpu(0, BEFORE))

    with memory.around("baseline", NONE):
        smi.has(gpu(0, 71000))
        thread = threading.Thread(target=give_back, args=(calls.read_text().count("\n"),))
        thread.start()
    thread.join()
    assert said == []


def test_of_two_beside_each_other_the_last_one_shows_what_has_stayed(
    smi: Any, memory: GpuMemory, said: list[str]
) -> None:
    with memory.around("baseline", NONE):
        with memory.around("speculative", NONE):
            smi.has(gpu(0, 5000))  # of the first one, which stands
        assert said == []
    assert len(said) == 1
    assert said[0].startswith("baseline and speculative: GPU 0 (NVIDIA Fake) has 4000 MiB more")


def test_only_the_gpus_that_the_server_sees_count(
    smi: Any, memory: GpuMemory, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    smi.has(gpu(0, BEFORE), gpu(1, BEFORE), gpu(2, BEFORE))
    with memory.around("baseline", {"CUDA_VISIBLE_DEVICES": "2,GPU-11"}):
        smi.has(gpu(0, 9000), gpu(1, 8000), gpu(2, BEFORE))
    assert [words.partition(" (")[0] for words in said] == ["baseline: GPU 1"]
    with memory.around("speculative", NONE):
        smi.has(gpu(0, 20000), gpu(1, 20000), gpu(2, BEFORE))
    assert [words.partition(" (")[0] for words in said[1:]] == ["speculative: GPU 0"]


def test_a_server_that_fails_is_looked_behind_and_one_that_is_cancelled_is_not(
    smi: Any, memory: GpuMemory, said: list[str]
) -> None:
    def end(error: BaseException, used: int) -> None:
        with memory.around("baseline", NONE):
            smi.has(gpu(0, used))
            raise error

    with pytest.raises(ValueError, match="it fails"):
        end(ValueError("it fails"), 5000)
    assert len(said) == 1
    with pytest.raises(SystemExit):
        end(SystemExit(), 9000)
    assert len(said) == 1
    with memory.around("baseline", NONE):  # it starts anew
        pass
    assert len(said) == 1


@pytest.mark.parametrize("before", [True, False])
def test_an_nvidia_smi_that_fails_is_no_memory_given_back(
    before: bool, smi: Any, memory: GpuMemory, said: list[str]
) -> None:
    if before:
        smi.breaks("Unable to determine the device handle")
    with memory.around("baseline", NONE):
        smi.breaks("Unable to determine the device handle")
    assert said == [
        "baseline: whether GPU memory was given back is not known: nvidia-smi failed with 9 and said: "
        "Unable to determine the device handle"
    ]


def test_gpus_of_which_nvidia_smi_knows_none_are_said_as_not_known(
    smi: Any, memory: GpuMemory, said: list[str]
) -> None:
    with memory.around("baseline", {"CUDA_VISIBLE_DEVICES": "MIG-12"}):
        smi.has(gpu(0, 71000))
    assert said == [
        "baseline: whether GPU memory was given back is not known: nvidia-smi lists no GPU that "
        "CUDA_VISIBLE_DEVICES=MIG-12 names"
    ]


@pytest.mark.parametrize("visible", ["", "-1"])
def test_of_a_server_that_sees_no_gpu_nothing_is_said(
    visible: str, smi: Any, memory: GpuMemory, said: list[str]
) -> None:
    with memory.around("baseline", {"CUDA_VISIBLE_DEVICES": visible}):
        smi.has(gpu(0, 71000))
    assert said == []


def test_without_nvidia_smi_nothing_is_said(
    memory: GpuMemory, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(environment, "SMI_PLACES", ())
    with memory.around("baseline", NONE):
        pass
    assert said == []
