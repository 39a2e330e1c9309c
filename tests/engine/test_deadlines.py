from fairlead.engine.deadlines import Deadlines


def test_keys_come_out_in_the_order_of_their_time_once_it_is_over():
    deadlines = Deadlines()
    for key, deadline_s in ((1, 5.0), (2, 3.0), (3, 9.0), (4, 3.0)):
        deadlines.add(key, deadline_s)
    assert [] == list(deadlines.passed(3.0))
    assert [2, 4, 1] == list(deadlines.passed(5.1))
    assert [] == list(deadlines.passed(5.1))
    assert 1 == len(deadlines)


def test_those_of_the_ended_are_dropped_when_they_are_most():
    deadlines = Deadlines()
    for key in range(300):
        deadlines.add(key, 300.0 - key)
    deadlines.forget_all_but(range(200), 200)
    assert 300 == len(deadlines)
    deadlines.forget_all_but({7, 9}, 2)
    assert [9, 7] == list(deadlines.passed(1000.0))
