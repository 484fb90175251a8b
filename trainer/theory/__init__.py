"""The theorems on finite worlds, checked numerically."""
