"""The commands that look at files and at the machine, or write files; none needs a server."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from fairlead.console.options import File, Flag, Port


def check(file: File, /, *, json: Flag = False) -> int:
    """Say whether a file is a configuration, naming file, line and key of everything that is wrong.

    Settings that are understood but have no effect are named, too.

    Parameters
    ----------
    file
        The configuration file.
    json
        Answer in JSON.
    """
    from fairlead.console.configuration import check as check_file

    return check_file(file, as_json=json)


def schema() -> int:
    """Print the JSON Schema of configuration files, with which editors complete and explain them."""
    from fairlead.console.configuration import print_schema

    print_schema()
    return 0


def doctor(
    *, config: File | None = None, host: str | None = None, port: Port | None = None, json: Flag = False
) -> int:
    """Look whether a server would run here, and say what to do where it would not.

    Parameters
    ----------
    config
        A configuration file to look at, too.
    host
        Address that the server is to listen on. Default: the configuration's, or 127.0.0.1.
    port
        Port that the server is to listen on. Default: the configuration's, or 8000.
    json
        Answer in JSON.
    """
    from fairlead.console.doctor import doctor as look

    return look(config=config, host=host, port=port, as_json=json)


def deploy(
    target: Literal["systemd", "docker", "compose", "grafana"],
    /,
    *,
    folder: Annotated[Path, Parameter(name=("--folder", "-o"))] = Path(),
    force: Flag = False,
) -> int:
    """Write out the files that run Fairlead as a service, and name each.

    There is no --json: the output is the files' names, one a line.

    Parameters
    ----------
    target
        systemd: a unit. docker: Dockerfiles for the CPU and for CUDA. compose: Fairlead and Open WebUI,
        whose users share fairly. grafana: a dashboard over /metrics.
    folder
        Where to write them.
    force
        Write over what is there.
    """
    from fairlead.console.deploy import deploy as write

    return write(target, folder, force=force)
