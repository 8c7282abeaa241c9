"""A real OpenEnv environment, served with OpenEnv's own server: `python openenv_echo.py PORT`."""

import sys
from uuid import uuid4

import uvicorn
from openenv.core.env_server import Environment, create_fastapi_app
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Echoed(Observation):
    echoed: str


class Echo(Environment):
    """Reward: the length of what was said, over when it was "stop"."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Echoed(echoed=f"seed {seed}", reward=0.0, done=False)

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        echoed = f"{self._state.step_count}: {action.message}"
        return Echoed(echoed=echoed, reward=float(len(action.message)), done=action.message == "stop")

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Said, Echoed, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
