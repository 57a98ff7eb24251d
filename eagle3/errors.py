"""What eagle3 and the jobs raise when a file or a setting is wrong."""

from __future__ import annotations


class BadInput(ValueError):
    """A checkpoint, a sample or a wiring cannot be used; the message names the file or field."""
