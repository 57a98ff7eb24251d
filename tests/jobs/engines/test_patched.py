"""A patched engine in real processes: over a package on disk, which stays as it is."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.conventions import RULES, Reach
from eagle3.engine_patches import SETTING, SHIPPED, Shipped, way
from eagle3.engines import rule_for
from eagle3.errors import BadInput
from jobs.engines.diffs import parse
from jobs.engines.patched import Overlay, Patch, overlaid, package_folder, patch_engine, read_patch
from jobs.engines.recording import Recorder
from jobs.engines.shipped import FOLDER, file_of, shipped, spared
from jobs.engines.talk import ServerError

LLAMA, OPS = "sglang/srt/models/llama.py", "sglang/srt/__init__.py"
SOURCES = {
    "sglang/__init__.py": "",
    OPS: "SAID = 'as installed'\n",
    "sglang/srt/models/__init__.py": "",
    LLAMA: "from .other import OTHER\n\n\ndef says():\n    return 'as installed'\n",
    "sglang/srt/models/other.py": "OTHER = 'other'\n",
}
# Asked in a process and in one that it spawns: what is said, and of which file.
RUN = """
import importlib, json, multiprocessing, sys

def said(put=None):
    llama = importlib.import_module("sglang.srt.models.llama")
    srt = importlib.import_module("sglang.srt")
    found = [llama.says(), llama.OTHER, srt.SAID, llama.__file__]
    return found if put is None else put(found)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=said, args=(queue.put,))
    child.start()
    grandchild = queue.get(timeout=60)
    child.join()
    print(json.dumps([said(), grandchild]))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder on the engine's path, with its package."""
    for name, text in SOURCES.items():
        file = tmp_path / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "site"


def patch_of(changes: dict[str, str], prefix: str = "python/") -> Patch:
    """The diff that makes these of the package's files, as one of the engine's repository."""
    text = ""
    for name, new in changes.items():
        old = SOURCES.get(name)
        lines = difflib.unified_diff(
            (old or "").splitlines(keepends=True),
            new.splitlines(keepends=True),
            "/dev/null" if old is None else f"a/{prefix}{name}",
            f"b/{prefix}{name}",
        )
        text += "".join(lines)
    return Patch(name="my.patch", text=text)


def changed(name: str = LLAMA) -> str:
    return SOURCES[name].replace("as installed", "as patched")


def run(site: Path, overlay: Overlay | None, recorder: Recorder | None = None) -> Any:
    """What RUN says under the overlay."""
    environment = {"PYTHONPATH": str(site)}
    if recorder is not None:
        environment = recorder.environment(environment)
    if overlay is not None:
        environment = overlay.environment(environment)
    program = site.parent / "run.py"
    program.write_text(RUN)
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def on_disk(site: Path) -> dict[str, str]:
    return {p.relative_to(site).as_posix(): p.read_text() for p in site.rglob("*") if p.is_file()}


@pytest.mark.runs
def test_a_child_and_what_it_spawns_import_the_patched_file_and_the_disk_stays(
    site: Path, tmp_path: Path
) -> None:
    patched = patch_engine(patch_of({LLAMA: changed()}), site / "sglang", "sglang", "0.5.12")
    with overlaid(patched, tmp_path / "over") as overlay:
        file = str(tmp_path / "over" / LLAMA)
        expected = ["as patched", "other", "as installed", file]
        assert run(site, overlay) == [expected, expected]
        assert overlay.check("x") == {LLAMA: 2}
    assert not (tmp_path / "over").exists()
    assert on_disk(site) == SOURCES
    plain = ["as installed", "other", "as installed", str(site / LLAMA)]
    assert run(site, None) == [plain, plain]


@pytest.mark.runs
def test_a_package_and_a_new_module_are_laid_over_and_the_rest_is_found(
    site: Path, tmp_path: Path
) -> None:
    new = "sglang/srt/models/added.py"
    patch = patch_of(
        {
            OPS: changed(OPS),
            new: "ADDED = 'added'\n",
            LLAMA: SOURCES[LLAMA].replace("other import OTHER", "added import ADDED as OTHER"),
        }
    )
    patched = patch_engine(patch, site / "sglang", "sglang", "0.5.12")
    with overlaid(patched, tmp_path / "over") as overlay:
        (said, spawned) = run(site, overlay)
        assert said[:3] == spawned[:3] == ["as installed", "added", "as patched"]
        assert overlay.check("x") == {OPS: 2, new: 2, LLAMA: 2}


@pytest.mark.runs
def test_the_recorder_still_watches_a_patched_module(site: Path, tmp_path: Path) -> None:
    drafter = "sglang/srt/models/llama_eagle3.py"
    body = "import torch\n\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n"
    body += "        super().__init__()\n        self.fc = torch.nn.Linear(WIDTH, 2)\n"
    (site / drafter).write_text(body.replace("WIDTH", "6"))
    lines = ["--- a/" + drafter, "+++ b/" + drafter, "@@ -7 +7 @@"]
    lines += [
        f"{sign}        self.fc = torch.nn.Linear({n}, 2)" for sign, n in (("-", 6), ("+", 4))
    ]
    patch = Patch(name="my.patch", text="\n".join(lines) + "\n")
    patched = patch_engine(patch, site / "sglang", "sglang", "0.5.12")
    recorder = Recorder(folder=tmp_path / "recorded")
    recorder.arm()
    with overlaid(patched, tmp_path / "over") as overlay:
        given = overlay.environment(recorder.environment({"PYTHONPATH": str(site)}))
        code = (
            "import torch; from sglang.srt.models.llama_eagle3 import Model; "
            "Model().fc(torch.full((3, 4), 5.0))"
        )
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **given}, check=True)
        assert overlay.check("x") == {drafter: 1}
    assert [call.tolist() for call in recorder.take().calls] == [[[5.0] * 4] * 3]


def test_a_patched_file_that_nobody_imports_is_an_error(site: Path, tmp_path: Path) -> None:
    patch = patch_of({LLAMA: changed(), OPS: changed(OPS)})
    patched = patch_engine(patch, site / "sglang", "sglang", "0.5.12")
    with overlaid(patched, tmp_path / "over") as overlay:
        given = overlay.environment({"PYTHONPATH": str(site)})
        with pytest.raises(
            ServerError, match=f"^x: {LLAMA} of the patch my.patch was imported by none"
        ):
            overlay.check("x")
        subprocess.run(
            [sys.executable, "-c", "import sglang.srt"], env={**os.environ, **given}, check=True
        )
        with pytest.raises(ServerError, match=LLAMA):
            overlay.check("x")


def test_a_file_that_the_target_does_not_run_need_not_be_imported(
    site: Path, tmp_path: Path
) -> None:
    found = patch_engine(
        patch_of({LLAMA: changed(), OPS: changed(OPS)}), site / "sglang", "sglang", "0.5.12"
    )
    with overlaid(replace(found, spared=frozenset({LLAMA})), tmp_path / "over") as overlay:
        with pytest.raises(ServerError, match=OPS):
            overlay.check("x")
        given = overlay.environment({"PYTHONPATH": str(site)})
        subprocess.run(
            [sys.executable, "-c", "import sglang.srt"], env={**os.environ, **given}, check=True
        )
        assert overlay.check("x") == {LLAMA: 0, OPS: 1}


@pytest.mark.parametrize("one", SHIPPED, ids=lambda one: file_of(one).stem)
def test_of_a_shipped_patch_the_file_of_the_targets_class_has_to_be_imported(one: Shipped) -> None:
    files = {"llama": "llama.py", "kimi_k25": "deepseek_v2.py"}
    files = {name: files[name] for name in one.classes}
    if "llama" in files:
        files |= {"MistralForCausalLM": "llama.py", "ExaoneMoEForCausalLM": "exaone_moe.py"}
    for name in files:
        patch = shipped(one.engine, one.version, name)
        paths = [file.path.removeprefix("b/") for file in parse(patch.text)]
        left = set(paths) - spared(one.engine, one.version, name, paths)
        assert [Path(path).name for path in left] == [files[name]]


def test_a_module_that_fails_as_it_is_run_is_not_taken_for_imported(
    site: Path, tmp_path: Path
) -> None:
    patch = patch_of({LLAMA: "raise ValueError('broken')\n"})
    patched = patch_engine(patch, site / "sglang", "sglang", "0.5.12")
    with overlaid(patched, tmp_path / "over") as overlay:
        given = overlay.environment({"PYTHONPATH": str(site)})
        done = subprocess.run(
            [sys.executable, "-c", "import sglang.srt.models.llama"],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "ValueError: broken" in done.stderr
        with pytest.raises(ServerError, match="imported by none"):
            overlay.check("x")


def test_the_package_is_found_where_the_server_would_import_it(site: Path, tmp_path: Path) -> None:
    given = {"PYTHONPATH": str(site)}
    assert package_folder("sglang", sys.executable, given, tmp_path) == site / "sglang"
    with pytest.raises(
        BadInput, match="does not say where its vllm is: it is not there as a folder"
    ):
        package_folder("vllm", sys.executable, given, tmp_path)
    with pytest.raises(BadInput, match="/no/python cannot be asked where its sglang is"):
        package_folder("sglang", "/no/python", given, tmp_path)


@pytest.mark.parametrize("prefix", ["", "python/"])
def test_what_was_patched_is_named_with_its_hash(prefix: str, site: Path) -> None:
    patch = patch_of({LLAMA: changed(), OPS: changed(OPS)}, prefix)
    found = patch_engine(patch, site / "sglang", "sglang", "0.5.12")
    assert found.plain() == {
        "name": "my.patch",
        "sha256": hashlib.sha256(patch.text.encode()).hexdigest(),
        "files": [LLAMA, OPS],
    }
    assert [(m.name, m.source) for m in found.modules] == [
        ("sglang.srt.models.llama", changed()),
        ("sglang.srt", changed(OPS)),
    ]


def refusal(site: Path, patch: Patch) -> str:
    with pytest.raises(BadInput) as caught:
        patch_engine(patch, site / "sglang", "sglang", "0.5.12")
    return str(caught.value)


def test_a_patch_for_another_release_is_refused_with_file_hunk_and_release(site: Path) -> None:
    patch = patch_of({LLAMA: changed()})
    (site / LLAMA).write_text(SOURCES[LLAMA].replace("def says", "def said"))
    assert refusal(site, patch) == (
        f"the patch my.patch does not fit sglang 0.5.12: {LLAMA}, hunk 1 does not apply: at line 4 "
        "there is 'def said():', not 'def says():'; make it anew for sglang 0.5.12, or name the "
        "interpreter that has the release it was made for: engine.python=…"
    )


def test_a_file_that_is_not_there_and_a_new_one_that_is_are_refused(site: Path) -> None:
    patch = patch_of({LLAMA: changed()})
    (site / LLAMA).unlink()
    assert f"changes {LLAMA}, which sglang 0.5.12 does not have; take" in refusal(site, patch)
    patch = patch_of({"sglang/srt/models/added.py": "a = 1\n"})
    (site / "sglang/srt/models/added.py").touch()
    assert "adds sglang/srt/models/added.py, which sglang 0.5.12 has already" in refusal(
        site, patch
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a/torch/nn.py", "changes a/torch/nn.py, which is not below sglang/"),
        ("sglang.py", "which is not below sglang/"),
        ("a/sglang/../../etc/x.py", "which is not below sglang/"),
        ("a/sglang/csrc/k.cu", "changes a/sglang/csrc/k.cu; only Python files can be laid over"),
    ],
)
def test_what_is_not_the_engines_python_is_refused(path: str, words: str, site: Path) -> None:
    text = f"--- {path}\n+++ {path}\n@@ -1 +1 @@\n-a\n+b\n"
    assert words in refusal(site, Patch(name="my.patch", text=text))


def test_a_file_twice_and_no_diff_at_all_are_refused(site: Path) -> None:
    once = patch_of({LLAMA: changed()}).text
    twice = Patch(name="my.patch", text=once + once)
    assert f"the patch my.patch changes {LLAMA} twice" in refusal(site, twice)
    assert refusal(site, Patch(name="my.patch", text="hello\n")).startswith(
        "the patch my.patch: it is no unified diff"
    )


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.patch").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=r"the patch .*my\.patch cannot be read"):
        read_patch(tmp_path / "my.patch")


@pytest.mark.parametrize("one", SHIPPED, ids=lambda one: file_of(one).stem)
def test_a_shipped_patch_changes_the_files_of_the_classes_that_it_names(one: Shipped) -> None:
    files = {Path(f.path).name for f in parse(read_patch(file_of(one)).text)}
    named: set[str] = set()
    for name in one.classes:
        rule = rule_for(one.engine, one.version, name)
        assert "embedding capture patch" in str(rule.patch)
        where = rule.source.partition("::")[0]
        named |= {Path(part.strip()).name for part in where.split(",")}
        assert shipped(one.engine, one.version, name).name == file_of(one).name
    assert files == named


@pytest.mark.parametrize("one", SHIPPED, ids=lambda one: file_of(one).stem)
def test_what_a_shipped_patch_captures_is_state_0_apart_and_the_sum_behind_it(one: Shipped) -> None:
    for file in parse(read_patch(file_of(one)).text):
        (hunk,) = file.hunks
        assert "".join(hunk.old).count("hidden_states + residual") in (1, 2)
        start = next(i for i, line in enumerate(hunk.new) if line.rstrip().endswith(" = ("))
        end = next(i for i, line in enumerate(hunk.new) if i > start and line.strip() == ")")
        statement = "".join(line.strip() + "\n" for line in hunk.new[start : end + 1])
        hidden, residual = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
        for given, expected in ((None, [1.0, 2.0]), (residual, [11.0, 22.0])):
            names: dict[str, Any] = {"hidden_states": hidden.clone(), "residual": given}
            exec(statement, names)
            names["hidden_states"].zero_()  # as the norm in place does
            (captured,) = (names[n] for n in ("captured", "aux_hidden_state") if n in names)
            assert captured.tolist() == expected


def test_the_patches_that_are_known_are_the_files_that_are_there() -> None:
    assert sorted(map(file_of, SHIPPED)) == sorted(FOLDER.glob("*.patch"))


def test_what_is_said_to_be_shipped_is_what_can_be_had() -> None:
    releases = {"sglang": ("0.5.12", "0.5.13", "0.5.21"), "vllm": ("0.17.0", "0.32.0", "0.33.0")}
    had = {True: 0, False: 0}
    for engine, name in sorted({(r.ecosystem, c) for r in RULES for c in r.classes}):
        for version in releases.get(engine, ()):
            try:
                rule = rule_for(engine, version, name)
            except BadInput:
                continue  # a class that is not served there
            if rule.embedding is not Reach.patch:
                continue
            try:
                shipped(engine, version, name)
                there = True
            except BadInput:
                there = False
            assert (way(rule, version, name) == SETTING) is there, (engine, version, name)
            had[there] += 1
    assert min(had.values()) > 10


@pytest.mark.parametrize(
    ("engine", "version", "engine_class", "words"),
    [
        (
            "sglang",
            "0.5.23",
            "llama",
            "captures the embedding output without a patch; leave engine",
        ),
        (
            "sglang",
            "0.5.13",
            "kimi_k25",
            "sglang 0.5.21, vllm 0.32.0, not for sglang 0.5.13; give a",
        ),
        (
            "sglang",
            "0.5.12",
            "qwen3",
            "does not change what sglang 0.5.12, class qwen3, runs; give a",
        ),
        ("vllm", "0.33.0", "kimi_k25", "not for vllm 0.33.0; give a patch of your own"),
    ],
)
def test_what_is_not_shipped_is_refused_by_name(
    engine: str, version: str, engine_class: str, words: str
) -> None:
    with pytest.raises(BadInput) as caught:
        shipped(engine, version, engine_class)
    assert words in str(caught.value)
