"""What this machine gives to this process."""
