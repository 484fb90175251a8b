"""One page that shows what a catalog holds: data, runs, scores, and what they look like in pictures and captions."""
