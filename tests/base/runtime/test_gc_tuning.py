"""The settings of Python's garbage collector; a benchmark measures their effect."""

import gc

from fairlead.base.runtime.gc_tuning import STARTING_OBJECTS, YOUNG_OBJECTS, begin, freeze


def test_collections_are_rare_at_the_start_and_existing_objects_are_frozen_later():
    earlier = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's defaults; a server in this process may have changed them
    try:
        begin()
        assert gc.get_threshold()[0] == STARTING_OBJECTS
        assert STARTING_OBJECTS > YOUNG_OBJECTS
        freeze()
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
        assert YOUNG_OBJECTS > 700
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.set_threshold(*earlier)  # nothing is unfrozen: the suite has frozen all modules
