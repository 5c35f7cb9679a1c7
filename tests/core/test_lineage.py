import pytest

from streamrft.schemas.errors import LogError
from streamrft.schemas.events import Branch
from streamrft.streams.lineage import Lineage, surviving_branch


def fork(branch: str, parent: str, step: int) -> Branch:
    return Branch(branch=branch, parent=parent, step=step, produced_at=1)


FORKS = [fork("main.90", "main", 90), fork("main.90.120", "main.90", 120)]


def test_main_contains_all_its_steps_and_no_others():
    lineage = Lineage.of("main", FORKS)
    assert lineage.contains("main", 10_000)
    assert not lineage.contains("main.90", 91)
    assert lineage.fork_step == 0


def test_fork_contains_its_own_steps_and_its_ancestors_up_to_each_fork():
    lineage = Lineage.of("main.90.120", FORKS)
    assert lineage.contains("main.90.120", 500)
    assert lineage.contains("main.90", 120) and not lineage.contains("main.90", 121)
    assert lineage.contains("main", 90) and not lineage.contains("main", 91)
    assert lineage.fork_step == 120


def test_fork_before_its_parents_own_fork_ends_the_grandparent_early():
    lineage = Lineage.of("b", [fork("a", "main", 50), fork("b", "a", 30)])
    assert lineage.last_step("a") == 30
    assert lineage.last_step("main") == 30


def test_branch_that_nobody_announced_is_an_error_that_names_the_known_ones():
    with pytest.raises(LogError, match=r"'typo': no Branch event.*main, main\.90"):
        Lineage.of("typo", FORKS)


def test_circle_of_branches_is_an_error():
    with pytest.raises(LogError, match="own ancestor"):
        Lineage.of("a", [fork("a", "b", 1), fork("b", "a", 1)])


def test_newest_branch_event_survives_also_when_it_continues_an_older_fork():
    assert surviving_branch([]) == "main"
    assert surviving_branch(FORKS) == "main.90.120"
    assert surviving_branch([*FORKS, FORKS[0]]) == "main.90"
