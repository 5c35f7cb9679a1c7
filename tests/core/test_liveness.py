import subprocess
import sys
import time

from streamrft.streams.liveness import is_dead, this_process


def test_this_process_lives():
    assert not is_dead(this_process())


def test_number_given_to_a_later_process_does_not_keep_the_first_alive():
    me = this_process()
    assert is_dead(me._replace(started=me.started - 60))


def test_killed_process_is_dead_before_and_after_it_was_reaped():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = this_process()._replace(pid=child.pid)
    child.kill()
    import psutil

    started = psutil.Process(child.pid).create_time()
    zombie = identity._replace(started=started)
    deadline = time.monotonic() + 60
    while not is_dead(zombie):
        assert time.monotonic() < deadline
    child.wait(timeout=60)
    assert is_dead(zombie)
    assert child.stdin
    child.stdin.close()


def test_process_of_another_machine_is_never_called_dead():
    me = this_process()
    assert not is_dead(me._replace(place="elsewhere/", pid=2**22 + 1))
