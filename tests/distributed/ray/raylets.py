"""A Ray cluster on this machine, for tests: `python raylets.py RAYLETS CPUS`.

Writes the address of the cluster's head, which has no CPUs itself. A line on standard input is an order:
`add` adds a raylet, `kill NUMBER` kills one as a power failure would, and `kill all` all of them; number 0 is
the head's, which goes on without it. It answers each. All raylets end with its standard input.
"""

import signal
import sys

STORE_BYTES = 80_000_000
# By default Ray notices the loss of a machine after about half a minute.
QUICK = {"health_check_period_ms": 500, "health_check_timeout_ms": 500, "health_check_failure_threshold": 3}


def main() -> None:
    """Run the cluster until standard input ends."""
    from ray.cluster_utils import Cluster

    raylets, cpus = map(int, sys.argv[1:])
    # Ctrl-C at a terminal is for the tests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head | {"_system_config": QUICK})
    try:
        others = [cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES) for _ in range(raylets)]
        nodes = [cluster.head_node, *others]
        _answer(cluster.address)
        for line in sys.stdin:
            match line.split():
                case ["add"]:
                    nodes.append(cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES))
                case ["kill", which]:
                    for node in nodes if which == "all" else [nodes[int(which)]]:
                        (raylet,) = node.all_processes["raylet"]
                        raylet.process.kill()
                        raylet.process.wait()  # its workers look for its process
            _answer("done")
    finally:
        cluster.shutdown()


def _answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
