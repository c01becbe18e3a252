"""Analyses of a trained model: they change neither it nor the random streams."""
