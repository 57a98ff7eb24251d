"""A drafter's folder as the hypothesis wants it served: links to its files, and a config.json anew."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput

CONFIG = "config.json"


def lay_out(source: Path, out: Path, config: Mapping[str, Any], *, copied: bool = False) -> Path:
    """Links to every file of `source` but config.json, which is written to `out` as `config`; copies
    for those who see `out` and not `source`, as in a container.

    The original is not touched, and nothing is left of what cannot be laid out whole. Raises
    BadInput where `out` cannot be made.
    """
    made = False
    try:
        out.mkdir(parents=True)
        made = True
        for file in sorted(source.resolve().iterdir()):
            if file.name == CONFIG:
                continue
            if not copied:
                (out / file.name).symlink_to(file, target_is_directory=file.is_dir())
            elif file.is_dir():
                shutil.copytree(file, out / file.name)
            else:
                shutil.copyfile(file, out / file.name)
        (out / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        if made:
            shutil.rmtree(out, ignore_errors=True)
        raise BadInput(
            f"{error.filename or out} cannot be laid out: {error.strerror or error}"
        ) from error
    return out


def drop_copies(out: Path) -> None:
    """Remove what `lay_out` copied; config.json stays."""
    for file in out.iterdir():
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        elif file.name != CONFIG:
            file.unlink()
