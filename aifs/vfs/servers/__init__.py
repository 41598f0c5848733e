"""The table of servers, and how they come and go."""
