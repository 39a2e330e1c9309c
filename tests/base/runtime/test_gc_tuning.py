"""The settings of Python's garbage collector; a benchmark measures their effect."""

import gc

from fairlead.base.runtime.gc_tuning import YOUNG_OBJECTS, freeze


def test_existing_objects_are_frozen_and_collections_are_less_frequent():
    earlier = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's defaults; a server in this process may have changed them
    try:
        freeze()
        assert gc.get_threshold()[0] == YOUNG_OBJECTS
        assert YOUNG_OBJECTS > 700
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.set_threshold(*earlier)  # nothing is unfrozen: the suite has frozen all modules
