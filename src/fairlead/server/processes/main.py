"""The program of the supervisor's children: `python -m fairlead.server.processes.main NAME FD`."""

import sys

import msgspec

from fairlead.base.runtime import gc_tuning
from fairlead.distributed.supervisor import control
from fairlead.server.processes import child


# Each imports only the modules of its role: imports take most of the time until a new dispatcher can grant.
async def _be_dispatcher(link: child.SupervisorLink, start: msgspec.Struct) -> None:
    from fairlead.server.processes import dispatcher_role

    await dispatcher_role.play(link, start)


async def _be_front(link: child.SupervisorLink, start: msgspec.Struct) -> None:
    from fairlead.server.processes import front_role

    await front_role.play(link, start)


ROLES: dict[type, child.Play] = {control.RunDispatcher: _be_dispatcher, control.RunFront: _be_front}

if __name__ == "__main__":
    gc_tuning.begin()
    # It may be started before it is needed: the imports are then done when the first message arrives.
    if sys.argv[1].startswith("dispatcher"):
        import fairlead.server.processes.dispatcher_role
    else:
        import fairlead.server.processes.front_role  # noqa: F401
    gc_tuning.freeze_imports()
    sys.exit(child.main(ROLES))
