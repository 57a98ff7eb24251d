"""The release of a server that a person started, by what it says and what was named."""

from __future__ import annotations

from eagle3.errors import BadInput


def plain(version: str) -> str:
    """A release without what a build adds to it."""
    return version.partition("+")[0]


def release(name: str, named: str | None, there: str | None, url: str, setting: str) -> str:
    """The plain release of the engine `name` at `url`, which says `there`; `setting` is where a person
    names one. Raises BadInput where another one was named, or nobody says which.
    """
    if named is None and there is None:
        raise BadInput(f"{name} at {url} does not say its release; name it: {setting}=X")
    if named and there and plain(named) != plain(there):
        raise BadInput(
            f"engine.version={named}, but the server at {url} is {name} {there}; leave it out, or name "
            "the other server"
        )
    return plain(str(there or named))
