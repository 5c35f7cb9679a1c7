from hypothesis import given
from hypothesis import strategies as st

from streamrft.streams.sqlite.balance import balance

members = st.lists(st.integers(1, 20), min_size=1, max_size=8, unique=True)
holders = st.dictionaries(st.integers(0, 30), st.one_of(st.none(), st.integers(1, 20)), max_size=30)


@given(holders, members)
def test_every_share_goes_to_one_member_and_loads_differ_by_at_most_one(holders, members):
    target = balance(holders, members)
    assert target.keys() == holders.keys()
    loads = [list(target.values()).count(m) for m in members]
    assert sum(loads) == len(holders)
    assert max(loads) - min(loads) <= 1


@given(holders, members)
def test_a_balanced_group_is_left_as_it_is(holders, members):
    target = balance(holders, members)
    assert balance(target, members) == target


@given(holders, members)
def test_no_more_shares_move_than_the_even_loads_demand(holders, members):
    target = balance(holders, members)
    least, num_larger = divmod(len(holders), len(members))
    held = sorted((list(holders.values()).count(m) for m in members), reverse=True)
    kept = sum(min(n, least + (rank < num_larger)) for rank, n in enumerate(held))
    assert sum(target[s] == holders[s] for s in holders) == kept


def test_first_members_of_a_group_get_contiguous_ranges():
    assert balance(dict.fromkeys(range(5)), [7, 3]) == {0: 7, 1: 7, 2: 7, 3: 3, 4: 3}
