from fairlead.engine.deadlines import Deadlines


def test_expired_keys_are_returned_in_deadline_order():
    deadlines = Deadlines()
    for key, deadline_s in ((1, 5.0), (2, 3.0), (3, 9.0), (4, 3.0)):
        deadlines.add(key, deadline_s)
    assert list(deadlines.passed(3.0)) == []
    assert list(deadlines.passed(5.1)) == [2, 4, 1]
    assert list(deadlines.passed(5.1)) == []
    assert len(deadlines) == 1


def test_entries_of_ended_sequences_are_dropped_once_they_are_the_majority():
    deadlines = Deadlines()
    for key in range(300):
        deadlines.add(key, 300.0 - key)
    deadlines.forget_all_but(range(200), 200)
    assert len(deadlines) == 300
    deadlines.forget_all_but({7, 9}, 2)
    assert list(deadlines.passed(1000.0)) == [9, 7]
