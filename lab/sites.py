"""Sites of hosts.py: hosts that are near one another, and far from others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.namespaces import tool

if TYPE_CHECKING:
    from lab.hosts import Hosts

BURST = ["burst", "256kb", "latency", "20ms"]


def connect(hosts: Hosts) -> None:
    """Give each site a switch. Its hosts reach one another over eth1, at their own addresses."""
    for site in sorted(set(hosts.site_of)):
        mates = [host for host in range(hosts.count) if hosts.site_of[host] == site]
        words = ["link", "add", f"site{site}", "type", "bridge", "mcast_snooping", 0]
        tool("ip", "-n", hosts.switch, *words)
        tool("ip", "-n", hosts.switch, "link", "set", f"site{site}", "up")
        for host in mates:
            _plug_in(hosts, host)
            for mate in mates:
                if mate != host:
                    route = [f"{hosts.addresses[mate]}/32", "dev", "eth1"]
                    tool("ip", "-n", hosts.namespaces[host], "route", "add", *route)


def _plug_in(hosts: Hosts, host: int) -> None:
    port, namespace, mtu = f"inside{host}", hosts.namespaces[host], ["mtu", hosts.mtu]
    words = ["type", "veth", "peer", "name", "eth1", *mtu, "netns", namespace]
    tool("ip", "-n", hosts.switch, "link", "add", port, *mtu, *words)
    site = f"site{hosts.site_of[host]}"
    tool("ip", "-n", hosts.switch, "link", "set", port, "master", site, "up")
    tool("ip", "-n", namespace, "link", "set", "eth1", "up")
    for space, device in ((namespace, "eth1"), (hosts.switch, port)):
        if hosts.rate:
            words = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", hosts.rate]
            tool("tc", "-n", space, *words, *BURST)
