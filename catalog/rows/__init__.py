"""Rows that jobs add to the catalog: runs, embedding sets, scores, comparisons, checks of the theorems."""
