"""Precisions: the dtypes of forward, backward and update."""
