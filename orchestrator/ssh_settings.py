"""What OpenSSH would do for an alias: its settings, and the hosts on the way there.

The truth is `ssh -G`, which knows Include, Match and every default. Where OpenSSH is not installed
paramiko reads the same files, and a file that it would read only in part is refused.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.errors import InputError

CONNECT_S = 15.0
ALIVE_S = 10.0
ALIVE_COUNT = 3
RESOLVE_S = 60.0  # `Match exec` and CanonicalizeHostname may take their time
DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
NOTE = "OpenSSH's ssh is not on PATH, so paramiko read the ssh config"

# Settings that change how one logs in and that are not acted on here, with what they are by default.
NOT_HONOURED = {
    "pkcs11provider": ("PKCS11Provider", "none"),
    "securitykeyprovider": ("SecurityKeyProvider", "internal"),
    "bindinterface": ("BindInterface", "none"),
    "gssapiauthentication": ("GSSAPIAuthentication", "no"),
    "hostbasedauthentication": ("HostbasedAuthentication", "no"),
    "knownhostscommand": ("KnownHostsCommand", "none"),
    "pubkeyauthentication": ("PubkeyAuthentication no", "true yes unbound host-bound"),
}

Values = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class SshSettings:
    """How to reach and to know one host; paths are absolute, times in seconds.

    `identity_agent` is the agent's socket, None for no agent. `not_honoured` names settings of the
    person's that are not acted on. `note` says where the settings come from, if not from `ssh -G`.
    """

    alias: str
    config: str | None
    hostname: str
    user: str
    port: int
    identity_files: tuple[str, ...]
    certificate_files: tuple[str, ...]
    identities_only: bool
    identity_agent: str | None
    proxy_jump: str | None
    proxy_command: str | None
    user_known_hosts: tuple[str, ...]
    global_known_hosts: tuple[str, ...]
    revoked_host_keys: str | None
    host_key_alias: str | None
    hash_known_hosts: bool
    connect_timeout_s: float
    alive_interval_s: float
    alive_count: int
    address_family: str
    bind_address: str | None
    not_honoured: tuple[str, ...] = ()
    note: str = ""

    @property
    def address(self) -> str:
        """Who is meant, for messages: user@hostname, with the port where it is not 22."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{host}" + ("" if self.port == 22 else f":{self.port}")


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One host of a route: `name` in messages, `trust` what `hosts trust` reaches it by."""

    settings: SshSettings
    name: str
    trust: str


def find_route(alias: str, config: str | None = None) -> tuple[Hop, ...]:
    """The hops to an alias, in the order in which they are visited; the last is the alias itself.

    Of a ProxyJump's `b1,b2` b1 comes first. The others are each hop's way; only the first one's own
    ProxyJump or ProxyCommand counts. Raises InputError.
    """
    target = ssh_settings(alias, config)
    hops = [Hop(settings=target, name=alias, trust=alias)]
    jumps, seen = target.proxy_jump, {_identity(target)}
    while jumps:
        *others, last = jumps.split(",")
        user, host, port = parse_jump(last)
        settings = ssh_settings(host, config, user=user, port=port)
        if _identity(settings) in seen:
            raise InputError(
                f"{alias}: the jump host {host} is reached through itself; "
                "mend ProxyJump in the ssh config"
            )
        seen.add(_identity(settings))
        if others:  # the hops before it take the place of its own way
            settings = replace(settings, proxy_jump=",".join(others), proxy_command=None)
        name = f"jump host {host} (on the way to {alias})"
        # A hop that is reached by way of others, or by an address that no URL of ssh's can hold, is
        # reached by the alias.
        trust = alias if others or ":" in host else _url(host, user, port)
        hops.append(Hop(settings=settings, name=name, trust=trust))
        jumps = settings.proxy_jump
    return tuple(reversed(hops))


def parse_jump(text: str) -> tuple[str | None, str, int | None]:
    """User, host and port of `[user@]host[:port]` or `ssh://…`; brackets around IPv6 are removed."""
    rest = text.strip().removeprefix("ssh://").removesuffix("/")
    user, at, rest = rest.rpartition("@")
    found = re.fullmatch(
        r"\[([^]]+)\](?::(\d+))?|([^:]+)(?::(\d+))?|([^:\[\]]*:[^\[\]]*:[^\[\]]*)", rest
    )
    if not found or (at and not user):
        raise InputError(f"ProxyJump {text!r} is not [user@]host[:port]; mend it in the ssh config")
    host = found[1] or found[3] or found[5]
    port = found[2] or found[4]
    return user or None, host, int(port) if port else None


def ssh_settings(
    alias: str, config: str | None = None, *, user: str | None = None, port: int | None = None
) -> SshSettings:
    """The settings that OpenSSH would use for `ssh [-F config] [-l user] [-p port] -- alias`.

    Raises InputError where the alias cannot be one or the config is not accepted.
    """
    if not alias or alias.startswith("-") or any(c in alias for c in "\n\r\0"):
        raise InputError(
            f"{alias!r} is no ssh alias; set host.alias to a name that `ssh NAME` knows"
        )
    config = str(Path(config).expanduser().absolute()) if config else None
    if shutil.which("ssh"):
        values = _ask_ssh(alias, config, user, port)
        return _settings(alias, config, values, expand=True)
    values = _ask_paramiko(alias, config, user, port)
    return _settings(alias, config, values, expand=False, note=NOTE)


def _ask_ssh(alias: str, config: str | None, user: str | None, port: int | None) -> Values:
    command = ["ssh", "-G"]
    command += ["-F", config] if config else []
    command += ["-l", user] if user else []
    command += ["-p", str(port)] if port else []
    try:
        done = subprocess.run(
            [*command, "--", alias],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=RESOLVE_S,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{alias}: `ssh -G` gave no settings within {RESOLVE_S:.0f} s; "
            "see Match exec in the ssh config"
        ) from None
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", errors="replace").strip().splitlines()
        lines = [line.strip() for line in lines if not line.startswith("Pseudo-terminal")]
        if not lines or lines[0].startswith("usage:"):
            lines = [f"{alias!r} is no host name to it"]
        raise InputError(f"{alias}: ssh refuses this alias or its config: {lines[0]}")
    values: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", errors="surrogateescape").splitlines():
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value)
    return values


def _ask_paramiko(alias: str, config: str | None, user: str | None, port: int | None) -> Values:
    """The same from paramiko's reader, with OpenSSH's defaults where it has none."""
    import paramiko

    reader = paramiko.SSHConfig()
    files = [config] if config else [str(Path("~/.ssh/config").expanduser()), "/etc/ssh/ssh_config"]
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except FileNotFoundError:
            if config:
                raise InputError(f"{alias}: there is no ssh config {file}") from None
            continue
        except (OSError, ValueError) as error:
            raise InputError(f"{alias}: the ssh config {file} cannot be read: {error}") from None
        if re.search(r"^\s*include\b", text, flags=re.IGNORECASE | re.MULTILINE):
            raise InputError(
                f"{alias}: {file} has an Include, which needs OpenSSH's ssh to be read; install it"
            )
        try:
            reader.parse(text.splitlines())
        except paramiko.ConfigParseError as error:
            raise InputError(f"{alias}: {file}: {error}") from None
    target_user, host, target_port = parse_jump(alias)
    found = dict(reader.lookup(host))
    values = {k: [v] if isinstance(v, str) else [str(item) for item in v] for k, v in found.items()}
    values["host"] = [host]
    values.setdefault("user", [getpass.getuser()])
    values.setdefault("identityfile", [f"~/.ssh/{name}" for name in DEFAULT_KEYS])
    values.setdefault("userknownhostsfile", ["~/.ssh/known_hosts ~/.ssh/known_hosts2"])
    values.setdefault(
        "globalknownhostsfile", ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"]
    )
    if user := user or target_user:
        values["user"] = [user]
    if port := port or target_port:
        values["port"] = [str(port)]
    return values


def _settings(
    alias: str, config: str | None, values: Values, *, expand: bool, note: str = ""
) -> SshSettings:
    def one(key: str) -> str | None:
        value = values.get(key, [""])[0].strip()
        return None if value.lower() in ("", "none") else value

    def flag(key: str) -> bool:
        return (one(key) or "no").lower() in ("yes", "true")

    def number(key: str, default: float) -> float:
        text = one(key) or "0"
        try:
            return float(text) or default
        except ValueError:
            raise InputError(f"{alias}: the ssh config sets {key} to {text!r}, no number") from None

    hostname, user = one("hostname") or alias, one("user") or getpass.getuser()
    port = int(number("port", 22))
    if flag("proxyusefdpass"):
        raise InputError(
            f"{alias}: ProxyUseFdpass hands over a socket, which cannot be done here; "
            "unset it for this alias"
        )
    tokens = _tokens(
        original=one("host") or alias,
        hostname=hostname,
        user=user,
        port=port,
        jump=one("proxyjump") or "",
        key_alias=one("hostkeyalias"),
    )

    def path(text: str) -> str:
        text = _expand(text, tokens, alias) if expand else text
        return str(Path(text).expanduser().absolute())

    def paths(key: str) -> tuple[str, ...]:
        return tuple(path(text) for text in values.get(key, []) if text.lower() not in ("", "none"))

    command = one("proxycommand")
    if command and expand:
        command = _expand(command, tokens, alias, environment=False)
    revoked = one("revokedhostkeys")
    return SshSettings(
        alias=alias,
        config=config,
        hostname=hostname,
        user=user,
        port=port,
        identity_files=paths("identityfile"),
        certificate_files=paths("certificatefile"),
        identities_only=flag("identitiesonly"),
        identity_agent=_agent_socket(values.get("identityagent", ["SSH_AUTH_SOCK"])[0]),
        proxy_jump=one("proxyjump"),
        proxy_command=None if one("proxyjump") else command,
        user_known_hosts=_files(values.get("userknownhostsfile", [])),
        global_known_hosts=_files(values.get("globalknownhostsfile", [])),
        revoked_host_keys=path(revoked) if revoked else None,
        host_key_alias=one("hostkeyalias"),
        hash_known_hosts=flag("hashknownhosts"),
        connect_timeout_s=number("connecttimeout", CONNECT_S),
        alive_interval_s=number("serveraliveinterval", ALIVE_S),
        alive_count=max(int(number("serveralivecountmax", ALIVE_COUNT)), ALIVE_COUNT),
        address_family=one("addressfamily") or "any",
        bind_address=one("bindaddress"),
        not_honoured=tuple(
            name
            for key, (name, default) in NOT_HONOURED.items()
            if (one(key) or "none").lower() not in f"none {default}".split()
        ),
        note=note,
    )


def _files(lines: Sequence[str]) -> tuple[str, ...]:
    """The paths of one known-hosts setting; ssh prints them with spaces between and unquoted."""
    found: list[str] = []
    for word in " ".join(lines).split(" "):
        if word.startswith(("/", "~")) or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return tuple(str(Path(f).expanduser()) for f in found if f.lower() not in ("", "none"))


def _agent_socket(value: str) -> str | None:
    if value.lower() == "none":
        return None
    if value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if value.startswith("$"):
        return os.environ.get(value.strip("${}")) or None
    return str(Path(value).expanduser())


def _tokens(
    *, original: str, hostname: str, user: str, port: int, jump: str, key_alias: str | None
) -> dict[str, str]:
    """ssh_config(5)'s TOKENS, as far as `ssh -G` leaves them in place."""
    machine = socket.gethostname()
    joined = f"{machine}{hostname}{port}{user}{jump}".encode()
    return {
        "%": "%",
        "C": hashlib.sha1(joined, usedforsecurity=False).hexdigest(),
        "d": str(Path.home()),
        "h": hostname,
        "i": str(os.getuid()),
        "j": jump,
        "k": key_alias or original,
        "L": machine.split(".")[0],
        "l": machine,
        "n": original,
        "p": str(port),
        "r": user,
        "u": getpass.getuser(),
    }


def _expand(text: str, tokens: dict[str, str], alias: str, *, environment: bool = True) -> str:
    def token(found: re.Match[str]) -> str:
        if found[1] not in tokens:
            raise InputError(f"{alias}: the ssh config has an unknown token {found[0]} in {text!r}")
        return tokens[found[1]]

    def variable(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise InputError(f"{alias}: the ssh config names ${{{found[1]}}}, which is not set")
        return os.environ[found[1]]

    text = re.sub(r"%(.)", token, text)
    return re.sub(r"\$\{(\w+)\}", variable, text) if environment else text


def _identity(settings: SshSettings) -> tuple[str, str, int]:
    return settings.user, settings.hostname, settings.port


def _url(host: str, user: str | None, port: int | None) -> str:
    """The shortest name that ssh takes for a jump: the alias itself, or a URL with user and port."""
    if user is None and port is None:
        return host
    return f"ssh://{f'{user}@' if user else ''}{host}{f':{port}' if port else ''}"
