"""Everything the orchestrator raises on purpose.

    OrchestratorError          exit code 1: the question was not answered
    ├── InputError             exit code 2: what was asked for cannot be run as written
    ├── HostError              the host or its program did not do what was asked
    │   ├── HostUnreachable    the host does not answer; the run may well go on there
    │   └── StateUnknown       the host answers, but not what became of a run
    ├── TrackingError          the tracking store cannot be written; the run's folder is intact
    └── Detached               the person left a run to itself; it goes on

Every message is one sentence that says what is wrong, where, and what to do.
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """Base of all errors raised on purpose; `exit_code` is the command's exit status."""

    exit_code = 1


class InputError(OrchestratorError):
    """The experiment, an override or a path is wrong; nothing was started."""

    exit_code = 2


class HostError(OrchestratorError):
    """The host's program refused or failed a request."""


class HostUnreachable(HostError):
    """The host does not answer. Never the same as a failed run."""


class StateUnknown(HostError):
    """What became of a run cannot be told now. Never the same as a failed run."""


class Detached(OrchestratorError):
    """A person chose to leave a run to itself."""


class TrackingError(OrchestratorError):
    """The tracking store cannot be read or written; filing can be repeated from the run's folder."""
