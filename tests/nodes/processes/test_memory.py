"""The memory of processes: a model's process counts with those that it has started."""

import subprocess
import sys

from fairlead.nodes.processes.memory import memory_of

MIB = 1024 * 1024
# Starts another process that takes 64 MiB, and passes its input and output on to it.
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]], check=True)"
CHILD = "import sys; kept = bytearray(b'x' * (64 << 20)); print('ready', flush=True); sys.stdin.read()"


def test_memory_of_a_process_includes_its_children():
    command = [sys.executable, "-S", "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        assert 64 * MIB < memory_of(process.pid) < 128 * MIB
        process.stdin.close()
    assert memory_of(process.pid) == 0
