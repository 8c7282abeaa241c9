"""An environment of verifiers with many turns: it repeats what the policy said until that is "bye"."""

import verifiers.v1 as vf


class TalkTask(vf.Task[vf.TaskData]):
    pass


class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self):
        return [TalkTask(vf.TaskData(prompt=f"Speak, {name}."), self.config.task) for name in ("Ann", "Bob", "Eve")]


class TalkConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        num_replies = 0
        async with agents.speaker.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and segment.last_reply != "bye":
                num_replies += 1
                if segment.last_reply == "break":
                    raise ValueError("the environment is broken")
                segment = await talk.turn(f"You said {segment.last_reply}.")
        talk.trace.record_reward("replies", float(num_replies))


__all__ = ["TalkEnv", "TalkTaskset"]
