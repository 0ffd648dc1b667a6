"""Which cases of a long list are told by default."""

import itertools

from pairwise_cases import once, pairwise_cases, spread

SIZES = (1, 2, 4)
LAYOUTS = ("tp=2", "tp=2 dp=2", "dp=2 zero=3", "zero=3")


def test_each_value_of_each_parameter_is_in_a_case_and_most_cases_are_left_out():
    cases = [{"size": size, "dtype": dtype} for size in SIZES for dtype in ("fp32", "bf16")]
    few = once(cases, dict)
    assert len(few) == 3
    assert {each["size"] for each in few} == set(SIZES)
    assert {each["dtype"] for each in few} == {"fp32", "bf16"}


def test_of_a_layout_each_setting_counts():
    few = once(LAYOUTS, lambda layout: {"layout": layout})
    assert few == ["tp=2 dp=2", "dp=2 zero=3"]
    settings = [dict(pair.split("=") for pair in layout.split()) for layout in LAYOUTS]
    assert once(settings, lambda each: {"settings": each}) == settings[1:3]
    tuples = [tuple(layout.split()) for layout in LAYOUTS]
    assert once(tuples, lambda each: {"settings": each}) == tuples[1:3]


def test_a_name_of_several_words_is_one_value():
    names = ["no index", "an index", "no header", "an index", "a header of zeros"]
    assert once(names, lambda name: {"name": name}) == [
        "no index",
        "an index",
        "no header",
        "a header of zeros",
    ]


def test_cases_have_every_pair_that_meets_in_the_list():
    cases = list(itertools.product("ab", "cd", "ef"))
    few = pairwise_cases(cases, lambda case: case, lambda case: 1)
    assert len(few) < len(cases)
    for pair in itertools.product("ab", "cdef"):
        assert any(set(pair) <= set(case) for case in few)


def test_few_cases_are_spread_over_all_and_begin_with_the_first():
    assert spread("abcdefghi", 3) == ["a", "e", "i"]
    assert spread("abcdefghi", 1) == ["a"]
    assert spread("ab", 2) == spread("ab", 5) == ["a", "b"]
