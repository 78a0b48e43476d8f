"""Training: recipes, the loop that loses nothing, evaluation and reports."""

from recnets.training.evaluate import Evaluation, Evaluator, evaluate
from recnets.training.loop import Diverged
from recnets.training.options import RunOptions
from recnets.training.recipe import Recipe, load_recipe, recipe_from_dict, recipe_names
from recnets.training.run import TrainResult, train
from recnets.training.run_folder import RunFolder
from recnets.training.schedule import learning_rate

__all__ = [
    "Diverged",
    "Evaluation",
    "Evaluator",
    "Recipe",
    "RunFolder",
    "RunOptions",
    "TrainResult",
    "evaluate",
    "learning_rate",
    "load_recipe",
    "recipe_from_dict",
    "recipe_names",
    "train",
]
