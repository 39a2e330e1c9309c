"""Measure a server's throughput and latency: the command `fairlead bench` as a script.

python bench/serve.py --url http://127.0.0.1:8000 --streams 1,8,32 --json result.json --plot result.png
"""

import sys

from fairlead.server.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
