"""``chambers site admit``, ``nodes`` and ``expel``: who may connect to the SuperLink."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chambers.errors import CommandError
from chambers.site import host
from chambers.sources import argument, count, option

if TYPE_CHECKING:
    from federation.flower_internals import ControlHttpClient, NodeInfo

_EXPELLED = "unregistered"


@dataclass(frozen=True)
class Admit:
    """Admit an institution under its name, after comparing its key's digest by telephone.

    \b
      sha256sum node.pub
      chambers site admit node.pub --name court --rows 1200

    In averages, the institution counts with at most the agreed number of training rows. For another
    number from the next run on, repeat the command.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    key: Annotated[Path, argument("node.pub")]
    name: Annotated[str, option("The institution's name, as in its chambers site join.", "NAME")]
    rows: Annotated[int | None, count("Agreed number of training rows; default: none.")] = None
    folder: Annotated[Path, host.FOLDER_OPTION] = Path()

    def __call__(self) -> int:
        """Register the key and the number of rows; refuse a name that another node has."""
        from chambers.site.keys import hash_node_key, read_node_public_key
        from federation import flower_internals as flower
        from federation.agreed_rows import agree_on_rows

        host.check_institution_name(self.name)
        key = read_node_public_key(self.key)
        public = flower.public_key_to_bytes(key)
        request = flower.RegisterNodeRequest(public_key=public, name=self.name)
        host.enter(self.folder)
        with flower.control_client() as client:
            members = _members(client, self.name)
            if members and (self.rows is None or members[0].public_key != public):
                raise CommandError(
                    f"{self.name} is admitted; to replace its key, expel it first; to change its "
                    "number of rows, name the same key, and --rows"
                )
            node = members[0].node_id if members else client.RegisterNode(request).node_id
        agree_on_rows(self.name, self.rows)
        rows = f" and {self.rows} rows" if self.rows else ""
        print(f"{self.name} is admitted as node {node}, with the key {hash_node_key(key)}{rows}")
        return 0


@dataclass(frozen=True)
class Nodes:
    """List the institutions: name, node id, state and since when (UTC), and the key's digest.

    If the folder has a list of groups for masked sums, members.json, also list these: a group takes
    part in a run only if all its members are online.
    """

    folder: Annotated[Path, host.FOLDER_OPTION] = Path()

    def __call__(self) -> int:
        """Print a line for each node."""
        from chambers.site.keys import hash_node_key
        from federation.flower_internals import bytes_to_public_key, control_client

        host.enter(self.folder)
        with control_client() as client:
            nodes = _nodes(client)
        for node in sorted(nodes, key=lambda node: (node.name, node.registered_at)):
            state, since = {
                "online": ("online", node.last_activated_at),
                "offline": ("last seen", node.last_deactivated_at),
                _EXPELLED: ("expelled", node.unregistered_at),
            }.get(node.status, ("never seen", node.registered_at))
            key = hash_node_key(bytes_to_public_key(node.public_key))
            print(f"{node.name or '-':20} {node.node_id:<20} {state:10} {since[:19]} {key}")
        if (file := self.folder / host.MEMBERS).exists():
            _print_groups(file, {node.name for node in nodes if node.status == "online"})
        return 0


@dataclass(frozen=True)
class Expel:
    """Expel an institution; its SuperNode ends within 30 seconds. To return, it needs a new key."""

    name: Annotated[str, argument("NAME")]
    folder: Annotated[Path, host.FOLDER_OPTION] = Path()

    def __call__(self) -> int:
        """Unregister the nodes with this name."""
        from federation.flower_internals import UnregisterNodeRequest, control_client

        host.enter(self.folder)
        with control_client() as client:
            members = _members(client, self.name)
            if not members:
                raise CommandError(f"{self.name} is not admitted: see chambers site nodes")
            for node in members:
                client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
        print(f"{self.name} is expelled")
        return 0


def _print_groups(file: Path, online: set[str]) -> None:
    """Print each group of a list, and whether all its members are online."""
    from federation.sums.members import read_members

    for number, group in enumerate(read_members(file).groups, start=1):
        missing = ", ".join(sorted(group.keys() - online))
        state = f"incomplete: {missing} not online" if missing else "complete"
        print(f"group {number} ({', '.join(sorted(group))}) is {state}")


def _nodes(client: "ControlHttpClient") -> "list[NodeInfo]":
    from federation.flower_internals import ListNodesRequest

    return list(client.ListNodes(ListNodesRequest()).nodes_info)


def _members(client: "ControlHttpClient", name: str) -> "list[NodeInfo]":
    return [n for n in _nodes(client) if n.name == name and n.status != _EXPELLED]
