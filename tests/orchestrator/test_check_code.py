"""Code that would fail on the host is not sent there."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.check_code import check_code
from orchestrator.errors import InputError
from orchestrator.paths import CLONE
from orchestrator.snapshot import take_snapshot

# Both crashes of the story stand first.
FLAWS = {
    "an import shadowed by a local name": (
        "import torch.nn.functional as F\n"
        "def score(x):\n    y = F.softmax(x, -1)\n    F = y.shape[0]\n    return y, F\n",
        r"code\.py:3: .*`F` referenced before assignment",
    ),
    "a variable used before assignment": (
        "def score(x):\n    hidden = hidden + x\n    return hidden\n",
        r"code\.py:2: .*`hidden`.*",
    ),
    "an undefined name": (
        "def score(x):\n    return torch.relu(x)\n",
        r"code\.py:2: Undefined name `torch`",
    ),
    "an import shadowed by a loop": (
        "import time\nfor time in range(3):\n    pass\nprint(time)\n",
        r"code\.py:2: Import `time` .* shadowed",
    ),
    "no Python": ("def score(:\n    pass\n", r"code\.py:1: "),
    "return outside of a function": ("return 3\n", r"code\.py:1: .*outside of a function"),
}
SOUND = {
    "an import that is said twice": "import torch\nimport torch\nprint(torch)\n",
    "a shape in an annotation": "def f(x: 'Float[Tensor, \"b t\"]'): # noqa: F821\n    return x\n",
    "syntax of a later Python": "def f[T](x: T) -> T:\n    return x\n",
    "a strange strip": "print('x'.strip('aab'))\n",
    "a parameter named as an import": (
        "import time\n\n\ndef f(time):\n    return time\n\n\ntime.sleep(0)\n"
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_flaw_is_named_with_its_place(tmp_path: Path, flaw: str) -> None:
    source, words = FLAWS[flaw]
    code = tmp_path / "code.py"
    code.write_text(source)
    with pytest.raises(InputError, match=words) as caught:
        check_code([code])
    assert "it was not sent" in str(caught.value)


@pytest.mark.parametrize("what", SOUND)
def test_what_runs_is_sent(tmp_path: Path, what: str) -> None:
    (tmp_path / "code.py").write_text(SOUND[what])
    check_code([tmp_path / "code.py"])


def test_our_own_code_is_held_to_more(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("def score():\n    return 1\ndef score():\n    return 2\n")
    with pytest.raises(InputError, match=r"code\.py:3: Redefinition of unused `score`"):
        check_code([code], own=True)
    code.write_text("def f[T](x: T) -> T:\n    return x\n")
    with pytest.raises(InputError, match=r"code\.py:1: .*Python 3\.10"):
        check_code([code], own=True)


def test_sound_code_passes_whatever_its_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "build" / '-o\'neil "q" $(x)'
    folder.mkdir(parents=True)
    (folder / "ok.py").write_text(
        "import time\n\n\ndef f(time):\n    return time\n\n\ntime.sleep(0)\n"
    )
    (folder / "notes.txt").write_text("def (")
    check_code([folder / "ok.py", folder / "notes.txt"])
    (folder / "ok.py").write_text("print(nothing)\n")
    with pytest.raises(InputError, match="nothing"):
        check_code([folder / "ok.py"])


def test_many_flaws_are_counted(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("".join(f"print(name_{i})\n" for i in range(9)))
    with pytest.raises(InputError, match="and 4 more"):
        check_code([code])


def test_what_is_shipped_passes() -> None:
    check_code((CLONE / name for name in take_snapshot(CLONE).tree.files), own=True)
