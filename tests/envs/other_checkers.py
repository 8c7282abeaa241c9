"""A package of checkers by the published protocol, with one checker, for test_verifyif.py."""

import random


class Says:
    def __init__(self, instruction_id):
        self.id = instruction_id

    def build_description(self, *, word=None):
        self._word = random.choice(["yes", "no"]) if word is None else word
        return f"Say {self._word}."

    def get_instruction_args(self):
        return {"word": self._word}

    def get_instruction_args_keys(self):
        return ["word"]

    def check_following(self, value):
        if value == "crash":
            raise IndexError(value)
        return self._word in value


INSTRUCTION_DICT = {"say:word": Says}
