"""The keys of the code interpreter."""

from dataclasses import dataclass
from typing import Literal

from poise.config.errors import require


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """Where model-written code runs (docs/sandbox.md)."""

    mode: Literal["auto", "bubblewrap", "namespaces", "landlock"] = "auto"
    """"auto" takes the strongest protection that works here; another: that one, or the run does not start."""
    url: str | None = None
    """Base URL of a SandboxFusion server, used instead of this machine."""
    allow_unsandboxed: bool = False
    """Run model-written code although nothing protects this machine from it."""
    memory_mib: int = 512
    """Memory of one interpreter, MiB beyond what the warm one takes."""
    packages: tuple[str, ...] = ("numpy", "sympy")
    """Installed packages that code can import beside the standard library; loaded beforehand."""

    def __post_init__(self) -> None:
        require(self.memory_mib >= 16, f"sandbox.memory_mib must be at least 16, got {self.memory_mib}")
        if self.url is not None:
            require(
                self.url.startswith(("http://", "https://")),
                f"sandbox.url must start with http:// or https://, got {self.url!r}",
            )
            for name in ("mode", "allow_unsandboxed", "packages"):
                is_default = getattr(self, name) == type(self).__dataclass_fields__[name].default
                require(is_default, f"sandbox.{name} does nothing beside sandbox.url: the server decides")
