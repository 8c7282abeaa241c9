"""A tool server, as verifiers starts it: one for all episodes."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


if __name__ == "__main__":
    Adder.run()
