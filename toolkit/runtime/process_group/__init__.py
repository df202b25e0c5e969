"""The processes of a job: starting them, how they meet, and the watch over them."""
