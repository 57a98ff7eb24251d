"""What is asked of a person on a terminal."""

import subprocess
import sys

# Select looks up each file's number before it waits; here that lookup is a signal raised in C, so
# the signal comes in the last moment before the wait, when no Python handler can run any more.
INTERRUPTED_BEFORE_IT_WAITS = """
import ctypes, functools, os, signal, sys

from rich.console import Console

from orchestrator.show import Show

class Terminal:
    isatty = staticmethod(lambda: True)
    fileno = functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGINT))  # 0, like stdin

silent = os.pipe()
os.dup2(silent[0], 0)
sys.stdin = Terminal()
print(Show(Console(force_terminal=True)).ask_interrupt())
"""


def test_a_second_interrupt_is_seen_whenever_it_comes() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_BEFORE_IT_WAITS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.endswith("detach\n")
