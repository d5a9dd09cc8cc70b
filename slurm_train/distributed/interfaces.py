"""The network interfaces of this machine and their addresses.

Imports nothing but the standard library: a supervisor on another node has this file run by its path, with the name of
an interface, and reads the address that is printed.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915


def interface_addresses() -> dict[str, str]:
    """Returns interface -> address for all that have one, without the loopback; of two the IPv4 one."""
    addresses: dict[str, str] = {}
    for digits, _, _, scope, _, name in table_rows("/proc/net/if_inet6"):
        if scope == "00":  # global
            addresses[name] = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses[name] = socket.inet_ntoa(answer[20:24])
    addresses.pop("lo", None)
    return addresses


def table_rows(path: str) -> list[list[str]]:
    """Returns the words of each line of a table of the kernel, [] where there is none."""
    try:
        return [line.split() for line in Path(path).read_text(encoding="ascii").splitlines()]
    except OSError:
        return []


if __name__ == "__main__":
    print(interface_addresses().get(sys.argv[1], ""))
