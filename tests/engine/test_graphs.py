"""The sizes for which graphs are recorded, and the one that a step replays."""

from itertools import pairwise

import pytest

from fairlead.engine.graphs import Graphs, ladder


class Recorder:
    """Logs the sizes that are recorded and replayed."""

    def __init__(self):
        self.recorded = []
        self.played = []

    def work(self, size):
        self.recorded.append(size)

    def __call__(self, work):
        work()
        size = self.recorded[-1]
        return lambda: self.played.append(size)


@pytest.mark.parametrize("most", [1, 2, 3, 16, 17, 64, 100, 256, 1000])
def test_ladder_ascends_to_the_largest_batch_with_little_padding(most):
    rungs = list(ladder(most))
    assert rungs[0] == 1
    assert rungs[-1] >= most > ([0, *rungs])[-2]
    for below, above in pairwise(rungs):
        assert below < above <= max(2 * below, 16)
        if below >= 32:
            assert above <= 1.26 * below
    assert len(rungs) <= 35


def test_step_replays_the_smallest_recording_that_fits_it():
    recorder = Recorder()
    graphs = Graphs(recorder.work, recorder)
    graphs.record(20, lambda _: None)
    for rows, expected in ((1, 1), (3, 4), (16, 16), (17, 24), (24, 24)):
        assert graphs.play(rows)
        assert expected == recorder.played.pop()
    assert not graphs.play(25)
    assert not recorder.played


def test_nothing_is_replayed_without_a_recording():
    recorder = Recorder()
    assert not Graphs(recorder.work, recorder).play(1)


def test_largest_size_is_recorded_first_and_each_is_reported():
    recorder, progress = Recorder(), []
    Graphs(recorder.work, recorder).record(9, progress.append)
    assert recorder.recorded == [16, 8, 4, 2, 1]
    assert pytest.approx(progress) == [0, 0.2, 0.4, 0.6, 0.8, 1]
