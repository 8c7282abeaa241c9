"""A taskset of verifiers: sums, with a tool that adds."""

import verifiers.v1 as vf
from poise_adder import Adder


class SumsData(vf.TaskData):
    numbers: tuple[int, int]


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(sum(self.data.numbers)))

    @vf.metric
    async def results(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 5
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)]

    def load(self):
        print("what a taskset prints is not taken for an answer")
        for i in range(self.config.num_tasks):
            data = SumsData(
                prompt=f"What is {i + 10} + {i}?", system_prompt="Answer with the number alone.", numbers=(i + 10, i)
            )
            yield SumsTask(data, self.config.task)


__all__ = ["SumsTaskset"]
