"""Experiments as data: their grid of cases, the tasks that it lacks, the engines that run them."""
