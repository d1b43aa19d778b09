from tests.architecture.walk import LIMITS, excesses, measure


def test_operations_pass_no_more_places_than_their_limits() -> None:
    measured = measure()
    assert measured.keys() == LIMITS.keys()
    assert not excesses(measured)
