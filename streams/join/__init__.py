"""The join: pure operators that turn trajectories and rewards into closed groups."""
