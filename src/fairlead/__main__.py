"""`python -m fairlead` is `fairlead`."""

import sys

from fairlead.server.cli import main

sys.exit(main())
