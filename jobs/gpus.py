"""Which GPUs a run takes, and the leases that keep timed runs apart.

A lease is a lock on one file a GPU, in a folder that all users of the machine share; the kernel
drops it when its holder dies. Only runs that measure time take one: the others may run beside them,
and pass leased GPUs by where they have a choice. Processes of others are named and left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput
from jobs.environment import ProbeError, read_gpus

LEASES = "ORCHESTRATOR_GPU_LEASES"  # names another folder for the locks
SHARED = Path("/tmp/orchestrator-gpu-leases")
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
MANY = 8  # foreign processes named in notes; gpus.json has them all

Gpu = Mapping[str, Any]  # as jobs.environment.read_gpus gives them


@dataclass(frozen=True, kw_only=True)
class Lock:
    """One lease: the name of its file and what it stands for."""

    name: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one run sees. `visible` is CUDA_VISIBLE_DEVICES, None where it is left as it is.

    `device` is cpu or cuda, or auto where only torch can tell.
    """

    device: str
    visible: str | None
    locks: tuple[Lock, ...]
    chosen: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """What the job's environment is to have."""
        if not self.visible:
            return {} if self.visible is None else {VISIBLE: ""}
        return {VISIBLE: self.visible, ORDER: "PCI_BUS_ID"}

    def plain(self) -> dict[str, Any]:
        """As gpus.json holds it."""
        foreign = [{"gpu": g["index"], **p} for g in self.chosen for p in g["processes"]]
        seen = [
            f"{gpu_label(g)} is in use by {process_label(p)}, which is left alone"
            for g in self.chosen
            for p in g["processes"]
        ]
        if len(seen) > MANY:
            seen[MANY:] = [f"and {len(seen) - MANY} processes more, named in gpus.json"]
        return {
            "device": self.device,
            "visible": self.visible,
            "chosen": [{k: g[k] for k in g if k != "processes"} for g in self.chosen],
            "foreign": foreign,
            "notes": [*self.notes, *seen],
        }


def gpu_label(gpu: Gpu) -> str:
    """'GPU 0 (NVIDIA H100)'."""
    return f"GPU {gpu['index']} ({gpu['name']})"


def process_label(process: Mapping[str, Any]) -> str:
    """'pid 12 (python3, 400 MiB, user anna)'."""
    more = [f"{process['memory_mib']} MiB"] if process["memory_mib"] is not None else []
    more += [f"user {process['user']}"] if process.get("user") else []
    return f"pid {process['pid']} ({', '.join([process['name'], *more])})"


# -- the choice --------------------------------------------------------------------------------


def look() -> tuple[list[dict[str, Any]] | None, str | None]:
    """What nvidia-smi shows (None where there is none), and why it failed, where it did."""
    try:
        return read_gpus(), None
    except ProbeError as error:
        return None, str(error)


def choose(
    device: str,
    wanted: Sequence[int] | None,
    gpus: Sequence[Gpu] | None,
    *,
    inherited: str | None = None,
    order: str | None = None,
    trouble: str | None = None,
) -> list[Choice]:
    """What the run may take, best first; several only where the freest one is wanted.

    `gpus` is None without nvidia-smi, or where it failed for the reason `trouble`; `inherited` and
    `order` are CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER as the host or a scheduler has set them,
    which limits the choice. Raises BadInput where what is wanted is not there.
    """
    if device == "cpu":
        return [on_cpu()]
    if wanted is not None and (not wanted or len(set(wanted)) < len(wanted)):
        raise BadInput(
            f"host.gpus={list(wanted)} must name each GPU once, or be null for the freest"
        )
    tokens = None if inherited is None else [token.strip() for token in inherited.split(",")]
    if tokens and tokens[0] in ("", "-1", "NoDevFiles"):
        return none_there(device, wanted, f"{VISIBLE}={inherited!r} is set on the host")
    if gpus is None:
        return [unseen(device, wanted, tokens, trouble)]
    if not gpus:
        return none_there(device, wanted, "nvidia-smi shows no GPU on this host")
    if tokens and any(not token.isdigit() and not token.startswith("GPU-") for token in tokens):
        # Parts of GPUs (MIG) are the scheduler's business.
        if wanted is not None:
            raise BadInput(
                f"host.gpus={list(wanted)}, but {VISIBLE}={inherited} is set on the host already; "
                "use host.gpus=null"
            )
        return [left_alone(device, tokens, f"{VISIBLE}={inherited} is set on the host and is kept")]
    allowed = [gpu for gpu in gpus if tokens is None or any(names(t, gpu) for t in tokens)]
    limit = "" if tokens is None else f" that {VISIBLE}={inherited} leaves"
    if not allowed:
        return none_there(device, wanted, f"there is no GPU{limit}")
    notes = []
    numbered = any(token.isdigit() for token in tokens or ())
    if numbered and order != "PCI_BUS_ID" and len({gpu["name"] for gpu in gpus}) > 1:
        # CUDA's own order puts the fastest first, so the numbers may have meant other GPUs.
        notes = [f"{VISIBLE}={inherited} is read in nvidia-smi's order ({ORDER}=PCI_BUS_ID)"]
    if wanted is not None:
        return [exactly(wanted, allowed, limit, *notes)]
    return [
        taken([gpu], f"{gpu_label(gpu)} is chosen out of {len(allowed)}{limit}", *notes)
        for gpu in sorted(allowed, key=freedom)
    ]


def on_cpu(*notes: str) -> Choice:
    """The CPU alone; the GPUs are hidden, so that none can be touched by accident."""
    locks = (Lock(name="cpu", label="this machine's CPU"),)
    return Choice(device="cpu", visible="", locks=locks, notes=notes)


def none_there(device: str, wanted: Sequence[int] | None, why: str) -> list[Choice]:
    """The CPU where the config leaves that open, else an error."""
    if wanted is not None:
        raise BadInput(f"host.gpus={list(wanted)}, but {why}; use job.device=cpu or another host")
    if device == "cuda":
        raise BadInput(f"job.device=cuda, but {why}; use job.device=cpu or another host")
    return [on_cpu(f"job.device=auto: {why}, so the job runs on the CPU")]


def unseen(
    device: str, wanted: Sequence[int] | None, tokens: Sequence[str] | None, trouble: str | None
) -> Choice:
    """Where nothing shows the GPUs."""
    why = trouble or "this host has no nvidia-smi"
    if wanted is None:
        if trouble is None and device == "auto" and tokens is None:
            note = f"job.device=auto: {why}, so the job runs on the CPU; job.device=cuda would not look"
            return on_cpu(note)
        return left_alone(device, tokens, f"{why}, so no GPU was chosen: torch takes what it finds")
    if trouble is None and device == "auto":
        raise BadInput(
            f"host.gpus={list(wanted)}, but {why}; use host.gpus=null or job.device=cuda"
        )
    outside = [i for i in wanted if tokens is not None and str(i) not in tokens]
    if outside:
        raise BadInput(
            f"host.gpus asks for GPU {outside[0]}, but {VISIBLE}={','.join(tokens or ())} is set on "
            "the host"
        )
    return Choice(
        device=device,
        visible=",".join(map(str, wanted)),
        locks=tuple(Lock(name=f"gpu-{i}", label=f"GPU {i}") for i in sorted(wanted)),
        notes=(f"{why}: whether GPU {', '.join(map(str, wanted))} is there and free is not known",),
    )


def left_alone(device: str, tokens: Sequence[str] | None, note: str) -> Choice:
    """CUDA_VISIBLE_DEVICES as it is; the lease then is for what it names, or for any GPU."""
    locks = [Lock(name="gpu-any", label="the GPUs")]
    if tokens is not None:
        locks = [Lock(name=f"gpu-{token}", label=f"GPU {token}") for token in sorted(set(tokens))]
    return Choice(device=device, visible=None, locks=tuple(locks), notes=(note,))


def names(token: str, gpu: Gpu) -> bool:
    """Whether a part of CUDA_VISIBLE_DEVICES means this GPU."""
    return int(token) == gpu["index"] if token.isdigit() else str(gpu["uuid"]).startswith(token)


def left_visible(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """Those that a value of CUDA_VISIBLE_DEVICES leaves; None leaves all."""
    if visible is None:
        return list(gpus)
    tokens = [token.strip() for token in visible.split(",") if token.strip()]
    return [gpu for gpu in gpus if any(names(token, gpu) for token in tokens)]


def exactly(wanted: Sequence[int], allowed: Sequence[Gpu], limit: str, *notes: str) -> Choice:
    """These GPUs in this order."""
    by_index = {gpu["index"]: gpu for gpu in allowed}
    missing = [index for index in wanted if index not in by_index]
    if missing:
        there = ", ".join(gpu_label(gpu) for gpu in allowed)
        raise BadInput(f"host.gpus asks for GPU {missing[0]}, but this host has {there}{limit}")
    return taken([by_index[index] for index in wanted], *notes)


def taken(gpus: Sequence[Gpu], *notes: str) -> Choice:
    """These GPUs."""
    locks = (Lock(name=str(gpu["uuid"]), label=gpu_label(gpu)) for gpu in gpus)
    return Choice(
        device="cuda",
        visible=",".join(str(gpu["index"]) for gpu in gpus),
        # One order for everybody, so that no two runs wait for each other.
        locks=tuple(sorted(locks, key=lambda lock: lock.name)),
        chosen=tuple(gpus),
        notes=notes,
    )


def freedom(gpu: Gpu) -> tuple[int, int, int, int]:
    """Sorts the freest GPU first: fewest processes, most free memory, least at work."""
    free = (gpu["memory_total_mib"] or 0) - (gpu["memory_used_mib"] or 0)
    busy = 100 if gpu["utilization"] is None else gpu["utilization"]
    return len(gpu["processes"]), -free, busy, gpu["index"]


def seen_again(choice: Choice) -> Choice:
    """The same choice after a wait, with what is on its GPUs now."""
    if not choice.chosen:
        return choice
    gpus, trouble = look()
    now = {gpu["uuid"]: gpu for gpu in gpus or ()}
    if any(gpu["uuid"] not in now for gpu in choice.chosen):
        note = f"the GPUs could not be seen again after the wait: {trouble or 'one is missing'}"
        return replace(choice, notes=(*choice.notes, note))
    return replace(choice, chosen=tuple(now[gpu["uuid"]] for gpu in choice.chosen))


# -- the lease ---------------------------------------------------------------------------------


class Leases:
    """The locks that one run holds. Every method raises BadInput where the folder is of no use."""

    def __init__(self, run_id: str, folder: Path | None = None) -> None:
        self.folder = folder or Path(os.environ.get(LEASES) or SHARED)
        self.run_id = run_id
        self.held: dict[str, int] = {}

    def take(self, locks: Sequence[Lock]) -> str | None:
        """Takes these locks in order and keeps what it got.

        Returns None when it has them all, else who holds the first that is not free.
        """
        for lock in locks:
            if lock.name in self.held:
                continue
            fd = self._open(lock)
            if not locked(fd, fcntl.LOCK_EX):
                try:
                    return f"{lock.label}, leased to {holder(fd)}"
                finally:
                    os.close(fd)
            self.held[lock.name] = fd
            self._sign(fd)
        return None

    def taken_by(self, locks: Sequence[Lock]) -> str | None:
        """Who holds the first of these locks that somebody holds; takes none."""
        for lock in locks:
            fd = self._open(lock)
            try:
                if not locked(fd, fcntl.LOCK_SH):
                    return f"{lock.label} is leased to {holder(fd)}"
            finally:
                os.close(fd)  # and with it the moment's lock
        return None

    def release(self) -> None:
        """Gives everything back."""
        while self.held:
            os.close(self.held.popitem()[1])

    def _open(self, lock: Lock) -> int:
        """The lock's file, which stays for ever: who removes one splits its waiters in two."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", lock.name)[:100] + ".lock"
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            with contextlib.suppress(FileExistsError), everybody_may():
                self.folder.mkdir(0o1777)
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # In a folder like /tmp the kernel refuses O_CREAT on a file of somebody else's.
                while True:
                    with contextlib.suppress(FileNotFoundError):
                        return os.open(name, flags, dir_fd=folder)
                    with contextlib.suppress(FileExistsError), everybody_may():
                        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise BadInput(
                f"the lease {self.folder / name} cannot be opened: {error.strerror}; every user of "
                f"the machine must be able to write there, or set {LEASES} in host.env"
            ) from error

    def _sign(self, fd: int) -> None:
        record = {
            "user": user_name(),
            "run_id": self.run_id,
            "pid": os.getpid(),
            "since": time.time(),
        }
        # Only a help for those who wait: the lock holds on a full disk, too.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(record).encode(), 0)


@contextlib.contextmanager
def everybody_may() -> Iterator[None]:
    """Within the block, new files get the very mode asked for."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def locked(fd: int, how: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(fd: int) -> str:
    """Who holds a lock, as its file says. Anybody may write there, so nothing of it is trusted."""
    try:
        record = json.loads(os.pread(fd, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(float(record["since"])))
        run_id, user, pid = (str(record[key])[:120] for key in ("run_id", "user", "pid"))
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return "somebody who has not signed"
    told = f"run {run_id} of {user} (pid {pid}) since {since}"
    return "".join(c if c.isprintable() else "?" for c in told)


def user_name() -> str:
    """This user's name, or number where nobody knows the name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def wait_for(
    leases: Leases, possible: Sequence[Choice], waiting: Callable[[str], None]
) -> tuple[Choice, bool]:
    """The first of these choices whose leases can be had, and whether there was a wait.

    `waiting` is called with what is waited for, again and again, and is to pause.
    """
    waited = False
    while True:
        blockers = []
        for choice in possible:
            blocker = leases.take(choice.locks)
            if blocker is None:
                return choice, waited
            blockers.append(blocker)
        waited = True
        waiting("; or ".join(blockers))


def pass_by_leased(leases: Leases, possible: Sequence[Choice]) -> Choice:
    """The first choice that nobody has leased; the first of all, with a note, where there is none."""
    said = []
    for choice in possible:
        try:
            who = leases.taken_by(choice.locks) if choice.chosen else None
        except BadInput as error:  # no reason to stop a run that wants no lease
            said = [f"whether a GPU is leased is not known: {error}"]
            break
        if who is None:
            return choice
        said.append(f"{who}; this run shares it")
    first = possible[0]
    return replace(first, notes=(*first.notes, said[0]))
