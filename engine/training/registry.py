"""The algorithms that ``outrider train`` knows; another one is added here, with its recipe."""

from .dflash import DFlash
from .dspark import DSpark
from .eagle import Eagle
from .eagle3 import Eagle3
from .recipe import RecipeRegistry
from .standalone import Standalone


def default_recipes() -> RecipeRegistry:
    """A registry of all recipes of this package."""
    registry = RecipeRegistry()
    registry.add("DFLASH", DFlash, DFlash.check)
    registry.add("DSPARK", DSpark, DSpark.check)
    registry.add("EAGLE", Eagle, Eagle.check)
    registry.add("EAGLE3", Eagle3, Eagle3.check)
    registry.add("STANDALONE", Standalone, Standalone.check)
    return registry
