"""Packages with kernels of others, which a GPU may use where they are installed. No torch: `llmq doctor` asks too."""

from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class KernelPackage:
    distribution: str
    versions: str  # whose functions llmq calls by the names and meanings that these have
    what_for: str

    def version(self) -> str | None:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def why_not(self) -> str | None:
        """What is to be said before it is imported; None: nothing."""
        from packaging.specifiers import SpecifierSet

        version = self.version()
        if version is None:
            return f"{self.distribution} is not installed"
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            return f"{self.distribution} {version} is installed, and llmq calls {self.versions}"
        return None


FLASHINFER = KernelPackage("flashinfer-python", ">=0.3,<0.8", "attention of prompts, and of steps outside CUDA graphs")
HUMMING = KernelPackage("humming-kernels", ">=0.1.19,<0.2", "int4 weights")
