"""A machine is described without touching it, and two descriptions tell what changed."""

from __future__ import annotations

import ast
import copy
import json
import os
import pwd
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import environment
from jobs.environment import ProbeError, describe, differences

SOURCE = Path(environment.__file__)


def ask(question: object, **env: str) -> dict[str, Any]:
    """As the orchestrator asks a host: the program on stdin, the question as its only argument."""
    done = subprocess.run(
        [sys.executable, "-", json.dumps(question)],
        input=SOURCE.read_bytes(),
        capture_output=True,
        env={**os.environ, **env},
        check=True,
    )
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A checkout with one commit, under a name that a shell would take apart."""
    folder = tmp_path / "engine $(x) 'y'"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "model.py").write_text("layers = [3, 31, 59]\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return folder


def test_a_description_holds_what_a_figure_may_depend_on() -> None:
    found = describe()
    assert found["hostname"] == os.uname().nodename
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["safetensors"]
    assert found["torch"]["version"].startswith(found["packages"]["torch"].split("+")[0])
    assert describe() == found
    assert json.loads(json.dumps(found)) == found


def test_it_imports_no_torch_and_nothing_of_the_project() -> None:
    code = (
        "import sys; sys.argv = ['x', '{}']; exec(sys.stdin.read(), {'__name__': 'x', }); "
        "sys.exit(any(name.split('.')[0] in ('torch', 'jobs', 'eagle3') for name in sys.modules))"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, input=SOURCE.read_bytes(), check=False).returncode == 0
    answer = ask({})
    assert answer["gpus"] is None
    assert answer["environment"]["packages"]["torch"]


def test_an_older_python_can_read_it() -> None:
    ast.parse(SOURCE.read_text(), feature_version=(3, 8))


def test_packages_are_found_by_the_names_of_their_folders(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (
        first / "Foo_Bar.baz-1.0.dist-info",
        first / "twice-1.0.dist-info",
        first / "twice-2.0.dist-info",
        first / "old-3.1-py3.11.egg-info",
        first / "local-1.0+cpu.dist-info",
        first / "~oo-1.0.dist-info",
        second / "foo_bar_baz-9.dist-info",
        second / "nameless.egg-info",
    ):
        path.mkdir(parents=True)
    (second / "nameless.egg-info" / "PKG-INFO").write_text("Name: nameless\nVersion: 7.5\n")
    assert environment.packages([str(first), str(tmp_path / "none"), str(second)]) == {
        "foo-bar-baz": "1.0",
        "local": "1.0+cpu",
        "nameless": "7.5",
        "old": "3.1",
        "twice": "1.0 and 2.0",
    }


def test_torch_is_read_from_its_files(tmp_path: Path) -> None:
    place = tmp_path / "torch"
    place.mkdir()
    (place / "__init__.py").write_text("raise RuntimeError('imported')")
    version = "from typing import Optional\n__version__ = '2.13.0+cu130'\ndebug = False\n"
    (place / "version.py").write_text(version + "cuda: Optional[str] = '13.0'\nhip = None\n")
    found = ask({}, PYTHONPATH=str(tmp_path))["environment"]["torch"]
    assert found == {"version": "2.13.0+cu130", "cuda": "13.0", "hip": None}
    (place / "version.py").unlink()
    found = ask({}, PYTHONPATH=str(tmp_path))["environment"]["torch"]
    assert (found["version"], "version.py" in found["error"]) == (None, True)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release\n",
            "560.35.03",
        ),
        ("something else\n", "something else"),
    ],
)
def test_the_driver_and_its_gpus_are_read_from_proc(
    tmp_path: Path, text: str, version: str
) -> None:
    (tmp_path / "version").write_text(text)
    for bus, name in (("0000:01:00.0", "NVIDIA A"), ("0000:02:00.0", "NVIDIA B")):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    assert environment.driver_version(tmp_path) == version
    assert environment.gpu_names(tmp_path) == ["NVIDIA A", "NVIDIA B"]
    assert environment.driver_version(tmp_path / "none") is None
    assert environment.gpu_names(tmp_path / "none") == []


def test_a_checkout_is_known_by_its_commit_and_changes(engine: Path) -> None:
    name = str(engine)
    clean = describe([name])
    commit = git(engine, "rev-parse", "HEAD")
    assert clean["checkouts"] == {name: {"commit": commit, "dirty": False, "changes": None}}
    prints, texts = [clean["fingerprint"]], ["layers = [0, 3, 31]\n", "layers = [0]\n"]
    for text in texts:
        (engine / "model.py").write_text(text)
        found = describe([name])
        assert found["checkouts"][name]["dirty"] is True
        prints.append(found["fingerprint"])
    assert len(set(prints)) == 3, "each state of the engine's source is another environment"
    before, after = copy.deepcopy(found), describe([name])
    assert differences(before, after) == []
    assert differences(clean, after) == [f"checkout {name} has changes"]
    git(engine, "commit", "-qam", "two")
    (line,) = differences(clean, describe([name]))
    assert line.startswith(f"checkout {name} {commit[:12]} → ")


def test_a_checkout_that_cannot_be_read_says_why_in_one_sentence(
    engine: Path, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    asked = [str(engine), str(tmp_path / "plain"), str(tmp_path / "none"), "a\0b"]
    # What git itself sets to stand for a checkout of another user.
    found = ask({"checkouts": asked[:3]}, GIT_TEST_ASSUME_DIFFERENT_OWNER="1", HOME=str(tmp_path))
    errors = [entry.get("error", "") for entry in found["environment"]["checkouts"].values()]
    command = f"git config --global --add safe.directory {shlex.quote(asked[0])}"
    assert errors[0].endswith(f"belongs to another user; run there: {command}")
    assert errors[1:] == [
        f"{tmp_path / 'plain'} is no git checkout",
        f"{tmp_path / 'none'} is no folder on this host",
    ]
    assert "is no folder" in environment.checkout(asked[3])["error"]


def test_differences_are_one_short_line_each() -> None:
    before = describe()
    after = copy.deepcopy(before)
    after["torch"]["version"] = "9.9"
    after["packages"] = {**after["packages"], "torch": "9.9", "brandnew": "1"}
    del after["packages"]["safetensors"]
    after |= {"kernel": "k", "driver": "560.35.03", "gpus": ["NVIDIA A"] * 2, "machine_id": "x"}
    assert differences(before, after) == [
        f"another machine ({before['hostname']} → {before['hostname']})",
        f"kernel {before['kernel']} → k",
        "driver 560.35.03 new",
        "GPUs 2 x NVIDIA A new",
        f"torch {before['torch']['version']} → 9.9",
        "package brandnew 1 new",
        f"package safetensors {before['packages']['safetensors']} gone",
    ]
    assert differences(before, copy.deepcopy(before)) == []


def test_paths_are_looked_at_where_they_lie(tmp_path: Path) -> None:
    folder = tmp_path / "data\n$(x) ü"
    (folder / "below").mkdir(parents=True)
    (folder / "a").write_bytes(bytes(10))
    (folder / "link").symlink_to(folder / "a")
    (folder / "below" / "b").write_bytes(bytes(100))
    asked = [str(folder), str(folder / "a"), str(tmp_path / "none"), "~", "~nobody-here/x"]
    found = ask({"paths": asked}, HOME=str(tmp_path))["paths"]
    assert list(found) == asked
    told = [(p["exists"], p["is_dir"], p["readable"], p["bytes"]) for p in found.values()]
    assert told[:3] == [
        (True, True, True, 20),
        (True, False, True, 10),
        (False, False, False, None),
    ]
    assert (found["~"]["path"], found["~"]["is_dir"]) == (str(tmp_path), True)
    assert found["~nobody-here/x"]["exists"] is False


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_free_memory_is_what_the_control_group_leaves(tmp_path: Path, version: str) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 800 kB\n")
    if version == "v2":
        (proc / "self" / "cgroup").write_text("0::/user/job\n")
        top, limit, used, cache = groups, "memory.max", "memory.current", "inactive_file"
    else:
        (proc / "self" / "cgroup").write_text("4:cpu:/x\n3:memory:/user/job\n0::/\n")
        top, limit, used = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        cache = "total_inactive_file"
    (top / "user" / "job").mkdir(parents=True)
    assert environment.memory(groups, proc) == {"available": 819200, "total": 1024000}
    (top / "user" / "job" / limit).write_text("max\n" if version == "v2" else str(2**63))
    (top / "user" / "job" / used).write_text("5\n")
    (top / "user" / limit).write_text("500000\n")
    (top / "user" / used).write_text("450000\n")
    assert environment.memory(groups, proc) == {"available": 50000, "total": 500000}
    (top / "user" / "memory.stat").write_text(f"{cache} 100000\n")
    assert environment.memory(groups, proc) == {"available": 150000, "total": 500000}


# -- nvidia-smi --------------------------------------------------------------------------------


def test_gpus_and_who_computes_on_them(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_called = Path("/proc/self/cmdline").read_text().split("\0")[0]
    me = f"GPU-b, {os.getpid()}, {as_called}, 512"
    machine.has(
        "0, GPU-a, NVIDIA GB10, [N/A], [Not Supported], [N/A]",
        "1, GPU-b, Odd, Name, 81559, 600, 98",
        apps=(me, "GPU-b, 4194999, [Not Found], [N/A]", "GPU-b, 1, other name, 7", "No running"),
    )
    with monkeypatch.context() as patch:
        for name, value in machine.env.items():
            patch.setenv(name, value)
        first, second = environment.read_gpus() or []
    unknown = dict.fromkeys(("memory_total_mib", "memory_used_mib", "utilization"))
    assert first == {
        "index": 0,
        "uuid": "GPU-a",
        "name": "NVIDIA GB10",
        "processes": [],
        **unknown,
    }
    assert (second["name"], second["memory_used_mib"], second["utilization"]) == (
        "Odd, Name",
        600,
        98,
    )
    mine, gone, other = second["processes"]
    user = pwd.getpwuid(os.getuid()).pw_name
    assert (mine["pid"], mine["memory_mib"], mine["user"]) == (os.getpid(), 512, user)
    assert (gone["name"], gone["memory_mib"], gone["user"]) == ("[Not Found]", None, None)
    assert other["user"] is None, "pid 1 here is not that process"
    assert ask({"gpus": True}, **machine.env)["gpus"][1]["uuid"] == "GPU-b"


def test_a_failing_nvidia_smi_is_told_and_is_not_no_gpu(machine: Any) -> None:
    sentence = "Failed to initialize NVML: Driver/library version mismatch"
    machine.breaks(f"{sentence}\nNVML library version: 560.35\n")
    found = ask({"gpus": True}, **machine.env)["gpus"]
    assert found == {"error": f"nvidia-smi failed with 9 and said: {sentence}"}


def test_a_host_without_nvidia_smi_is_told_apart(tmp_path: Path) -> None:
    if environment.find_smi():
        pytest.skip("this machine has an nvidia-smi of its own")
    assert ask({"gpus": True})["gpus"] == {"error": "this host has no nvidia-smi", "missing": True}


def test_a_program_that_hangs_is_left_after_the_deadline(
    tmp_path: Path, eventually: Callable[..., Any], is_running: Callable[[int], bool]
) -> None:
    hanging = tmp_path / "nvidia-smi"
    hanging.write_text(
        textwrap.dedent(f"""\
            #!/bin/sh
            sleep 600 &
            echo $! > "{tmp_path}/child"
            wait
            """)
    )
    hanging.chmod(0o755)
    with pytest.raises(ProbeError, match=r"nvidia-smi gave no answer within 0\.5 s"):
        environment.answer_of([str(hanging)], deadline_s=0.5)
    if (tmp_path / "child").exists():
        eventually(lambda: not is_running(int((tmp_path / "child").read_text())))


@pytest.mark.parametrize("argument", [[], ["{"], ["[]"]])
def test_a_question_that_is_not_one_is_refused(argument: list[str]) -> None:
    command = [sys.executable, str(SOURCE), *argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "must be a JSON object" in done.stderr
