from __future__ import annotations

from kllm.telemetry.tier_counts import OF_THE_MOMENT, TierCounts, add_tier_counts


def test_counters_are_added_and_what_is_of_the_moment_is_left_out() -> None:
    names = TierCounts.__struct_fields__
    first = TierCounts(**{name: 10 + place for place, name in enumerate(names)})
    second = TierCounts(**{name: 100 * place for place, name in enumerate(names)})
    total = add_tier_counts(first, second)
    assert total is not None
    for place, name in enumerate(names):
        assert getattr(total, name) == (0 if name in OF_THE_MOMENT else 10 + 101 * place)


def test_none_stays_none_and_nothing_is_changed() -> None:
    assert add_tier_counts(None, None) is None
    one = TierCounts(saved=3, l2_blocks=5)
    assert add_tier_counts(one, None) == add_tier_counts(None, one) == TierCounts(saved=3)
    assert one.l2_blocks == 5
