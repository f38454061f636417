"""A trained drafter's acceptance: by position, by request, and forgotten when the weights change."""

from sam.drafting.position_acceptance import FIRST_GUESS, PositionAcceptance


def feed(acceptance, name, tokens, followed, times=1):
    for _ in range(times):
        acceptance.drafted(name, 1, tokens)
        acceptance.compare(name, [0, *followed])


def test_a_position_counts_only_where_those_before_were_accepted():
    acceptance = PositionAcceptance(3)
    acceptance.drafted("a", 1, [1, 2, 3])
    assert acceptance.compare("a", [0, 1]) == 1, "a text cut short"
    assert acceptance.shares[0] == acceptance.shares[2] > FIRST_GUESS and not acceptance.waiting
    feed(acceptance, "a", [1, 2, 3], [9, 9, 9], times=1000)
    assert acceptance.shares[0] < 0.02 and (acceptance.shares[1:] == acceptance.shares[0]).all()


def test_a_request_departs_from_all_once_it_has_steps_and_all_is_tried_again_after_a_weight_sync():
    acceptance = PositionAcceptance(1)
    feed(acceptance, "good", [1], [1], times=40)
    feed(acceptance, "bad", [1], [2], times=40)
    good, bad, new = acceptance.expected(["good", "bad", "new"])[:, 0]
    assert bad < 0.2 < new < 0.8 < good and abs(new - 0.5) < 0.1
    feed(acceptance, "bad", [1], [2], times=400)
    before = acceptance.shares[0]
    acceptance.weights_updated()
    assert acceptance.shares[0] > before and (acceptance.expected(["good", "bad"]) == acceptance.shares).all()
