"""How goodviews touches the world: errors, config, storage, seeds, Ray sessions, progress, the CLI root."""
