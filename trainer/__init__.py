"""Training of text and image encoders on view tars. The commands of this stage are not built yet."""
