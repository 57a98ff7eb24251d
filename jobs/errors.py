"""What jobs raise on purpose."""

from __future__ import annotations


class InputError(Exception):
    """What the job was asked to do cannot be done as written; the message is one sentence."""
