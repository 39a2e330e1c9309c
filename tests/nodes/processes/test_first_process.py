"""Process 1 of a container waits for orphans, passes signals on, and ends as the server ends."""

import signal
import subprocess
import sys

import pytest

NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")


def has_namespaces():
    try:
        return subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not has_namespaces(), reason="needs PID namespaces")

PROGRAM = """
import os, signal, subprocess, sys, time
from fairlead.nodes.processes.first_process import leave_first_place
assert os.getpid() == 1
leave_first_place()
"""


def contained(source, **options):
    return subprocess.Popen(
        [*NAMESPACE, sys.executable, "-c", PROGRAM + source], stdout=subprocess.PIPE, text=True, **options
    )


def test_orphans_are_reaped_and_own_children_keep_their_exit_status():
    program = contained(
        """
# The shells end before what they start, which then belongs to process 1.
for _ in range(20):
    subprocess.run(["sh", "-c", "sleep 0.05 & exit 7"])
statuses = {subprocess.run(["sh", "-c", f"exit {n}"]).returncode for n in range(20)}
time.sleep(0.3)
states = [open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
          for pid in os.listdir("/proc") if pid.isdigit()]
print(os.getpid() > 1, statuses == set(range(20)), states.count("Z"), len(states))
"""
    )
    out, _ = program.communicate(timeout=60)
    assert (out, program.returncode) == ("True True 0 2\n", 0)


@pytest.mark.parametrize(
    ("source", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)]
)
def test_process_1_ends_with_the_exit_status_of_the_server(source, status):
    with contained(source) as program:
        assert program.wait(60) == status


def test_signals_reach_the_server_once_each():
    source = """
got = []
for name in ("SIGTERM", "SIGHUP", "SIGINT"):
    signal.signal(getattr(signal, name), lambda number, _: got.append(signal.Signals(number).name))
for name in ("SIGHUP", "SIGINT", "SIGTERM"):
    os.kill(1, getattr(signal, name))
    time.sleep(0.2)
print(*got)
"""
    out, _ = contained(source).communicate(timeout=60)
    assert out == "SIGHUP SIGINT SIGTERM\n"


def test_server_that_is_not_process_1_stays_one_process():
    source = (
        "from fairlead.nodes.processes.first_process import leave_first_place as l; import os; p = "
        "os.getpid(); l()"
    )
    subprocess.run([sys.executable, "-c", f"{source}; assert os.getpid() == p"], check=True, timeout=60)
