"""What a person sees of a run, from the log alone."""
