"""Loads the stand-in in front of SGLang, in each process that has this folder on its PYTHONPATH.

SGLang asks whether there is AMX, and imports torchvision, before it imports `sgl_kernel`. Processes
that never import SGLang, as Python's own helpers, are left alone: torch takes seconds to import.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


class BeforeSGLang(MetaPathFinder):
    """Finds nothing; imports the stand-in when SGLang is looked for."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname == "sglang":
            sys.meta_path.remove(self)
            __import__("sgl_kernel")
        return None


sys.meta_path.insert(0, BeforeSGLang())
