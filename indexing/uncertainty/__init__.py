"""Intervals, chance, and divisions into fit and test."""
