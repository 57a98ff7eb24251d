"""A drafter's folder as the hypothesis wants it served: links to its files, and a config.json anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import BadInput

CONFIG = "config.json"


def lay_out(source: Path, out: Path, config: Mapping[str, Any]) -> Path:
    """Links to every file of `source` but config.json, which is written to `out` as `config`.

    The original is not touched. Raises BadInput where `out` cannot be made.
    """
    try:
        out.mkdir(parents=True)
        for file in sorted(source.resolve().iterdir()):
            if file.name != CONFIG:
                (out / file.name).symlink_to(file, target_is_directory=file.is_dir())
        (out / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{error.filename or out} cannot be laid out: {error.strerror}") from error
    return out
