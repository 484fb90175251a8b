"""What align, rotate and probe share: checks of their tables, facts of a row, printed scores."""
