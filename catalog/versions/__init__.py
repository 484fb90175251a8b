"""Versions of datasets: as they lie on disk, committed, audited, rebuilt, collected."""
