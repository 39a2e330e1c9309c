"""The program of the supervisor's children: `python -m fairlead.roles.main NAME FD`."""

import sys

from fairlead.roles import child, control, dispatcher_role, front_role

if __name__ == "__main__":
    sys.exit(child.main({control.RunDispatcher: dispatcher_role.play, control.RunFront: front_role.play}))
