"""Topics in, denormalised topics out, nothing lost, nothing twice."""

from importlib.metadata import version

__version__ = version("zync-assets")
