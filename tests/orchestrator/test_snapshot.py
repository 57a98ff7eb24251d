"""The snapshot is named by content, holds what git would not ignore, and can be found again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.snapshot import take_snapshot


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "a clone"
    for name in ("jobs/a.py", "eagle3/b.py", "eagle3/sub/c.py", "orchestrator/d.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    (root / ".gitignore").write_text("__pycache__/\n*.log\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def test_a_clean_clone(clone: Path) -> None:
    snapshot = take_snapshot(clone)
    assert sorted(snapshot.tree.files) == ["eagle3/b.py", "eagle3/sub/c.py", "jobs/a.py"]
    assert snapshot.commit == git(clone, "rev-parse", "HEAD").strip()
    assert snapshot.diff == ""


def test_changes_new_and_deleted_files_count_and_ignored_ones_do_not(clone: Path) -> None:
    before = take_snapshot(clone)
    (clone / "jobs" / "x.log").write_text("noise")
    (clone / "jobs" / "__pycache__").mkdir()
    (clone / "jobs" / "__pycache__" / "a.pyc").write_text("noise")
    (clone / "orchestrator" / "d.py").write_text("changed, but does not run on the host")
    assert take_snapshot(clone).digest == before.digest

    (clone / "jobs" / "a.py").write_text("# changed\n")
    (clone / "eagle3" / "new.py").write_text("# new\n")
    (clone / "eagle3" / "b.py").unlink()
    after = take_snapshot(clone)
    assert sorted(after.tree.files) == ["eagle3/new.py", "eagle3/sub/c.py", "jobs/a.py"]
    assert after.digest != before.digest
    assert after.commit == before.commit
    assert "+# changed" in after.diff
    git(clone, "checkout", "-q", ".")
    (clone / "eagle3" / "new.py").unlink()
    assert take_snapshot(clone).digest == before.digest


def test_outside_git_the_content_counts_alone(clone: Path, tmp_path: Path) -> None:
    inside = take_snapshot(clone)
    copy = tmp_path / "copy"
    for folder in ("jobs", "eagle3"):
        shutil.copytree(clone / folder, copy / folder)
    outside = take_snapshot(copy)
    assert outside.commit == "none"
    assert outside.digest == inside.digest


@given(content=st.binary(max_size=50), other=st.binary(max_size=50))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_digests_are_equal_exactly_where_contents_are(
    tmp_path: Path, content: bytes, other: bytes
) -> None:
    digests = []
    for name, data in (("one", content), ("two", other)):
        for folder in ("jobs", "eagle3"):
            (tmp_path / name / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "jobs" / "a.py").write_bytes(data)
        digests.append(take_snapshot(tmp_path / name).digest)
    assert (digests[0] == digests[1]) is (content == other)


def test_a_folder_without_code_says_where_to_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run the orchestrator from its clone"):
        take_snapshot(tmp_path)
