"""A research toolkit for cyclic data parallelism.

from toolkit.schedule import catalog
print(catalog.cyclic(4).grid())
"""

__version__ = "0.1.0"
