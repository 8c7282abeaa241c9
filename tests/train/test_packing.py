"""Packing against rows written out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poise.train.packing import TokenCredit, pack, pack_demonstrations
from poise.types import Stop, Trajectory, Turn


def trajectory(*turns, routes=False, stop=Stop.DONE, episode_id="e"):
    """Turns are (observation_ids, action_ids, log_probs)."""
    made = []
    for number, (observation_ids, action_ids, log_probs) in enumerate(turns):
        num_tokens = len(observation_ids) + len(action_ids)
        rows = None
        if routes:
            # Layer 0 names the token, layer 1 the token plus 100: two experts each.
            rows = np.array([[[i, i + 1], [i + 100, i + 101]] for i in (*observation_ids, *action_ids)], dtype=np.int16)
            if number == 0:
                rows[0] = -1
            assert len(rows) == num_tokens
        made.append(
            Turn(observation_ids=observation_ids, action_ids=action_ids, rollout_log_probs=log_probs, routes=rows)
        )
    return Trajectory(group_id=0, episode_id=episode_id, turns=tuple(made), reward=0.0, stop=stop)


# Two turns: prompt 10 11 12, action 20 21, tool result 13, action 22. Seven tokens, six rows.
LONG = trajectory(((10, 11, 12), (20, 21), (-0.1, -0.2)), ((13,), (22,), (-0.3,)), routes=True)
# Prompt 14, action 23 24: three tokens, two rows.
SHORT = trajectory(((14,), (23, 24), (-0.4, -0.5)), routes=True)


def test_rows_by_hand():
    # Budget 8 holds both; in a micro-batch the order given is kept.
    (batch,) = pack([SHORT, LONG], torch.tensor([2.0, -3.0], dtype=torch.float64), tokens_per_microbatch=8)
    assert batch.input_ids.tolist() == [14, 23, 10, 11, 12, 20, 21, 13]
    assert batch.target_ids.tolist() == [23, 24, 11, 12, 20, 21, 13, 22]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert batch.cu_seqlens.tolist() == [0, 2, 8]
    # Row 6 reads the action's last token and speaks of the tool's 13: not the policy's.
    assert batch.response_mask.tolist() == [True, True, False, False, True, True, False, True]
    assert batch.rollout_log_probs.tolist() == pytest.approx([-0.4, -0.5, 0, 0, -0.1, -0.2, 0, -0.3])
    assert batch.advantages.tolist() == [2, 2, 0, 0, -3, -3, 0, -3]
    # The experts of the forward that predicted each target; -1, of the first tokens, never appears.
    assert batch.routes[:, 0, 0].tolist() == batch.target_ids.tolist()
    assert batch.routes[:, 1, 1].tolist() == [i + 101 for i in batch.target_ids.tolist()]
    assert batch.old_log_probs is None
    assert batch.ref_log_probs is None
    assert batch.num_response_tokens == 5
    assert [t.dtype for t in (batch.input_ids, batch.target_ids, batch.position_ids)] == [torch.int64] * 3
    assert [t.dtype for t in (batch.rollout_log_probs, batch.advantages)] == [torch.float32] * 2
    assert [t.dtype for t in (batch.cu_seqlens, batch.response_mask, batch.routes)] == [
        torch.int32,
        torch.bool,
        torch.int16,
    ]


def of_length(num_tokens, first_id):
    return trajectory(((first_id,), tuple([1] * (num_tokens - 1)), tuple([-1.0] * (num_tokens - 1))))


def test_first_fit_decreasing():
    # Rows 3, 5, 2, 5, 4 into bins of 9. By size: 5 (#1) -> bin 0; 5 (#3) -> bin 1; 4 (#4) -> bin 0, now full;
    # 3 (#0) -> bin 1, one left; 2 (#2) -> bin 2.
    trajectories = [of_length(rows + 1, 100 + index) for index, rows in enumerate([3, 5, 2, 5, 4])]
    batches = pack(trajectories, torch.arange(5.0), tokens_per_microbatch=9)
    first_ids = [batch.input_ids[batch.cu_seqlens[:-1].long()].tolist() for batch in batches]
    assert first_ids == [[101, 104], [100, 103], [102]]
    # Each keeps its own advantage.
    assert [batch.advantages.unique().tolist() for batch in batches] == [[1, 4], [0, 3], [2]]


@given(st.lists(st.integers(2, 30), min_size=1, max_size=40), st.integers(29, 60))
def test_nothing_is_lost_and_no_budget_broken(lengths, budget):
    trajectories = [of_length(length, 100 + index) for index, length in enumerate(lengths)]
    batches = pack(trajectories, torch.arange(float(len(lengths))), tokens_per_microbatch=budget)
    assert all(len(batch.input_ids) <= budget for batch in batches)
    found = {}
    for batch in batches:
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            found[batch.input_ids[start].item() - 100] = end - start + 1
    assert found == dict(enumerate(lengths))


def test_demonstrations_by_hand():
    # Observation 5 6, action 7; observation 8, action 9 4.
    (batch,) = pack_demonstrations([[([5, 6], [7]), ([8], [9, 4])]], tokens_per_microbatch=10)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.target_ids.tolist() == [6, 7, 8, 9, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4]
    assert batch.response_mask.tolist() == [False, True, False, True, True]
    assert batch.advantages.tolist() == [0, 1, 0, 1, 1]
    assert batch.rollout_log_probs.tolist() == [0] * 5
    assert batch.routes is None


def test_a_trajectory_without_a_sampled_token_is_all_mask():
    silent = trajectory(((1, 2, 3), (), ()), stop=Stop.MAX_TOKENS)
    (batch,) = pack([silent], torch.tensor([9.0]), tokens_per_microbatch=5)
    assert batch.input_ids.tolist() == [1, 2]
    assert batch.response_mask.tolist() == [False, False]
    assert batch.advantages.tolist() == [0, 0]


def test_what_cannot_be_packed_is_refused_with_its_number():
    with pytest.raises(ValueError, match=r"sequence 1 has 8 tokens and needs 7 rows: .*tokens_per_microbatch \(6\)"):
        pack([of_length(7, 0), of_length(8, 0)], torch.zeros(2), tokens_per_microbatch=6)
    with pytest.raises(ValueError, match=r"sequence 0 has 9 tokens"):
        pack_demonstrations([[(range(4), range(5))]], tokens_per_microbatch=7)
    with pytest.raises(ValueError, match="sequence 0 has 1 tokens"):
        pack([trajectory(((1,), (), ()))], torch.zeros(1), tokens_per_microbatch=7)
    with pytest.raises(ValueError, match=r"trajectory 1 \(broken\) ended in ENV_ERROR"):
        pack(
            [SHORT, trajectory(((1,), (2,), (-1.0,)), stop=Stop.ENV_ERROR, episode_id="broken")],
            torch.zeros(2),
            tokens_per_microbatch=7,
        )
    with pytest.raises(ValueError, match="routes are recorded for all or for none"):
        pack([SHORT, of_length(3, 0)], torch.zeros(2), tokens_per_microbatch=7)
    with pytest.raises(ValueError, match="advantages has 1 entries for 2 trajectories"):
        pack([SHORT, LONG], torch.zeros(1), tokens_per_microbatch=7)


def test_no_trajectories_make_no_batches():
    assert pack([], torch.zeros(0), tokens_per_microbatch=7) == []


def test_token_credits_stand_at_the_sampled_tokens():
    def credit(advantages, values, returns):
        return TokenCredit(
            advantages=torch.tensor(advantages), values=torch.tensor(values), returns=torch.tensor(returns)
        )

    long = credit([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0])
    short = credit([0.5, 0.25], [0.0, 1.0], [2.0, 3.0])
    (batch,) = pack([SHORT, LONG], [short, long], tokens_per_microbatch=8)
    assert batch.advantages.tolist() == [0.5, 0.25, 0, 0, 1, 2, 0, 3]
    assert batch.values.tolist() == [0, 1, 0, 0, 4, 5, 0, 6]
    assert batch.returns.tolist() == [2, 3, 0, 0, 7, 8, 0, 9]
    with pytest.raises(ValueError, match=r"advantages\[0\].advantages has 2 numbers for 3 sampled tokens"):
        pack([LONG], [short], tokens_per_microbatch=8)
    with pytest.raises(ValueError, match="a TokenCredit for all or for none"):
        pack([SHORT, LONG], [short, torch.tensor(1.0)], tokens_per_microbatch=8)
