"""What ranks measure while they run, and what it says together."""
