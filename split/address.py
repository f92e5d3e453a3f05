"""Addresses of servers: a host and a port, such as 10.0.0.5:8900 or [::1]:8900."""

import ipaddress
import re

# IPv6 addresses need brackets: gRPC would connect to another port.
_ADDRESS = re.compile(r"(\[[^][/\s]+\]|[^][:/\s]+):([0-9]{1,5})")


def parse_address(address: str) -> tuple[str, int]:
    """Return the host, without the brackets of an IPv6 address, and the port.

    Raise ``ValueError``, whose text doesn't name the address, if it has another form.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found[2]) >= 2**16:
        raise ValueError("must be an address and a port, like 127.0.0.1:8900 or [::1]:8900")
    return found[1].strip("[]"), int(found[2])


def is_loopback(address: str) -> bool:
    """Return whether an address names this machine itself."""
    try:
        return ipaddress.ip_address(_host(address)).is_loopback
    except ValueError:
        return _host(address) == "localhost"


def is_unspecified(address: str) -> bool:
    """Return whether a server that listens on an address uses all interfaces of its machine."""
    try:
        return ipaddress.ip_address(_host(address)).is_unspecified
    except ValueError:
        return False


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
