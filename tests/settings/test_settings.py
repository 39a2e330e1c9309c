"""Each setting of a configuration file has an effect, shown on a whole server in virtual time.

The server is the real one from its composition root down, with the real engine in its children; the system
around it is simulated (see `simulation`). A new setting needs a scenario: see `cases.setting`.
"""

import ast
from pathlib import Path

import pytest

from settings.all_cases import CASES
from settings.cases import ALWAYS_WITH_FRONTS, FRONTS, NOT_WITH_FRONTS
from settings.keys import keys
from settings.play import failure_of, play, play_after_reload, play_without, played

TESTS = Path(__file__).parent.parent
# Tests of settings that `app.run` applies before it serves, each run with the setting and without it, and of
# settings of several machines.
ELSEWHERE = {
    "batches.folder": (
        "server/batches/test_batch_routes.py::test_without_a_folder_files_and_batches_are_not_served"
    ),
    "batches.tenantBytes": (
        "server/batches/test_batch_routes.py::test_upload_beyond_the_tenants_bytes_is_refused_and_leaves_nothing"
    ),
    "batches.lines": (
        "server/batches/test_batch_routes.py::"
        "test_batch_of_an_invalid_file_fails_with_the_reason_and_runs_nothing"
    ),
    "batches.keepDays": "server/batches/test_store.py::test_old_files_and_batches_are_removed",
    **dict.fromkeys(
        ("budgets.batchDiscount", "prices.NAME.batchDiscount", "models.COMMAND.price.batchDiscount"),
        "distributed/supervisor/test_controlling.py::"
        "test_lines_of_a_batch_are_discounted_whichever_front_runs_them",
    ),
    "models.ENGINE.price.batchDiscount": (
        "clients/test_openai_batches.py::test_lines_of_a_batch_pay_the_discounted_price_of_an_engines_model"
    ),
    "responses.inStore": "clients/test_openai_responses_in_store.py::test_responses_survive_a_restart",
    "responses.storeBytes": (
        "store/test_kept.py::test_tenant_with_the_most_bytes_loses_its_oldest_ended_response"
    ),
    "logJson": "settings/test_logging_settings.py::test_log_json",
    "logLevel": "settings/test_logging_settings.py::test_log_level",
    "otlpEndpoint": "settings/test_logging_settings.py::test_otlp_endpoint",
    "fronts": "distributed/supervisor/test_several_fronts.py::test_every_front_answers_for_all",
    **dict.fromkeys(
        (
            f"dispatcher.{name}"
            for name in ("addresses", "keyFile", "listen", "tlsCa", "tlsCertificate", "tlsKey")
        ),
        "e2e/test_fronts_on_machines.py::test_fronts_share_a_dispatcher_over_tls_and_need_its_key",
    ),
    **dict.fromkeys(
        ("lease.duration", "lease.redis"),
        "e2e/test_fronts_on_machines.py::test_standby_takes_over_without_an_effect_on_streams_and_on_the_order_of_jobs",
    ),
    "lease.redisKey": "distributed/lease/test_factory.py::test_redis_key_of_the_configuration_is_used",
    **dict.fromkeys(
        ("cluster.scaleDownAfter", "cluster.scaleUpAfter", "cluster.targetWait"),
        "distributed/ray/test_controller.py::test_replicas_follow_the_estimated_wait",
    ),
    "cluster.ray": "distributed/ray/test_launcher.py::test_launcher_is_started_again_when_it_ends",
    **dict.fromkeys(
        (f"models.ENGINE.replicas.{name}" for name in ("cpus", "gpus", "memoryMb")),
        "distributed/ray/test_launcher.py::test_ray_reserves_what_a_replica_takes",
    ),
    **dict.fromkeys(
        ("models.ENGINE.replicas.max", "models.ENGINE.replicas.min"),
        "distributed/ray/test_controller.py::test_replicas_follow_the_estimated_wait",
    ),
    "models.ENGINE.closeAtLimit": (
        "e2e/test_structured_answers.py::test_answer_is_cut_at_its_limit_where_closing_is_off"
    ),
    "nodes[].caFile": "nodes/test_probing.py::test_certificate_of_an_authority_in_a_file_is_trusted",
    **dict.fromkeys(
        ("store", "usageDays"),
        "e2e/test_store.py::test_usage_is_in_the_store_when_the_server_has_stopped",
    ),
    "models.COMMAND.price.cached": "router/quotas/test_budgets.py::test_price_counts_cached_tokens_apart",
    "lease.kubernetes": (
        "distributed/lease/test_factory.py::test_kubernetes_object_of_the_configuration_is_used"
    ),
}


def test_each_setting_has_a_scenario_or_another_test():
    assert sorted([*CASES, *ELSEWHERE]) == keys()


@pytest.mark.parametrize("named", sorted(set(ELSEWHERE.values())))
def test_each_test_that_is_named_exists(named):
    file, _, name = named.partition("::")
    functions = ast.walk(ast.parse((TESTS / file).read_text()))
    assert name in {
        part.name for part in functions if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("fronts", FRONTS)
@pytest.mark.parametrize("key", CASES)
def test_setting_has_its_effect(key, fronts, simulators):
    if fronts > 1 and key in NOT_WITH_FRONTS:
        assert played(simulators, failure_of, play, key, fronts) is not None, "it has an effect"
    else:
        played(simulators, play, key, fronts)


@pytest.mark.slow  # all parameters together
@pytest.mark.parametrize("key", CASES)
def test_scenario_fails_where_its_setting_is_ignored(key, simulators):
    assert played(simulators, play_without, key) is not None


@pytest.mark.nightly
@pytest.mark.parametrize("key", CASES)
def test_scenario_fails_where_its_setting_is_ignored_with_several_fronts(key, simulators):
    fails = played(simulators, play_without, key, FRONTS[-1]) is not None
    assert fails == (key not in ALWAYS_WITH_FRONTS)


@pytest.mark.parametrize("fronts", FRONTS)
@pytest.mark.parametrize("key", CASES)
def test_setting_is_applied_by_a_reload_or_reported_as_needing_a_restart(key, fronts, simulators):
    assert played(simulators, play_after_reload, key, fronts) in ([], [key])
