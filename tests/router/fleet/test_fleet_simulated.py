"""Three nodes that crash, stop, slow down and refuse jobs at random: `simulation/faults.py` defines a round.

`bench/faults.py` runs many more rounds, with many more requests.
"""

from unittest.mock import patch

import pytest

from simulation.faults import run_round

ROUNDS = 30
AT_ONCE = 10


@pytest.mark.parametrize("first", range(0, ROUNDS, AT_ONCE))
def test_no_response_is_lost_or_wrong_and_nothing_leaks(first):
    verdicts = [run_round(seed, streams=12, plain=12) for seed in range(first, first + AT_ONCE)]
    assert [problem for verdict in verdicts for problem in verdict.problems] == []
    # The faults had effects: some jobs succeeded after their node had failed, and some could not.
    assert sum(verdict.replayed for verdict in verdicts) > 10
    assert any(verdict.outcomes["node_failed"] for verdict in verdicts)


def test_same_seed_gives_the_same_round():
    assert run_round(1) == run_round(1)


MUTANTS = {
    "the second answer is added to the first": (
        "fairlead.generation.gateway.retry_sink",
        lambda deltas, _reader: deltas,
    ),
    "nothing is tried again": ("fairlead.generation.gateway.ATTEMPTS", 1),
    "a node that is down keeps its jobs": (
        "fairlead.nodes.running_relays.RunningRelays.fail_all",
        lambda _node, _error: None,
    ),
    "connections are not given back": (
        "fairlead.nodes.http.idle_connections.IdleConnections.put",
        lambda _idle, _connection: None,
    ),
    "kept connections outlive their pool": (
        "fairlead.nodes.http.client.Upstream.close",
        lambda _upstream: None,
    ),
    "a node gets more jobs than it has seats": ("simulation.faults.CONFIGURED_SEATS", 5),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_injected_bug_is_detected(what):
    with patch(*MUTANTS[what]):
        assert any(run_round(seed).problems for seed in range(20))
