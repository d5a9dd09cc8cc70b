"""Which interfaces this machine has and which one leads to an address, asked of the Linux kernel without a command."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_LOOPBACK = "lo"
_GLOBAL = "00"


def interface_addresses() -> dict[str, str]:
    """Returns interface -> address for all that have one, the loopback left out; IPv4 before IPv6."""
    found = _global_ipv6()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    found.pop(_LOOPBACK, None)
    return found


def route_to(address: str, addresses: dict[str, str]) -> tuple[str, str]:
    """Returns interface and own address of the way to another machine, ("", "") where there is none.

    Args:
        address: of the other machine.
        addresses: what `interface_addresses` gave.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # Connecting a datagram socket sends nothing; the kernel chooses the way.
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))
            own = str(asking.getsockname()[0])
    except OSError:
        return "", ""
    by_address = next((name for name, its in addresses.items() if its == own), "")
    return by_address or _by_table(address), own


def _by_table(address: str) -> str:
    """Returns the interface of the longest IPv4 route that holds an address; for second addresses of an interface."""
    if ":" in address:
        return ""
    wanted = _little_endian(socket.inet_aton(address))
    best, found = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            target, mask = int(fields[1], 16), int(fields[7], 16)
            if wanted & mask == target and mask.bit_count() > best:
                best, found = mask.bit_count(), fields[0]
    return found


def _little_endian(packed: bytes) -> int:
    return int.from_bytes(packed, "little")


def _global_ipv6() -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope == _GLOBAL:
                found[name] = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return found


def link_speed_mbit(interface: str) -> int | None:
    """Returns the speed that an interface claims, None where it claims none (virtual ones, many InfiniBand ones)."""
    try:
        speed = int(Path("/sys/class/net", interface, "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return speed if speed > 0 else None


def has_infiniband() -> bool:
    """Returns whether this machine has a device that speaks verbs."""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def resolve(name: str) -> tuple[list[str], str]:
    """Returns the addresses of a name as seen from here, IPv4 first, and why there are none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as err:
        return [], str(err.strerror or err)
    return sorted({str(entry[4][0]) for entry in found}, key=lambda address: (":" in address, address)), ""
