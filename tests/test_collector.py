"""The cycle collector's settings; whether they help is for a benchmark."""

import gc

from fairlead.collector import YOUNG_OBJECTS, settle


def test_what_is_there_is_not_looked_at_again_and_collections_are_rarer():
    earlier = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own; a server that ran in this process may have settled already
    try:
        settle()
        assert YOUNG_OBJECTS == gc.get_threshold()[0]
        assert YOUNG_OBJECTS > 700
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.set_threshold(*earlier)
