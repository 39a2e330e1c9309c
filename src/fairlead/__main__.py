"""`python -m fairlead` is `fairlead`."""

import sys

from fairlead.cli import main

sys.exit(main())
