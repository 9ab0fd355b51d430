"""The stories model: a recipe that turns a folder of children's stories into the pair of models in the wheel."""
