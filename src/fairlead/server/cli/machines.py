"""The commands that check files and the machine, or write files; none needs a server."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from fairlead.server.console.options import File, Flag, Model, Port


def check(file: File, /, *, json: Flag = False) -> int:
    """Check a configuration file, and print the file, line and key of every error.

    Settings that are valid but have no effect are listed, too.

    Parameters
    ----------
    file
        The configuration file.
    json
        Print JSON.
    """
    from fairlead.server.console.configuration import check as check_file

    return check_file(file, as_json=json)


def schema() -> int:
    """Print the JSON Schema of configuration files, for completion and help in editors."""
    from fairlead.server.console.configuration import print_schema

    print_schema()
    return 0


def doctor(
    model: Model | None = None,
    /,
    *,
    config: File | None = None,
    host: str | None = None,
    port: Port | None = None,
    json: Flag = False,
) -> int:
    """Check whether a server would run on this machine, and suggest fixes.

    Parameters
    ----------
    model
        A model to check, too: its directory, its GGUF file or its name on the hub. Shows its memory, and how
        fast it is at most.
    config
        A configuration file to check, too.
    host
        Address that the server would listen on. Default: the configuration's, or 127.0.0.1.
    port
        Port that the server would listen on. Default: the configuration's, or 8000.
    json
        Print JSON.
    """
    from fairlead.server.console.doctor import doctor as run_checks

    return run_checks(model=model, config=config, host=host, port=port, as_json=json)


def models(*, json: Flag = False) -> int:
    """List the models on this machine: those fetched from the hub, and the one that comes with Fairlead.

    `ps` shows the models of a server.

    Parameters
    ----------
    json
        Print JSON.
    """
    from fairlead.server.console.local_models import models as list_models

    return list_models(as_json=json)


def pull(model: str, /) -> int:
    """Fetch a model from the hub, so that a server starts with it at once.

    There is no --json: the exit code is the result.

    Parameters
    ----------
    model
        Name of the model: organization/name, or organization/name@revision.
    """
    from fairlead.server.console.local_models import pull as fetch

    return fetch(model)


def show(model: str, /, *, json: Flag = False) -> int:
    """Show what a model's files say: its architecture, size, context and defaults of sampling.

    Parameters
    ----------
    model
        Folder of the model, or its name on the hub. It must be on this machine.
    json
        Print JSON.
    """
    from fairlead.server.console.local_models import show as describe

    return describe(model, as_json=json)


def rm(model: str, /) -> int:
    """Remove a model of the hub from this machine.

    There is no --json: the exit code is the result.

    Parameters
    ----------
    model
        Name of the model: organization/name. All of its revisions are removed.
    """
    from fairlead.server.console.local_models import rm as remove

    return remove(model)


def deploy(
    target: Literal["systemd", "docker", "compose", "kubernetes", "grafana"],
    /,
    *,
    folder: Annotated[Path, Parameter(name=("--folder", "-o"))] = Path(),
    force: Flag = False,
) -> int:
    """Write the files that run Fairlead as a service, and print their paths.

    There is no --json: the output is one path per line.

    Parameters
    ----------
    target
        systemd: a unit. docker: Dockerfiles for the CPU and for CUDA. compose: Fairlead with Open WebUI, for
        which each user is a tenant. kubernetes: manifests for kustomize, with fronts, a dispatcher with a
        standby, and nodes. grafana: a dashboard of /metrics.
    folder
        Folder to write to.
    force
        Overwrite existing files.
    """
    from fairlead.server.console.deploy import deploy as write

    return write(target, folder, force=force)
