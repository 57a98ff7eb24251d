"""A real host behind a real sshd: own user, own mounts, own processes, nothing of ours in sight."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.channel import Channel
from orchestrator.paths import CLONE
from orchestrator.ssh import open_ssh

SSHD = "/usr/sbin/sshd"
USER = "gpu"
UID = 4242
PYTHON = "/mnt/venv/bin/python"
# An interpreter finds its library at the place it was built for, so it stays there; pyenv has others
# beside ours.
BASE = Path(sys.base_prefix)
PYTHONS = BASE.parent if BASE.parent.name == "versions" else BASE
NAMESPACES = ("--mount", "--uts", "--pid")

# The host's side, as root inside the namespaces. What is needed of ours is bound below /mnt before
# the places that a host must not see are hidden under empty file systems.
SET_UP = r"""
set -e
mount --make-rprivate /
hostname "$NAME"
stage=$(mktemp -d /dev/shm/host.XXXXXX)
cp -a "$FOLDER/host/." "$stage"
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir -p /mnt/venv /mnt/pythons /mnt/stage
cp -a "$stage/." /mnt/stage
rm -rf "$stage"
mount --bind "$VENV" /mnt/venv
mount --bind "$PYTHONS" /mnt/pythons
for place in /root /tmp /home /run "$CLONE"; do
  # A clone below one of the others is hidden with it.
  [ ! -d "$place" ] || mount -t tmpfs -o mode=755 tmpfs "$place"
done
chmod 1777 /tmp
mkdir -p "$PYTHONS"
mount --bind /mnt/pythons "$PYTHONS"
for name in passwd shadow group hosts; do mount --bind "/mnt/stage/$name" "/etc/$name"; done
mkdir -p /run/sshd "/home/$LOGIN/.ssh"
cp /mnt/stage/authorized_keys "/home/$LOGIN/.ssh/"
chown -R "$OWNER:$OWNER" "/home/$LOGIN"
chmod 700 "/home/$LOGIN" "/home/$LOGIN/.ssh"
touch /mnt/stage/up
while :; do sleep 1000 & wait; done
"""


def unavailable(reason: str) -> None:
    """Skip, or fail where the caller asked for these tests."""
    if os.environ.get("REQUIRE_SSH") == "1":
        pytest.fail(f"REQUIRE_SSH=1, but {reason}")
    pytest.skip(reason)


def require_sshd() -> None:
    """Skips or fails with the reason where no such host can be made here."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        unavailable("a host with its own user needs Linux and root")
    for tool in (SSHD, "ssh", "ssh-keygen", "ssh-agent", "unshare", "nsenter", "setpriv"):
        if not shutil.which(tool):
            unavailable(f"{tool} is missing (Debian: openssh-server, openssh-client, util-linux)")
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, check=False
    )
    if tried.returncode:
        unavailable(f"the kernel gives no namespaces: {tried.stderr.decode().strip()}")


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 20) -> Any:
    """Polls until the condition is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)
    return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_key(path: Path, *, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A key pair at `path` and `path`.pub."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", path.name, "-f", str(path)],
        check=True,
    )
    return path


class SshHost:
    """One machine: namespaces with a user, a home and an sshd on a port of 127.0.0.1."""

    def __init__(
        self,
        folder: Path,
        *,
        key: Path,
        name: str = "gpu8.test",
        shell: str = "/bin/bash",
        options: dict[str, str] | None = None,
        hosts: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.name = name
        self.user = USER
        self.port = free_port()
        self.log_file = folder / "sshd.log"
        self._options = options or {}
        stage = folder / "host"
        stage.mkdir(parents=True)
        for kind in ("ed25519", "rsa"):
            make_key(stage / f"key_{kind}", kind=kind)
        (stage / "authorized_keys").write_bytes(key.with_name(f"{key.name}.pub").read_bytes())
        for file, line in {
            "passwd": f"{USER}:x:{UID}:{UID}::/home/{USER}:{shell}",
            "shadow": f"{USER}:*:19000:0:99999:7:::",
            "group": f"{USER}:x:{UID}:",
        }.items():
            (stage / file).write_text(f"{Path('/etc', file).read_text().rstrip()}\n{line}\n")
            (stage / file).chmod(0o600 if file == "shadow" else 0o644)
        names = {"localhost": "127.0.0.1", name: "127.0.0.1", **(hosts or {})}
        (stage / "hosts").write_text("".join(f"{ip} {host}\n" for host, ip in names.items()))
        (stage / "hosts").chmod(0o644)
        with (folder / "set-up.log").open("wb") as errors:
            self._init = subprocess.Popen(
                # Dies with us, whatever becomes of us, and everything inside with it.
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                    *("bash", "-c", SET_UP),
                ],
                env={
                    "PATH": os.environ["PATH"],
                    "NAME": name,
                    "FOLDER": str(folder),
                    "VENV": sys.prefix,
                    "PYTHONS": str(PYTHONS),
                    "CLONE": str(CLONE),
                    "LOGIN": USER,
                    "OWNER": str(UID),
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        self.pid = wait_for(self._find_init, f"{name} to be set up")
        self._sshds: list[subprocess.Popen[bytes]] = []
        self.start()

    def _find_init(self) -> int | None:
        """The pid, out here, of the first process inside; once everything is in place."""
        if self._init.poll() is not None:
            pytest.fail(f"no host: {(self.folder / 'set-up.log').read_text()}")
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text()
        for word in children.split():
            if Path(f"/proc/{word}/root/mnt/stage/up").exists():
                return int(word)
        return None

    @property
    def root(self) -> Path:
        """Its file system as seen from here."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def home(self) -> Path:
        """Its user's home as seen from here."""
        return self.root / "home" / USER

    @property
    def log(self) -> str:
        """What its sshd has logged."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command as root in there."""
        return ["nsenter", "--target", str(self.pid), *NAMESPACES, "--wd=/", *command]

    def start(self, **options: str) -> None:
        """Starts the sshd on its port, with these options besides its own."""
        settings = {
            "ListenAddress": f"127.0.0.1:{self.port}",
            "PidFile": "none",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "AllowUsers": USER,
            "PrintMotd": "no",
            "LogLevel": "VERBOSE",
            **self._options,
            **options,
        }
        words = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        for kind in ("ed25519", "rsa"):
            words += ["-h", f"/mnt/stage/key_{kind}"]
        with self.log_file.open("ab") as log:
            sshd = subprocess.Popen(
                self.inside(SSHD, "-D", "-e", "-f", "/dev/null", *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._sshds.append(sshd)
        wait_for(lambda: self._answers() or sshd.poll() is not None, f"the sshd of {self.name}")
        assert sshd.poll() is None, self.log

    def stop(self) -> None:
        """Ends the listening sshd and the connections it serves; what was started there goes on."""
        for pid, command in self.processes().items():
            if command.startswith("sshd:"):
                os.kill(pid, signal.SIGKILL)
        for sshd in self._sshds:
            sshd.wait(timeout=10)
        self._sshds.clear()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                return probe.recv(4) == b"SSH-"
        except OSError:
            return False

    def processes(self) -> dict[int, str]:
        """Command lines of all processes inside, by their pid out here; sleepers of init left out."""
        namespace = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.pid:
                continue
            try:
                if (entry / "ns" / "pid").readlink() != namespace:
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            if command and command != "sleep 1000":
                found[int(entry.name)] = command
        return found

    def user_processes(self) -> dict[int, str]:
        """Those that are no sshd."""
        return {pid: cmd for pid, cmd in self.processes().items() if not cmd.startswith("sshd:")}

    def public_key(self, kind: str = "ed25519") -> str:
        """`TYPE BASE64` of a host key."""
        words = (self.root / f"mnt/stage/key_{kind}.pub").read_text().split()
        return " ".join(words[:2])

    def fingerprint(self, kind: str = "ed25519") -> str:
        """As ssh-keygen prints it."""
        file = self.folder / "host" / f"key_{kind}.pub"
        listed = subprocess.run(
            ["ssh-keygen", "-lf", str(file)], capture_output=True, check=True, text=True
        )
        return listed.stdout.split()[1]

    def authorize(self, line: str) -> None:
        """One more line of its user's authorized_keys."""
        with (self.home / ".ssh" / "authorized_keys").open("a") as file:
            file.write(f"{line.strip()}\n")

    def tidy(self) -> None:
        """Leaves the home as it was in the beginning."""
        for entry in self.home.iterdir():
            if entry.name != ".ssh":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        first = (self.root / "mnt/stage/authorized_keys").read_bytes()
        (self.home / ".ssh" / "authorized_keys").write_bytes(first)

    def close(self) -> None:
        """Ends everything inside."""
        self._init.kill()
        self._init.wait()
        for sshd in self._sshds:
            sshd.wait(timeout=10)


class Client:
    """The person's side: an ssh config, a known_hosts file and a key of their own."""

    def __init__(self, folder: Path, key: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.key = key
        self.config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.touch()

    def add(
        self,
        alias: str,
        host: SshHost | None = None,
        *,
        pin: bool = True,
        port: int | None = None,
        hostname: str = "127.0.0.1",
        **settings: str,
    ) -> None:
        """A Host block for the alias, which leads to `host` (by way of `port`); its key is pinned."""
        port = port or (host.port if host else 22)
        block = {
            "HostName": hostname,
            "Port": str(port),
            "User": USER,
            "IdentityFile": str(self.key),
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": str(self.known_hosts),
            "GlobalKnownHostsFile": "none",
            **settings,
        }
        with self.config.open("a") as file:
            file.write(f"Host {alias}\n")
            file.writelines(f"  {key} {value}\n" for key, value in block.items() if value)
        if pin and host:
            self.pin(hostname, port, host.public_key())

    def pin(self, hostname: str, port: int, public_key: str) -> None:
        """A line of known_hosts."""
        with self.known_hosts.open("a") as file:
            file.write(f"[{hostname}]:{port} {public_key}\n")

    def section(self, alias: str = "gpu8", **changes: Any) -> dict[str, Any]:
        """The `host` section of a resolved config."""
        return {
            "name": "ssh",
            "alias": alias,
            "ssh_config": str(self.config),
            "work": "~/work",
            "python": PYTHON,
            **changes,
        }

    def open(self, alias: str = "gpu8", **changes: Any) -> AbstractContextManager[Channel]:
        """The channel to that host."""
        return open_ssh(self.section(alias, **changes))

    def ssh(self, alias: str, *command: str) -> subprocess.CompletedProcess[str]:
        """The same with OpenSSH's own ssh."""
        return subprocess.run(
            ["ssh", "-F", str(self.config), "-o", "BatchMode=yes", alias, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


def children() -> dict[int, str]:
    """The child processes of this one."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread or a child that has just ended
            for word in (task / "children").read_text().split():
                command = Path("/proc", word, "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(word)] = command.decode(errors="replace").strip()
    return found


class Agent:
    """A real ssh-agent; `add` loads a private key file."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "agent"
        self._process = subprocess.Popen(
            ["ssh-agent", "-D", "-a", str(self.socket)], stdout=subprocess.DEVNULL
        )
        wait_for(self.socket.exists, "ssh-agent")

    def add(self, *keys: Path) -> None:
        subprocess.run(
            ["ssh-add", "-q", *map(str, keys)],
            env={**os.environ, "SSH_AUTH_SOCK": str(self.socket)},
            check=True,
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


HostMaker = Callable[..., SshHost]
