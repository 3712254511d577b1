"""What fits on a machine and how fast it can be, worked out before anything is loaded."""
