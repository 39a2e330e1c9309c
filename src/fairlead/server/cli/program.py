"""The `fairlead` program: registers the commands and maps outcomes to exit codes.

The commands are functions in five modules: those in `servers` run a server, those in `clients`, `keys` and
`budgets` connect to one, and those in `machines` check files and the machine. The server is in `app`, the
output in `console`.

Exit codes: 0 success, 1 failure, 2 bad usage or configuration, 130 interrupted.
"""

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Literal

from cyclopts import App, CycloptsError

from fairlead.base.config import ConfigError
from fairlead.base.runtime import gc_tuning
from fairlead.base.runtime.compilers import ADVICE
from fairlead.base.runtime.environment import remove_empty
from fairlead.nodes.processes.first_process import leave_first_place
from fairlead.server.cli.budgets import budgets
from fairlead.server.cli.clients import bench, logs, ps, run, stop, top
from fairlead.server.cli.keys import keys, usage
from fairlead.server.cli.machines import check, deploy, doctor, models, pull, rm, schema, show
from fairlead.server.cli.servers import dispatcher, front, node, serve

commands = App(
    "fairlead",
    help="A language-model server that gives every user a fair turn.",
    version=lambda: metadata.version("fairlead"),
)
commands.register_install_completion_command()
commands.command(configuration := App("config", help="Look at configuration files."))
for command in (
    *(serve, node, front, dispatcher),
    *(run, ps, top, logs, stop, usage, bench),
    *(pull, show, rm, doctor, deploy),
):
    commands.command(command)
commands.command(models, alias=("list", "ls"))
commands.command(keys)
commands.command(budgets)
configuration.command(check)
configuration.command(schema)


@commands.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print the completion script for a shell. `fairlead --install-completion` installs it.

    Parameters
    ----------
    shell
        Name of the shell.
    """
    sys.stdout.write(commands.generate_completion(prog_name="fairlead", shell=shell))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: this process's arguments) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    leave_first_place()
    remove_empty()
    if words[:1] not in (["serve"], ["node"], ["front"], ["dispatcher"]):
        return _run(words)
    gc_tuning.begin()
    from fairlead.base.telemetry.logs import log_streams

    # Output must never block the server, and with --log-json every line is JSON, from the first one on.
    with log_streams(json="--log-json" in words):
        try:
            return _run(words)
        except Exception:  # noqa: BLE001  # the interpreter would bypass the log
            import structlog

            structlog.get_logger("fairlead").critical("crashed", exc_info=True)
            return 1


def _command_of(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words that name a command, such as `config check`; none if the first word is no command."""
    return commands.parse_commands(words)[0]


def _run(words: list[str]) -> int:
    from fairlead.server.console.announcer import report_error

    try:
        code = commands(words, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, ConfigError) as error:
        report_error(f"{error}\nTry '{' '.join(['fairlead', *_command_of(words), '--help'])}'.")
        return 2
    except BrokenPipeError:
        # The reader of the output has closed it. Flushing the rest at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        report_error(str(error))
        return 1
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("fairlead._cext"):
            raise
        report_error(
            f"the compiled kernel {error.name} is missing. Install Fairlead again; before that {ADVICE}."
        )
        return 1
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0
