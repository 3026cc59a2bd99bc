"""The labels that a release shows: by the head's bias, by images that its gradients separate, and by what moved."""
