"""Each option of the command line and each environment variable has an effect, which a test shows.

An option of a server sets a key of its configuration: the key's scenario is run with the option instead of
the key. `TESTS` names the tests of all other options.
"""

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlead.base.config import Config
from fairlead.server.cli.program import commands
from fairlead.server.cli.servers import node, serve
from fairlead.server.console.options import ServeOptions
from settings.play import (
    play_served_model_name,
    play_variable_in_a_file,
    play_with_option,
    play_with_variable,
    played,
)

ROOT = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

KEYS = {
    "--host": "host",
    "--port": "port",
    "--api-key": "apiKeys[].key",
    "--device": "models.ENGINE.device",
    "--dtype": "models.ENGINE.dtype",
    "--quantization": "models.ENGINE.quantization",
    "--slots": "models.ENGINE.slots",
    "--max-batch": "models.ENGINE.maxBatch",
    "--max-batched-tokens": "models.ENGINE.maxBatchedTokens",
    "--max-model-len": "models.ENGINE.maxModelLen",
    "--kv-cache-memory-mb": "models.ENGINE.kvCache.maxMemoryMb",
    "--wire-format": "models.ENGINE.wireFormat",
    "--threads": "models.ENGINE.threads",
    "--parallel": "models.ENGINE.parallel",
    "--queue-capacity": "queue.capacity",
    "--queue-timeout": "queue.timeout",
    "--fairness": "queue.fairness",
    "--estimate": "queue.estimate",
    "--keep-alive": "queue.keepAlive",
    "--request-timeout": "requestTimeout",
    "--drain-timeout": "limits.drain",
}
VARIABLES = {"FAIRLEAD_HOST": "host", "FAIRLEAD_PORT": "port", "FAIRLEAD_API_KEY": "apiKeys[].key"}

_LOGS = "tests/settings/test_logging_settings.py::test_"
_CLUSTER = "tests/distributed/ray/test_cluster_settings.py::test_"
_BENCH = "tests/server/cli/test_bench_serve.py::test_"
_LOOKING = "tests/server/cli/test_looking.py::test_"
_SERVE = "tests/server/cli/test_serve.py::test_"
_MACHINE = "tests/server/cli/test_machine.py::test_"
_LOCAL = "tests/server/cli/test_local_models.py::test_"
_MACHINES = "tests/e2e/test_fronts_on_machines.py::test_"
_FILE = "tests/server/cli/test_config_file.py::test_"
_PRINTED = "tests/server/cli/test_logs.py::test_"
_ASGI = "tests/server/test_asgi.py::test_"
_IN_PROCESS = "tests/e2e/test_asgi_in_process.py::test_"
_RUN = "tests/server/cli/test_run.py::test_"
_ADDRESSED = f"{_LOOKING}each_command_has_options_for_the_address_and_the_key"
_KEYS = "tests/server/cli/test_keys.py::test_"
_STORE = "tests/e2e/test_store.py::test_"
_IN_FORCE = f"{_STORE}acknowledged_changes_of_keys_are_in_force_everywhere_and_outlive_a_kill"
TESTS = {
    "serve --store": f"{_STORE}usage_is_in_the_store_when_the_server_has_stopped",
    "$FAIRLEAD_STORE": f"{_STORE}acknowledged_changes_of_keys_are_in_force_everywhere_and_outlive_a_kill",
    **dict.fromkeys(
        (
            f"keys add --{name}"
            for name in (
                *("team", "user", "role", "priority", "models", "tokens-per-day", "tokens-per-month"),
                *("cost-per-day", "cost-per-month", "requests-per-minute", "tokens-per-minute"),
                *("concurrent", "expires"),
            )
        ),
        f"{_KEYS}option_of_a_new_key_is_sent",
    ),
    **dict.fromkeys(
        ("keys add --trusted", "keys add --json"), f"{_KEYS}new_key_may_be_trusted_and_is_printed_once"
    ),
    **dict.fromkeys(
        (
            *("keys rotate KEY_ID", "keys rotate --overlap", "keys rotate --json", "keys show KEY_ID"),
            *("keys show --json", "keys revoke KEY_ID"),
        ),
        f"{_KEYS}key_is_rotated_shown_and_revoked",
    ),
    **dict.fromkeys(("keys list --team", "keys list --json"), f"{_KEYS}keys_of_a_team_are_listed"),
    "keys import FILE": f"{_STORE}keys_of_litellm_stay_valid",
    "keys add NAME": _IN_FORCE,
    **dict.fromkeys(
        (
            f"budgets set --{name}"
            for name in (
                "team",
                "tokens-per-day",
                "tokens-per-month",
                "cost-per-day",
                "cost-per-month",
                "json",
            )
        ),
        f"{_KEYS}budget_is_set_with_each_limit_that_is_given",
    ),
    "budgets set --user": f"{_KEYS}faulty_command_for_a_budget_sends_nothing",
    "budgets list --json": f"{_KEYS}budgets_are_listed_with_where_they_are_set_and_what_is_used",
    **dict.fromkeys(
        ("budgets remove --team", "budgets remove --user"), f"{_KEYS}only_budgets_of_the_store_are_removed"
    ),
    **dict.fromkeys(
        (
            f"{command} --{option}"
            for command in (
                *(f"keys {name}" for name in ("add", "list", "show", "rotate", "revoke", "import")),
                *(f"budgets {name}" for name in ("set", "list", "remove")),
                "usage",
            )
            for option in ("url", "api-key")
        ),
        _IN_FORCE,
    ),
    **dict.fromkeys(
        ("usage --by", "usage --days", "usage --json"), f"{_KEYS}usage_is_summed_up_over_days_and_kinds"
    ),
    "serve MODEL": "tests/e2e/test_likelihoods.py::test_lm_evals_requests_give_torchs_sums",
    "serve --config": f"{_LOGS}log_json",
    "serve --watch-config": "tests/e2e/test_reload.py::test_watched_file_is_read_again_after_each_change",
    "serve --served-model-name": "tests/settings/test_options.py::test_model_is_served_by_another_name",
    "serve --log-json": f"{_LOGS}log_json",
    "serve --admin-key": f"{_SERVE}admin_key_is_added_to_other_keys_with_the_role_admin",
    "serve --allowed-host": f"{_SERVE}allowed_host_is_added_to_those_of_the_configuration",
    "serve --lifeline": (
        "tests/server/cli/test_serve.py::test_server_with_the_lifeline_option_ends_when_its_standard_input_is_closed"
    ),
    "front --config": f"{_MACHINES}fronts_share_a_dispatcher_over_tls_and_need_its_key",
    "dispatcher --config": f"{_MACHINES}fronts_share_a_dispatcher_over_tls_and_need_its_key",
    "serve --ray": f"{_CLUSTER}model_of_the_command_line_runs_on_the_cluster",
    "node MODEL": "tests/e2e/test_server_life.py::test_node_refuses_what_has_no_free_seat",
    "config check FILE": f"{_FILE}valid_file_is_summarized_in_a_few_lines",
    "config check --json": f"{_FILE}valid_file_is_summarized_in_json_without_its_secrets",
    "run --model": f"{_RUN}directory_names_the_model_that_is_served_from_it",
    "run --prompt": f"{_RUN}first_model_is_the_default_and_a_v1_url_will_do",
    "run --url": f"{_RUN}answer_is_printed",
    "run --api-key": _ADDRESSED,
    "logs MODEL": f"{_PRINTED}logs_prints_the_lines_that_the_server_has",
    "logs --follow": f"{_PRINTED}follow_prints_new_lines_until_ctrl_c",
    "logs --url": f"{_PRINTED}logs_prints_the_lines_that_the_server_has",
    "logs --api-key": f"{_PRINTED}logs_prints_the_lines_that_the_server_has",
    "ps --json": f"{_LOOKING}ps_prints_the_same_figures_as_json",
    "ps --url": _ADDRESSED,
    "ps --api-key": _ADDRESSED,
    "top --json": f"{_LOOKING}top_writes_each_snapshot_as_a_line_of_json",
    "top --url": _ADDRESSED,
    "top --api-key": _ADDRESSED,
    "stop MODEL": f"{_LOOKING}stop_unloads_the_model",
    "stop --force": f"{_LOOKING}stop_unloads_the_model",
    "stop --url": _ADDRESSED,
    "stop --api-key": _ADDRESSED,
    "bench MODEL": f"{_BENCH}each_option_reaches_the_requests",
    "bench --endpoint": f"{_BENCH}same_seed_sends_the_same_prompts",
    "bench --streams": f"{_BENCH}every_level_is_measured_and_written",
    "bench --requests": f"{_BENCH}every_level_is_measured_and_written",
    "bench --warmup": f"{_BENCH}same_seed_sends_the_same_prompts",
    "bench --prompt-tokens": f"{_BENCH}prompts_have_the_requested_length_and_share_no_prefix",
    "bench --output-tokens": f"{_BENCH}each_option_reaches_the_requests",
    "bench --ignore-eos": f"{_BENCH}each_option_reaches_the_requests",
    "bench --tenants": f"{_BENCH}prompts_have_the_requested_length_and_share_no_prefix",
    "bench --duration": f"{_BENCH}level_starts_no_request_after_its_time_limit",
    "bench --timeout": f"{_BENCH}answer_after_the_timeout_is_an_error",
    "bench --seed": f"{_BENCH}same_seed_sends_the_same_prompts",
    "bench --json": f"{_BENCH}every_level_is_measured_and_written",
    "bench --plot": f"{_BENCH}every_level_is_measured_and_written",
    "bench --url": f"{_BENCH}every_level_is_measured_and_written",
    "bench --api-key": f"{_BENCH}each_option_reaches_the_requests",
    "doctor MODEL": f"{_MACHINE}doctor_says_whether_a_gguf_runs_and_what_it_takes",
    "doctor --config": f"{_MACHINE}doctor_reports_the_faults_of_a_configuration",
    "doctor --host": f"{_MACHINE}doctor_checks_the_given_address",
    "doctor --port": f"{_MACHINE}doctor_does_not_promise_a_server_on_a_port_that_is_taken",
    "doctor --json": f"{_MACHINE}doctor_does_not_promise_a_server_on_a_port_that_is_taken",
    "models --json": f"{_LOCAL}model_is_fetched_listed_shown_and_removed",
    "list --json": f"{_LOCAL}model_is_fetched_listed_shown_and_removed",
    "ls --json": f"{_LOCAL}model_is_fetched_listed_shown_and_removed",
    "pull MODEL": f"{_LOCAL}model_is_fetched_listed_shown_and_removed",
    "show MODEL": f"{_LOCAL}model_is_fetched_listed_shown_and_removed",
    "show --json": f"{_LOCAL}model_is_fetched_listed_shown_and_removed",
    "rm MODEL": f"{_LOCAL}model_is_fetched_listed_shown_and_removed",
    "deploy TARGET": f"{_MACHINE}deploy_writes_the_files_and_names_them",
    "deploy --folder": f"{_MACHINE}deploy_writes_the_files_and_names_them",
    "deploy --force": f"{_MACHINE}deploy_overwrites_only_on_request",
    "completion SHELL": f"{_MACHINE}completion_is_in_the_language_of_the_shell_and_has_every_command",
    "$FAIRLEAD_ADMIN_KEY": f"{_SERVE}admin_key_and_allowed_host_may_come_from_the_environment",
    "$FAIRLEAD_ALLOWED_HOST": f"{_SERVE}admin_key_and_allowed_host_may_come_from_the_environment",
    "$FAIRLEAD_URL": f"{_LOOKING}server_and_its_key_may_come_from_the_environment",
    "$FAIRLEAD_MODEL": f"{_IN_PROCESS}model_that_the_environment_names_is_served",
    "$FAIRLEAD_CONFIG": "tests/e2e/test_asgi.py::test_body_over_the_limit_is_refused",
    "$FAIRLEAD_WATCH_CONFIG": f"{_ASGI}watched_file_is_read_again_after_a_change",
    "$CC": "tests/server/cli/test_first_steps.py::test_doctor_names_the_compiler_that_triton_needs_on_a_gpu",
    "$NO_COLOR": "tests/server/cli/test_announcer.py::test_no_color_removes_colors",
    "$NOTIFY_SOCKET": f"{_MACHINE}systemd_is_notified_of_readiness_and_of_stopping",
    "$OMP_NUM_THREADS": "tests/engine/test_threads.py::test_number_in_the_environment_is_used",
    "$TMPDIR": (
        "tests/server/routes/test_media.py::test_forms_are_kept_in_the_folder_that_the_environment_names"
    ),
    "$HF_HOME": f"{_MACHINE}doctor_reports_the_hubs_folder_and_token",
    "$HF_TOKEN": f"{_MACHINE}doctor_reports_the_hubs_folder_and_token",
}


def options() -> Iterator[str]:
    """Yield each option of each command, except those of `node` that are options of `serve` as well."""
    found = [
        (command, argument.names[0])
        for command, app in _commands(commands, ())
        for argument in app.assemble_argument_collection()
    ]
    for command, name in found:
        is_servers = command == "node" and name.startswith("--") and ("serve", name) in found
        if name != "*" and not is_servers:
            yield f"{command} {name}"


def _commands(app, path: tuple[str, ...]):
    for name in app:
        if name.startswith("-"):
            continue
        if app[name].default_command is not None:
            yield " ".join((*path, name)), app[name]
        yield from _commands(app[name], (*path, name))


def variables() -> set[str]:
    """Return the environment variables that the source reads by name."""
    sources = [file.read_text() for file in (ROOT / "src").rglob("*.py")]
    return {name for source in sources for part in ast.walk(ast.parse(source)) for name in _read_by(part)}


def _read_by(part: ast.AST) -> Iterator[str]:
    """Yield the environment variables that an expression reads by name."""
    match part:
        case ast.Call(ast.Attribute(mapping, "get" | "pop"), [name, *_]) if _is_environment(mapping):
            named = [name]
        case ast.Call(ast.Attribute(attr="getenv") | ast.Name("getenv"), [name, *_]):
            named = [name]
        case ast.Subscript(mapping, name, ast.Load()) if _is_environment(mapping):
            named = [name]
        case ast.Compare(name, [ast.In() | ast.NotIn()], [mapping]) if _is_environment(mapping):
            named = [name]
        case ast.keyword("env_var", ast.List(names) | ast.Tuple(names)):
            named = names
        case ast.keyword("env_var", name):
            named = [name]
        case _:
            return
    for each in named:
        assert isinstance(each, ast.Constant), f"the name is not a literal: {ast.unparse(part)}"
        yield each.value


def _is_environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node).endswith("environ")


@pytest.mark.parametrize("option", KEYS)
def test_option_has_the_effect_of_its_key(option, simulators):
    played(simulators, play_with_option, KEYS[option], option)


@pytest.mark.parametrize("variable", VARIABLES)
def test_variable_has_the_effect_of_its_key(variable, simulators):
    played(simulators, play_with_variable, VARIABLES[variable], variable)


def test_model_is_served_by_another_name(simulators):
    played(simulators, play_served_model_name)


def test_file_may_refer_to_an_environment_variable(simulators):
    played(simulators, play_variable_in_a_file)


def test_each_option_has_a_test():
    shown = {f"serve {option}" for option in KEYS} | {name for name in TESTS if not name.startswith("$")}
    assert set(options()) == shown


@pytest.mark.parametrize(
    "source",
    [
        'os.environ.get("A", "")',
        'os.environ["A"]',
        'environ.get("A")',
        'os.getenv("A")',
        'getenv("A", "")',
        '"A" in os.environ',
        'Parameter(env_var="A")',
        'Parameter(env_var=["A"])',
    ],
)
def test_variable_is_found_however_it_is_read(source):
    assert {name for part in ast.walk(ast.parse(source)) for name in _read_by(part)} == {"A"}


def test_each_variable_has_a_test():
    assert variables() == VARIABLES.keys() | {name[1:] for name in TESTS if name.startswith("$")}


def test_help_names_the_defaults_that_the_configuration_has():
    text = inspect.getdoc(ServeOptions)
    assert text is not None
    config = Config(models=())
    queue = config.queue
    defaults = {
        "host": f"Default: {config.host}.",
        "port": f"Default: {config.port}.",
        "queue_capacity": f"Default: {queue.capacity}.",
        "queue_timeout": f"Default: {queue.timeout_s:g}.",
        "fairness": f"Default: {queue.fairness}.",
        "estimate": f"Default: {queue.estimate}.",
        "keep_alive": f"Default: {queue.keep_alive_s:g}.",
        "request_timeout": f"Default: {config.request_timeout_s:g}.",
        "drain_timeout": f"Default: {config.limits.drain_s:g}.",
    }
    helps = dict(re.findall(r"^(\w+)\n {4}(.*(?:\n {4}.*)*)", text, re.MULTILINE))
    assert {name for name in defaults if defaults[name] not in helps[name]} == set()


def test_node_has_the_options_of_a_server():
    kinds = [typing.get_type_hints(command)["options"] for command in (serve, node)]
    assert kinds[0] is kinds[1]
    assert "options" in inspect.signature(node).parameters


@pytest.mark.parametrize("named", sorted(set(TESTS.values())))
def test_each_test_that_is_named_exists(named):
    file, _, name = named.partition("::")
    functions = ast.walk(ast.parse((ROOT / file).read_text()))
    assert name in {part.name for part in functions if isinstance(part, FUNCTIONS)}
