"""A round beside steps goes as far as steps allow, and comes to its end when it is asked for."""

import threading

import pytest

from tfposeidon.local.background import Background
from tfposeidon.local.beside_steps import spread


class Pieces:
    """Does a piece after each of four steps, and notes which."""

    def __init__(self):
        self.done, self.may_look = [], threading.Semaphore(0)

    def __call__(self, wait_for):
        for step in range(4):
            wait_for(step)
            self.done.append(step)
            self.may_look.release()
        return list(self.done)


def finish(background, number):
    while not background.is_done(number):
        pass
    return background.result()


def test_it_goes_no_further_than_steps_have_passed():
    pieces = Pieces()
    background = Background(pieces)
    for steps in range(3):
        background.go_on(7, steps)
        pieces.may_look.acquire()
        assert pieces.done == list(range(steps + 1))
    assert finish(background, 7) == [0, 1, 2, 3]


def test_a_resumed_run_catches_up():
    pieces = Pieces()
    background = Background(pieces)
    background.go_on(7, 2)
    for _ in range(3):
        pieces.may_look.acquire()
    assert pieces.done == [0, 1, 2]
    background.discard()
    assert pieces.done == [0, 1, 2, 3], "other ranks wait for all of it"


def test_what_it_raises_is_raised_where_the_result_is_asked_for():
    def fail(wait_for):
        wait_for(1)
        raise ValueError("of the exchange")

    background = Background(fail)
    background.go_on(1, 0)
    with pytest.raises(ValueError, match="of the exchange"):
        finish(background, 1)
    assert finish(Background(Pieces()), 2) == [0, 1, 2, 3], "begun where it is asked for"


@pytest.mark.parametrize("count", [1, 2, 5, 32])
@pytest.mark.parametrize("steps", [1, 2, 3, 31])
def test_buckets_are_spread_evenly_and_none_is_left_out(count, steps):
    due = spread(count, steps)
    assert len(due) == steps
    assert [index for part in due for index in part] == list(range(count))
    assert due[0], "the first goes at once"
    assert max(map(len, due)) == -(-count // steps)
