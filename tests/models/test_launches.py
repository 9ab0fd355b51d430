"""Launches are counted on the graph: every call counts, views do not."""

import mlx.core as mx

from support.launches import count_added_launches, count_launches


def test_every_call_of_a_compiled_function_is_counted():
    once = mx.compile(lambda x: mx.exp(x) + 1)
    x = mx.ones((4, 4))
    mx.eval(x)
    assert sum(count_launches(once(x)).values()) == 1
    assert sum(count_launches(once(once(once(x)))).values()) == 3


def test_views_are_not_counted():
    x = mx.ones((4, 4), mx.bfloat16)
    mx.eval(x)
    assert count_launches(x[:2].reshape(8).view(mx.uint16)) == {}


def test_an_operation_that_two_arrays_need_is_counted_once():
    x = mx.ones((4,))
    mx.eval(x)
    shared = mx.exp(x)
    assert sum(count_launches(shared + 1, shared * 2).values()) == 3


def test_a_step_adds_only_the_launches_that_earlier_steps_do_not_have():
    x = mx.ones((4,))
    mx.eval(x)

    def steps():
        h = mx.exp(x)
        yield h
        yield mx.sin(h)
        yield mx.cos(mx.exp(mx.sin(h)))

    assert count_added_launches(steps()) == [1, 1, 3]
