"""Speaks as ``verifiers_child.py`` does, of episodes that are written down here; what it hears goes to a file."""

import json
import os
import sys

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": None}}


def user(text):
    return {"role": "user", "content": text}


class Stub:
    def __init__(self, heard):
        self.heard, self.number = heard, 0

    def tell(self, **line):
        print(json.dumps(line), flush=True)

    def hear(self):
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        with open(self.heard, "a") as file:
            file.write(line)
        return json.loads(line)

    def ask(self, episode, *messages, tools=()):
        self.number += 1
        self.tell(request=self.number, episode=episode, messages=messages, tools=tools)
        return self.number

    def end(self, episode, **what):
        self.tell(end=episode, **(what or {"reward": 1.5, "metrics": {"reward/good": 1.5}}))

    def play(self, episode, task):
        if task == "rewrites its history":
            self.ask(episode, user("Long story."))
            said = self.hear()["message"]
            self.ask(episode, user("Long story."), said, user("Sum it up."))
            summary = self.hear()["message"]["content"]
            self.ask(episode, user(f"So far: {summary}"))
            self.hear()
            self.end(episode)
        elif task == "asks twice at once":
            self.ask(episode, user("left"))
            self.ask(episode, user("right"))
            answers = [self.hear(), self.hear()]
            said = " ".join(f"{line['answer']}:{line['message']['content']}" for line in answers)
            self.end(episode, reward=float(said == "1:left 2:right"), metrics={})
        elif task == "changes its tools":
            self.ask(episode, user("Hi."), tools=[TOOL])
            said = self.hear()["message"]
            result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "seen"}
            self.ask(episode, user("Hi."), said, result)
            self.hear()
            self.end(episode)
        elif task == "goes on after a limit":
            for text in ("one", "two", "three"):
                self.ask(episode, user(text))
                self.hear()
            self.end(episode)
        elif task == "fails":
            self.ask(episode, user("Hi."))
            self.hear()
            self.end(episode, error="TaskError: the grader is broken")
        elif task == "asks nothing":
            self.end(episode, error="HarnessError: not installed")
        elif task == "falls silent":
            self.ask(episode, user("Hi."))
            self.hear()
            self.hear()  # that it is given up
        elif task == "dies":
            self.ask(episode, user("Hi."))
            self.hear()
            os._exit(1)


if __name__ == "__main__":
    stub = Stub(sys.argv[1])
    settings = stub.hear()
    tasks = settings["env"]["tasks"]
    stub.tell(num_tasks=len(tasks))
    while True:
        order = stub.hear()
        stub.play(order["play"], tasks[order["task"]])
