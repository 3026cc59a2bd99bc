"""What a classifier is worth: accuracy, consistency under shuffles, robustness."""
