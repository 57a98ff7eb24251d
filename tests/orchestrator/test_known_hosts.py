"""known_hosts files, beside ssh-keygen's own reading of them."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InputError
from orchestrator.known_hosts import (
    entries_of,
    fingerprint,
    known_types,
    look_up,
    matches,
    name_of,
    parse_line,
    read_entries,
    trust,
)

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
ED25519 = f"ssh-ed25519 {KEY}"


def blob(line=ED25519):
    return parse_line(Path("x"), 1, f"h {line}".encode()).blob


def other(number):
    """Another key of the same kind."""
    return blob()[:-1] + bytes([number])


def keygen(*arguments):
    return subprocess.run(
        ["ssh-keygen", *map(str, arguments)], capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.parametrize(
    ("names", "name", "expected"),
    [
        ("gpu8", "gpu8", True),
        ("gpu8", "gpu80", False),
        ("a,gpu8,b", "gpu8", True),
        ("GPU8.Example", "gpu8.example", True),
        ("*.example", "gpu8.example", True),
        ("*.example", "example", False),
        ("gpu?", "gpu8", True),
        ("gpu?", "gpu", False),
        ("*,!gpu8", "gpu8", False),
        ("!gpu8,*", "gpu8", False),
        ("!gpu8,*", "gpu9", True),
        ("!gpu8", "gpu9", False),
        ("[10.0.0.1]:2222", "[10.0.0.1]:2222", True),
        ("[10.0.0.1]:2222", "10.0.0.1", False),
        ("[10.0.0.[1]:2222", "10.0.0.1", False),
        ("[10.0.0.*]:2222", "[10.0.0.1]:2222", True),
        ("10.0.0.1", "10x0.0.1", False),
        ("|1|not|base64!", "gpu8", False),
        ("|1|", "gpu8", False),
        ("|2|c2FsdA==|aGFzaA==", "gpu8", False),
    ],
)
def test_names(names, name, expected):
    assert matches(names, name) is expected


def test_names_are_looked_up_by_port_or_alias():
    assert name_of("GPU8", 22) == "gpu8"
    assert name_of("gpu8", 2222) == "[gpu8]:2222"
    assert name_of("fe80::1", 2222) == "[fe80::1]:2222"
    assert name_of("10.0.0.1", 2222, "Rented") == "rented"


def test_hashed_names_and_fingerprints_as_ssh_keygen_makes_them(tmp_path):
    file = tmp_path / "known_hosts"
    file.write_text(f"[gpu8]:2222 {ED25519} comment\ngpu9 {ED25519}\n")
    printed = keygen("-lf", file).splitlines()[0].split()[1]
    keygen("-H", "-f", file)
    first, second = read_entries(file)
    assert first.names.startswith("|1|")
    assert first.is_for("[gpu8]:2222")
    assert not first.is_for("gpu8")
    assert second.is_only_for("gpu9")
    assert fingerprint(first.blob) == printed


@pytest.mark.parametrize("name", ["gpu8", "[gpu8]:2222", "[fe80::1]:22022"])
@pytest.mark.parametrize("hashed", [False, True])
def test_ssh_keygen_finds_what_was_pinned(tmp_path, name, hashed):
    file = tmp_path / "known_hosts"
    trust(file, name, "ssh-ed25519", blob(), hashed=hashed)
    assert KEY in keygen("-F", name, "-f", file)
    assert (name in file.read_text()) is not hashed


def test_lines_without_a_key_are_passed_over(tmp_path):
    file = tmp_path / "known_hosts"
    file.write_bytes(
        b"\n# gpu8 " + ED25519.encode() + b"\ngpu8\ngpu8 ssh-ed25519\ngpu8 ssh-ed25519 ???\n"
        b"gpu8 ssh-ed25519 \xff\xfe\n\xff\xff\n gpu8\t" + ED25519.encode() + b" \xff comment\r\n"
    )
    (entry,) = read_entries(file)
    assert (entry.number, entry.names) == (8, "gpu8")
    assert read_entries(tmp_path / "none") == []
    with pytest.raises(InputError, match="cannot be read"):
        read_entries(tmp_path)


def test_what_the_files_say(tmp_path):
    first, second = tmp_path / "one", tmp_path / "two"
    rsa = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAAQA="
    first.write_text(f"gpu8 {rsa}\n@cert-authority gpu* {ED25519}\n")
    second.write_text(f"gpu8,other {ED25519}\nbare {ED25519}\n")
    entries = entries_of([str(first), str(tmp_path / "none"), str(second)])
    assert look_up(entries, "gpu8", blob()).state == "known"
    assert known_types(entries, "gpu8") == ["ssh-ed25519", "ssh-rsa"]

    changed = look_up(entries, "gpu8", other(1))
    assert changed.state == "changed"
    assert [entry.where for entry in changed.entries] == [f"{first}:1", f"{second}:1"]

    unknown = look_up(entries, "gpu9", blob())
    assert (unknown.state, len(unknown.authorities)) == ("unknown", 1)
    assert look_up(entries, "[bare]:22022", blob(), bare_name="bare").state == "known"
    assert look_up(entries, "[bare]:22022", other(1), bare_name="bare").state == "unknown"
    # A port with a line of its own is known by that line alone.
    with first.open("a") as file:
        file.write(f"[bare]:22022 {rsa}\n")
    own = entries_of([str(first), str(second)])
    assert look_up(own, "[bare]:22022", blob(), bare_name="bare").state == "changed"


@pytest.mark.parametrize("names", ["gpu8", "*", "bare"])
def test_revoked_wins(tmp_path, names):
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu8 {ED25519}\n@revoked {names} {ED25519}\n")
    finding = look_up(read_entries(file), "gpu8", blob(), bare_name="bare")
    assert (finding.state, finding.entries[0].number) == ("revoked", 2)
    assert look_up(read_entries(file), "gpu8", other(1)).state == "changed"


def test_pinning_replaces_the_hosts_own_lines_and_no_other(tmp_path):
    file = tmp_path / "known_hosts"
    keygen_line = f"old {ED25519}\n"
    file.write_text(keygen_line)
    keygen("-H", "-f", file)
    hashed = file.read_text()
    kept = [
        "# a comment about old\r\n",
        "\n",
        f"old,10.0.0.1 {ED25519}\n",
        f"ol? {ED25519}\n",
        f"@revoked old {ED25519}\n",
        f"@cert-authority old {ED25519}\n",
        "old is no line\n",
        f"[old]:2222 {ED25519}\n",
        f"elsewhere   {ED25519}  with  spaces",
    ]
    gone = [keygen_line, hashed, f"OLD {ED25519} again\n", "old ssh-rsa AAAAB3NzaC1yc2E=\n"]
    lines = [part for pair in zip(gone, kept[:4], strict=True) for part in pair] + kept[4:]
    file.write_bytes("".join(lines).encode())
    file.chmod(0o644)
    left = trust(file, "old", "ssh-ed25519", other(7))
    written = file.read_bytes().decode()
    assert written.startswith("".join(kept) + "\n")
    assert written.count("\n") == "".join(kept).count("\n") + 2
    assert read_entries(file)[-1].blob == other(7)
    assert [entry.names for entry in left] == ["old,10.0.0.1", "ol?"]
    assert file.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_a_new_file_is_for_its_owner_alone(tmp_path):
    file = tmp_path / "new" / "ssh" / "known_hosts"
    trust(file, "gpu8", "ssh-ed25519", blob())
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert file.read_text() == f"gpu8 {ED25519}\n"


def test_a_link_stays_a_link(tmp_path):
    real, link = tmp_path / "real", tmp_path / "known_hosts"
    real.write_text("# kept\n")
    link.symlink_to(real)
    trust(link, "gpu8", "ssh-ed25519", blob())
    assert link.is_symlink()
    assert real.read_text() == f"# kept\ngpu8 {ED25519}\n"


def test_pins_at_once_are_all_kept(tmp_path):
    file = tmp_path / "known_hosts"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: trust(file, f"h{n}", "ssh-ed25519", other(n)), range(40)))
    assert {entry.names for entry in read_entries(file)} == {f"h{n}" for n in range(40)}


def test_a_place_that_cannot_be_written():
    with pytest.raises(InputError, match="cannot be pinned"):
        trust(Path("/proc/nowhere/known_hosts"), "gpu8", "ssh-ed25519", blob())


LINES = st.lists(
    st.one_of(
        st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")),
        st.sampled_from(
            [f"gpu8 {ED25519}", f"a,gpu8 {ED25519}", f"@revoked gpu8 {ED25519}", "#"]
        ).map(str.encode),
    ),
    max_size=8,
)


@given(lines=LINES, end=st.booleans())
def test_no_other_line_is_ever_lost(tmp_path_factory, lines, end):
    file = tmp_path_factory.mktemp("any") / "known_hosts"
    file.write_bytes(b"\n".join(lines) + (b"\n" if end else b""))
    own = f"gpu8 {ED25519}".encode()
    trust(file, "gpu8", "ssh-ed25519", other(9))
    written = file.read_bytes().split(b"\n")
    assert [line for line in lines if line not in (own, b"")] == [
        line for line in written[:-2] if line
    ]
    assert look_up(read_entries(file), "gpu8", other(9)).state == "known"
