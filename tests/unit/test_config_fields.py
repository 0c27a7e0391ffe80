"""Sizes, addresses, the server list and keys: what is read, and what is said about the rest."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.config import RailAddress, ServerAddress, format_size, parse_auth_key, parse_servers, parse_size
from memkv_vllm.config.fields import parse_address
from memkv_vllm.config.problems import Problem, Reject, did_you_mean, redact, shown

SECRET = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (2097152, 2097152),
        ("2097152", 2097152),
        ("512 B", 512),
        ("2 MiB", 2 * 1024**2),
        ("2MiB", 2 * 1024**2),
        ("2 mib", 2 * 1024**2),
        ("2Mi", 2 * 1024**2),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("64MB", 64 * 10**6),
        ("0.1 GB", 10**8),
        ("247 GiB", 247 * 1024**3),
        ("1 TiB", 1024**4),
        ("1 PB", 10**15),
        # A float of 2**53 + 1 would lose the last byte.
        ("9007199254740993 B", 9007199254740993),
    ],
)
def test_sizes_are_exact(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "-1 MiB", "1 MiB extra", "1e9", "1,5 GiB", "٣ MiB", 1.5, True, None, []]
)
def test_what_is_no_size_is_rejected(text: object) -> None:
    with pytest.raises(Reject, match="expected a size in bytes such as"):
        parse_size(text)


def test_a_fraction_of_a_byte_is_rejected() -> None:
    with pytest.raises(Reject, match="whole number of bytes"):
        parse_size("1.3 KiB")


@pytest.mark.parametrize("unit", ["K", "m", "G", "T", "P"])
def test_an_ambiguous_unit_is_rejected_and_says_why(unit: str) -> None:
    with pytest.raises(Reject) as caught:
        parse_size(f"64{unit}")
    assert "may mean 1000 or 1024" in caught.value.fix


def test_an_unknown_unit_lists_the_known_ones() -> None:
    with pytest.raises(Reject) as caught:
        parse_size("5 parsecs")
    assert "MiB" in caught.value.fix
    assert "may mean" not in caught.value.fix


@given(st.integers(0, 2**60))
def test_size_round_trip(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 10**6), st.sampled_from([("KiB", 1024), ("MB", 10**6), ("TiB", 1024**4)]))
def test_size_is_number_times_unit(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number} {unit[0]}") == number * unit[1]


@pytest.mark.parametrize(
    ("text", "host", "port", "canonical"),
    [
        ("10.0.0.2", "10.0.0.2", 9900, "10.0.0.2:9900"),
        ("10.0.0.2:77", "10.0.0.2", 77, "10.0.0.2:77"),
        (" Store-1.example ", "store-1.example", 9900, "store-1.example:9900"),
        ("[2001:DB8:0::1]", "2001:db8::1", 9900, "[2001:db8::1]:9900"),
        ("[::1]:1", "::1", 1, "[::1]:1"),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535, "[fe80::1%eth0]:65535"),
    ],
)
def test_addresses(text: str, host: str, port: int, canonical: str) -> None:
    address = parse_address(text)
    assert address == RailAddress(host, port)
    assert str(address) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":9900",
        "host:",
        "host:0",
        "host:65536",
        "host:99x",
        "host:-1",
        "10.0.0.256",
        "10.0.0",
        "2001:db8::1",
        "[::1",
        "[nope]:1",
        "[::1]9900",
        "tcp://host:9900",
        "host name:1",
        "-host",
    ],
)
def test_what_is_no_address_is_rejected(text: str) -> None:
    with pytest.raises(Reject, match="expected"):
        parse_address(text)


def test_bare_ipv6_is_told_about_brackets() -> None:
    with pytest.raises(Reject) as caught:
        parse_address("2001:db8::1")
    assert "brackets" in caught.value.fix


def test_servers_from_a_comma_list_a_list_and_a_mapping_agree() -> None:
    expected = (
        ServerAddress("10.0.0.2:9900", (RailAddress("10.0.0.2", 9900),)),
        ServerAddress("s1", (RailAddress("10.0.1.3", 9900), RailAddress("10.0.2.3", 7))),
    )
    assert parse_servers("10.0.0.2, s1=10.0.1.3|10.0.2.3:7") == expected
    assert parse_servers(["10.0.0.2:9900", "s1=10.0.1.3|10.0.2.3:7"]) == expected
    assert parse_servers(["10.0.0.2", {"name": "s1", "rails": ["10.0.1.3", "10.0.2.3:7"]}]) == expected
    assert parse_servers(expected) == expected


@pytest.mark.parametrize(
    ("servers", "key", "text"),
    [
        ("a,a", "", "name a:9900 is given more than once"),
        ("a,A:9900", "", "address a:9900 is given more than once"),
        ("x=a,y=a", "", "address a:9900 is given more than once"),
        ("x=a,x=b", "", "name x is given more than once"),
        ("x=a|a", "", "address a:9900 is given more than once"),
        ("a|b", "[0]", "needs a name"),
        ("a,b:x", "[1]", "expected a port"),
        ("a,", "[1]", "expected host:port"),
        (["a", 9900], "[1]", "expected host:port, name="),
        ([{"nam": "x", "rails": ["a"]}], "[0]", "unknown key 'nam'"),
        ([{"host": 9900}], "[0]", "unknown key 'host'"),
        ([{"name": "x"}], "[0]", "expected rails"),
        ([{"name": "x", "rails": []}], "[0]", "expected rails"),
        ([{"name": "x y", "rails": ["a"]}], "[0]", "expected a name"),
    ],
)
def test_wrong_servers(servers: object, key: str, text: str) -> None:
    with pytest.raises(Reject) as caught:
        parse_servers(servers)
    assert any(part.key == key and text in part.line() for part in caught.value.parts), caught.value.parts


@pytest.mark.parametrize("servers", ["", "  ", [], {}, None, 5])
def test_no_server_at_all(servers: object) -> None:
    with pytest.raises(Reject, match="at least one server"):
        parse_servers(servers)


def test_all_wrong_servers_are_told_at_once() -> None:
    with pytest.raises(Reject) as caught:
        parse_servers("ok, a:0, [::1, ok")
    assert [part.key for part in caught.value.parts] == ["[1]", "[2]", "", ""]


_hosts = st.one_of(
    st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
)
_addresses = st.tuples(_hosts, st.integers(1, 65535)).map(lambda pair: f"{pair[0]}:{pair[1]}")


@given(st.lists(_addresses, min_size=1, max_size=12, unique=True), st.data())
def test_server_list_round_trip(addresses: list[str], data: st.DataObject) -> None:
    """However the addresses are spread over servers, the text of what was parsed is parsed to the same."""
    entries: list[str] = []
    rest = list(addresses)
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        rails, rest = rest[:count], rest[count:]
        entries.append(rails[0] if count == 1 else f"srv{len(entries)}={'|'.join(rails)}")
    servers = parse_servers(",".join(entries))
    assert [str(rail) for server in servers for rail in server.rails] == addresses
    assert parse_servers([str(server) for server in servers]) == servers


@given(st.text(max_size=40))
def test_any_text_is_a_server_list_or_rejected(text: str) -> None:
    try:
        servers = parse_servers(text)
    except Reject:
        return
    for rail in (rail for server in servers for rail in server.rails):
        assert 1 <= rail.port <= 65535
        if ":" in rail.host:
            ipaddress.IPv6Address(rail.host)


def test_a_key_is_32_bytes_and_hidden() -> None:
    key = parse_auth_key(f" {SECRET.upper()}\n")
    assert key.get_secret_value() == bytes.fromhex(SECRET)
    assert SECRET[:8] not in repr(key) + str(key)
    assert parse_auth_key(bytes(range(32))).get_secret_value() == bytes(range(32))


@pytest.mark.parametrize("value", [SECRET[:-1], SECRET + "0", "g" + SECRET[1:], "", int("1" * 64), None, b"short"])
def test_a_wrong_key_is_rejected_without_showing_it(value: object) -> None:
    with pytest.raises(Reject) as caught:
        parse_auth_key(value)
    message = f"{caught.value} {caught.value.fix}"
    assert "64 hexadecimal characters" in message
    assert SECRET[1:20] not in message
    assert "1" * 20 not in message


def test_what_looks_like_a_secret_is_redacted_anywhere() -> None:
    token = "eyJhbGciOiJFUzM4NCJ9.eyJzdWIiOiJ4In0.c2ln"
    text = redact(f"no such file: {SECRET} {token}")
    assert text == "no such file: *** ***"
    assert SECRET not in Problem("auth_key_file", f"no such file: {SECRET}", "", SECRET).line()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "'x'"),
        (5, "5"),
        (["a", 1], "['a', 1]"),
        ({"key": "x"}, "a mapping"),
        ([{"key": "x"}], "a list"),
        (None, "nothing"),
        ("y" * 500, "'" + "y" * 119 + "..."),
    ],
)
def test_shown_values(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_problem_is_one_line() -> None:
    assert "\n" not in Problem("key", "expected\nsomething", "do\nthis", "a\nb").line()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("maxSize", "max_size"),
        ("max-size", "max_size"),
        ("MAX_SIZE", "max_size"),
        ("mx_size", "max_size"),
        ("zzz", None),
    ],
)
def test_did_you_mean(name: str, near: str | None) -> None:
    assert did_you_mean(name, ("max_size", "block_size", "hugepages")) == near
