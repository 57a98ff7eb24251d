"""The way to a host: jump hosts in OpenSSH's order, and proxy commands that die."""

import os
import signal
import time

import pytest

from orchestrator.errors import HostUnreachable, InputError
from tests.ssh.machines import children, make_key

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def first(make_host):
    """The only one that knows where `second` is."""
    return make_host(name="b1.test", hosts={"second.inner": HERE})


@pytest.fixture(scope="module")
def second(make_host):
    """The only one that knows where `third` is."""
    return make_host(name="b2.test", hosts={"third.inner": HERE})


@pytest.fixture(scope="module")
def third(make_host):
    return make_host(name="gpu8.test")


@pytest.fixture
def chain(client, first, second, third):
    """b1, then b2, then gpu8: each name is known on the hop before it alone."""
    client.add("b1", first)
    client.add("b2", second, hostname="second.inner")
    client.add("gpu8", third, hostname="third.inner", ProxyJump="b1,b2")
    return client


def hostname(client, alias):
    with client.open(alias) as channel:
        return channel.hello()["hostname"]


def test_two_hops_in_openssh_order(chain):
    assert hostname(chain, "gpu8") == "gpu8.test"
    agreed = chain.ssh("gpu8", "hostname")
    assert agreed.stdout == "gpu8.test\n", agreed.stderr


def test_one_hop(chain, second):
    chain.add("inner", second, hostname="second.inner", ProxyJump="b1")
    assert hostname(chain, "inner") == "b2.test"


def test_a_hop_that_has_a_hop_of_its_own(chain, second, third):
    chain.add("b2-by-itself", second, hostname="second.inner", ProxyJump="b1")
    chain.add("far", third, hostname="third.inner", ProxyJump="b2-by-itself")
    assert hostname(chain, "far") == "gpu8.test"


def test_a_hop_by_user_and_port(client, first, second):
    with client.config.open("w") as file:
        file.write(
            f"Host {HERE}\n  IdentityFile {client.key}\n  UserKnownHostsFile {client.known_hosts}\n"
        )
    client.pin(HERE, first.port, first.public_key())
    jump = f"gpu@{HERE}:{first.port}"
    client.add("inner", second, hostname="second.inner", ProxyJump=f"ssh://{jump}")
    assert hostname(client, "inner") == "b2.test"
    assert client.ssh("inner", "hostname").stdout == "b2.test\n"


def test_each_hop_has_its_own_key(chain, second, tmp_path):
    key = make_key(tmp_path / "id_inner")
    second.authorize(key.with_name("id_inner.pub").read_text())
    first_line, rest = "Host inner\n", f"  IdentityFile {key}\n"
    chain.config.write_text(chain.config.read_text() + first_line + rest)
    chain.add("inner", second, hostname="second.inner", ProxyJump="b1", IdentityFile="")
    assert hostname(chain, "inner") == "b2.test"
    second.tidy()


def test_none_means_none(client, third):
    client.add("gpu8", third, ProxyJump="none")
    with client.config.open("a") as file:
        file.write("Host *\n  ProxyJump nowhere.invalid\n")
    assert hostname(client, "gpu8") == "gpu8.test"


def test_a_loop(client, third):
    client.add("a", third, ProxyJump="b")
    client.add("b", third, port=third.port + 1, ProxyJump="a")
    with pytest.raises(InputError, match=r"a: the jump host a is reached through itself"):
        client.open("a").__enter__()


def test_the_failing_hop_is_named(chain, third):
    chain.add("lost", third, hostname="nowhere.invalid", ProxyJump="b1")
    with pytest.raises(HostUnreachable, match=r"lost: jump host b1 .*opens no way to nowhere"):
        hostname(chain, "lost")
    chain.add("b3", hostname="nowhere.invalid")
    chain.add("gone", third, ProxyJump="b3")
    with pytest.raises(HostUnreachable, match=r"^jump host b3 \(on the way to gone\): the name"):
        hostname(chain, "gone")


def test_a_login_refused_at_a_hop(chain, third, tmp_path):
    chain.add("b1-as-other", hostname=HERE, IdentityFile=str(tmp_path / "none"))
    chain.config.write_text(
        chain.config.read_text().replace("Port 22\n", f"Port {_port(chain, 'b1')}\n")
    )
    chain.add("far", third, ProxyJump="b1-as-other")
    with pytest.raises(InputError, match=r"^jump host b1-as-other .* accepts none of the keys"):
        hostname(chain, "far")


def _port(client, alias):
    lines = client.config.read_text().split(f"Host {alias}\n", 1)[1].splitlines()
    return next(line.split()[1] for line in lines if line.split()[0] == "Port")


def test_a_hop_that_allows_no_forwarding(client, make_host, third):
    closed = make_host(name="closed.test", options={"AllowTcpForwarding": "no"})
    client.add("closed", closed)
    client.add("gpu8", third, ProxyJump="closed")
    with pytest.raises(HostUnreachable, match=r"does the jump host allow forwarding"):
        hostname(client, "gpu8")


def test_a_proxy_command(chain, third):
    command = f"ssh -F {chain.config} -o ProxyJump=b1 -W %h:%p b2"
    chain.add("far", third, hostname="third.inner", ProxyCommand=command)
    assert hostname(chain, "far") == "gpu8.test"


def test_a_proxy_command_that_fails(client, third):
    client.add("gpu8", third, ProxyCommand="sh -c 'echo no way to %h >&2; exit 3'")
    with pytest.raises(HostUnreachable, match=r"ProxyCommand said: no way to 127\.0\.0\.1"):
        hostname(client, "gpu8")


def test_a_proxy_command_that_dies_midway(chain, third):
    """It ends at once, and nobody spins on a dead pipe."""
    chain.add("far", third, ProxyCommand=f"ssh -F {chain.config} -W %h:%p b1")
    before = set(children())
    with chain.open("far") as channel:
        channel.hello()
        (proxy,) = set(children()) - before
        os.kill(proxy, signal.SIGKILL)
        started = time.process_time()
        with pytest.raises(HostUnreachable, match=r"far: "):
            channel.request("list")
        assert time.process_time() - started < 1


def test_a_proxy_command_that_waits_for_ever(client, third):
    client.add("gpu8", third, ProxyCommand="sleep 1000", ConnectTimeout="1")
    with pytest.raises(HostUnreachable, match=r"gpu8: .*within 1 s"):
        hostname(client, "gpu8")
