"""The verl recipe: an application, whose every process shows the warnings of its own code."""

from sam.log import show_warnings

show_warnings("recipe.sam_dapo", "sam")
