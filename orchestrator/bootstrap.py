"""From an open session to the host's program: sent once, kept there under its hash, started.

The command line holds two hexadecimal words beside the interpreter, so that no shell finds anything
in it to expand. The first is a small source that every Python can read; the second says which
program is wanted and where it lies.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from typing import Protocol

from orchestrator.errors import HostError, InputError

NEEDED = "3.10"
MAX_NOISE = 1 << 16

# It answers in lines `NONCE word …`: `need` (send the program), `ready`, `old`, `input` or `fail`
# (and why). Python 2.7 must be able to compile it, to be told that it is too old.
BOOT = r"""
import sys
sys.path[:] = [p for p in sys.path if p]
import errno, hashlib, json, os, time
asked = json.loads(bytes(bytearray.fromhex(sys.argv[1])).decode('ascii'))
def say(word, more=''):
    line = (asked['nonce'] + ' ' + word + ' ' + ' '.join(more.split()) + '\n').encode('utf-8', 'replace')
    while line:
        line = line[os.write(1, line):]
def end(word, more):
    say(word, more)
    sys.exit(0)
version = '%d.%d.%d' % tuple(sys.version_info[:3])
if sys.version_info < (3, 10):
    end('old', version)
root = os.path.expanduser(asked['root'].encode('utf-8', 'surrogateescape'))
if root.startswith(b'~'):
    end('input', 'there is no home folder for ' + asked['root'] + '; set host.work to an absolute path')
root = os.path.abspath(root)
folder = os.path.join(root, b'programs')
path = os.path.join(folder, asked['sha256'].encode('ascii') + b'.py')
temp = path + b'.' + asked['nonce'].encode('ascii')
def whole():
    try:
        with open(path, 'rb') as file:
            return hashlib.sha256(file.read()).hexdigest() == asked['sha256']
    except OSError:
        return False
def fetch():
    say('need')
    data = bytearray()
    while len(data) < asked['size']:
        part = os.read(0, min(1 << 20, asked['size'] - len(data)))
        if not part:
            sys.exit(0)
        data += part
    if hashlib.sha256(data).hexdigest() != asked['sha256']:
        end('fail', 'the program was damaged on the way; run it again')
    target = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(target, left):]
        os.fsync(target)
    finally:
        os.close(target)
    os.rename(temp, path)
def tidy():
    os.utime(path)
    for name in os.listdir(folder):
        entry = os.path.join(folder, name)
        if time.time() - os.lstat(entry).st_mtime > 30 * 86400:
            os.unlink(entry)
try:
    os.makedirs(folder, exist_ok=True)
    if not whole():
        fetch()
except OSError as error:
    try:
        os.unlink(temp)
    except OSError:
        pass
    why = '%s: %s' % (os.fsdecode(error.filename or path), error.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        end('fail', why + '; free some space there, or set host.work to another folder')
    end('input', why + '; set host.work to a folder that this user can write')
try:
    tidy()
except OSError:
    pass
say('ready', version)
os.execv(sys.executable, [sys.executable, '-I', '-u', path, '--root', root])
"""


class Stream(Protocol):
    """What the bootstrap needs of a session's streams."""

    def readline(self) -> bytes:
        """One line with its end, b"" at the end."""

    def write(self, data: bytes, /) -> object:
        """Takes all of `data`."""


class NoAnswerError(Exception):
    """The session ended, or said too much, before the program was there; `str` is its last line."""


@dataclass(frozen=True, kw_only=True)
class Boot:
    """One start of the host's program: the command line, and what its answers are known by."""

    command: str
    nonce: str
    program: bytes


def prepare(python: str, root: str, program: bytes) -> Boot:
    """The command that starts `program` with `root` by `python`, a bare name, absolute or from ~."""
    for what, value in (("python", python), ("work", root)):
        if not value or "\0" in value:
            raise InputError(f"host.{what} is {value!r}; set it to a path on the host")
    nonce = secrets.token_hex(8)
    asked = {
        "root": root,
        "sha256": hashlib.sha256(program).hexdigest(),
        "size": len(program),
        "nonce": nonce,
    }
    # Options that Python 2.7 knows too; the program itself is then run with -I.
    command = (
        f'{quote(python)} -E -s -u -c "exec(bytes(bytearray.fromhex({_hex(BOOT)!r})))"'
        f" {_hex(json.dumps(asked))}"
    )
    return Boot(command=command, nonce=nonce, program=program)


def quote(path: str) -> str:
    """A path as one word of any login shell; a leading `~/` is left for the shell to expand.

    Unlike shlex.quote it always quotes: `A=b` would be an assignment.
    """
    home, rest = ("~/", path[2:]) if path.startswith("~/") else ("", path)
    return home + "'" + rest.replace("'", "'\"'\"'") + "'"


def start(boot: Boot, stream: Stream, *, name: str, python: str) -> str:
    """Gets the program going; the host's Python version.

    What the login shell prints is skipped. Raises InputError (interpreter too old, no such home),
    HostError (the program cannot be stored) and NoAnswerError.
    """
    while True:
        word, more = _answer(boot.nonce, stream)
        if word == "need":
            stream.write(boot.program)
        elif word == "ready":
            return more
        elif word == "old":
            raise InputError(
                f"{name}: {python} is Python {more} there, and {NEEDED} or newer is needed; "
                "set host.python"
            )
        elif word == "input":
            raise InputError(f"{name}: {more}")
        else:
            raise HostError(f"{name}: the host's program cannot be stored: {more}")


def _answer(nonce: str, stream: Stream) -> tuple[str, str]:
    noise, last = 0, ""
    while noise < MAX_NOISE:
        line = stream.readline()
        text = line.decode("utf-8", errors="replace")
        # The shell's last line may have no end, and then the answer stands behind it.
        _, found, answer = text.partition(f"{nonce} ")
        if found and line.endswith(b"\n"):
            word, _, more = answer.strip().partition(" ")
            return word, more
        noise += len(line)
        last = text.strip() or last
        if not line.endswith(b"\n"):
            break
    raise NoAnswerError(f"{last:.200}")


def _hex(text: str) -> str:
    return text.encode("utf-8").hex()
