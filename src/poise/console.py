"""What a person sees while a run goes on: bars on a terminal, one line per step everywhere."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table


class Bar:
    """``advance`` once per unit done; the note behind the bar is the newest one given."""

    def __init__(self, progress: Progress | None = None, task: TaskID | None = None) -> None:
        self._progress, self._task = progress, task

    def advance(self, note: str = "") -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, note=note)


class _Rich(RichConsole):
    def on_broken_pipe(self) -> None:
        raise  # called where BrokenPipeError is handled: what to do then is the command line's matter


class Console:
    """Lines and tables on stdout. Bars only on a terminal, so that a log file stays readable."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self._rich = _Rich(highlight=False, soft_wrap=True, quiet=is_silent)
        if not self._rich.is_terminal:
            self._rich.width = 1000  # a file has no width of its own: no cell of a table is cut
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._rich,
            transient=True,
        )

    def line(self, text: str) -> None:
        self._rich.print(text, markup=False)

    @contextmanager
    def bar(self, description: str, total: int | None) -> Iterator[Bar]:
        """A bar, below those that are already there; without a ``total`` it only counts."""
        if self._rich.quiet or not self._rich.is_terminal:
            yield Bar()
            return
        if not self._progress.tasks:
            self._progress.start()
        task = self._progress.add_task(description, total=total, note="")
        try:
            yield Bar(self._progress, task)
        finally:
            self._progress.remove_task(task)
            if not self._progress.tasks:
                self._progress.stop()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self._rich.print(table)


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """One step of reinforcement learning in one line. ratio: min..max; engine-trainer: mean |difference|, nats."""
    m = metrics
    critic = f"  value loss {m['value_loss']:.3f}  explained {m['explained_variance']:.0%}" if "value_loss" in m else ""
    return (
        f"step {step}/{num_steps}"
        f"  reward {m['reward_mean']:.3f}±{m['reward_std']:.2f}"
        f"  equal groups {m['equal_groups']:.0%}"
        f"  turns {m['episode_turns']:.2f}"
        f"  tokens {m['episode_tokens']:.0f}"
        f"  tool {m.get('tool_calls', 0):.2f}/{m.get('tool_errors', 0):.2f} err"
        f"  done {m['stop_done']:.0%}"
        f"  entropy {m['entropy']:.3f}"
        f"  grad {m['grad_norm']:.2f}{critic}"
        f"  ratio {m['ratio_min']:.7g}..{m['ratio_max']:.7g}"
        f"  clip {m['clip_fraction']:.2%}"
        f"  engine-trainer {m['mismatch_mean']:.1e}"
        f"  rollout {m['rollout_tokens_per_s']:.0f} tok/s"
        f"  train {m['train_tokens_per_s']:.0f} tok/s"
    )


def metric_rows(*evaluations: Mapping[str, float]) -> list[list[str]]:
    """Rows of a table with one column per evaluation: the headline numbers, in words, then whatever else there is."""
    known = {
        "reward_mean": "reward (mean)",
        "reward_std": "reward (standard deviation)",
        "solved": "accuracy (reward 1)",
        "share_with_tool": "episodes with a tool call",
        "solved_with_tool": "solved episodes with a tool call",
        "episode_turns": "turns per episode",
        "episode_tokens": "tokens per episode",
        "response_tokens_per_episode": "sampled tokens per episode",
        "tool_calls": "tool calls per episode",
        "tool_errors": "tool errors per episode",
    }
    names = {name: label for name, label in known.items() if any(name in metrics for metrics in evaluations)}
    for metrics in evaluations:
        for name in metrics:
            names.setdefault(name, name.replace("stop_", "stopped: ").replace("_", " "))
    shares = {
        "solved",
        "share_with_tool",
        "solved_with_tool",
        *(n for n in names if n.startswith("stop_") or n.endswith("_accuracy")),
    }
    return [
        [label, *(f"{m.get(name, 0.0):.1%}" if name in shares else f"{m.get(name, 0.0):.3f}" for m in evaluations)]
        for name, label in names.items()
    ]
