"""kvgen bench --list-cases and --list-peers."""

from __future__ import annotations

from kvgen.bench.cases import CASES
from kvgen.bench.peers.registry import PEERS, Peer
from kvgen.commands import output


def run(cases: bool, peers: bool, *, as_json: bool) -> None:
    """Print what there is to choose from."""
    listed = [(case.name, str(case)) for case in CASES.values()]
    if as_json:
        found: dict[str, object] = {"cases": dict(listed)} if cases else {}
        if peers:
            found["peers"] = {peer.name: _data(peer) for peer in PEERS.values()}
        output.print_json(found)
        return
    if cases:
        output.table(("case", "what"), listed)
    if peers:
        rows = [(peer.name, state(peer), ", ".join(peer.ops), peer.what) for peer in PEERS.values()]
        output.table(("peer", "here", "ops", "what"), rows)


def state(peer: Peer) -> str:
    """Whether it is there, and what to do where it is not, or does not run by itself."""
    if not peer.installed:
        return f"no: {peer.install}"
    return f"yes, when named: --peers {peer.name}" if peer.slow else "yes"


def _data(peer: Peer) -> dict[str, object]:
    return {"what": peer.what, "ops": list(peer.ops), "installed": peer.installed, "install": peer.install}
