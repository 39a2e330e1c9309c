"""The program of the supervisor's children: `python -m fairlead.roles.main NAME FD`."""

import sys
from importlib import import_module

import msgspec

from fairlead.roles import child, control

MODULES = {
    control.RunDispatcher: "fairlead.roles.dispatcher_role",
    control.RunFront: "fairlead.roles.front_role",
}


async def _play(link: child.SupervisorLink, start: msgspec.Struct) -> None:
    """Import only the modules of the role: a third of the time until a new dispatcher grants."""
    await import_module(MODULES[type(start)]).play(link, start)


if __name__ == "__main__":
    sys.exit(child.main(dict.fromkeys(MODULES, _play)))
