"""Who appends: scheduler, explorers with their engines, workflows and rewards."""
