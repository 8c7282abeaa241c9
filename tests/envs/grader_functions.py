"""What a grader process is asked to run in test_graders.py."""

import os
import random
import time
from functools import cache


def add(a, b):
    print("a library's chatter is no answer")
    return a + b


def burn():
    return 9**9**9**9  # one call into C, deaf to signals' handlers


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return "it was there"


def leave():
    os._exit(3)


def eat():
    return len(bytearray(64 * 2**30))


def fail():
    raise KeyError("no such rule")


@cache
def loads_first():
    while time.process_time() < 1:
        pass
    return 1


def process():
    return [os.getpid(), os.getppid()]


def dice():
    return random.random()


def all_of(name, *arguments):
    return globals()[name](*arguments)
