"""A Ray cluster of two nodes on this machine: prints its address and the pid of its second node's raylet, whose children are
the workers there, and loses that node at a line on stdin.

Run as a process of its own, because the token and its mode are read when ray is imported. Ends when stdin does.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

CPUS = 2


def main() -> None:
    """Start, tell the address, wait for `lose`, tell that the node is gone, wait for the end of stdin."""
    cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    try:
        second = cluster.add_node(num_cpus=CPUS)
        cluster.wait_for_nodes()
        (raylet,) = [process for kind, process in second.live_processes() if kind == "raylet"]
        print(cluster.address, raylet.pid, flush=True)
        for line in sys.stdin:
            if line.strip() == "lose":
                cluster.remove_node(second, allow_graceful=False)
                print("lost", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
