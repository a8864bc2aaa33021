"""The fixtures of tests/port: properties of the algorithm hold on every port too."""

from tests.helpers.fixtures import checkpoints, port

__all__ = ["checkpoints", "port"]
