"""What a host is asked by the verb `doctor`: read headers and configs there, say what will not fit.

It is run from a snapshot by the host's `probe`, as a program on stdin with one JSON argument, and
prints one line of JSON: `{"report": …}`, or `{"error": {"kind", "message"}}`. No torch, no GPU.
"""

from __future__ import annotations

import json
import traceback
from typing import Any

from eagle3.errors import BadInput

# What the host runs, given the argument; older interpreters must be able to read it as well.
PROGRAM = b"""\
import json, sys
asked = json.loads(sys.argv[1])
sys.path.insert(0, asked["snapshot"])
def refuse(said):
    print(json.dumps({"error": {"kind": "host", "message": said}}))
    sys.exit(0)
if sys.version_info < (3, 10):
    refuse("%s is Python %d.%d; set host.python to one of 3.10 or newer"
           % ((sys.executable,) + tuple(sys.version_info[:2])))
try:
    import numpy
except ImportError:
    refuse("numpy is not installed for %s; install it there or set host.python" % sys.executable)
from jobs.doctor import main
print(main(sys.argv[1]))
"""


def main(argument: str) -> str:
    """The answer to one question: `{drafter, target, data, trainer, engine, states}`, paths or null."""
    try:
        answer = {"report": examined(json.loads(argument))}
    except BadInput as error:
        answer = {"error": {"kind": "input", "message": str(error)}}
    except OSError as error:
        said = (
            f"{error.filename} cannot be read: {error.strerror}" if error.filename else str(error)
        )
        answer = {"error": {"kind": "input", "message": said}}
    except Exception as error:  # noqa: BLE001 -- the asker must be told, and where
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"doctor failed: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        answer = {"error": {"kind": "bug", "message": said}}
    return json.dumps(answer)


def examined(asked: dict[str, Any]) -> dict[str, Any]:
    """The report on what is asked about, as plain data."""
    from eagle3.doctor.report import examine
    from eagle3.doctor.subject import EngineAsked, on_host

    engine = asked.get("engine")
    report = examine(
        *(
            None if asked.get(role) is None else on_host(asked[role])
            for role in ("drafter", "target", "data")
        ),
        engine=EngineAsked(**engine) if engine else None,
        trainer=asked.get("trainer"),
        states=asked.get("states"),
    )
    return report.plain()
