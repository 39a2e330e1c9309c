"""For all tests, before anything imports torch: its threads must not spin while they wait."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
