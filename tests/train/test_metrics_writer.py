"""The metrics file: what a resumed run leaves equals what an uninterrupted one leaves."""

import json
import sys

import pytest

from poise.metrics import MetricsWriter


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_line_per_step_at_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"loss": 0.5, "tokens": 12})
        # Readable while the run goes on.
        assert lines(tmp_path) == [{"step": 0, "loss": 0.5, "tokens": 12}]
        writer.write(1, {"loss": 0.25})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 0, "loss": 0.5, "tokens": 12}\n{"step": 1, "loss": 0.25}\n'
    )


def test_a_number_that_is_none_for_json_is_null(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "a": null, "b": null, "c": 1.0}\n'


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with MetricsWriter(straight) as writer:
        for step in range(6):
            writer.write(step, {"loss": step / 7})
    with MetricsWriter(broken) as writer:
        for step in range(5):  # died after step 4; its last checkpoint is of step 3
            writer.write(step, {"loss": step / 7 if step < 3 else 99.0})
    with MetricsWriter(broken, first_step=3) as writer:
        for step in range(3, 6):
            writer.write(step, {"loss": step / 7})
    assert (broken / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()
    assert sorted(path.name for path in broken.iterdir()) == ["metrics.jsonl"]


def test_half_a_last_line_is_dropped_and_half_a_middle_line_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    with MetricsWriter(tmp_path, first_step=1) as writer:
        writer.write(1, {"loss": 2.0})
    assert lines(tmp_path) == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}]
    path.write_text('{"step": 0, "lo\n{"step": 1, "loss": 1.0}\n')
    with pytest.raises(ValueError, match="line 1 is no JSON"):
        MetricsWriter(tmp_path, first_step=1)


def test_tensorboard_receives_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        writer.write(0, {"reward": 0.25})
        writer.write(1, {"reward": 0.75})
    with MetricsWriter(tmp_path, ["tensorboard"], first_step=1) as writer:
        writer.write(1, {"reward": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(0, 0.25), (1, 0.5)]


def test_unknown_and_missing_trackers_are_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown tracker 'mlflow'"):
        MetricsWriter(tmp_path, ["mlflow"])
    # None in sys.modules is how python says that a package cannot be imported.
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r'needs the package tensorboard: pip install "poise\[tracking\]"'):
        MetricsWriter(tmp_path, ["tensorboard"])
