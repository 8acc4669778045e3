"""A Ray cluster on 127.0.0.1 for a test: a process of its own, because Ray in the test's would warn and linger.

    python ray_cluster.py < specification

Standard input: one line of JSON, ``{"folder": …, "nodes": [{"name", "num_gpus", "resources", "memory", "env_vars"}]}``;
the first node is the head. Standard output: one line of JSON with the address and each node's raylet pid. The cluster
ends when standard input closes.
"""

from __future__ import annotations

import json
import os
import sys

# Also for whoever connects: without the second, Ray takes 127.0.0.1 for the address that others see.
LOCAL_ONLY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def main() -> None:
    wanted = json.loads(sys.stdin.readline())
    os.environ |= {**LOCAL_ONLY, "RAY_TMPDIR": wanted["folder"]}
    from ray.cluster_utils import Cluster

    cluster = Cluster(shutdown_at_exit=True)
    pids = {}
    for spec in wanted["nodes"]:
        name = spec.pop("name")
        node = cluster.add_node(
            node_ip_address="127.0.0.1",
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            **spec,
        )
        pids[name] = node.all_processes["raylet"][0].process.pid
    print(json.dumps({"address": cluster.address, "pids": pids}), flush=True)
    sys.stdin.read()
    cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray's own


if __name__ == "__main__":
    main()
