"""What a machine is like, as far as a figure may depend on it.

    python - '{"checkouts": […], "paths": […], "gpus": true}' < environment.py

prints one line of JSON: the environment, what lies at the paths, the free memory and the GPUs.
Linux, Python 3.10 or newer, standard library only: this file goes to a host alone. It imports no
torch, and older interpreters can read it as well, so that they are told apart and not tripped over.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import pwd
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Mapping, Sequence  # noqa: UP035 -- Python 3.8 has no other generic forms

DEADLINE_S = 20.0
FINGERPRINTED = (
    "python",
    "packages",
    "torch",
    "kernel",
    "cpu",
    "driver",
    "gpus",
    "checkouts",
    "machine_id",
)
NVIDIA = Path("/proc/driver/nvidia")
SMI_PLACES = ("/usr/bin/nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
GPU_FIELDS = "index,uuid,name,memory.total,memory.used,utilization.gpu"
APP_FIELDS = "gpu_uuid,pid,process_name,used_memory"
DISTRIBUTION = re.compile(r"([A-Za-z0-9].*?)(?:-(\d.*?))?(?:-py\d[\d.]*)?\.(?:dist|egg)-info")
GIT_SET = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR")


class ProbeError(Exception):
    """A program that was asked gave no answer; the text is one sentence."""


def answer_of(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> str:
    """What a program prints; raises ProbeError where it fails or takes too long."""
    name = Path(command[0]).name
    try:
        asked = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise ProbeError(f"{name} cannot be run: {error.strerror}") from None
    try:
        out, err = asked.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(asked.pid, signal.SIGKILL)
        # One that hangs in the driver cannot be killed, and must not be waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            asked.wait(1)
        for pipe in (asked.stdout, asked.stderr):
            if pipe is not None:
                pipe.close()
        raise ProbeError(f"{name} gave no answer within {deadline_s:g} s") from None
    if asked.returncode:
        said = (err.strip() or out.strip()).decode("utf-8", "replace").splitlines() or ["nothing"]
        raise ProbeError(f"{name} failed with {asked.returncode} and said: {said[0].strip()[:300]}")
    return out.decode("utf-8", "replace")


def text_of(path: Path) -> str | None:
    """A small file's text; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


# -- Python's side -----------------------------------------------------------------------------


def packages(path: Sequence[str] | None = None) -> dict[str, str]:
    """Every installed distribution and its version, from the names of its metadata folders.

    Where one is installed twice the first on the path counts, as for an import. The current folder
    is left out: what lies where a program was started is not installed.
    """
    found: dict[str, str] = {}
    here = Path.cwd()
    for entry in dict.fromkeys(sys.path if path is None else path):
        if not entry or Path(entry) == here:
            continue
        try:
            names = sorted(item.name for item in os.scandir(entry))
        except OSError:
            continue  # an archive, or a folder that is not there
        inside: dict[str, str] = {}
        for file_name in names:
            match = DISTRIBUTION.fullmatch(file_name)
            if match is None:
                continue
            name = re.sub(r"[-_.]+", "-", match.group(1)).lower()
            version = match.group(2) or version_in(Path(entry) / file_name)
            # Two versions in one folder are the remains of a broken update; both are told.
            inside[name] = f"{inside[name]} and {version}" if name in inside else version
        found = {**inside, **found}
    return dict(sorted(found.items()))


def version_in(place: Path) -> str:
    """The version that a distribution's metadata states."""
    for file in (place / "METADATA", place / "PKG-INFO", place):
        for line in (text_of(file) or "").splitlines():
            if line.startswith("Version:"):
                return line.partition(":")[2].strip()
    return "unknown"


def torch_on_disk() -> dict[str, Any] | None:
    """torch's version and what it was built for, read from its files; None where it is missing."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    facts: dict[str, Any] = {"version": None, "cuda": None, "hip": None}
    path = Path(spec.origin).parent / "version.py"
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError) as error:
        return {**facts, "error": f"{path} cannot be read: {error}"}
    for node in body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        if isinstance(node.value, ast.Constant):
            for target in targets:
                name = target.id.strip("_") if isinstance(target, ast.Name) else ""
                if name in facts:
                    facts[name] = node.value.value
    return facts


# -- the machine -------------------------------------------------------------------------------


def machine_id() -> str | None:
    """A digest that tells two machines of one name apart; None where the system keeps no id."""
    text = (text_of(Path("/etc/machine-id")) or "").strip()
    return hashlib.sha256(text.encode()).hexdigest() if text else None


def cpu_model() -> str | None:
    """The processor's name as the kernel gives it."""
    for line in (text_of(Path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or None


def driver_version(nvidia: Path = NVIDIA) -> str | None:
    """The version of NVIDIA's kernel driver; None where it is not loaded."""
    text = text_of(nvidia / "version")
    if text is None:
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", f"{text} ")
    return match.group(1) if match else (text.splitlines() or ["unknown"])[0]


def gpu_names(nvidia: Path = NVIDIA) -> list[str]:
    """The GPUs' names in the order of their bus addresses, as NVIDIA's kernel driver gives them."""
    names = []
    for path in sorted((nvidia / "gpus").glob("*/information")):
        for line in (text_of(path) or "").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                names.append(value.strip())
    return names


def memory(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> dict[str, int]:
    """Bytes that a new process may use, and that there are, the control group's limits observed."""
    sizes = {}
    for line in (text_of(proc / "meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[name] = int(words[0]) * 1024
    available, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    for limit, free in group_limits(root, proc):
        total = min(total, limit)
        available = min(available, max(0, free))
    return {"available": available, "total": total}


def group_limits(root: Path, proc: Path) -> list[tuple[int, int]]:
    """(limit, what is left of it) of each control group above this process, v1 and v2."""
    found = []
    for line in (text_of(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # In a container the path may be the machine's while the mount is the container's.
        place = top / path.lstrip("/")
        for group in dict.fromkeys([place, *place.parents, top]):
            if group != top and top not in group.parents:
                continue
            most, now = number_in(group / limit), number_in(group / used)
            if most is None or now is None:
                continue
            stat = text_of(group / "memory.stat") or ""
            match = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
            # Pages of files read once are given back when memory is asked for.
            found.append((most, most - now + (int(match.group(1)) if match else 0)))
    return found


def number_in(path: Path) -> int | None:
    """The one number in a file; None where there is none ('max')."""
    text = (text_of(path) or "").strip()
    return int(text) if text.isdigit() else None


def weights_of(sizes: Mapping[str, int]) -> int:
    """The bytes of a checkpoint's weights, by its files' sizes."""
    for pattern in (r"(model|pytorch_model)[^/]*\.safetensors", r"pytorch_model[^/]*\.bin"):
        found = [size for name, size in sizes.items() if re.fullmatch(pattern, name)]
        if found:
            return sum(found)
    return 0


def look_at(given: str) -> dict[str, Any]:
    """What lies at a path; `bytes` counts a file, or the files directly in a folder.

    `weights` counts those of one format: checkpoints may hold the same ones in several.
    """
    with contextlib.suppress(RuntimeError):  # '~nobody': left as it is, so it does not exist
        given = str(Path(given).expanduser())
    path = Path(given).absolute()
    facts: dict[str, Any] = {
        "path": str(path),
        "exists": False,
        "is_dir": False,
        "readable": False,
        "bytes": None,
        "weights": None,
    }
    try:
        facts["exists"] = path.exists()
        facts["is_dir"] = path.is_dir()
        facts["readable"] = os.access(path, os.R_OK | (os.X_OK if facts["is_dir"] else 0))
        if facts["is_dir"] and facts["readable"]:
            sizes = {item.name: item.stat().st_size for item in path.iterdir() if item.is_file()}
            facts["bytes"] = sum(sizes.values())
            facts["weights"] = weights_of(sizes)
        elif path.is_file():
            facts["bytes"] = facts["weights"] = path.stat().st_size
    except (OSError, ValueError) as error:
        facts["error"] = str(error)
    return facts


# -- checkouts ---------------------------------------------------------------------------------


def checkout(given: str) -> dict[str, Any]:
    """The commit of a git checkout, whether it was changed since, and a digest of the changes.

    The digest covers tracked files' content and untracked files' names.
    """
    env = {name: value for name, value in os.environ.items() if name not in GIT_SET}
    # Without the last one `git status` would write into the checkout's index.
    env.update(LC_ALL="C", GIT_TERMINAL_PROMPT="0", GIT_OPTIONAL_LOCKS="0")
    try:
        path = str(Path(given).expanduser())
        if not Path(path).is_dir():
            return {"error": f"{path} is no folder on this host"}
        git = shutil.which("git")
        if git is None:
            return {"error": "git is not on this host's PATH, so the commit cannot be read"}
        base = [git, "-C", path, "-c", "core.fsmonitor=false"]
        commit = answer_of([*base, "rev-parse", "--verify", "HEAD"], env).strip()
        status = answer_of([*base, "status", "--porcelain", "-z"], env)
        changes = None
        if status:
            diff = ["diff", "HEAD", "--full-index", "--no-ext-diff", "--no-textconv", "--no-color"]
            changes = sha256(status + answer_of([*base, *diff], env))
    except (RuntimeError, ValueError) as error:
        return {"error": f"{given!r} is no path: {error}"}
    except ProbeError as error:
        if "dubious ownership" in str(error):
            return {
                "error": f"git refuses {path}, which belongs to another user; run there: "
                f"git config --global --add safe.directory {shlex.quote(path)}"
            }
        if "not a git repository" in str(error):
            return {"error": f"{path} is no git checkout"}
        return {"error": f"the commit of {path} cannot be read: {error}"}
    return {"commit": commit, "dirty": bool(status), "changes": changes}


# -- GPUs --------------------------------------------------------------------------------------


def find_smi() -> str | None:
    """Where nvidia-smi is; None where this host has none."""
    found = shutil.which("nvidia-smi")
    return found or next((place for place in SMI_PLACES if os.access(place, os.X_OK)), None)


def read_gpus() -> list[dict[str, Any]] | None:
    """The GPUs in nvidia-smi's order, each with the processes that compute on it; memory in MiB.

    None where there is no nvidia-smi. One that fails raises ProbeError: that is not "no GPU".
    """
    smi = find_smi()
    if smi is None:
        return None
    form = "--format=csv,noheader,nounits"
    rows = answer_of([smi, f"--query-gpu={GPU_FIELDS}", form])
    gpus = [parse_gpu(line) for line in rows.splitlines() if line.strip()]
    apps = answer_of([smi, f"--query-compute-apps={APP_FIELDS}", form])
    for line in apps.splitlines():
        # A name may hold commas, so the fields are counted from both ends.
        words = [word.strip() for word in line.split(",")]
        if len(words) < 4 or not words[1].isdigit():
            continue
        uuid, pid, name = words[0], int(words[1]), ", ".join(words[2:-1])
        for gpu in gpus:
            if gpu["uuid"] == uuid:
                used = quantity(words[-1])
                user = user_of(pid, name)
                gpu["processes"].append(
                    {"pid": pid, "name": name, "memory_mib": used, "user": user}
                )
    return gpus


def parse_gpu(line: str) -> dict[str, Any]:
    """One line of nvidia-smi's list of GPUs."""
    words = [word.strip() for word in line.split(",")]
    if len(words) < 6 or not words[0].isdigit():
        raise ProbeError(f"nvidia-smi's list of GPUs cannot be read: it says {line.strip()[:300]}")
    total, used, utilization = (quantity(word) for word in words[-3:])
    return {
        "index": int(words[0]),
        "uuid": words[1],
        "name": ", ".join(words[2:-3]),
        "memory_total_mib": total,
        "memory_used_mib": used,
        "utilization": utilization,
        "processes": [],
    }


def quantity(word: str) -> int | None:
    """A number; None for '[N/A]', '[Not Supported]' and their like."""
    match = re.match(r"\d+", word)
    return int(match.group()) if match else None


def user_of(pid: int, name: str) -> str | None:
    """Whose process it is; None where /proc shows none of that number and name."""
    place = Path(f"/proc/{pid}")
    # In a container the number may be another process's: the name must fit.
    first = (text_of(place / "cmdline") or "").split("\0")[0]
    comm = (text_of(place / "comm") or "").strip()
    short = Path(name.split(" ")[0]).name
    if not short or not (Path(first).name == short or (comm and short.startswith(comm))):
        return None
    try:
        return pwd.getpwuid(place.stat().st_uid).pw_name
    except (OSError, KeyError):
        return None


# -- the whole ---------------------------------------------------------------------------------


def sha256(text: str) -> str:
    """As it stands in records."""
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def describe(checkouts: Sequence[str] = ()) -> dict[str, Any]:
    """This machine and interpreter; `fingerprint` covers what may change a figure."""
    facts: dict[str, Any] = {
        "hostname": os.uname().nodename,
        "machine_id": machine_id(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "platform": platform.platform(),
        "kernel": platform.release(),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "packages": packages(),
        "torch": torch_on_disk(),
        "driver": driver_version(),
        "gpus": gpu_names(),
        "checkouts": {path: checkout(path) for path in checkouts},
    }
    parts = {name: facts[name] for name in FINGERPRINTED}
    return {**facts, "fingerprint": sha256(json.dumps(parts, sort_keys=True))}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What changed between two descriptions, one short line each."""
    lines = []
    old_name, new_name = before.get("hostname"), after.get("hostname")
    if before.get("machine_id") != after.get("machine_id"):
        lines.append(f"another machine ({old_name} → {new_name})")
    elif old_name != new_name:
        lines.append(f"host name {old_name} → {new_name}")
    for label, key in (("python", "python"), ("interpreter", "executable"), ("kernel", "kernel")):
        lines += changed(label, before.get(key), after.get(key))
    lines += changed("cpu", before.get("cpu"), after.get("cpu"))
    lines += changed("driver", before.get("driver"), after.get("driver"))
    lines += changed("GPUs", counted(before.get("gpus")), counted(after.get("gpus")))
    old_torch, new_torch = before.get("torch") or {}, after.get("torch") or {}
    lines += changed("torch", old_torch.get("version"), new_torch.get("version"))
    for part in ("cuda", "hip"):
        lines += changed(f"torch's {part}", old_torch.get(part), new_torch.get(part))
    old, new = before.get("packages") or {}, after.get("packages") or {}
    for name in sorted({*old, *new}):
        if name != "torch" or old_torch.get("version") == new_torch.get("version"):
            lines += changed(f"package {name}", old.get(name), new.get(name))
    old, new = before.get("checkouts") or {}, after.get("checkouts") or {}
    for path in sorted({*old, *new}):
        lines += changed_checkout(path, old.get(path), new.get(path))
    return lines


def changed(label: str, old: object, new: object) -> list[str]:
    """'foo 1.0 → 2.0', 'foo 1.0 gone', 'foo 2.0 new', or nothing."""
    if old == new:
        return []
    if new is None:
        return [f"{label} {old} gone"]
    return [f"{label} {new} new"] if old is None else [f"{label} {old} → {new}"]


def counted(names: Sequence[str] | None) -> str | None:
    """'2 x NVIDIA H100'; None for no GPU."""
    kinds = dict.fromkeys(names or ())
    return ", ".join(f"{(names or ()).count(kind)} x {kind}" for kind in kinds) or None


def changed_checkout(
    path: str, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None
) -> list[str]:
    """One line where a checkout is another one than before."""
    if old == new:
        return []
    if new is None or old is None:
        return [f"checkout {path} " + ("no longer recorded" if new is None else "newly recorded")]
    if "error" in new:
        return [f"checkout {path}: {new['error']}"]
    if old.get("commit") != new["commit"]:
        dirty = " with uncommitted changes" if new["dirty"] else ""
        was = str(old.get("commit") or "unknown")[:12]
        return [f"checkout {path} {was} → {new['commit'][:12]}{dirty}"]
    if old.get("dirty") and new["dirty"]:
        return [f"checkout {path} has other uncommitted changes"]
    return [f"checkout {path} " + ("has" if new["dirty"] else "no longer has") + " changes"]


def is_importable(name: str) -> bool:
    """Whether a top-level module is there; nothing is imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def main(arguments: Sequence[str]) -> int:
    """Answers one question in JSON with one line of JSON."""
    try:
        asked = json.loads(arguments[0])
        checkouts, paths = asked.get("checkouts") or [], asked.get("paths") or []
        modules = asked.get("modules") or []
    except (IndexError, ValueError, AttributeError) as error:
        sys.stderr.write(f"the only argument must be a JSON object: {error}\n")
        return 2
    gpus: object = None
    if asked.get("gpus"):
        try:
            gpus = read_gpus()
        except ProbeError as error:
            gpus = {"error": str(error)}
        else:
            if gpus is None:
                gpus = {"error": "this host has no nvidia-smi", "missing": True}
    answer = {
        "environment": describe(checkouts),
        "paths": {path: look_at(path) for path in paths},
        "memory": memory(),
        "gpus": gpus,
        "modules": {name: is_importable(name) for name in modules},
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
