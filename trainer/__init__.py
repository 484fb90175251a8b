"""Training of text and image encoders on view tars."""
